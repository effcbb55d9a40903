"""What should a person know of a run?  Header, incidents, notes, and what could not be read.

`report` condenses a loaded run; `cli.report` puts it on a terminal, `to_json` gives it to machines."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import msgspec

from resilience.analysis.load import Missing, Run
from resilience.core import events
from resilience.core.advice import named
from resilience.core.incident import Incident, to_json
from resilience.core.incidents import fold
from resilience.core.records import Record

SCHEMA = 1


class Note(msgspec.Struct, frozen=True):
    """Something beside the incidents that should be known, and of which ranks."""

    what: str
    ranks: tuple[int, ...] = ()


class Left(msgspec.Struct, frozen=True):
    """A rank that left its last call with an exception."""

    rank: int
    error: str


class Report(msgspec.Struct, frozen=True):
    """A run, condensed. Times are UTC nanoseconds; ranks are initial ranks.

    completed, lost, open: ranks whose last call completed, whose process ended without a goodbye, and
    of which no end is on record. steps and seconds lost: of all incidents, as far as known."""

    run: str
    job_id: str
    functions: tuple[str, ...]
    world_size: int | None
    nodes: tuple[str, ...]
    versions: dict[str, str]
    attempts: int
    calls: int
    iterations: int
    started_wall_ns: int | None
    last_wall_ns: int | None
    completed: tuple[int, ...]
    lost: tuple[int, ...]
    left: tuple[Left, ...]
    open: tuple[int, ...]
    lost_s: float | None
    lost_steps: int | None
    incidents: tuple[Incident, ...]
    notes: tuple[Note, ...]
    missing: tuple[Missing, ...]

    @property
    def end(self) -> str:
        """How the run ended, in words."""
        parts = []
        if self.completed:
            parts.append(f"completed on {named(self.completed)}")
        if self.lost:
            parts.append(f"{named(self.lost)} lost")
        if self.left:
            parts.append(f"{named(left.rank for left in self.left)} left with an error")
        if self.open:
            parts.append(f"no end on record of {named(self.open)}: running, or cut off")
        return "; ".join(parts) or "nothing on record"


class _Rank:
    """What is known of one rank's last call."""

    def __init__(self) -> None:
        self.outcome: str | None = None
        self.error = ""
        self.is_lost = False


def report(run: Run) -> Report:
    """Return what a person should know of a run."""
    started = [record for record in run.records if isinstance(record.event, events.CallStarted)]
    ranks = _ranks(run.records)
    incidents = fold(run.records)
    seconds = [cost for incident in incidents if (cost := incident.cost.lost_s) is not None]
    steps = [cost for incident in incidents if (cost := incident.cost.lost_steps) is not None]
    size = max(
        (record.event.world_size for record in started if isinstance(record.event, events.CallStarted)), default=None
    )
    times = [record.wall_ns for record in run.records]
    return Report(
        run=str(run.folder),
        job_id=run.job.job_id if run.job else next((record.origin.job_id for record in run.records), run.folder.name),
        functions=tuple(dict.fromkeys(_called(record) for record in started)),
        world_size=size if size is not None or run.job is None else run.job.world_size,
        nodes=tuple(sorted({record.origin.node for record in run.records})),
        versions=_versions(run, started),
        attempts=len({(record.origin.attempt, record.origin.cycle) for record in run.records}),
        calls=len({_call(record) for record in started}),
        iterations=len({(_call(r), r.origin.iteration) for r in run.records if r.origin.iteration is not None}),
        started_wall_ns=min(times, default=None),
        last_wall_ns=max(times, default=None),
        completed=tuple(rank for rank, known in ranks if known.outcome == "completed"),
        lost=tuple(rank for rank, known in ranks if known.outcome is None and known.is_lost),
        left=tuple(Left(rank, known.error) for rank, known in ranks if known.outcome not in (None, "completed")),
        open=tuple(rank for rank, known in ranks if known.outcome is None and not known.is_lost),
        lost_s=sum(seconds) if seconds else None,
        lost_steps=sum(steps) if steps else None,
        incidents=incidents,
        notes=_notes(run.records),
        missing=run.missing,
    )


def as_json(found: Report) -> dict[str, Any]:
    """Return the report as plain values."""
    plain: dict[str, Any] = msgspec.to_builtins(found)
    plain["incidents"] = [to_json(incident) for incident in found.incidents]
    return {"schema": SCHEMA, **plain, "end": found.end}


def _call(record: Record) -> tuple[int, int, int]:
    return record.origin.attempt, record.origin.cycle, record.origin.call


def _called(record: Record) -> str:
    return record.event.function if isinstance(record.event, events.CallStarted) else ""


def _versions(run: Run, started: list[Record]) -> dict[str, str]:
    for record in started:
        event = record.event
        if isinstance(event, events.CallStarted):
            return {
                "resilience": event.resilience_version,
                "torch": event.torch_version,
                "Python": event.python_version,
            }
    if run.job is None:
        return {}
    job = run.job
    named_versions = {"resilience": job.resilience_version, "torch": job.torch_version, "Python": job.python_version}
    return {name: version for name, version in named_versions.items() if version}


def _ranks(records: Iterable[Record]) -> list[tuple[int, _Rank]]:
    """How each rank's last call ended, by initial rank."""
    found: dict[int, _Rank] = {}
    for record in records:
        rank, event = record.origin.initial_rank, record.event
        if rank is None:
            continue
        match event:
            case events.CallStarted():
                found[rank] = _Rank()
            case events.CallEnded():
                known = found.setdefault(rank, _Rank())
                known.outcome, known.error = event.outcome, event.error
            case events.RankExited(goodbye=False):
                found.setdefault(rank, _Rank()).is_lost = True
            case _:
                found.setdefault(rank, _Rank())
    return sorted(found.items())


def _notes(records: Iterable[Record]) -> tuple[Note, ...]:
    """What is worth knowing beside the incidents, once each."""
    found: defaultdict[str, set[int]] = defaultdict(set)
    for record in records:
        what = _note(record.event)
        if what is not None:
            ranks = found[what]
            if record.origin.initial_rank is not None:
                ranks.add(record.origin.initial_rank)
    return tuple(Note(what, tuple(sorted(ranks))) for what, ranks in found.items())


def _note(event: events.Event) -> str | None:
    match event:
        case events.ProgressUnknown():
            return "nothing was armed that shows progress: a loop that gets nowhere would not be noticed"
        case events.AbortFailed():
            return f"the abort hook raised: {event.error}"
        case events.MonitorLost():
            return f"went on without a monitor: {event.reason}"
        case events.StoreLost():
            return f"lost the store: {event.error}"
        case events.NodeFellSilent():
            return f"node {event.silent_node} fell silent for {event.silent_for_s:.3g} s"
        case events.CallStarted(monitor="executed"):
            return f"the monitor was started as a fresh process: {event.monitor_reason}"
        case events.TelemetryDropped():
            return f"telemetry was lost: {event.signal}s, {event.reason}"
        case events.ExportFailed():
            return f"export of {'metrics' if event.exporter == 'prometheus' else 'spans'} failed: {event.reason}"
        case events.ExportStarted(note=note) if note:
            return f"metrics are served at {event.endpoint}: {note}"
    return None
