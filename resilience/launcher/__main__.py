"""Makes `python -m resilience.launcher` the same as `resilience run`."""

import sys

from resilience.launcher.main import main

sys.exit(main())
