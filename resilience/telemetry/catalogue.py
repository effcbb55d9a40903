"""Which metrics are there?  Name, kind, labels, buckets and meaning of each, and the events it is a view of.

`telemetry.metrics` computes their values; the docs are made from here. Base units, seconds; labels have few
values and never hold text."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

import msgspec

from resilience.core import events

MAX_SECTIONS = 16  # names of sections that get series of their own; the others are added up as "other"
OPEN_SHOWN = 2  # open sections of a rank that are shown: those open longest
OTHER = "other"


def geometric(first: float, last: float, ratio: float) -> tuple[float, ...]:
    """Return upper bounds of buckets from first to last, each at most `ratio` times the one before."""
    steps = math.ceil(math.log(last / first) / math.log(ratio))
    return tuple(float(f"{first * (last / first) ** (number / steps):.3g}") for number in range(steps + 1))


# A quantile is within one bucket of the records: within 1.5 times for restarts, 2 times for sections.
RESTART_BUCKETS = PHASE_BUCKETS = geometric(0.001, 600.0, 1.49)
DURATION_BUCKETS = geometric(0.001, 3600.0, 1.99)
CALL_BUCKETS = (0.1, 1.0, 10.0, 60.0, 600.0)

Kind = Literal["counter", "gauge", "histogram"]
Labels = tuple[str, ...]


class Metric(msgspec.Struct, frozen=True):
    """One metric. events: what it is a view of; () where it comes from timing histograms or exporters."""

    name: str
    kind: Kind
    help: str
    labels: Labels = ()
    events: tuple[type[events.Event], ...] = ()
    buckets: tuple[float, ...] = ()
    source: str = ""


_E = events
_OF_STATES = (
    _E.IterationStarted,
    _E.MonitorStarted,
    _E.RankFellSilent,
    _E.RankExited,
    _E.RankLeft,
    _E.RankStoodInFor,
    _E.MonitorLost,
)
_OF_WORK = (
    _E.StageStarted,
    _E.StageEnded,
    _E.OutcomeSeen,
    _E.RankFellSilent,
    _E.RankExited,
    _E.Interrupted,
    _E.CyclePhaseEnded,
)
_OF_LOSSES = (
    _E.CallStarted,
    _E.CallEnded,
    _E.StageStarted,
    _E.StageEnded,
    _E.RestartEnded,
    _E.OutcomeSeen,
    _E.RankFellSilent,
    _E.RankExited,
    _E.WorkerStarted,
    _E.WorkerProgressed,
    _E.CyclePhaseEnded,
    _E.CycleEnded,
)
METRICS: tuple[Metric, ...] = (
    Metric("resilience_build_info", "gauge", "Versions in use; always 1.", ("version", "torch"), (_E.CallStarted,)),
    Metric("resilience_run_info", "gauge", "Where the run folder is; always 1.", ("folder",), source="the exporter"),
    Metric(
        "resilience_job_info",
        "gauge",
        "The wrapped function, or the launcher's job; always 1.",
        ("name", "world_size", "layer"),
        (_E.CallStarted, _E.RendezvousCompleted, _E.CycleStarted),
    ),
    Metric(
        "resilience_verdict_timestamp_seconds",
        "gauge",
        "When the last verdict on an interruption was reached, in Unix time; sentence: in the words of the terminal.",
        ("sentence",),
        (_E.IncidentJudged,),
    ),
    Metric(
        "resilience_start_timestamp_seconds",
        "gauge",
        "When this node's part of the job began, in Unix time.",
        (),
        events.CATALOGUE,
    ),
    Metric(
        "resilience_ended_timestamp_seconds",
        "gauge",
        "When the job ended on this node, in Unix time; outcome: completed, failed, stopped (asked to stop), left (the "
        "node leaves, the job may go on).",
        ("outcome",),
        (_E.JobEnded, _E.CallEnded, _E.CallStarted, _E.RankExited),
    ),
    Metric(
        "resilience_written_timestamp_seconds",
        "gauge",
        "When the file for node-exporter was written, in Unix time; the endpoint does not have it.",
        source="the exporter",
    ),
    Metric(
        "resilience_restart_iterations_total",
        "counter",
        "Iterations, and cycles of the launcher, that ended, once for all ranks of the node.",
        ("layer", "outcome"),
        (_E.IterationEnded, _E.RankStoodInFor, _E.CycleEnded),
    ),
    Metric(
        "resilience_restart_iteration",
        "gauge",
        "The iteration, or the launcher's cycle, under way.",
        ("layer",),
        (_E.IterationStarted, _E.CycleStarted),
    ),
    Metric(
        "resilience_restart_budget_remaining",
        "gauge",
        "Restarts that the whole job has left, as this node knows.",
        ("layer",),
        (_E.CycleStarted, _E.RestartDecided),
    ),
    Metric(
        "resilience_restart_duration_seconds",
        "histogram",
        "From detection to the first progress, a sample a rank; a worker that shows none counts with its start, late.",
        ("layer",),
        (_E.StageEnded, _E.WorkerProgressed, _E.StageStarted, _E.CycleEnded),
        RESTART_BUCKETS,
    ),
    Metric(
        "resilience_restart_phase_duration_seconds",
        "histogram",
        "How long a phase of a restart took, a sample a rank; of the launcher's a sample a node, of import a worker.",
        ("layer", "phase"),
        (_E.StageEnded, _E.CyclePhaseEnded, _E.CycleStarted, _E.CycleEnded, _E.WorkerProgressed, _E.StageStarted),
        PHASE_BUCKETS,
    ),
    Metric(
        "resilience_interruptions_total",
        "counter",
        "Interruptions. origin: first, at most one in each iteration or cycle that failed, or cascade, what followed.",
        ("interruption", "category", "origin"),
        (_E.Interrupted, _E.OutcomeSeen, _E.MonitorEnded, _E.CycleEnded),
    ),
    Metric(
        "resilience_hangs_detected_total",
        "counter",
        "Limits that were exceeded.",
        ("detector", "section"),
        (_E.RankFellSilent,),
    ),
    Metric(
        "resilience_rank_state",
        "gauge",
        "The state a rank is in; 1.",
        ("rank", "state"),
        _OF_STATES,
    ),
    Metric(
        "resilience_ranks",
        "gauge",
        "Ranks of the node by state.",
        ("state",),
        _OF_STATES,
    ),
    Metric(
        "resilience_productive_seconds_total",
        "counter",
        "Rank-seconds at work: in the function, or after a worker's first progress. Hangs and rework are included.",
        (),
        _OF_WORK,
    ),
    Metric(
        "resilience_lost_seconds_total",
        "counter",
        "Rank-seconds lost: startup until at work, restart, hang (silence until a limit fired, of all ranks at work), "
        "rework (steps done again, where steps are reported), idle (spares, ranks that finished first).",
        ("cause",),
        _OF_LOSSES,
    ),
    Metric(
        "resilience_monitor_up",
        "gauge",
        "Monitors of the node that watch their rank.",
        (),
        (_E.MonitorStarted, _E.MonitorEnded, _E.MonitorLost),
    ),
    Metric("resilience_events_total", "counter", "Records by kind of event.", ("event",), events.CATALOGUE),
    Metric(
        "resilience_telemetry_dropped_total",
        "counter",
        "Records, spans or measurements that were lost.",
        ("signal", "reason"),
        (_E.TelemetryDropped, _E.MonitorEnded),
    ),
    Metric(
        "resilience_telemetry_errors_total",
        "counter",
        "Exporters that could not start or send.",
        ("signal", "reason"),
        (_E.ExportFailed,),
    ),
    Metric(
        "resilience_heartbeat_interval_seconds",
        "histogram",
        "Time from one heartbeat to the next.",
        (),
        (),
        DURATION_BUCKETS,
        source="timing histograms",
    ),
    Metric(
        "resilience_section_duration_seconds",
        "histogram",
        "How long sections took; failed: an exception left it (number and sum only); other: sections beyond the first "
        "names.",
        ("section", "outcome"),
        (),
        DURATION_BUCKETS,
        source="timing histograms",
    ),
    Metric("resilience_rank_step", "gauge", "The highest step a rank has told.", ("rank",), source="signs of life"),
    Metric(
        "resilience_rank_silence_seconds",
        "gauge",
        "Time since a rank's last sign of life (heartbeat, ping, step, end of a section), at the moment of the scrape.",
        ("rank",),
        source="signs of life",
    ),
    Metric(
        "resilience_rank_section_open_seconds",
        "gauge",
        "How long a section of a rank has been open, for the few open longest.",
        ("rank", "section"),
        source="signs of life",
    ),
    Metric(
        "resilience_section_timeout_seconds",
        "gauge",
        "The limit of a section, of the strictest rank; source: config or calibrated.",
        ("section", "source"),
        source="signs of life",
    ),
    Metric(
        "resilience_heartbeat_timeout_seconds",
        "gauge",
        "The limit between two heartbeats, of the strictest rank; source: config or calibrated.",
        ("source",),
        source="signs of life",
    ),
    Metric(
        "resilience_timeout_headroom_ratio",
        "gauge",
        "Used share of a section's limit: its largest recent or open duration, divided by the limit; 1 is the limit.",
        ("section",),
        source="signs of life, timing histograms",
    ),
    Metric(
        "resilience_elastic_calls_total",
        "counter",
        "torchelastic's own: calls of its agent, by how they ended (`<call>.success`, `<call>.failure`).",
        ("call", "outcome"),
        (_E.ElasticMeasured,),
    ),
    Metric(
        "resilience_elastic_call_duration_seconds",
        "histogram",
        "torchelastic's own: how long calls of its agent took (`<call>.duration.ms`).",
        ("call",),
        (_E.ElasticMeasured,),
        CALL_BUCKETS,
    ),
    Metric(
        "resilience_elastic_value",
        "gauge",
        "torchelastic's own: the last of each other value, as torch names it, without the role of the workers.",
        ("name",),
        (_E.ElasticMeasured,),
    ),
    Metric(
        "resilience_elastic_events_total",
        "counter",
        "torchelastic's own: events of its agent and of workers, by the state that they tell.",
        ("source", "state"),
        (_E.ElasticTold,),
    ),
    Metric(
        "resilience_suspicions_total",
        "counter",
        "Ranks that were late against their own past, before their learned limit, by detector and section.",
        ("detector", "section"),
        (_E.RankSuspected,),
    ),
    Metric(
        "resilience_shadow_alarms_total",
        "counter",
        "Learned limits on trial that would have ended a rank, by detector and section.",
        ("detector", "section"),
        (_E.TimeoutExceededInShadow,),
    ),
    Metric(
        "resilience_calibration_stale",
        "gauge",
        "Learned limits that do not agree with what is seen; 1.",
        ("section",),
        (_E.TimeoutsStale,),
    ),
)
BY_NAME: Mapping[str, Metric] = {metric.name: metric for metric in METRICS}
