"""What should a person know of a run?  Header, incidents, notes, and what could not be read.

`report` condenses a loaded run; `cli.report` puts it on a terminal, `to_json` gives it to machines."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import msgspec

from resilience.analysis.load import Missing, Run
from resilience.core import events
from resilience.core.accounting import Times, times
from resilience.core.advice import named
from resilience.core.incident import Incident, to_json
from resilience.core.incidents import fold
from resilience.core.launches import Launches, Worker
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


class Launched(msgspec.Struct, frozen=True):
    """What the launcher says of the job. outcome, exit_code, detail: None and empty while it runs."""

    cycles: int
    restarts_used: int
    max_restarts: int
    outcome: str | None = None
    exit_code: int | None = None
    detail: str = ""


class Report(msgspec.Struct, frozen=True):
    """A run, condensed. Times are UTC nanoseconds; ranks are initial ranks.

    completed, lost, stopped, open: ranks whose last call, or worker, completed; whose process ended without a
    goodbye; was ended by the launcher; and of which no end is on record. steps and seconds lost: of all
    incidents, as far as known. times: of the whole job. launched: None without the launcher."""

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
    stopped: tuple[int, ...]
    open: tuple[int, ...]
    lost_s: float | None
    lost_steps: int | None
    times: Times
    launched: Launched | None
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
        if self.stopped:
            parts.append(f"{named(self.stopped)} stopped by the launcher")
        if self.open:
            parts.append(f"no end on record of {named(self.open)}: running, or cut off")
        if self.launched is not None and self.launched.outcome is not None:
            detail = f": {self.launched.detail}" if self.launched.detail else ""
            parts.append(f"the launcher: {self.launched.outcome}, exit status {self.launched.exit_code}{detail}")
        return "; ".join(parts) or "nothing on record"


class _Rank:
    """What is known of one rank's last call."""

    def __init__(self) -> None:
        self.outcome: str | None = None
        self.error = ""
        self.is_lost = False
        self.is_stopped = False


def report(run: Run) -> Report:
    """Return what a person should know of a run."""
    started = [record for record in run.records if isinstance(record.event, events.CallStarted)]
    launches = Launches()
    for record in run.records:
        launches.take(record)
    ranks = _ranks(run.records, launches)
    incidents = fold(run.records)
    seconds = [cost for incident in incidents if (cost := incident.cost.lost_s) is not None]
    steps = [cost for incident in incidents if (cost := incident.cost.lost_steps) is not None]
    size = max(
        (record.event.world_size for record in started if isinstance(record.event, events.CallStarted)),
        default=_launched_size(launches),
    )
    walls = [record.wall_ns for record in run.records]
    return Report(
        run=str(run.folder),
        job_id=run.job.job_id if run.job else next((record.origin.job_id for record in run.records), run.folder.name),
        functions=tuple(dict.fromkeys(_called(record) for record in started)) or _program(run),
        world_size=size if size is not None or run.job is None else run.job.world_size,
        nodes=tuple(sorted({record.origin.node for record in run.records})),
        versions=_versions(run, started),
        attempts=len({record.origin.attempt for record in run.records}),
        calls=len({_call(record) for record in started}),
        iterations=len({(_call(r), r.origin.iteration) for r in run.records if r.origin.iteration is not None}),
        started_wall_ns=min(walls, default=None),
        last_wall_ns=max(walls, default=None),
        completed=tuple(rank for rank, known in ranks if known.outcome == "completed"),
        lost=tuple(rank for rank, known in ranks if known.outcome is None and known.is_lost),
        left=tuple(Left(rank, known.error) for rank, known in ranks if known.outcome not in (None, "completed")),
        stopped=tuple(rank for rank, known in ranks if known.outcome is None and known.is_stopped),
        open=tuple(rank for rank, known in ranks if known.outcome is None and not (known.is_lost or known.is_stopped)),
        lost_s=sum(seconds) if seconds else None,
        lost_steps=sum(steps) if steps else None,
        times=times(run.records, incidents, launches),
        launched=_launched(launches),
        incidents=incidents,
        notes=(*_notes(run.records), *_unknown_progress(launches)),
        missing=run.missing,
    )


def as_json(found: Report) -> dict[str, Any]:
    """Return the report as plain values."""
    plain: dict[str, Any] = msgspec.to_builtins(found)
    plain["times"]["ettr"] = found.times.ettr
    plain["incidents"] = [to_json(incident) for incident in found.incidents]
    return {"schema": SCHEMA, **plain, "end": found.end}


def _call(record: Record) -> tuple[int, int, int]:
    return record.origin.attempt, record.origin.cycle, record.origin.call


def _called(record: Record) -> str:
    return record.event.function if isinstance(record.event, events.CallStarted) else ""


def _program(run: Run) -> tuple[str, ...]:
    return (run.job.function,) if run.job is not None and run.job.function else ()


def _launched_size(launches: Launches) -> int | None:
    return max((size for place in launches.places if (size := launches.world_size(place)) is not None), default=None)


def _launched(launches: Launches) -> Launched | None:
    if not launches.places:
        return None
    newest = launches.parts(launches.places[-1])
    began = [part.started for part in newest.values() if part.started is not None]
    spent = max(event.restarts_used for event in began)
    ended = [event for (_, attempt), event in sorted(launches.over.items()) if attempt == launches.places[-1][0]]
    last = max(ended, key=lambda event: event.exit_code, default=None)
    return Launched(
        cycles=len(launches.places),
        restarts_used=spent,
        max_restarts=began[0].max_restarts,
        outcome=None if last is None else last.outcome,
        exit_code=None if last is None else last.exit_code,
        detail="" if last is None else last.detail,
    )


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


def _ranks(records: Iterable[Record], launches: Launches) -> list[tuple[int, _Rank]]:
    """How each rank's last call, or its last worker, ended, by initial rank."""
    found: dict[int, _Rank] = {}
    for record in records:
        rank, event = record.origin.initial_rank, record.event
        if rank is None or record.origin.is_launchers:
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
    for rank, worker in _last_workers(launches).items():
        known = found.setdefault(rank, _Rank())
        end = worker.exit
        if worker.called_ns is None:  # what a Wrapper says of an earlier cycle is over
            known = found[rank] = _Rank()
        if end is not None and end.code == 0 and known.outcome is None:
            known.outcome = "completed"
        elif end is not None and known.outcome is None:
            known.is_stopped, known.is_lost = end.expected, not end.expected
    return sorted(found.items())


def _last_workers(launches: Launches) -> dict[int, Worker]:
    """The workers of the last cycle; one that another node has taken over counts there."""
    if not launches.places:
        return {}
    parts = launches.parts(launches.places[-1])
    return {rank: worker for part in parts.values() for rank, worker in part.workers.items()}


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


def _unknown_progress(launches: Launches) -> Iterable[Note]:
    """Workers of the last cycle that run, or were stopped, and have told nothing by which a hang shows."""
    ranks = tuple(
        rank
        for rank, worker in sorted(_last_workers(launches).items())
        if worker.progress is None and worker.called_ns is None and (worker.exit is None or worker.exit.expected)
        if worker.exit is None or worker.exit.code != 0
    )
    if ranks:
        yield Note("progress unknown: no heartbeat, step or section was told, so only a death would be noticed", ranks)


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
        case events.NodeUnhealthy():
            return f"a node was not healthy: {event.check}: {event.detail}"
        case events.NodeExcluded():
            return f"a node left: {event.why}"
        case events.ZygoteLost():
            return f"workers were started cold: {event.why}"
        case events.StopRequested():
            return f"the job was asked to stop: {event.source}"
        case events.ControlRequested():
            return f"a rank asked for {event.action}: {event.description}"
        case events.CycleStarted(why="membership"):
            return "a new cycle began because nodes joined or left"
        case events.TelemetryDropped():
            return f"telemetry was lost: {event.signal}s, {event.reason}"
        case events.ExportFailed():
            return f"export of {'metrics' if event.exporter == 'prometheus' else 'spans'} failed: {event.reason}"
        case events.ExportStarted(note=note) if note:
            return f"metrics are served at {event.endpoint}: {note}"
    return None
