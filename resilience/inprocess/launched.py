"""Do the launcher around this job and its Wrapper agree?  What is wrong is told loudly, and changes nothing.

The Wrapper restarts in place whom it can, the launcher replaces processes. A launcher that starts all workers
again for one that is gone takes over whatever happens, and one whose monitors are more impatient than the
Wrapper's ends a rank while the Wrapper still gives it time."""

from __future__ import annotations

import warnings

from resilience.adapters.environment import Launcher


def warn(launcher: Launcher, hard_timeout: float) -> None:
    """Warn of what does not go together. hard_timeout: the Wrapper's, in seconds."""
    if launcher.policy == "any-failed":
        warnings.warn(
            "a Wrapper runs under `resilience run --ft-restart-policy any-failed`: a rank that dies makes the launcher "
            "start all workers again, before the Wrapper can go on without it; pass --ft-restart-policy min-healthy "
            "and the smallest number of nodes that the Wrapper goes on with as the minimum of --nnodes",
            RuntimeWarning,
            stacklevel=2,
        )
    limit = launcher.shortest_limit
    if limit is not None and limit < hard_timeout:
        warnings.warn(
            f"the launcher's rank monitors end a rank after {limit:g} s of silence (--ft-rank-heartbeat-timeout, "
            f"--ft-rank-section-timeouts, --ft-step-timeout), and the Wrapper gives it {hard_timeout:g} s "
            "(hard_timeout): a rank that heartbeats to the launcher is killed where the Wrapper would restart it in "
            "place; make the launcher's limits the longer ones",
            RuntimeWarning,
            stacklevel=2,
        )
