"""A package to be run."""

import sys

print("in the package", __name__, sys.argv[:1] == ["-m"])
