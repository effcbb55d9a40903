"""What do the ranks of the selected nodes do now?"""

from __future__ import annotations

from dashboards.generator.boards.common import (
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
from dashboards.generator.panels import Board, Panel, PanelRow, Query
from dashboards.generator.queries import counted, grown, present, stepped

NODE = Board(
    "node",
    "Resilience / Node",
    "What the ranks of the selected nodes do now. Per-rank panels need RESILIENCE_METRICS_RANKS other than `none`.",
    (
        PanelRow(
            "Ranks",
            (
                Panel(
                    title="State of each rank",
                    description="The current state of each rank.",
                    unit="none",
                    queries=(Query(f"max by (node, rank, state) ({present('resilience_rank_state')})"),),
                    view="table",
                    empty="This node has no ranks, or per-rank metrics are off",
                    runbook="RankHeartbeatStale",
                ),
                Panel(
                    title="Step of each rank",
                    description="The highest step that each rank has reported.",
                    unit="none",
                    queries=(Query(f"max by (node, rank) ({present(STEP)})", "{{node}} rank {{rank}}"),),
                    empty=NO_STEPS,
                    runbook="JobStalled",
                ),
                Panel(
                    title="Time since the last sign of life",
                    description="Time since the last heartbeat, ping, step, or start or end of a section, per rank.",
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
                        Query(f"max by (node, rank, section) ({present(OPEN)})", "{{node}} rank {{rank}} {{section}}"),
                    ),
                    empty=NONE_OPEN,
                    runbook="SectionNearLimit",
                ),
            ),
        ),
        PanelRow(
            "Node",
            (
                Panel(
                    title="Ranks by state and node",
                    description="Number of ranks of each node, by state.",
                    unit="none",
                    queries=(Query(counted("resilience_ranks", by=("node", "state")), "{{node}} {{state}}"),),
                    view="stacked",
                    runbook="SparesExhausted",
                ),
                Panel(
                    title="Interruptions by node",
                    description=(
                        "Interruptions per interval, on the node that recorded them: faults, and consequences of "
                        "another rank's fault. The dashboard *Restarts* has the nodes that the verdicts blame."
                    ),
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
                    description="Rank-seconds lost within the range, by cause.",
                    unit="s",
                    queries=(Query(top(grown("resilience_lost_seconds_total", by=("node", "cause")))),),
                    view="table",
                    runbook="GoodputLow",
                ),
                Panel(
                    title="Monitors",
                    description="Number of running monitors per node.",
                    unit="none",
                    queries=(Query(counted("resilience_monitor_up", by=("node",)), "{{node}}"),),
                    runbook="MonitorDown",
                ),
            ),
        ),
    ),
)
