"""What was I called with, and where do I import from?"""

import os
import sys

print(sys.argv, sys.orig_argv[1:])
print(sys.path)
print(sys.executable, sys.prefix, sys.flags.safe_path if hasattr(sys.flags, "safe_path") else None)
print(os.getcwd())
