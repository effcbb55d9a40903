"""Tools for trying out a wrapped function."""

from resilience.inprocess.tools import inject_fault

__all__ = ["inject_fault"]
