"""What interrupts the job, where, and where does the time of a restart go?"""

from __future__ import annotations

from dashboards.generator.boards.common import BLAMED, DURATION, FAULTS, FIRST, QUIET, top
from dashboards.generator.panels import Board, Panel, PanelRow, Query
from dashboards.generator.queries import JOB, grown, present, quantile, stepped

_PHASE = "resilience_restart_phase_duration_seconds"


def _phases(q: float) -> str:
    """Return a quantile of each phase over ranks. Phase `import` is shown as what it is, as the report does."""
    durations = quantile(q, grown(_PHASE + "_bucket", by=("layer", "phase", "le")))
    return f'label_replace({durations}, "phase", "script start", "phase", "import")'


RESTARTS = Board(
    "restarts",
    "Resilience / Restarts",
    "What interrupts the job, where, and where the time of a restart goes.",
    (
        PanelRow(
            "How long",
            (
                Panel(
                    title="Restart duration",
                    description=(
                        "From detection to first progress, one sample per rank. A point is one restart and links to "
                        "the trace of its cycle."
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
                        "Median and 95th percentile over all ranks that restarted, by layer; each point covers the "
                        "preceding range."
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
                    description=(
                        "Median duration of each phase over ranks, within the range. `script start` is the phase "
                        "`import`: from the start of a worker to its first sign of progress."
                    ),
                    unit="s",
                    queries=(
                        Query(
                            _phases(0.5),
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
                        "95th percentile of each phase over ranks, within the range. A restart waits for the slowest."
                    ),
                    unit="s",
                    queries=(
                        Query(
                            _phases(0.95),
                            "{{layer}} {{phase}}",
                        ),
                    ),
                    view="gauge",
                    empty=QUIET,
                    runbook="RestartSlow",
                ),
            ),
        ),
        PanelRow(
            "What failed, and where",
            (
                Panel(
                    title="Interruptions by kind and category",
                    description=(
                        "Faults within the range. The category comes from each record alone; the verdict of "
                        "`resilience report` compares all ranks. If ranks of two nodes die at the same time, that is "
                        "two faults and one restart."
                    ),
                    unit="none",
                    queries=(Query(grown(FAULTS, FIRST, by=("interruption", "category")) + " > 0"),),
                    view="table",
                    empty=QUIET,
                    runbook="RestartLoop",
                ),
                Panel(
                    title="Blamed nodes",
                    description=(
                        "Interruptions within the range whose verdict blames ranks of the node. Interruptions with "
                        "candidates only count for no node."
                    ),
                    unit="none",
                    queries=(
                        Query(
                            top(grown(BLAMED, 'culprit_node=~"$node"', by=("culprit_node",), scope=(JOB,)) + " > 0"),
                            "{{culprit_node}}",
                        ),
                    ),
                    view="table",
                    empty=QUIET,
                    runbook="NodeRepeatOffender",
                ),
                Panel(
                    title="Iterations and cycles by outcome",
                    description="How iterations (in place) and cycles (launcher) ended, per interval.",
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
                    title="Current iteration and cycle",
                    description="Both count from 0; each increase is a restart.",
                    unit="none",
                    queries=(Query(f"max by (layer) ({present('resilience_restart_iteration')})", "{{layer}}"),),
                    runbook="RestartLoop",
                ),
                Panel(
                    title="Restarts left",
                    description="Restarts left in the launcher's budget (`--max-restarts`).",
                    unit="none",
                    queries=(Query(f"min by (layer) ({present('resilience_restart_budget_remaining')})", "{{layer}}"),),
                    empty="The job was not started by `resilience run`, so it has no budget",
                    steps=((None, "red"), (2, "yellow"), (3, "green")),
                    runbook="RestartBudgetLow",
                ),
                Panel(
                    title="Cascades",
                    description="Interruptions per interval that are consequences of another rank's fault.",
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
