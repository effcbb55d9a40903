"""What interrupts the job, where, and where does the time of a restart go?"""

from __future__ import annotations

from resilience.analysis.dashboards.boards.common import DURATION, FAULTS, FIRST, QUIET, top
from resilience.analysis.dashboards.panels import Board, Panel, Query, Row
from resilience.analysis.dashboards.queries import grown, quantile, select, stepped

_PHASE = "resilience_restart_phase_duration_seconds"

RESTARTS = Board(
    "restarts",
    "Resilience / Restarts",
    "What interrupts the job, where, and where the time of a restart goes.",
    (
        Row(
            "How long",
            (
                Panel(
                    title="Restart duration",
                    description=(
                        "From detection to first progress, a sample a rank. A point is one restart; it leads to the "
                        "trace of its cycle."
                    ),
                    unit="s",
                    queries=(Query(stepped(DURATION + "_bucket", by=("le",)), "{{le}}"),),
                    view="heatmap",
                    empty=QUIET,
                    has_exemplars=True,
                    runbook="RestartSlow",
                ),
                Panel(
                    title="Restart duration, quantiles",
                    description=(
                        "Median and 95th percentile over all ranks that restarted, by layer; each point looks back "
                        "over a whole range."
                    ),
                    unit="s",
                    queries=tuple(
                        Query(quantile(q, grown(DURATION + "_bucket", by=("layer", "le"))), f"{{{{layer}}}} {name}")
                        for q, name in ((0.5, "p50"), (0.95, "p95"))
                    ),
                    empty=QUIET,
                    runbook="RestartSlow",
                ),
                Panel(
                    title="Phases, median",
                    description="Where the time goes in half of the ranks, within the range.",
                    unit="s",
                    queries=(
                        Query(
                            quantile(0.5, grown(_PHASE + "_bucket", by=("layer", "phase", "le"))),
                            "{{layer}} {{phase}}",
                        ),
                    ),
                    view="gauge",
                    empty=QUIET,
                    runbook="RestartSlow",
                ),
                Panel(
                    title="Phases, 95th percentile",
                    description=(
                        "Where the time goes in the slowest ranks, within the range. A restart waits for the slowest."
                    ),
                    unit="s",
                    queries=(
                        Query(
                            quantile(0.95, grown(_PHASE + "_bucket", by=("layer", "phase", "le"))),
                            "{{layer}} {{phase}}",
                        ),
                    ),
                    view="gauge",
                    empty=QUIET,
                    runbook="RestartSlow",
                ),
            ),
        ),
        Row(
            "What and where",
            (
                Panel(
                    title="Interruptions by kind and category",
                    description=(
                        "Faults within the range. The category is what the record shows by itself; the verdict of "
                        "`resilience report` weighs all ranks against each other."
                    ),
                    unit="none",
                    queries=(Query(grown(FAULTS, FIRST, by=("interruption", "category")) + " > 0"),),
                    view="table",
                    empty=QUIET,
                    runbook="RestartLoop",
                ),
                Panel(
                    title="Nodes that failed first",
                    description="Faults of each node within the range, without what only followed from another node's.",
                    unit="none",
                    queries=(Query(top(grown(FAULTS, FIRST, by=("node",)) + " > 0"), "{{node}}"),),
                    view="table",
                    empty=QUIET,
                    runbook="NodeRepeatOffender",
                ),
                Panel(
                    title="Iterations and cycles by outcome",
                    description="How iterations (in processes) and cycles (of the launcher) ended, in each interval.",
                    unit="none",
                    queries=(
                        Query(
                            "max by (layer, outcome) "
                            f"({stepped('resilience_restart_iterations_total', by=('layer', 'outcome', 'node'))})",
                            "{{layer}} {{outcome}}",
                        ),
                    ),
                    view="bars",
                    empty="No iteration has ended in this range",
                    runbook="RestartLoop",
                ),
                Panel(
                    title="Iteration and cycle under way",
                    description="Counts from 0; each step up is a restart.",
                    unit="none",
                    queries=(Query(f"max by (layer) ({select('resilience_restart_iteration')})", "{{layer}}"),),
                    runbook="RestartLoop",
                ),
                Panel(
                    title="Restarts left",
                    description="What is left of the launcher's budget (`--max-restarts`).",
                    unit="none",
                    queries=(Query(f"min by (layer) ({select('resilience_restart_budget_remaining')})", "{{layer}}"),),
                    empty="The job was not started by `resilience run`, so it has no budget",
                    steps=((None, "red"), (2, "yellow"), (3, "green")),
                    runbook="RestartBudgetLow",
                ),
                Panel(
                    title="Cascades",
                    description="Interruptions in each interval that only followed from another rank's fault.",
                    unit="none",
                    queries=(
                        Query(
                            stepped(FAULTS, 'origin="cascade"', by=("interruption",)),
                            "{{interruption}}",
                        ),
                    ),
                    view="bars",
                    empty=QUIET,
                    runbook="RestartLoop",
                ),
            ),
        ),
    ),
)
