"""How long do sections take, against the limits that end them?"""

from __future__ import annotations

from dashboards.generator.boards.common import LIMIT, NO_SECTIONS, SECTION
from dashboards.generator.panels import Board, Panel, PanelRow, Query
from dashboards.generator.queries import counted, present, quantile, rate, stepped

NO_LIMITS = "No section has a limit"
COMPLETED = 'outcome="completed"'
_SAMPLES = counted(SECTION + "_count", COMPLETED, by=("section",))

SECTIONS = Board(
    "sections",
    "Resilience / Sections & calibration",
    "How long sections take, against the limits that end them.",
    (
        PanelRow(
            "Durations",
            (
                Panel(
                    title="Section duration, 99th percentile, and limit",
                    description=(
                        "Lines named only after a section are measured durations. Lines with a source are limits: "
                        "configured or calibrated."
                    ),
                    unit="s",
                    queries=(
                        Query(
                            quantile(0.99, rate(SECTION + "_bucket", COMPLETED, by=("section", "le"))), "{{section}}"
                        ),
                        Query(f"min by (section, source) ({present(LIMIT)})", "{{section}} limit ({{source}})"),
                    ),
                    empty=NO_SECTIONS,
                    runbook="SectionNearLimit",
                ),
                Panel(
                    title="Section duration, median",
                    description="Median over all ranks.",
                    unit="s",
                    queries=(
                        Query(quantile(0.5, rate(SECTION + "_bucket", COMPLETED, by=("section", "le"))), "{{section}}"),
                    ),
                    empty=NO_SECTIONS,
                    runbook="SectionNearLimit",
                ),
                Panel(
                    title="All sections",
                    description="Distribution of section durations over all ranks.",
                    unit="s",
                    queries=(Query(rate(SECTION + "_bucket", COMPLETED, by=("le",)), "{{le}}"),),
                    view="heatmap",
                    empty=NO_SECTIONS,
                    runbook="SectionNearLimit",
                ),
                Panel(
                    title="Failed sections",
                    description="Sections per interval that an exception ended.",
                    unit="none",
                    queries=(Query(stepped(SECTION + "_count", 'outcome="failed"', by=("section",)), "{{section}}"),),
                    view="bars",
                    empty="No section has failed in this range",
                    runbook="RestartLoop",
                ),
            ),
        ),
        PanelRow(
            "Limits",
            (
                Panel(
                    title="Used share of the limit",
                    description=(
                        "Longest recent or open duration of a section, divided by its limit. At 100 % the rank is "
                        "restarted or killed; above two thirds the limit risks killing healthy ranks."
                    ),
                    unit="percentunit",
                    queries=(
                        Query(f"max by (section) ({present('resilience_timeout_headroom_ratio')})", "{{section}}"),
                    ),
                    empty=NO_LIMITS,
                    steps=((None, "green"), (0.67, "orange"), (1, "red")),
                    runbook="SectionNearLimit",
                ),
                Panel(
                    title="Limits in force",
                    description=(
                        "Limits of sections and heartbeats that hold, with their source. The default limit of "
                        "heartbeats holds once a rank has announced them."
                    ),
                    unit="s",
                    queries=(
                        Query(f"min by (section, source) ({present(LIMIT)})"),
                        Query(f"min by (source) ({present('resilience_heartbeat_timeout_seconds')})"),
                    ),
                    view="table",
                    empty="No limit is set",
                    runbook="TimeoutsUncalibrated",
                ),
                Panel(
                    title="Samples",
                    description=(
                        "Section durations recorded so far in this job, from which `resilience calibrate` can learn."
                    ),
                    unit="none",
                    queries=(Query(_SAMPLES, "{{section}}"),),
                    empty=NO_SECTIONS,
                    runbook="TimeoutsUncalibrated",
                ),
                Panel(
                    title="Stale limits",
                    description=(
                        "Learned limits that disagree with current durations; a longer limit applies instead."
                    ),
                    unit="none",
                    queries=(
                        Query(f"max by (section) ({present('resilience_calibration_stale')}) > 0", "{{section}}"),
                    ),
                    view="table",
                    empty="No learned limit is stale",
                    runbook="TimeoutsUncalibrated",
                ),
            ),
        ),
    ),
)
