"""Who is silent, in which section, and how near to its limit?"""

from __future__ import annotations

from resilience.analysis.dashboards.boards.common import LIMIT, NO_BEATS, NO_STEPS, NONE_OPEN, OPEN, STEPS, silence, top
from resilience.analysis.dashboards.panels import Board, Panel, Query, Row
from resilience.analysis.dashboards.queries import quantile, rate, select, stepped

_INTERVAL = "resilience_heartbeat_interval_seconds"

_limits = f"min by (section) ({select(LIMIT)})"
_open_of_limit = f"max by (node, rank, section) ({select(OPEN)}) / on (section) group_left () {_limits}"

HANGS = Board(
    "hangs",
    "Resilience / Hangs",
    "Who is silent, in which section, and how near to its limit.",
    (
        Row(
            "Silence",
            (
                Panel(
                    title="Stalest ranks",
                    description=(
                        "Time since the last sign of life of a rank (heartbeat, ping, step, end of a section), the "
                        "longest first."
                    ),
                    unit="s",
                    queries=(Query(top(silence("node, rank"))),),
                    view="table",
                    empty=NO_BEATS,
                    runbook="RankHeartbeatStale",
                ),
                Panel(
                    title="Sections that are open",
                    description="How long a section of a rank has been open, the longest first.",
                    unit="s",
                    queries=(Query(top(f"max by (node, rank, section) ({select(OPEN)})")),),
                    view="table",
                    empty=NONE_OPEN,
                    runbook="SectionNearLimit",
                ),
                Panel(
                    title="Open sections against their limits",
                    description=(
                        "How much of its limit a section has used, the most first; at 100 % the rank restarts or is "
                        "ended."
                    ),
                    unit="percentunit",
                    queries=(Query(top(_open_of_limit)),),
                    view="table",
                    empty="No section with a limit is open, or metrics of ranks are switched off",
                    steps=((None, "green"), (0.67, "orange"), (1, "red")),
                    runbook="SectionNearLimit",
                ),
                Panel(
                    title="Oldest sign of life",
                    description="Of the most silent rank of each node: time since its last sign of life.",
                    unit="s",
                    queries=(Query(top(f"max by (node) ({silence('node, rank')})"), "{{node}}"),),
                    empty=NO_BEATS,
                    runbook="JobStalled",
                ),
            ),
        ),
        Row(
            "Progress",
            (
                Panel(
                    title="Step skew",
                    description=(
                        "Steps between the first and the last rank. What grows is a straggler or a hang; ranks are "
                        "seen every 2 s."
                    ),
                    unit="none",
                    queries=(Query(f"max({STEPS}) - min({STEPS})", "skew"),),
                    empty=NO_STEPS,
                    runbook="JobStalled",
                ),
                Panel(
                    title="Ranks that are furthest behind",
                    description="Steps behind the first rank, the most first.",
                    unit="none",
                    queries=(Query(top(f"scalar(max({STEPS})) - max by (node, rank) ({STEPS})")),),
                    view="table",
                    empty=NO_STEPS,
                    runbook="JobStalled",
                ),
                Panel(
                    title="Limits that were exceeded",
                    description=(
                        "In each interval, by detector and section. Suspected: later than ever, below the limit. "
                        "On trial: a limit that only reports."
                    ),
                    unit="none",
                    queries=(
                        Query(
                            stepped("resilience_hangs_detected_total", by=("detector", "section")),
                            "{{detector}} {{section}}",
                        ),
                        Query(
                            stepped("resilience_suspicions_total", by=("detector", "section")),
                            "suspected: {{detector}} {{section}}",
                        ),
                        Query(
                            stepped("resilience_shadow_alarms_total", by=("detector", "section")),
                            "on trial: {{detector}} {{section}}",
                        ),
                    ),
                    view="bars",
                    empty="No hang in this range",
                    runbook="JobStalled",
                ),
                Panel(
                    title="Heartbeat interval",
                    description=(
                        "Median and 99th percentile of the time from one heartbeat to the next, over all ranks."
                    ),
                    unit="s",
                    queries=tuple(
                        Query(quantile(q, rate(_INTERVAL + "_bucket", by=("le",))), name)
                        for q, name in ((0.5, "p50"), (0.99, "p99"))
                    ),
                    empty="No rank sends heartbeats",
                    runbook="RankHeartbeatStale",
                ),
            ),
        ),
    ),
)
