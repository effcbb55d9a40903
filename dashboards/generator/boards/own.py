"""Is the telemetry complete?  Scrapes, losses, number of series."""

from __future__ import annotations

from dashboards.generator.boards.common import top
from dashboards.generator.panels import Board, Panel, PanelRow, Query
from dashboards.generator.queries import RANGE, fold, grown, labelled, of_nodes, present, quantile, select, stepped

# The last value in the range, even if the job has ended.
_versions = of_nodes("resilience_build_info", f"last_over_time({select('resilience_build_info')}[{RANGE}])")
_folders = fold("min", ("node",), present("resilience_run_folder_up"))
_values = f"last_over_time({select('resilience_elastic_value')}[{RANGE}])"
_NO_AGENT = "No launcher in this range: only `resilience run` uses torch's agent"

OWN = Board(
    "self",
    "Resilience / Self",
    "Whether the telemetry is complete: scrapes, losses, number of series.",
    (
        PanelRow(
            "Scrapes",
            (
                Panel(
                    title="Endpoints",
                    description=(
                        "1 if the node's endpoint answers; run folder: 1 if the folder answers and can be written."
                    ),
                    unit="none",
                    queries=(
                        Query(
                            f"min by (node, instance) ({select('up')}) "
                            f"or {labelled(_folders, 'instance', 'run folder', 'node')}",
                            "{{node}} {{instance}}",
                        ),
                    ),
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
                    title="Samples per scrape",
                    description=(
                        "Samples in each answer of a node's endpoint; a node with 8 ranks and 10 sections has at most "
                        "1,200."
                    ),
                    unit="none",
                    queries=(Query(f"max by (node) ({select('scrape_samples_scraped')})", "{{node}}"),),
                    steps=((None, "green"), (1200, "red")),
                    runbook="TelemetryDropping",
                ),
                Panel(
                    title="Series of the job",
                    description="Samples of all selected nodes: the load of the job on Prometheus.",
                    unit="none",
                    queries=(Query(f"sum({select('scrape_samples_scraped')})", "series"),),
                    runbook="TelemetryDropping",
                ),
            ),
        ),
        PanelRow(
            "Losses",
            (
                Panel(
                    title="Telemetry dropped",
                    description="Records, spans and measurements lost per interval.",
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
                    title="Exporter failures",
                    description="Exporters that could not start or send, per interval.",
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
                    description="Records written per interval, most frequent events.",
                    unit="none",
                    queries=(Query(top(stepped("resilience_events_total", by=("event",))), "{{event}}"),),
                    view="bars",
                    runbook="TelemetryDropping",
                ),
                Panel(
                    title="Versions",
                    description="Versions of the toolkit and of torch; more than one row means a mixed installation.",
                    unit="none",
                    queries=(Query(f"count by (version, torch) ({_versions})"),),
                    view="table",
                    empty="Only ranks with a Wrapper report their versions",
                ),
            ),
        ),
        PanelRow(
            "torchelastic",
            (
                Panel(
                    title="Calls of torch's agent",
                    description="Calls that ended per interval, with torch's names and counts.",
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
                    title="Duration of calls of torch's agent, 95th percentile",
                    description="95th percentile within the range. A rendezvous waits for the slowest node.",
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
                    description="Events per interval, by source and state.",
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
                    description="Last values that torch reported, such as how the run ended and how flaky it was.",
                    unit="none",
                    queries=(Query(f"max by (node, name) ({_values})"),),
                    view="table",
                    empty="Reported when the job ends under `resilience run`",
                    runbook="RestartLoop",
                ),
            ),
        ),
    ),
)
