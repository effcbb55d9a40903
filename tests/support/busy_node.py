"""A node on which everything has happened: 8 ranks, 10 sections with limits, every interruption, loss and detector."""

from __future__ import annotations

from typing import get_args

import msgspec

from resilience.facts import events
from resilience.facts.identity import Origin
from resilience.facts.interruptions import Detector, ExceptionInfo, Interruption, InterruptionRecord
from resilience.telemetry.metrics import MetricView
from resilience.telemetry.rank_snapshot import Allowed, RankSnapshot, SnapshotSection
from resilience.telemetry.timings import HEARTBEAT, Timings
from tests.support import launch_streams
from tests.support.launch_streams import launched
from tests.support.rank_timings import add_durations, add_failed, durations_of
from tests.support.record_streams import Fault, Kind, job

RANKS, SECTIONS = 8, 10
# What torch's agent tells through ours.
CALLS = ("run", "_rendezvous", "_assign_worker_ranks")
STATES = {"AGENT": ("RENDEZVOUS", "ASSIGN_WORKER_RANKS", "SUCCEEDED", "FAILED"), "WORKER": ("SUCCEEDED", "TERMINATED")}
RUNS = tuple(f"run_{end}_{how}" for end in ("success", "failed") for how in ("no_retries", "with_retries"))


def shown(rank: int, sections: int = 1, alive_at: float = 20.0) -> RankSnapshot:
    """What a rank shows. alive_at: when its monitor last looked; nothing had changed since 20.0."""
    origin = Origin("job", "node0", "monitor", 500 + rank, initial_rank=rank)
    opened = tuple(SnapshotSection(f"section {number}", 10.0 + number) for number in range(sections))
    return RankSnapshot(
        origin, "run", 20.0, 1000.5, step=7, step_at=19.0, heartbeat_at=19.5, sections=opened, alive_at=alive_at
    )


def busy_node() -> MetricView:
    """Return the view of it."""
    view = MetricView(lambda: 10**15)
    _sections(view)
    _restarts(view)
    _silence_and_loss(view)
    _elastic(view)
    for event in events.CATALOGUE:
        view._count("resilience_events_total", (str(event.__struct_config__.tag),))
    return view


def _sections(view: MetricView) -> None:
    sections = [HEARTBEAT, *(f"section {number}" for number in range(SECTIONS))]
    timings = Timings()
    for number in range(SECTIONS):
        add_durations(timings, ((f"section {number}", 10.0**power) for power in range(-4, 4)))
        add_failed(timings, [(f"section {number}", 1.0)])
    add_durations(timings, ((HEARTBEAT, 10.0**power) for power in range(-4, 4)))
    view.take_durations({0: durations_of(timings)})
    limits = tuple(Allowed(name, 9.0, name in sections[1::2]) for name in sections)
    view.take_snapshots(
        {rank: msgspec.structs.replace(shown(rank, SECTIONS, 1e6), limits=limits) for rank in range(RANKS)}
    )


def _restarts(view: MetricView) -> None:
    for kind in get_args(Kind):
        for record in job([Fault(kind, 1, 0), Fault("exception", 2, 1, 20)], world=7, spares=1, seed=3).records:
            view.take(record)
    for fault in get_args(launch_streams.Kind):
        told = launched([launch_streams.Fault(fault, 1)], nodes=2, ranks=RANKS, is_running=True)
        for record in sorted(told.of_node("node0"), key=lambda record: record.mono_ns):
            view.take(record)
    for record in launched(ranks=RANKS, is_running=True).records:
        view.take(record)


def _tell(view: MetricView, *told: events.Event) -> None:
    record = job().records[0]
    for event in told:
        view.take(msgspec.structs.replace(record, event=event))


def _silence_and_loss(view: MetricView) -> None:
    sections = [f"section {number}" for number in range(SECTIONS)]
    for number, limit in enumerate(["ping", "step", "leave", "heartbeat", *(f"section:{name}" for name in sections)]):
        _tell(view, events.RankFellSilent(limit, "soft", 1.0, 1.0 + number))
    _tell(view, *(events.TimeoutsStale(name, "it grew", 9.0) for name in sections[::2]))
    for signal in ("record", "span", "metric", "log", "timing"):
        for reason in ("sink", "queue full", "export failed", "malformed message: x", "ring was overrun", "closing"):
            _tell(view, events.TelemetryDropped(signal, reason, 1))  # type: ignore[arg-type]
    for interruption in Interruption:
        _tell(view, events.RestartEnded(interruption.value, 0.1, "step"))
        for words in ("CUDA error", "No space left", "Address already in use", "MemoryError", "Broken pipe", "mine"):
            error = ExceptionInfo("RuntimeError", words, "f")
            seen = InterruptionRecord(0, interruption, exception=error, detector=Detector("peer"), iteration=0)
            _tell(view, events.RankInterrupted(seen))


def _elastic(view: MetricView) -> None:
    for call in CALLS:
        for what in ("success", "failure", "duration.ms"):
            _tell(view, events.ElasticMeasured(f"SimpleElasticAgent.{call}.{what}", 1.0))
    _tell(view, *(events.ElasticMeasured(f"workers.trainer.{name}", 1.0) for name in ("run_total", "flakiness", *RUNS)))
    for source, states in STATES.items():
        _tell(view, *(events.ElasticTold(f"torchelastic.worker.status.{state}", source, state) for state in states))
