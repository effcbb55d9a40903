"""What do the ranks of one node, or of some, do now?"""

from __future__ import annotations

from resilience.analysis.dashboards.boards.common import (
    FAULTS,
    NO_BEATS,
    NO_STEPS,
    NONE_OPEN,
    OPEN,
    QUIET,
    STEP,
    silence,
    top,
)
from resilience.analysis.dashboards.panels import Board, Panel, Query, Row
from resilience.analysis.dashboards.queries import grown, select, stepped

NODE = Board(
    "node",
    "Resilience / Node",
    "What the ranks of one node, or of some, do now. For ranks, RESILIENCE_METRICS_RANKS must not be `none`.",
    (
        Row(
            "Ranks",
            (
                Panel(
                    title="State of each rank",
                    description="The state a rank is in.",
                    unit="none",
                    queries=(Query(f"max by (node, rank, state) ({select('resilience_rank_state')})"),),
                    view="table",
                    empty="No rank is here, or metrics of ranks are switched off",
                    runbook="RankHeartbeatStale",
                ),
                Panel(
                    title="Step of each rank",
                    description="The highest step a rank has told.",
                    unit="none",
                    queries=(Query(f"max by (node, rank) ({select(STEP)})", "{{node}} rank {{rank}}"),),
                    empty=NO_STEPS,
                    runbook="JobStalled",
                ),
                Panel(
                    title="Time since the last sign of life",
                    description="Of each rank: a heartbeat, a ping, a step or the end of a section.",
                    unit="s",
                    queries=(Query(silence("node, rank"), "{{node}} rank {{rank}}"),),
                    empty=NO_BEATS,
                    runbook="RankHeartbeatStale",
                ),
                Panel(
                    title="Open sections",
                    description="How long each open section has been open.",
                    unit="s",
                    queries=(
                        Query(f"max by (node, rank, section) ({select(OPEN)})", "{{node}} rank {{rank}} {{section}}"),
                    ),
                    empty=NONE_OPEN,
                    runbook="SectionNearLimit",
                ),
            ),
        ),
        Row(
            "Node",
            (
                Panel(
                    title="Ranks by state and node",
                    description="Ranks of each node.",
                    unit="none",
                    queries=(Query(f"sum by (node, state) ({select('resilience_ranks')})", "{{node}} {{state}}"),),
                    view="stacked",
                    runbook="SparesExhausted",
                ),
                Panel(
                    title="Interruptions by node",
                    description="In each interval: faults, and what followed from another rank's.",
                    unit="none",
                    queries=(
                        Query(
                            stepped(FAULTS, by=("node", "interruption", "origin")),
                            "{{node}} {{interruption}} ({{origin}})",
                        ),
                    ),
                    view="bars",
                    empty=QUIET,
                    runbook="NodeRepeatOffender",
                ),
                Panel(
                    title="Lost time by node",
                    description="Rank-seconds lost within the range.",
                    unit="s",
                    queries=(Query(top(grown("resilience_lost_seconds_total", by=("node", "cause")))),),
                    view="table",
                    runbook="GoodputLow",
                ),
                Panel(
                    title="Monitors",
                    description="Monitors of the node that watch their rank.",
                    unit="none",
                    queries=(Query(f"sum by (node) ({select('resilience_monitor_up')})", "{{node}}"),),
                    runbook="MonitorDown",
                ),
            ),
        ),
    ),
)
