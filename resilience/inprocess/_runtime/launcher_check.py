"""Do this job's launcher and its Wrapper fit together?  If not, the job gets advice; nothing changes.

The Wrapper restarts ranks in place; the launcher replaces processes. If the launcher starts all workers again when one
dies, nothing is left for the Wrapper to do. If the launcher's monitors have shorter limits than the Wrapper, they kill
a rank that the Wrapper would still restart."""

from __future__ import annotations

from collections.abc import Iterator

from resilience.system.environment import Launcher


def advice(launcher: Launcher, hard_timeout: float) -> Iterator[str]:
    """Yield a line for each setting that does not fit. hard_timeout: the Wrapper's, in seconds."""
    if launcher.policy == "any-failed":
        yield (
            "when a rank dies, this launcher starts all workers again; with --ft-restart-policy min-healthy the "
            "Wrapper continues without that rank"
        )
    limit = launcher.shortest_limit
    if limit is not None and limit < hard_timeout:
        yield (
            f"this launcher kills a rank after {limit:g} s of silence, but the Wrapper may restart it until "
            f"{hard_timeout:g} s (hard_timeout); raise the launcher's limit"
        )
