"""The outside world, one kind a module.  Each acts, returns or raises; none decides or reports."""
