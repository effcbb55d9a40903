"""The health of this process's devices.  One module per kind of device."""
