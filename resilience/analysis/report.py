"""What should a person know of a run?  Header, incidents, notes, and what could not be read.

`report` condenses a loaded run; `cli.report` puts it on a terminal, `to_json` gives it to machines."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import msgspec

from resilience.analysis.counterfactual import WhatIf, what_ifs
from resilience.analysis.load import Missing, Reader, Run
from resilience.analysis.sections import Section, sections_of, write_s
from resilience.attribution.advice import named
from resilience.attribution.cost import Spans, Times, times
from resilience.attribution.incident import Incident, to_json
from resilience.attribution.incidents import fold
from resilience.core import events
from resilience.core.records import Record
from resilience.core.watched import watched_in_words
from resilience.history.cycles import Launches, Worker

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
    """What the launcher says of the job. outcome, exit_code, detail: None and empty while it runs. is_clean: it was
    preempted, and all workers ended with exit status 0."""

    cycles: int
    restarts_used: int
    max_restarts: int
    outcome: str | None = None
    exit_code: int | None = None
    detail: str = ""
    is_clean: bool = False


class Report(msgspec.Struct, frozen=True):
    """A run, condensed. Times are UTC nanoseconds; ranks are initial ranks.

    completed, lost, stopped, open: ranks whose last call, or worker, completed; whose process ended without a
    goodbye; was ended by the launcher; and of which no end is on record. steps and seconds lost: of all
    incidents, as far as known. times: of the whole job; what_ifs: what else they could have been. launched:
    None without the launcher. attempt: the newest on record; a folder of an older version may hold several."""

    run: str
    job_id: str
    functions: tuple[str, ...]
    world_size: int | None
    nodes: tuple[str, ...]
    versions: dict[str, str]
    attempt: int
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
    what_ifs: tuple[WhatIf, ...]
    sections: tuple[Section, ...]
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
            cleanly = " cleanly" if self.launched.is_clean else ""
            parts.append(
                f"the launcher: {self.launched.outcome}{cleanly}, exit status {self.launched.exit_code}{detail}"
            )
        return "; ".join(parts) or "nothing on record"


class _Rank:
    """What is known of one rank's last call."""

    def __init__(self) -> None:
        self.outcome: str | None = None
        self.error = ""
        self.is_lost = False
        self.is_stopped = False


class _Facts:
    """What the header tells, gathered while the records pass by."""

    def __init__(self) -> None:
        self.job_id: str | None = None
        self.size: int | None = None
        self.functions: dict[str, None] = {}
        self.versions: dict[str, str] = {}
        self.nodes: set[str] = set()
        self.attempts: set[int] = set()
        self.calls: set[tuple[int, int, int]] = set()
        self.iterations: set[tuple[tuple[int, int, int], int]] = set()
        self.ranks: dict[int, _Rank] = {}
        self.notes: defaultdict[str, set[int]] = defaultdict(set)
        self.first_wall_ns: int | None = None
        self.last_wall_ns: int | None = None

    def take(self, record: Record) -> None:
        origin, event, at = record.origin, record.event, record.wall_ns
        if self.first_wall_ns is None or self.last_wall_ns is None:
            self.job_id, self.first_wall_ns, self.last_wall_ns = origin.job_id, at, at
        elif at > self.last_wall_ns:
            self.last_wall_ns = at
        elif at < self.first_wall_ns:
            self.first_wall_ns = at
        self.nodes.add(origin.node)
        self.attempts.add(origin.attempt)
        call = (origin.attempt, origin.cycle, origin.call)
        if origin.iteration is not None:
            self.iterations.add((call, origin.iteration))
        if isinstance(event, events.CallStarted):
            self._called(call, event)
        if origin.initial_rank is not None and not origin.is_launchers:
            self._take_of_rank(origin.initial_rank, event)
        note = _note(event) if type(event) in _NOTED else None
        if note is not None:
            ranks = self.notes[note]
            if origin.initial_rank is not None:
                ranks.add(origin.initial_rank)

    def _called(self, call: tuple[int, int, int], event: events.CallStarted) -> None:
        self.calls.add(call)
        self.functions.setdefault(event.function)
        self.size = max(event.world_size, self.size or 0)
        if not self.versions:
            self.versions = {
                "resilience": event.resilience_version,
                "torch": event.torch_version,
                "Python": event.python_version,
            }

    def _take_of_rank(self, rank: int, event: events.Event) -> None:
        known = self.ranks.get(rank)
        if known is None or isinstance(event, events.CallStarted):
            known = self.ranks[rank] = _Rank()
        match event:
            case events.CallEnded():
                known.outcome, known.error = event.outcome, event.error
            case events.RankExited(goodbye=False):
                known.is_lost = True


def report(run: Run | Reader, also: Sequence[Callable[[Record], None]] = ()) -> Report:
    """Return what a person should know of a run. also: take the records too."""
    launches, spans, facts = Launches(), Spans(), _Facts()

    def told() -> Iterator[Record]:
        for record in run.records:  # once: a run of any length passes by
            spans.take(record)
            facts.take(record)
            for take in also:
                take(record)
            yield record

    incidents = fold(told(), launches)
    ranks = _ranks(facts.ranks, launches)
    seconds = [cost for incident in incidents if (cost := incident.cost.lost_s) is not None]
    steps = [cost for incident in incidents if (cost := incident.cost.lost_steps) is not None]
    size = facts.size if facts.size is not None else _launched_size(launches)
    sections = sections_of(run.folder)
    spent = times(spans, incidents, launches)
    return Report(
        run=str(run.folder),
        job_id=run.job.job_id if run.job else facts.job_id or run.folder.name,
        functions=tuple(facts.functions) or _program(run),
        world_size=size if size is not None or run.job is None else run.job.world_size,
        nodes=tuple(sorted(facts.nodes)),
        versions=facts.versions or _versions(run),
        attempt=max(facts.attempts, default=0),
        attempts=len(facts.attempts),
        calls=len(facts.calls),
        iterations=len(facts.iterations),
        started_wall_ns=facts.first_wall_ns,
        last_wall_ns=facts.last_wall_ns,
        completed=tuple(rank for rank, known in ranks if known.outcome == "completed"),
        lost=tuple(rank for rank, known in ranks if known.outcome is None and known.is_lost),
        left=tuple(Left(rank, known.error) for rank, known in ranks if known.outcome not in (None, "completed")),
        stopped=tuple(rank for rank, known in ranks if known.outcome is None and known.is_stopped),
        open=tuple(rank for rank, known in ranks if known.outcome is None and not (known.is_lost or known.is_stopped)),
        lost_s=sum(seconds) if seconds else None,
        lost_steps=sum(steps) if steps else None,
        times=spent,
        what_ifs=what_ifs(spent, incidents, facts.last_wall_ns, write_s(sections)),
        sections=sections,
        launched=_launched(launches),
        incidents=incidents,
        notes=(
            *(Note(what, tuple(sorted(of))) for what, of in facts.notes.items()),
            *_unknown_progress(launches),
        ),
        missing=run.missing,
    )


def as_json(found: Report) -> dict[str, Any]:
    """Return the report as plain values."""
    plain: dict[str, Any] = msgspec.to_builtins(found)
    plain["times"]["ettr"] = found.times.ettr
    plain["incidents"] = [to_json(incident) for incident in found.incidents]
    return {"schema": SCHEMA, **plain, "end": found.end}


def _program(run: Run | Reader) -> tuple[str, ...]:
    return (run.job.function,) if run.job is not None and run.job.function else ()


def _launched_size(launches: Launches) -> int | None:
    return max((size for place in launches.places if (size := launches.world_size(place)) is not None), default=None)


def _launched(launches: Launches) -> Launched | None:
    if not launches.places:
        return None
    newest = launches.parts(launches.places[-1])
    began = [part.started for part in newest.values() if part.started is not None]
    spent = max(event.restarts_used for event in began)
    ended = [
        event
        for (node, attempt), event in sorted(launches.over.items())
        if attempt == launches.places[-1][0] and node in newest  # those that left before do not say how the job ended
    ]
    done = [event for event in ended if event.outcome == "completed"]  # then some nodes went on without the others
    last = max(done or ended, key=lambda event: event.exit_code, default=None)
    return Launched(
        cycles=len(launches.places),
        restarts_used=spent,
        max_restarts=began[0].max_restarts,
        outcome=None if last is None else last.outcome,
        exit_code=None if last is None else last.exit_code,
        detail="" if last is None else last.detail,
        is_clean=bool(ended) and all(event.is_clean for event in ended),
    )


def _versions(run: Run | Reader) -> dict[str, str]:
    if run.job is None:
        return {}
    job = run.job
    named_versions = {"resilience": job.resilience_version, "torch": job.torch_version, "Python": job.python_version}
    return {name: version for name, version in named_versions.items() if version}


def _ranks(told: dict[int, _Rank], launches: Launches) -> list[tuple[int, _Rank]]:
    """How each rank's last call, or its last worker, ended, by initial rank."""
    found = dict(told)
    newest = launches.parts(launches.places[-1]).values() if launches.places else ()
    stopped = [part for part in newest if part.ended is not None and part.ended.outcome == "preempted"]
    preempted = {rank for part in stopped for rank in part.workers}
    for rank, worker in _last_workers(launches).items():
        known = found.setdefault(rank, _Rank())
        end = worker.exit
        if worker.called_ns is None:  # what a Wrapper says of an earlier cycle is over
            known = found[rank] = _Rank()
        if end is not None and end.code == 0 and end.expected and known.outcome is None and rank not in preempted:
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


_NOTED = frozenset(
    (
        events.HangsWatched,
        events.HangSuspected,
        events.ProgressUnknown,
        events.AbortFailed,
        events.GroupAborted,
        events.MonitorLost,
        events.StoreLost,
        events.NodeFellSilent,
        events.CallStarted,
        events.NodeUnhealthy,
        events.NodeWarned,
        events.OutputLost,
        events.DrainLost,
        events.NodeExcluded,
        events.ZygoteLost,
        events.StopRequested,
        events.ControlRequested,
        events.CycleStarted,
        events.TelemetryDropped,
        events.ExportFailed,
        events.ExportStarted,
    )
)
"""Events that may be worth a note: millions of others pass by."""


_MISSING = {
    "file": "could not be kept",
    "rotated": "was removed by rotation",
    "terminal": "was not shown at the terminal, and is in its file",
}


def _note(event: events.Event) -> str | None:
    match event:
        case events.HangsWatched():
            return watched_in_words(event)
        case events.HangSuspected():
            where = f"in section {event.kind!r}" if event.kind else "outside sections"
            return f"a hang was suspected {where}, where no limit is set; allowed were {event.allowed_s:g} s"
        case events.ProgressUnknown():
            return "nothing was armed that shows progress: a loop that gets nowhere would not be noticed"
        case events.AbortFailed():
            return f"the abort hook raised: {event.error}"
        case events.GroupAborted(outcome="timed out"):
            return f"the abort of group {event.group} ({event.backend}) was given up after {event.duration_s:.3g} s"
        case events.GroupAborted(outcome="failed"):
            return f"the abort of group {event.group} ({event.backend}) failed: {event.error}"
        case events.GroupAborted(note=note) if note:
            return note
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
        case events.NodeWarned():
            return f"a warning of a node: {event.check}: {event.detail}"
        case events.OutputLost():
            return f"some of the workers' output {_MISSING[event.place]}: {event.why}"
        case events.DrainLost():
            return f"the process that read the workers' output was lost: {event.why}; another one went on"
        case events.NodeExcluded():
            return f"a node left: {event.why}"
        case events.ZygoteLost():
            return f"workers were started cold: {event.why}"
        case events.StopRequested():
            who = "a node" if event.leaves else "the job"
            return f"{who} was asked to stop: {event.source}"
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
