"""Tools for trying out a wrapped function."""
