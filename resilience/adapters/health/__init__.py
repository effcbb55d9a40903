"""What the health of this process's devices is.  One kind of device a module."""
