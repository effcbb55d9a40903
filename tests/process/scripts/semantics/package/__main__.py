"""Run by `-m package`."""

import sys

from . import module

print(__name__, __file__, __spec__.name, __package__, sys.argv, sys.path[0], module.VALUE)
print(__doc__, type(__loader__).__name__, sys.modules["__main__"].__dict__ is globals())
