"""How long do sections take, against the limits that end them?"""

from __future__ import annotations

from resilience.analysis.dashboards.boards.common import LIMIT, NO_SECTIONS, SECTION
from resilience.analysis.dashboards.panels import Board, Panel, Query, Row
from resilience.analysis.dashboards.queries import quantile, rate, select, stepped

NO_LIMITS = "No section has a limit"
COMPLETED = 'outcome="completed"'
_SAMPLES = select(SECTION + "_count", COMPLETED)

SECTIONS = Board(
    "sections",
    "Resilience / Sections & calibration",
    "How long sections take, against the limits that end them.",
    (
        Row(
            "Durations",
            (
                Panel(
                    title="Section duration, 99th percentile, and limit",
                    description=(
                        "Lines named after a section alone are what was measured; those with a source are its limit: "
                        "from the config, or calibrated."
                    ),
                    unit="s",
                    queries=(
                        Query(
                            quantile(0.99, rate(SECTION + "_bucket", COMPLETED, by=("section", "le"))), "{{section}}"
                        ),
                        Query(f"min by (section, source) ({select(LIMIT)})", "{{section}} limit ({{source}})"),
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
                    description="How many sections ended after how long, over all ranks.",
                    unit="s",
                    queries=(Query(rate(SECTION + "_bucket", COMPLETED, by=("le",)), "{{le}}"),),
                    view="heatmap",
                    empty=NO_SECTIONS,
                    runbook="SectionNearLimit",
                ),
                Panel(
                    title="Sections that failed",
                    description="Sections in each interval that an exception left.",
                    unit="none",
                    queries=(Query(stepped(SECTION + "_count", 'outcome="failed"', by=("section",)), "{{section}}"),),
                    view="bars",
                    empty="No section has failed in this range",
                    runbook="RestartLoop",
                ),
            ),
        ),
        Row(
            "Limits",
            (
                Panel(
                    title="Used share of the limit",
                    description=(
                        "A section's largest recent or open duration, divided by its limit. At 100 % the rank is "
                        "restarted or ended; past two thirds the limit is about to end healthy ranks."
                    ),
                    unit="percentunit",
                    queries=(
                        Query(f"max by (section) ({select('resilience_timeout_headroom_ratio')})", "{{section}}"),
                    ),
                    empty=NO_LIMITS,
                    steps=((None, "green"), (0.67, "orange"), (1, "red")),
                    runbook="SectionNearLimit",
                ),
                Panel(
                    title="Limits in force",
                    description="Of sections and of heartbeats, and where they come from.",
                    unit="s",
                    queries=(
                        Query(f"min by (section, source) ({select(LIMIT)})"),
                        Query(f"min by (source) ({select('resilience_heartbeat_timeout_seconds')})"),
                    ),
                    view="table",
                    empty="No limit is set",
                    runbook="TimeoutsUncalibrated",
                ),
                Panel(
                    title="Samples",
                    description=(
                        "Sections that were timed in this job so far: what `resilience calibrate` can learn from."
                    ),
                    unit="none",
                    queries=(Query(f"sum by (section) ({_SAMPLES})", "{{section}}"),),
                    empty=NO_SECTIONS,
                    runbook="TimeoutsUncalibrated",
                ),
                Panel(
                    title="Stale limits",
                    description=(
                        "Learned limits that do not agree with what is seen now; a longer one holds in their place."
                    ),
                    unit="none",
                    queries=(Query(f"max by (section) ({select('resilience_calibration_stale')}) > 0", "{{section}}"),),
                    view="table",
                    empty="No learned limit is stale",
                    runbook="TimeoutsUncalibrated",
                ),
            ),
        ),
    ),
)
