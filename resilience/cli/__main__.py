"""`python -m resilience.cli`."""

import sys

from resilience.cli import main

sys.exit(main())
