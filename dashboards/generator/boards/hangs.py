"""Which ranks are silent, in which section, and how close are they to the limit?"""

from __future__ import annotations

from dashboards.generator.boards.common import (
    FIRST_STEP,
    LAST_STEP,
    NO_BEATS,
    NO_PROGRESS,
    NO_STEPS,
    NONE_OPEN,
    OPEN,
    STEPS,
    silence,
    top,
)
from dashboards.generator.panels import Board, Panel, PanelRow, Query
from dashboards.generator.queries import present, quantile, rate, stepped

_INTERVAL = "resilience_heartbeat_interval_seconds"

_open_of_limit = f"max by (node, rank, section) ({present('resilience_rank_section_used_ratio')})"

HANGS = Board(
    "hangs",
    "Resilience / Hangs",
    "Which ranks are silent, in which section, and how close they are to the limit.",
    (
        PanelRow(
            "Silence",
            (
                Panel(
                    title="Most silent ranks",
                    description=(
                        "Time since the last sign of life of each rank (heartbeat, ping, step, start or end of a "
                        "section), longest first."
                    ),
                    unit="s",
                    queries=(Query(top(silence("node, rank"))),),
                    view="table",
                    empty=NO_BEATS,
                    runbook="RankHeartbeatStale",
                ),
                Panel(
                    title="Open sections",
                    description="How long each rank's section has been open, longest first.",
                    unit="s",
                    queries=(Query(top(f"max by (node, rank, section) ({present(OPEN)})")),),
                    view="table",
                    empty=NONE_OPEN,
                    runbook="SectionNearLimit",
                ),
                Panel(
                    title="Open sections against their limits",
                    description=(
                        "Share that an open section has used of the limit in force, most first; at 100 % the rank is "
                        "restarted or killed. The first occurrences after a start may have a longer limit."
                    ),
                    unit="percentunit",
                    queries=(Query(top(_open_of_limit)),),
                    view="table",
                    empty="No section with a limit is open, or per-rank metrics are off",
                    steps=((None, "green"), (0.67, "orange"), (1, "red")),
                    runbook="SectionNearLimit",
                ),
                Panel(
                    title="Oldest sign of life",
                    description="Longest time since the last sign of life of any rank, per node.",
                    unit="s",
                    queries=(Query(top(f"max by (node) ({silence('node, rank')})"), "{{node}}"),),
                    empty=NO_BEATS,
                    runbook="JobStalled",
                ),
            ),
        ),
        PanelRow(
            "Progress",
            (
                Panel(
                    title="Step skew",
                    description=(
                        "Difference in steps between the first and the last rank. Growth means a straggler or a hang. "
                        "Steps are read every 2 s, with N ranks (more than 256) every N / 128 s."
                    ),
                    unit="none",
                    queries=(Query(f"{FIRST_STEP} - {LAST_STEP}", "skew"),),
                    empty=NO_PROGRESS,
                    runbook="JobStalled",
                ),
                Panel(
                    title="Ranks furthest behind",
                    description=(
                        "Steps behind the first rank, most first; only ranks with series of their own "
                        "(RESILIENCE_METRICS_RANKS)."
                    ),
                    unit="none",
                    queries=(Query(top(f"scalar({FIRST_STEP}) - max by (node, rank) ({STEPS})")),),
                    view="table",
                    empty=NO_STEPS,
                    runbook="JobStalled",
                ),
                Panel(
                    title="Exceeded limits",
                    description=(
                        "Per interval, by detector and section. Suspected: longer than ever before, but below the "
                        "limit. On trial: a limit that only reports."
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
                    description=("Median and 99th percentile of the time between two heartbeats, over all ranks."),
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
