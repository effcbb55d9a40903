"""Does the job use its machines well?  Goodput, restarts, ranks, lost time."""

from __future__ import annotations

from dashboards.generator.boards.common import (
    DURATION,
    FAULTS,
    FIRST,
    FIRST_STEP,
    LAST_STEP,
    NO_PROGRESS,
    QUIET,
)
from dashboards.generator.panels import Board, Panel, PanelRow, Query
from dashboards.generator.queries import (
    RANGE,
    RATE,
    counted,
    goodput,
    grown,
    living,
    or_zero,
    restarts,
    select,
    stepped,
)
from dashboards.generator.queries import STEP as INTERVAL

_ACTIVE = counted("resilience_ranks", 'state="active"')
_RANKS, _INACTIVE = counted("resilience_ranks"), counted("resilience_ranks", 'state="inactive"')
_SPARE_NODES = f"({counted('resilience_node_waiting')} and {_ACTIVE} > 0)"
_ALERTS = select("ALERTS", scope=('job_id="$job"',))

_MEDIAN_SPEED, _LOWEST_SPEED = (
    living(f"deriv({select(f'resilience_step_{which}')}[{RATE}])") for which in ("median", "lowest")
)
_recovering = grown(DURATION + "_sum", by=("layer",))
_recovered = grown(DURATION + "_count", by=("layer",))
_productive = grown("resilience_productive_seconds_total")
# At each point of the range: exporters and nodes come and go, and each has series for a part of it.
_active = f"avg_over_time({_ACTIVE}[{RANGE}:{INTERVAL}])"

OVERVIEW = Board(
    "overview",
    "Resilience / Overview",
    "How well the job uses its machines: goodput, restarts, ranks, lost time.",
    (
        PanelRow(
            "The job",
            (
                Panel(
                    title="Goodput",
                    description=(
                        "Share of rank-seconds within the range that were not lost to a start, a restart, a hang, "
                        "repeated steps, or waiting (a spare, a rank that has finished). During a hang all ranks "
                        "wait, so the time of all of them is lost."
                    ),
                    unit="percentunit",
                    queries=(Query(goodput()),),
                    view="stat",
                    width=5,
                    height=5,
                    steps=((None, "red"), (0.8, "orange"), (0.9, "yellow"), (0.95, "green")),
                    maximum=1,
                    runbook="GoodputLow",
                ),
                Panel(
                    title="Restarts",
                    description=(
                        "Restarts within the range, in place, by the launcher and by torchrun; each counts once for "
                        "all ranks. A fault that ends a call of a Wrapper under the launcher is one restart by the "
                        "launcher."
                    ),
                    unit="none",
                    queries=(Query(restarts()),),
                    view="stat",
                    width=4,
                    height=5,
                    steps=((None, "green"), (1, "yellow"), (5, "red")),
                    runbook="RestartLoop",
                ),
                Panel(
                    title="Time between restarts",
                    description=(
                        "Mean time that an active rank spent in the function per restart within the range (MTBF)."
                    ),
                    unit="s",
                    queries=(Query(f"{_productive} / {_active} / ({restarts()} > 0)"),),
                    view="stat",
                    width=4,
                    height=5,
                    empty=QUIET,
                    runbook="RestartLoop",
                ),
                Panel(
                    title="Time to recover",
                    description=("Mean time from detection to the first progress afterwards, within the range (MTTR)."),
                    unit="s",
                    queries=(
                        Query(
                            f"{_recovering} / ({_recovered} > 0)",
                            "{{layer}}",
                        ),
                    ),
                    view="stat",
                    width=4,
                    height=5,
                    empty=QUIET,
                    runbook="RestartSlow",
                ),
                Panel(
                    title="Active ranks",
                    description="Ranks that take part in the training.",
                    unit="none",
                    queries=(Query(_ACTIVE),),
                    view="stat",
                    width=3,
                    height=5,
                    empty="No rank is active: the job has not started, is restarting, or has ended",
                    runbook="JobStalled",
                ),
                Panel(
                    title="Spares",
                    description=(
                        "Ranks of a Wrapper that wait to replace a lost one, and nodes of the launcher that wait for a "
                        "place while other ranks are active; 0 if the job has no spares."
                    ),
                    unit="none",
                    queries=(Query(f"{or_zero(_INACTIVE, _RANKS)} + {or_zero(_SPARE_NODES, _RANKS)}"),),
                    view="stat",
                    width=4,
                    height=5,
                    empty="No ranks: the job has not started, or has ended",
                    runbook="SparesExhausted",
                ),
            ),
        ),
        PanelRow(
            "Over time",
            (
                Panel(
                    title="Goodput over time",
                    description="Goodput of each interval of the graph.",
                    unit="percentunit",
                    queries=(Query(goodput(window=RATE), "goodput"),),
                    maximum=1,
                    runbook="GoodputLow",
                ),
                Panel(
                    title="Ranks by state",
                    description=(
                        "Ranks of the selected nodes: active, inactive (spares), suspect (a limit was exceeded), "
                        "terminated, excluded, unmonitored (their monitor is gone)."
                    ),
                    unit="none",
                    queries=(Query(counted("resilience_ranks", by=("state",)), "{{state}}"),),
                    view="stacked",
                    runbook="SparesExhausted",
                ),
                Panel(
                    title="Lost time by cause",
                    description=(
                        "Rank-seconds lost per interval. startup: until the function is entered; restart: from "
                        "detection to the first progress; hang: from the last sign of life until a limit fired; "
                        "rework: repeated steps; idle: spares, and ranks that have finished."
                    ),
                    unit="s",
                    queries=(Query(stepped("resilience_lost_seconds_total", by=("cause",)), "{{cause}}"),),
                    view="bars",
                    runbook="GoodputLow",
                ),
                Panel(
                    title="Interruptions by kind",
                    description="Faults per interval, without their consequences.",
                    unit="none",
                    queries=(Query(stepped(FAULTS, FIRST, by=("interruption",)), "{{interruption}}"),),
                    view="bars",
                    empty=QUIET,
                    runbook="RestartLoop",
                ),
                Panel(
                    title="Steps per second",
                    description=(
                        "How fast steps grow: the median of the nodes' median ranks, and the slowest node's last rank; "
                        "0 while the job restarts."
                    ),
                    unit="none",
                    queries=(
                        Query(f"clamp_min(quantile(0.5, {_MEDIAN_SPEED}), 0)", "median"),
                        Query(f"clamp_min(min({_LOWEST_SPEED}), 0)", "slowest"),
                    ),
                    empty=NO_PROGRESS,
                    runbook="JobStalled",
                ),
                Panel(
                    title="Progress",
                    description="The highest and the lowest step of the ranks.",
                    unit="none",
                    queries=(
                        Query(FIRST_STEP, "first"),
                        Query(LAST_STEP, "last"),
                    ),
                    empty=NO_PROGRESS,
                    runbook="JobStalled",
                ),
                Panel(
                    title="Alerts",
                    description="Firing and pending alerts about this job.",
                    unit="none",
                    queries=(Query(f"max by (alertname, alertstate, severity, node) ({_ALERTS})"),),
                    view="table",
                    width=24,
                    empty="No alert",
                ),
            ),
        ),
    ),
)
