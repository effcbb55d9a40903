"""Which job needs attention?  All jobs of the cluster, worst first."""

from __future__ import annotations

from dashboards.generator.boards.common import LISTED, NO_BEATS, SILENCE
from dashboards.generator.panels import Board, Panel, PanelRow, Query
from dashboards.generator.queries import (
    ALL_JOBS,
    OF_JOB,
    RATE,
    counted,
    fold,
    goodput,
    grown,
    living,
    present,
    restarts,
    select,
)


def _firing(*matchers: str) -> str:
    firing = select("ALERTS", 'alertstate="firing"', 'alertname=~".+"', *matchers, scope=ALL_JOBS)
    return fold("max", (*OF_JOB, "alertname", "severity"), firing)


_critical, _warning = (_firing(f'severity="{severity}"') for severity in ("critical", "warning"))
# ALERTS is always 1, and Prometheus sorts by value only.
_severest_first = f"sort_desc({_critical} * 3 or {_warning} * 2 or {_firing()})"
_deriv = f"deriv({select('resilience_step', scope=ALL_JOBS)}[{RATE}])"
_steps = f"clamp_min({living(_deriv, ALL_JOBS)}, 0)"
_ended = "last_over_time({}[$__range])"

FLEET = Board(
    "fleet",
    "Resilience / Fleet",
    "All jobs, worst first. Each job links to its overview.",
    (
        PanelRow(
            "Needs attention",
            (
                Panel(
                    title="Firing alerts",
                    description="Alerts of all jobs, including those that another alert silences. "
                    "Value: 3 critical, 2 warning, 1 other; most severe first.",
                    unit="none",
                    queries=(Query(_severest_first),),
                    view="table",
                    empty="No alert",
                    leads_to_job=True,
                ),
                Panel(
                    title="How jobs ended",
                    description="Jobs that ended within the range and reported their end through node-exporter, "
                    "latest first.",
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
                    empty="No job has ended, or no job writes a file for node-exporter",
                    runbook="JobFailed",
                    leads_to_job=True,
                ),
                Panel(
                    title="Lowest goodput",
                    description="Share of rank-seconds within the range that were not lost, lowest first.",
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
                    description="Restarts within the range, in place and by the launcher, most first.",
                    unit="none",
                    queries=(Query(f"sort_desc(topk({LISTED}, {restarts(OF_JOB, scope=ALL_JOBS)} > 0))"),),
                    view="table",
                    empty="No job was restarted in this range",
                    runbook="RestartLoop",
                    leads_to_job=True,
                ),
                Panel(
                    title="Longest silence",
                    description="The longest time since the last sign of life of any rank, per job, longest first.",
                    unit="s",
                    queries=(
                        Query(f"sort_desc(topk({LISTED}, {fold('max', OF_JOB, present(SILENCE, scope=ALL_JOBS))}))"),
                    ),
                    view="table",
                    empty=NO_BEATS,
                    runbook="RankHeartbeatStale",
                    leads_to_job=True,
                ),
                Panel(
                    title="Most lost time",
                    description="Rank-seconds lost within the range, most first.",
                    unit="s",
                    queries=(
                        Query(
                            f"sort_desc(topk({LISTED}, "
                            f"{grown('resilience_lost_seconds_total', by=OF_JOB, scope=ALL_JOBS)} > 0))"
                        ),
                    ),
                    view="table",
                    empty="No time was lost in this range",
                    runbook="GoodputLow",
                    leads_to_job=True,
                ),
            ),
        ),
        PanelRow(
            "All jobs",
            (
                Panel(
                    title="Steps per second by job",
                    description="Step rate of the node that is furthest, per job; 0 while the job restarts.",
                    unit="none",
                    queries=(Query(fold("max", OF_JOB, _steps), "{{cluster}} {{job_id}}"),),
                    empty="No rank has reported a step",
                    runbook="JobStalled",
                ),
                Panel(
                    title="Active ranks by job",
                    description="Ranks that take part in the training.",
                    unit="none",
                    queries=(
                        Query(
                            counted("resilience_ranks", 'state="active"', by=OF_JOB, scope=ALL_JOBS),
                            "{{cluster}} {{job_id}}",
                        ),
                    ),
                    view="stacked",
                    runbook="JobGone",
                ),
                Panel(
                    title="Run folders",
                    description="The run folder of each job: the RUN argument of all commands.",
                    unit="none",
                    queries=(Query(fold("max", (*OF_JOB, "folder"), select("resilience_run_info", scope=ALL_JOBS))),),
                    view="table",
                    runbook="JobGone",
                    leads_to_job=True,
                ),
                Panel(
                    title="Age of files for node-exporter",
                    description="Age of each node's file; a running job writes it every 15 s.",
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
