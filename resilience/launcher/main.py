"""The command line of the launcher: `resilience run`, `python -m resilience.launcher`."""

from __future__ import annotations

import signal
from collections.abc import Sequence

from resilience.adapters.environment import one_blas_thread
from resilience.errors import ConfigurationError, ResilienceError

WRONG_USE = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run this node's part of the job; return the exit status."""
    # If SIGCHLD was ignored when this process started, the kernel would drop the exit statuses of all workers.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    with one_blas_thread():
        from resilience.launcher.arguments import parse
        from resilience.launcher.console import say
        from resilience.launcher.launch import launch

    try:
        return launch(parse(arguments))
    except ConfigurationError as error:
        say(str(error))
        return WRONG_USE
    except ResilienceError as error:
        say(str(error))
        return 1
