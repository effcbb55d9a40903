"""Do this job's launcher and its Wrapper fit together?  If not, the job gets advice; nothing changes.

The Wrapper restarts ranks in place; the launcher replaces processes. If the launcher starts all workers again when one
dies, nothing is left for the Wrapper to do. With min-healthy it does so only if too few nodes are healthy, and a node
is healthy as long as all of its ranks live. If the launcher's monitors have shorter limits than the Wrapper, they kill
a rank that the Wrapper would still restart."""

from __future__ import annotations

from collections.abc import Iterator

from resilience.system.environment import Launcher


def advice(launcher: Launcher, hard_timeout: float) -> Iterator[str]:
    """Yield a line for each setting that does not fit. hard_timeout: the Wrapper's, in seconds."""
    if launcher.policy == "any-failed" and launcher.nodes * launcher.ranks_per_node > 1:
        yield f"when a rank dies, this launcher starts all workers again; {_way_to_continue(launcher)}"
    limit = launcher.shortest_limit
    if limit is not None and limit < hard_timeout:
        yield (
            f"this launcher kills a rank after {limit:g} s of silence, but the Wrapper may restart it until "
            f"{hard_timeout:g} s (hard_timeout); raise the launcher's limit"
        )


def _way_to_continue(launcher: Launcher) -> str:
    if launcher.ranks_per_node == 1:
        return (
            "with --ft-restart-policy min-healthy the Wrapper continues without that rank, down to the minimum of "
            "--nnodes"
        )
    if launcher.nodes == 1:
        return (
            "the Wrapper can continue without that rank only with one agent for each rank (--nproc-per-node 1, "
            "--nnodes MIN:MAX) and --ft-restart-policy min-healthy"
        )
    return (
        "with --ft-restart-policy min-healthy the Wrapper continues without that rank's node, down to the minimum of "
        "--nnodes, if its rank_assignment gives up whole nodes (FilterGroupedByKey)"
    )
