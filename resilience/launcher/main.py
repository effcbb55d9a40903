"""The command line of the launcher: `resilience run`, `python -m resilience.launcher`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from resilience.adapters.environment import one_blas_thread
from resilience.errors import ConfigurationError, ResilienceError

WRONG_USE = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the job on this node; return the exit status."""
    with one_blas_thread():
        from resilience.launcher.arguments import parse
        from resilience.launcher.launch import launch

    try:
        return launch(parse(arguments))
    except ConfigurationError as error:
        print(f"resilience run: {error}", file=sys.stderr)
        return WRONG_USE
    except ResilienceError as error:
        print(f"resilience run: {error}", file=sys.stderr)
        return 1
