"""Do the launcher around this job and its Wrapper agree?  Where they do not, the job is advised; nothing changes.

The Wrapper restarts ranks in place, the launcher replaces processes. A launcher that starts all workers again when
one dies leaves nothing for the Wrapper to do then, and a launcher whose monitors have shorter limits than the Wrapper
kills a rank that the Wrapper would still restart."""

from __future__ import annotations

from collections.abc import Iterator

from resilience.adapters.environment import Launcher


def advice(launcher: Launcher, hard_timeout: float) -> Iterator[str]:
    """Yield a line for each setting that does not fit. hard_timeout: the Wrapper's, in seconds."""
    if launcher.policy == "any-failed":
        yield (
            "when a rank dies, this launcher starts all workers again; with --ft-restart-policy min-healthy the "
            "Wrapper goes on without it"
        )
    limit = launcher.shortest_limit
    if limit is not None and limit < hard_timeout:
        yield (
            f"this launcher kills a rank after {limit:g} s of silence, the Wrapper restarts it until "
            f"{hard_timeout:g} s (hard_timeout); make the launcher's limit longer"
        )
