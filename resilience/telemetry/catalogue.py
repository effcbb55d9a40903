"""Which metrics exist?  Name, kind, labels, buckets and meaning of each, and the events that it is computed from.

`telemetry.metrics` computes the values; the docs are generated from this module. Units are base units (seconds); labels
have few values."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

import msgspec

from resilience.facts import events

MAX_SECTIONS = 16  # section names with their own series; the rest is summed up as "other"
OPEN_SHOWN = 2  # open sections shown per rank: those open longest
OTHER = "other"


def geometric(first: float, last: float, ratio: float) -> tuple[float, ...]:
    """Return upper bounds of buckets from first to last, each at most `ratio` times the previous one."""
    steps = math.ceil(math.log(last / first) / math.log(ratio))
    return tuple(float(f"{first * (last / first) ** (number / steps):.3g}") for number in range(steps + 1))


# A quantile is within one bucket of the true value: within a factor of 1.5 for restarts up to 10 minutes, and of 2 for
# longer ones and for sections. 1,000 ranks may need 40 minutes. A quantile is interpolated within its bucket, so the
# limits of RestartSlow are edges: if all restarts are below the limit, the quantile is too.
SLOW_IN_PLACE_S, SLOW_BY_LAUNCHER_S = 30.0, 240.0
PHASE_BUCKETS = geometric(0.001, 600.0, 1.49) + geometric(600.0, 7200.0, 1.99)[1:]
RESTART_BUCKETS = (
    geometric(0.001, SLOW_IN_PLACE_S, 1.49)
    + geometric(SLOW_IN_PLACE_S, SLOW_BY_LAUNCHER_S, 1.49)[1:]
    + geometric(SLOW_BY_LAUNCHER_S, 600.0, 1.49)[1:]
    + geometric(600.0, 7200.0, 1.99)[1:]
)
DURATION_BUCKETS = geometric(0.001, 3600.0, 1.99)
CALL_BUCKETS = (0.1, 1.0, 10.0, 60.0, 600.0)

Kind = Literal["counter", "gauge", "histogram"]
Labels = tuple[str, ...]


class Metric(msgspec.Struct, frozen=True):
    """One metric. events: what it is computed from; () if it comes from timing histograms or exporters."""

    name: str
    kind: Kind
    help: str
    labels: Labels = ()
    events: tuple[type[events.Event], ...] = ()
    buckets: tuple[float, ...] = ()
    source: str = ""


_E = events
_STATE_EVENTS = (
    _E.IterationStarted,
    _E.MonitorStarted,
    _E.RankFellSilent,
    _E.RankExited,
    _E.RankLeft,
    _E.RankStoodInFor,
    _E.MonitorLost,
    _E.CycleStarted,
)
_WORK_EVENTS = (
    _E.StageStarted,
    _E.StageEnded,
    _E.IterationDecided,
    _E.RankFellSilent,
    _E.RankExited,
    _E.RankInterrupted,
    _E.CyclePhaseEnded,
    _E.CycleEnded,
)
_LOSS_EVENTS = (
    _E.CallStarted,
    _E.CallEnded,
    _E.StageStarted,
    _E.StageEnded,
    _E.FirstStepReported,
    _E.RestartEnded,
    _E.RestartStep,
    _E.IterationDecided,
    _E.RankFellSilent,
    _E.RankExited,
    _E.RankInterrupted,
    _E.WorkerStarted,
    _E.WorkerProgressed,
    _E.CyclePhaseEnded,
    _E.CycleEnded,
)
METRICS: tuple[Metric, ...] = (
    Metric("resilience_build_info", "gauge", "Versions in use; always 1.", ("version", "torch"), (_E.CallStarted,)),
    Metric("resilience_run_info", "gauge", "Where the run folder is; always 1.", ("folder",), source="the exporter"),
    Metric(
        "resilience_run_folder_up",
        "gauge",
        "1 while the run folder answers and can be written, else 0: then counters may stand still, records may be "
        "lost, and values of single ranks may be missing.",
        source="the exporter",
    ),
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
        "Unix time of the last verdict on an interruption; sentence: the verdict as on the terminal.",
        ("sentence",),
        (_E.IncidentJudged,),
    ),
    Metric(
        "resilience_blamed_total",
        "counter",
        "Interruptions whose verdict blames ranks of culprit_node, counted by the node that records the verdict. "
        "Candidates count for no node, nor does a common cause on several nodes.",
        ("culprit_node",),
        (_E.IncidentJudged,),
    ),
    Metric(
        "resilience_start_timestamp_seconds",
        "gauge",
        "Unix time at which this node's part of the job began.",
        (),
        events.CATALOGUE,
    ),
    Metric(
        "resilience_ended_timestamp_seconds",
        "gauge",
        "Unix time at which the job ended on this node; outcome: completed, failed, stopped (asked to stop), left (the "
        "node left, the job may continue).",
        ("outcome",),
        (_E.JobEnded, _E.CycleEnded, _E.CallEnded, _E.CallStarted, _E.RankSignalled, _E.RankExited),
    ),
    Metric(
        "resilience_written_timestamp_seconds",
        "gauge",
        "Unix time at which the file for node-exporter was written; not on the endpoint.",
        source="the exporter",
    ),
    Metric(
        "resilience_restart_iterations_total",
        "counter",
        "Iterations and launcher cycles that ended, counted once for all ranks of the node; interrupted: another one "
        "followed, in the same call, under the launcher, or because torchrun started the ranks again. One that failed "
        "and was not followed does not count, nor does one whose restart in place the launcher ended a moment later.",
        ("layer", "outcome"),
        (_E.IterationStarted, _E.IterationEnded, _E.RankStoodInFor, _E.WorkerExited, _E.CycleStarted, _E.CycleEnded),
    ),
    Metric(
        "resilience_restart_iteration",
        "gauge",
        "The current iteration, or the launcher's current cycle.",
        ("layer",),
        (_E.IterationStarted, _E.CycleStarted),
    ),
    Metric(
        "resilience_restart_budget_remaining",
        "gauge",
        "Restarts that the whole job has left, as far as this node knows.",
        ("layer",),
        (_E.CycleStarted, _E.RestartDecided),
    ),
    Metric(
        "resilience_restart_budget_max",
        "gauge",
        "Restarts that the whole job may use.",
        ("layer",),
        (_E.CycleStarted,),
    ),
    Metric(
        "resilience_restart_duration_seconds",
        "histogram",
        "From detection to the first progress, one sample per rank; without progress: until the start. "
        "Restarts by torchrun are not counted.",
        ("layer",),
        (_E.StageEnded, _E.WorkerProgressed, _E.StageStarted, _E.CycleEnded),
        RESTART_BUCKETS,
    ),
    Metric(
        "resilience_restart_phase_duration_seconds",
        "histogram",
        "Duration of a restart phase: one sample per rank; for the launcher one per node, for import one per worker.",
        ("layer", "phase"),
        (_E.StageEnded, _E.CyclePhaseEnded, _E.CycleStarted, _E.CycleEnded, _E.WorkerProgressed, _E.StageStarted),
        PHASE_BUCKETS,
    ),
    Metric(
        "resilience_interruptions_total",
        "counter",
        "Interruptions. origin: first (at most one per failed iteration or cycle, the first fault in the store) or "
        "cascade (a consequence). Monitors that the launcher lost count too: of a node and cycle, one is first.",
        ("interruption", "category", "origin"),
        (
            _E.RankInterrupted,
            _E.InterruptionArrived,
            _E.IterationDecided,
            _E.MonitorEnded,
            _E.MonitorLost,
            _E.CycleEnded,
        ),
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
        "The state of a rank; always 1.",
        ("rank", "state"),
        _STATE_EVENTS,
    ),
    Metric(
        "resilience_ranks",
        "gauge",
        "Ranks of the node by state.",
        ("state",),
        _STATE_EVENTS,
    ),
    Metric(
        "resilience_node_waiting",
        "gauge",
        "1 while the node's agent waits in the rendezvous, for other nodes or as a spare, else 0.",
        (),
        (_E.CyclePhaseStarted, _E.CyclePhaseEnded),
    ),
    Metric(
        "resilience_productive_seconds_total",
        "counter",
        "Rank-seconds at work: in the function, or after a worker's first progress. Includes hangs and rework. "
        "Unfinished activities count until 5 s ago.",
        (),
        _WORK_EVENTS,
    ),
    Metric(
        "resilience_lost_seconds_total",
        "counter",
        "Rank-seconds lost: startup (until at work), restart, hang (silence of all ranks at work until a limit fired), "
        "rework (repeated steps, if steps are reported), idle (spares, and ranks that finished first). "
        "Unfinished activities count until 5 s ago, or to the end of the job.",
        ("cause",),
        _LOSS_EVENTS,
    ),
    Metric(
        "resilience_monitor_up",
        "gauge",
        "Monitors of the node that watch their rank.",
        (),
        (_E.MonitorStarted, _E.MonitorEnded, _E.MonitorLost, _E.RankExited, _E.CycleStarted),
    ),
    Metric("resilience_events_total", "counter", "Records by kind of event.", ("event",), events.CATALOGUE),
    Metric(
        "resilience_telemetry_dropped_total",
        "counter",
        "Lost records, spans or measurements.",
        ("signal", "reason"),
        (_E.TelemetryDropped, _E.MonitorEnded),
    ),
    Metric(
        "resilience_telemetry_errors_total",
        "counter",
        "Failures of exporters to start or to send.",
        ("signal", "reason"),
        (_E.ExportFailed,),
    ),
    Metric(
        "resilience_heartbeat_interval_seconds",
        "histogram",
        "Time between two heartbeats.",
        (),
        (),
        DURATION_BUCKETS,
        source="timing histograms",
    ),
    Metric(
        "resilience_section_duration_seconds",
        "histogram",
        "Duration of sections; failed: an exception left the section (count and sum only); other: section names beyond "
        "the maximum.",
        ("section", "outcome"),
        (),
        DURATION_BUCKETS,
        source="timing histograms",
    ),
    Metric(
        "resilience_step",
        "gauge",
        "The highest step that a rank of the node has reported, without spares; also if single ranks have no series.",
        (),
        source="rank snapshots",
    ),
    Metric(
        "resilience_step_lowest",
        "gauge",
        "Lowest of the last steps that the node's ranks reported; without spares.",
        (),
        source="rank snapshots",
    ),
    Metric(
        "resilience_step_median",
        "gauge",
        "Median of the last steps that the node's ranks reported; without spares.",
        (),
        source="rank snapshots",
    ),
    Metric(
        "resilience_rank_step",
        "gauge",
        "The highest step that a rank has reported.",
        ("rank",),
        source="rank snapshots",
    ),
    Metric(
        "resilience_rank_silence_seconds",
        "gauge",
        "Time since a rank's last sign of life (heartbeat, ping, step, start or end of a section) when its state was "
        "written. No value for a rank that waits for the others, shuts down, or has ended its monitoring, or whose "
        "monitor has not written its state in time.",
        ("rank",),
        source="rank snapshots",
    ),
    Metric(
        "resilience_rank_section_open_seconds",
        "gauge",
        "How long a section of a rank has been open; only for the sections open longest.",
        ("rank", "section"),
        source="rank snapshots",
    ),
    Metric(
        "resilience_rank_section_used_ratio",
        "gauge",
        "The share of the limit in force that an open section of a rank has used; 1 is the limit. Only for the "
        "sections open longest.",
        ("rank", "section"),
        source="rank snapshots",
    ),
    Metric(
        "resilience_section_timeout_seconds",
        "gauge",
        "The limit of a section, of the strictest rank; source: config (set or calculated) or calibrated.",
        ("section", "source"),
        source="rank snapshots",
    ),
    Metric(
        "resilience_heartbeat_timeout_seconds",
        "gauge",
        "The limit between two heartbeats, of the strictest rank; source: config (set, calculated or the default) or "
        "calibrated. No value while none holds: the default holds once a rank has announced heartbeats.",
        ("source",),
        source="rank snapshots",
    ),
    Metric(
        "resilience_timeout_headroom_ratio",
        "gauge",
        "The largest used share of a section's limit: a rank's longest recent or open duration divided by its limit; 1 "
        "is the limit.",
        ("section",),
        source="rank snapshots, timing histograms",
    ),
    Metric(
        "resilience_elastic_calls_total",
        "counter",
        "From torchelastic: calls of its agent by result (`<call>.success`, `<call>.failure`).",
        ("call", "outcome"),
        (_E.ElasticMeasured,),
    ),
    Metric(
        "resilience_elastic_call_duration_seconds",
        "histogram",
        "From torchelastic: duration of its agent's calls (`<call>.duration.ms`).",
        ("call",),
        (_E.ElasticMeasured,),
        CALL_BUCKETS,
    ),
    Metric(
        "resilience_elastic_value",
        "gauge",
        "From torchelastic: the last value of each other metric, named as in torch but without the workers' role.",
        ("name",),
        (_E.ElasticMeasured,),
    ),
    Metric(
        "resilience_elastic_events_total",
        "counter",
        "From torchelastic: events of its agent and of workers, by the reported state.",
        ("source", "state"),
        (_E.ElasticTold,),
    ),
    Metric(
        "resilience_suspicions_total",
        "counter",
        "Ranks that were slow compared with their own past, before their learned limit, by detector and section.",
        ("detector", "section"),
        (_E.RankSuspected,),
    ),
    Metric(
        "resilience_shadow_alarms_total",
        "counter",
        "Learned limits on trial that would have ended a rank, by detector and section.",
        ("detector", "section"),
        (_E.TimeoutsShadowAlarm,),
    ),
    Metric(
        "resilience_calibration_stale",
        "gauge",
        "Learned limits that disagree with observed durations; always 1.",
        ("section",),
        (_E.TimeoutsStale,),
    ),
)
BY_NAME: Mapping[str, Metric] = {metric.name: metric for metric in METRICS}
