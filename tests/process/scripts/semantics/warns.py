"""Warnings and logs come out as usual."""

import logging
import sys
import warnings

warnings.warn("of my own", stacklevel=1)
warnings.warn("outdated", DeprecationWarning, stacklevel=1)
print(logging.getLogger().handlers, logging.getLogger("mine").getEffectiveLevel(), sys.warnoptions)
logging.warning("a warning")
logging.basicConfig(level=logging.INFO, force=True)
logging.getLogger("mine").info("some information")
