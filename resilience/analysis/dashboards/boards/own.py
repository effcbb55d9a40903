"""Can what is shown be believed?  Scrapes, losses, number of series."""

from __future__ import annotations

from resilience.analysis.dashboards.boards.common import top
from resilience.analysis.dashboards.panels import Board, Panel, Query, Row
from resilience.analysis.dashboards.queries import RANGE, grown, of_nodes, quantile, select, stepped

# The last value in the range, also of a job that has ended.
_versions = of_nodes("resilience_build_info", f"last_over_time({select('resilience_build_info')}[{RANGE}])")
_values = f"last_over_time({select('resilience_elastic_value')}[{RANGE}])"
_NO_AGENT = "No launcher in this range: only `resilience run` is built on torch's agent"

OWN = Board(
    "self",
    "Resilience / Self",
    "Can what is shown be believed: scrapes, losses, number of series.",
    (
        Row(
            "Scrapes",
            (
                Panel(
                    title="Endpoints",
                    description="1 where a node's endpoint answers.",
                    unit="none",
                    queries=(Query(f"min by (node, instance) ({select('up')})", "{{node}} {{instance}}"),),
                    runbook="MonitorDown",
                ),
                Panel(
                    title="Scrape duration",
                    description="How long a node's endpoint takes to answer.",
                    unit="s",
                    queries=(Query(f"max by (node) ({select('scrape_duration_seconds')})", "{{node}}"),),
                    runbook="MonitorDown",
                ),
                Panel(
                    title="Samples a scrape",
                    description=(
                        "Values that a node's endpoint answers with; a node of 8 ranks and 10 sections has 1,200 at "
                        "most."
                    ),
                    unit="none",
                    queries=(Query(f"max by (node) ({select('scrape_samples_scraped')})", "{{node}}"),),
                    steps=((None, "green"), (1200, "red")),
                    runbook="TelemetryDropping",
                ),
                Panel(
                    title="Series of the job",
                    description="Values of all chosen nodes together: what the job costs Prometheus.",
                    unit="none",
                    queries=(Query(f"sum({select('scrape_samples_scraped')})", "series"),),
                    runbook="TelemetryDropping",
                ),
            ),
        ),
        Row(
            "Losses",
            (
                Panel(
                    title="Telemetry dropped",
                    description="Records, spans or measurements that were lost, in each interval.",
                    unit="none",
                    queries=(
                        Query(
                            stepped("resilience_telemetry_dropped_total", by=("signal", "reason")),
                            "{{signal}} {{reason}}",
                        ),
                    ),
                    view="bars",
                    empty="Nothing was lost",
                    runbook="TelemetryDropping",
                ),
                Panel(
                    title="Exporters that failed",
                    description="Exporters that could not start or send, in each interval.",
                    unit="none",
                    queries=(
                        Query(
                            stepped("resilience_telemetry_errors_total", by=("signal", "reason")),
                            "{{signal}} {{reason}}",
                        ),
                    ),
                    view="bars",
                    empty="All exporters work",
                    runbook="TelemetryDropping",
                ),
                Panel(
                    title="Records by event",
                    description="What was put on record in each interval, the most frequent events.",
                    unit="none",
                    queries=(Query(top(stepped("resilience_events_total", by=("event",))), "{{event}}"),),
                    view="bars",
                    runbook="TelemetryDropping",
                ),
                Panel(
                    title="Versions",
                    description="Of the toolkit and of torch; more than one line is a mixed installation.",
                    unit="none",
                    queries=(Query(f"count by (version, torch) ({_versions})"),),
                    view="table",
                    empty="Only ranks with a Wrapper tell their versions",
                ),
            ),
        ),
        Row(
            "What torchelastic says of itself",
            (
                Panel(
                    title="Calls of torch's agent",
                    description="Calls that ended in each interval, as torch names and counts them.",
                    unit="none",
                    queries=(
                        Query(
                            stepped("resilience_elastic_calls_total", by=("call", "outcome")), "{{call}} {{outcome}}"
                        ),
                    ),
                    view="bars",
                    empty=_NO_AGENT,
                    runbook="RestartLoop",
                ),
                Panel(
                    title="Duration of these calls, 95th percentile",
                    description="Within the range. A rendezvous waits for the slowest node.",
                    unit="s",
                    queries=(
                        Query(
                            quantile(
                                0.95,
                                grown("resilience_elastic_call_duration_seconds_bucket", by=("call", "le")),
                            ),
                            "{{call}}",
                        ),
                    ),
                    view="gauge",
                    empty=_NO_AGENT,
                    runbook="RestartSlow",
                ),
                Panel(
                    title="Events of torch's agent and of workers",
                    description="Told in each interval, by the state that they tell.",
                    unit="none",
                    queries=(
                        Query(
                            stepped("resilience_elastic_events_total", by=("source", "state")), "{{source}} {{state}}"
                        ),
                    ),
                    view="bars",
                    empty=_NO_AGENT,
                    runbook="RestartLoop",
                ),
                Panel(
                    title="Other values",
                    description="The last of each: how the run ended, in torch's words, and how flaky it was.",
                    unit="none",
                    queries=(Query(f"max by (node, name) ({_values})"),),
                    view="table",
                    empty="Told when the job ends under `resilience run`",
                    runbook="RestartLoop",
                ),
            ),
        ),
    ),
)
