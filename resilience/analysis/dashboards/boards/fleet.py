"""Which job needs somebody?  All jobs of the cluster, the worst first."""

from __future__ import annotations

from resilience.analysis.dashboards.boards.common import LISTED, NO_BEATS, NO_STEPS, SILENCE, STEP
from resilience.analysis.dashboards.panels import Board, Panel, Query, Row
from resilience.analysis.dashboards.queries import ALL_JOBS, OF_JOB, RATE, fold, goodput, grown, restarts, select

_firing = fold(
    "max",
    (*OF_JOB, "alertname", "severity"),
    select("ALERTS", 'alertstate="firing"', 'alertname=~".+"', scope=ALL_JOBS),
)
_steps = f"clamp_min(deriv({select(STEP, scope=ALL_JOBS)}[{RATE}]), 0)"
_ended = "last_over_time({}[$__range])"

FLEET = Board(
    "fleet",
    "Resilience / Fleet",
    "All jobs, the worst first. A job's name leads to its overview.",
    (
        Row(
            "Needs somebody",
            (
                Panel(
                    title="Alerts that fire",
                    description="Of all jobs; an alert that another one silences is listed too.",
                    unit="none",
                    queries=(Query(_firing),),
                    view="table",
                    empty="No alert",
                    leads_to_job=True,
                ),
                Panel(
                    title="How jobs ended",
                    description="Jobs that ended within the range and told Prometheus so through node-exporter.",
                    unit="dateTimeAsIso",
                    queries=(
                        Query(
                            "sort_desc("
                            + fold(
                                "max",
                                (*OF_JOB, "outcome"),
                                _ended.format(select("resilience_ended_timestamp_seconds", scope=ALL_JOBS)),
                            )
                            + " * 1000)"
                        ),
                    ),
                    view="table",
                    empty="No job has ended, or none writes a file for node-exporter",
                    runbook="JobFailed",
                    leads_to_job=True,
                ),
                Panel(
                    title="Lowest goodput",
                    description="Share of rank-seconds within the range that were not lost, the lowest first.",
                    unit="percentunit",
                    queries=(Query(f"sort(bottomk({LISTED}, {goodput(OF_JOB, scope=ALL_JOBS)}))"),),
                    view="table",
                    steps=((None, "red"), (0.8, "orange"), (0.9, "yellow"), (0.95, "green")),
                    maximum=1,
                    runbook="GoodputLow",
                    leads_to_job=True,
                ),
                Panel(
                    title="Most restarts",
                    description="Restarts within the range, in processes and by the launcher, the most first.",
                    unit="none",
                    queries=(Query(f"sort_desc(topk({LISTED}, {restarts(OF_JOB, scope=ALL_JOBS)} > 0))"),),
                    view="table",
                    empty="No job was restarted in this range",
                    runbook="RestartLoop",
                    leads_to_job=True,
                ),
                Panel(
                    title="Silent for longest",
                    description="Of each job the rank whose last sign of life is oldest, the most silent first.",
                    unit="s",
                    queries=(
                        Query(f"sort_desc(topk({LISTED}, {fold('max', OF_JOB, select(SILENCE, scope=ALL_JOBS))}))"),
                    ),
                    view="table",
                    empty=NO_BEATS,
                    runbook="RankHeartbeatStale",
                    leads_to_job=True,
                ),
                Panel(
                    title="Most lost time",
                    description="Rank-seconds lost within the range, the most first.",
                    unit="s",
                    queries=(
                        Query(
                            f"sort_desc(topk({LISTED}, "
                            f"{grown('resilience_lost_seconds_total', by=OF_JOB, scope=ALL_JOBS)} > 0))"
                        ),
                    ),
                    view="table",
                    empty="Nothing was lost in this range",
                    runbook="GoodputLow",
                    leads_to_job=True,
                ),
            ),
        ),
        Row(
            "All jobs",
            (
                Panel(
                    title="Steps per second of each job",
                    description="Of the fastest rank of each job; 0 while a job restarts.",
                    unit="none",
                    queries=(Query(fold("max", OF_JOB, _steps), "{{cluster}} {{job_id}}"),),
                    empty=NO_STEPS,
                    runbook="JobStalled",
                ),
                Panel(
                    title="Active ranks of each job",
                    description="Ranks that take part in the training.",
                    unit="none",
                    queries=(
                        Query(
                            fold("sum", OF_JOB, select("resilience_ranks", 'state="active"', scope=ALL_JOBS)),
                            "{{cluster}} {{job_id}}",
                        ),
                    ),
                    view="stacked",
                    runbook="JobGone",
                ),
                Panel(
                    title="Run folders",
                    description="Where the account of each job is: RUN of every command.",
                    unit="none",
                    queries=(Query(fold("max", (*OF_JOB, "folder"), select("resilience_run_info", scope=ALL_JOBS))),),
                    view="table",
                    runbook="JobGone",
                    leads_to_job=True,
                ),
                Panel(
                    title="Age of files for node-exporter",
                    description="Of each node's file; one that runs is written every 15 s.",
                    unit="s",
                    queries=(
                        Query(
                            f"sort_desc(topk({LISTED}, time() - "
                            + fold(
                                "max",
                                (*OF_JOB, "node"),
                                select("resilience_written_timestamp_seconds", scope=ALL_JOBS),
                            )
                            + "))"
                        ),
                    ),
                    view="table",
                    empty="No job writes a file for node-exporter",
                    runbook="JobGone",
                    leads_to_job=True,
                ),
            ),
        ),
    ),
    is_of_one_job=False,
)
