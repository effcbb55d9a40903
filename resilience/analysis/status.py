"""How is a job doing right now?  Its run folder, looked at again and again.

`Watcher` follows the record files as they grow and reads what monitors leave of their ranks' present signs; a look
costs what was added since the last one. Of a long file the first look reads the beginning and the end: what a rank or
an agent is doing now was recorded last. It needs no server, and works from any host that sees the folder: ages
are by the clock of whoever looks. States are those of `history.rank_states`. `order` puts the ranks first that show
nothing new for longest, `grouped` makes few lines of many ranks."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Literal

import msgspec

from resilience.attribution.symptoms import symptom
from resilience.core import events
from resilience.core.records import Record
from resilience.history.history import History
from resilience.history.rank_states import HEALTHY
from resilience.telemetry import signs
from resilience.telemetry.recording import READ_AT_ONCE, RecordTail

SILENT_LOOKS = 3  # of the times between two signs of life, after which a job that shows none is lost
ORPHANED = 5.0  # seconds in which an agent records that its workers have ended; it takes milliseconds
BETWEEN_CALLS = 5.0  # seconds after the end of a call in which the same processes may begin another one
LIST_EVERY = 5.0  # seconds between two looks for new files
HEAD = 2 << 10  # bytes of a file's beginning, which tells of the call
TAIL = 12 << 10  # bytes of its end that are read first; more where they do not tell what the rank or agent is doing
MORE = 8  # times as many
STAGES = b'"event":"stage.'  # most records, and none of them changes what is shown here
_WRONG = ("suspect", "terminated", "excluded", "unmonitored")

Phase = Literal["starting", "running", "restarting", "ended", "lost"]
Sort = Literal["staleness", "limit", "step", "rank", "node"]
Kind = Literal["alike", "node"]


class Section(msgspec.Struct, frozen=True, omit_defaults=True):
    """An open section: for how long at least, and what it may take; None without a limit."""

    name: str
    open_s: float
    limit_s: float | None = None

    @property
    def share(self) -> float:
        """Of its limit, how much is used up; 0 without one."""
        return self.open_s / self.limit_s if self.limit_s else 0.0


class RankNow(msgspec.Struct, frozen=True, omit_defaults=True):
    """A rank at this moment. silent_s: since its last heartbeat, ping or higher step. section: the open one that
    is nearest to its limit, else the innermost. shown_s: age of what is shown. pid: of its process on its node, None if
    it has ended or is not known."""

    rank: int
    node: str
    state: str
    doing: str = ""
    step: int | None = None
    silent_s: float | None = None
    section: Section | None = None
    sections: int = 0
    shown_s: float | None = None
    pid: int | None = None

    @property
    def is_well(self) -> bool:
        return self.state in HEALTHY

    @property
    def stale_s(self) -> float:
        """Seconds since anything about the rank has changed that is known here: a heartbeat, a step, a section."""
        return next((age for age in (self.shown_s, self.silent_s) if age is not None), 0.0)

    @property
    def share(self) -> float:
        """How much of its open section's limit is used up."""
        return self.section.share if self.section is not None else 0.0


class Group(msgspec.Struct, frozen=True):
    """Ranks that one line can tell of. state: of all of them, or of how many each. where: the section that all of
    them are in, or what they do. worst: the one that comes first in the order of staleness."""

    ranks: tuple[int, ...]
    nodes: int
    state: str
    where: str
    low: int | None
    high: int | None
    worst: RankNow


class Failure(msgspec.Struct, frozen=True):
    """The last thing that broke."""

    what: str
    rank: int
    ago_s: float


class Now(msgspec.Struct, frozen=True, omit_defaults=True):
    """A job at this moment. restarts: by the launcher; iterations: restarts in place, since the present cycle
    began. states: how many ranks are in each state. outcome: how it ended, in the launcher's words. phase "lost": no
    process of it is left, and no end is on record; detail says how that is known."""

    run: str
    job_id: str
    phase: Phase
    since_s: float
    last_record_s: float
    nodes: int
    world_size: int | None
    states: dict[str, int]
    ranks: tuple[RankNow, ...]
    cycle: int | None = None
    restarts: int | None = None
    restarts_left: int | None = None
    iterations: int = 0
    outcome: str | None = None
    detail: str = ""
    failure: Failure | None = None
    attempt: int = 0

    @property
    def is_well(self) -> bool:
        """Whether it runs, or has completed."""
        return self.phase not in ("ended", "lost") or self.outcome == "completed"


class Watcher:
    """Follows one run folder."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.time) -> None:
        """clock: UTC seconds."""
        self._folder = folder
        self._clock = clock
        self._tails: dict[Path, RecordTail | None] = {}  # None: not read yet
        self._list_at = float("-inf")
        self._job_id = folder.name
        self._begin(0)

    def _begin(self, attempt: int) -> None:
        """Forget everything about the attempts before."""
        self._attempt = attempt
        self._history = History(has_details=False)
        self._first_ns: int | None = None
        self._last_ns = 0
        self._calls: dict[int, str] = {}  # initial rank -> how its last call ended, empty while it goes on
        self._left: set[int] = set()  # ranks whose process has ended
        self._outside: set[int] = set()  # ranks whose call is over; their process may go on with something else
        self._node: dict[int, str] = {}
        self._pid: dict[int, int] = {}
        self._size: int | None = None
        self._newest = (0, 0)  # attempt and cycle of any rank
        self._iteration = (0, 0, 0)  # attempt, cycle, iteration
        self._failure: tuple[int, int, str] | None = None  # UTC, rank, what

    def look(self) -> Now | None:
        """Return the job at this moment; None while there is nothing on record."""
        now = self._clock()
        if now >= self._list_at:
            self._list_at = now + LIST_EVERY
            self._list()
        for path, tail in self._tails.items():
            if tail is None:
                self._tails[path], added = _opened(path)
            else:
                added = tail.added()
            for record in added:
                self._take(record)
        return None if self._first_ns is None else self._now(now, self._first_ns)

    def _list(self) -> None:
        try:
            paths = sorted(path for path in (self._folder / "records").iterdir() if path.suffix == ".jsonl")
        except OSError:
            return
        for path in paths:
            self._tails.setdefault(path, None)

    # -- records --------------------------------------------------------------------------------

    def _take(self, record: Record) -> None:
        origin, event = record.origin, record.event
        if origin.attempt < self._attempt:
            return  # what an attempt before has left
        if origin.attempt > self._attempt:
            self._begin(origin.attempt)
        self._job_id = origin.job_id
        self._first_ns = record.wall_ns if self._first_ns is None else min(self._first_ns, record.wall_ns)
        self._last_ns = max(self._last_ns, record.wall_ns)
        self._history.take(record)
        rank = origin.initial_rank
        if isinstance(event, events.Interrupted) and symptom(event.record).is_own:
            seen = event.record
            at = seen.detected_wall_ns or record.wall_ns
            if self._failure is None or at >= self._failure[0]:
                what = seen.message if seen.exception is None else f"{seen.exception.type}: {seen.exception.message}"
                self._failure = (at, seen.rank, what)
        if isinstance(event, events.WorkerStarted):
            self._pid[event.worker_rank] = event.worker_pid
        if rank is None:
            return
        self._node[rank] = origin.node
        if origin.role == "rank" and rank not in self._left:
            self._pid[rank] = origin.pid
            self._size = origin.world_size if self._size is None else self._size
        self._newest = max(self._newest, (origin.attempt, origin.cycle))
        if origin.iteration is not None:
            self._iteration = max(self._iteration, (origin.attempt, origin.cycle, origin.iteration))
        match event:
            case events.MonitorStarted() | events.CallStarted():
                self._left.discard(rank)
                self._outside.discard(rank)
                self._calls[rank] = ""
                self._size = event.world_size if isinstance(event, events.CallStarted) else self._size
                self._pid[rank] = event.rank_pid if isinstance(event, events.MonitorStarted) else origin.pid
            case events.CallEnded(outcome=outcome):
                self._calls[rank] = outcome
            case events.MonitorEnded() if not origin.is_launchers:
                self._outside.add(rank)
            case events.RankExited():
                self._left.add(rank)
                self._pid.pop(rank, None)

    # -- the present ----------------------------------------------------------------------------

    def _now(self, now: float, first_ns: int) -> Now:
        shown = {
            rank: seen
            for rank, seen in signs.read_all(self._folder).items()
            if (seen.origin.attempt, seen.origin.cycle) >= self._newest  # else of the worker before
        }
        ranks = self._ranks(now, shown)
        states: dict[str, int] = defaultdict(int)
        for rank in ranks:
            states[rank.state] += 1
        place = self._history.cycles.places[-1] if self._history.cycles.places else None
        parts = {} if place is None else self._history.cycles.parts(place)
        began = [part.started for part in parts.values() if part.started is not None]
        left = [part.restarts_left for part in parts.values() if part.restarts_left is not None]
        phase, outcome, detail = self._phase(now)
        why = self._why_lost(now, shown.values()) if phase != "ended" else ""
        if why:
            phase, detail = "lost", why
        iteration = self._iteration if place is None or self._iteration[:2] == place else (0, 0, 0)
        failure = self._failure
        return Now(
            run=str(self._folder),
            job_id=self._job_id,
            attempt=self._attempt,
            phase=phase,
            since_s=max(0.0, now - first_ns / 1e9),
            last_record_s=max(0.0, now - self._last_ns / 1e9),
            nodes=len(parts) or len(set(self._node.values())),
            world_size=self._size if place is None else self._history.cycles.world_size(place),
            states=dict(sorted(states.items())),
            ranks=ranks,
            cycle=None if place is None else place[1],
            restarts=max((event.restarts_used for event in began), default=None),
            restarts_left=min(left, default=None),
            iterations=iteration[2],
            outcome=outcome,
            detail=detail,
            failure=None if failure is None else Failure(failure[2], failure[1], max(0.0, now - failure[0] / 1e9)),
        )

    def _phase(self, now: float) -> tuple[Phase, str | None, str]:
        """What the job is doing; once it has ended, how."""
        cycles = self._history.cycles
        if not cycles.began:
            ended = self._left
            if now - self._last_ns / 1e9 > BETWEEN_CALLS:
                ended = ended | self._outside
            if ended and ended >= set(self._calls):
                outcomes = {self._calls.get(rank) for rank in ended}
                # A rank that died was replaced by others, or not: what the last call says counts.
                return "ended", "completed" if "completed" in outcomes else "failed", ""
            return ("running" if self._iteration != (0, 0, 0) or self._calls else "starting"), None, ""
        attempt = max(attempt for _, attempt in cycles.began)
        over = [event for (_, of), event in cycles.over.items() if of == attempt]
        present = [node for node, of in cycles.began if of == attempt]
        if over and len(over) >= len(present):
            newest = cycles.parts(cycles.places[-1]) if cycles.places else {}
            stayed = [event for (node, of), event in cycles.over.items() if of == attempt and node in newest]
            done = [event for event in over if event.outcome == "completed"]  # some went on without the others
            worst = max(done or stayed or over, key=lambda event: event.exit_code)
            return "ended", worst.outcome, worst.detail
        if not cycles.places or cycles.places[-1][0] != attempt:
            return "starting", None, ""
        parts = cycles.parts(cycles.places[-1]).values()
        if any(part.ended is not None for part in parts):
            return "restarting", None, ""
        return ("running" if any(part.run_began_ns is not None for part in parts) else "starting"), None, ""

    def _why_lost(self, now: float, shown: Collection[signs.Signs]) -> str:
        """How it is known that nothing of a job lives any more that has not ended, "" if it may."""
        quiet = now - self._last_ns / 1e9
        parts = self._history.cycles.last_parts()
        if quiet > ORPHANED and not any(part.ended for part in parts):
            unreported = {rank for part in parts for rank, worker in part.workers.items() if worker.exit is None}
            if unreported and unreported <= self._left:
                return f"all ranks ended {quiet:.0f} s ago, and no agent has recorded it"
        alive = [each.wall(each.alive_at) for each in shown if each.alive_at is not None]
        every = signs.alive_every(max((each.origin.world_size or 1 for each in shown), default=1))
        silent = min([quiet, *(now - at for at in alive)])
        if alive and silent > SILENT_LOOKS * every:
            return f"no sign of life for {silent:.0f} s; there should be one every {every:.0f} s"
        return ""

    def _ranks(self, now: float, shown: dict[int, signs.Signs]) -> tuple[RankNow, ...]:
        found: dict[int, RankNow] = {}
        for node in sorted(self._history.nodes):
            for rank, state in self._history.states(node).items():
                known = found.get(rank)
                # A rank that moved to another node is what it is there.
                if known is None or self._node.get(rank) == node:
                    found[rank] = _rank_now(rank, node, state, now, shown.get(rank))
        pids = {rank: pid for rank, pid in self._pid.items() if rank not in self._left}
        return tuple(msgspec.structs.replace(found[rank], pid=pids.get(rank)) for rank in sorted(found))


_TELLING = frozenset((events.IterationStarted, events.MonitorStarted, events.CycleStarted))
"""Events from which on a file says what its rank or agent is doing."""


def _opened(path: Path) -> tuple[RecordTail, list[Record]]:
    """Return a reader of what a file gains from now on, and what is known of it so far: its first and last records."""
    try:
        size = path.stat().st_size
    except OSError:
        size = 0
    last = TAIL
    while HEAD + last < min(size, READ_AT_ONCE):
        tail = RecordTail(path, last=last, without=STAGES)
        records = tail.added()
        if any(type(record.event) in _TELLING for record in records):
            return tail, [*RecordTail(path, until=HEAD, without=STAGES).added(), *records]
        last *= MORE
    tail = RecordTail(path, last=READ_AT_ONCE if size > READ_AT_ONCE else None, without=STAGES)
    return tail, tail.added()


def _rank_now(rank: int, node: str, state: str, now: float, shown: signs.Signs | None) -> RankNow:
    if shown is None or shown.origin.node != node:
        return RankNow(rank, node, state)
    # Of a large job's ranks what is shown is seldom new: a section that was short may have ended long ago.
    opened = [
        Section(section.name, max(0.0, shown.open_for(section, now - shown.offset)), section.limit_s)
        for section in shown.sections
    ]
    nearest = max(reversed(opened), key=lambda section: section.share, default=None)
    is_gone = state in ("terminated", "excluded")
    return RankNow(
        rank=rank,
        node=node,
        state=state,
        doing="" if is_gone else shown.doing,
        step=shown.step,
        silent_s=None if shown.heartbeat_at is None else max(0.0, now - shown.wall(shown.heartbeat_at)),
        section=None if is_gone else nearest,
        sections=0 if is_gone else len(opened) + shown.sections_more,
        shown_s=max(0.0, now - shown.wall(shown.written_at)),
    )


def order(ranks: Iterable[RankNow], by: Sort = "staleness", world_size: int = 1) -> list[RankNow]:
    """Return ranks, those first that deserve a look.

    by: staleness (what is lost or suspect, then what has shown nothing new for longest, then what is nearest to a
    limit), limit (the share of it that is used), step (the lowest), rank or node. world_size: says how seldom ranks
    tell what is new, and so from which age on it means anything."""
    usual = 2 * signs.pause(world_size)

    def staleness(rank: RankNow) -> tuple[int, float, float, float, int]:
        wrong = _WRONG.index(rank.state) if rank.state in _WRONG else len(_WRONG)
        stale = rank.stale_s if rank.stale_s > usual else 0.0
        return wrong, -stale, -rank.share, -(rank.silent_s or 0.0), rank.rank

    match by:
        case "staleness":
            return sorted(ranks, key=staleness)
        case "limit":
            return sorted(ranks, key=lambda rank: (-rank.share, staleness(rank)))
        case "step":
            return sorted(ranks, key=lambda rank: (rank.step is None, rank.step or 0, staleness(rank)))
        case "rank":
            return sorted(ranks, key=lambda rank: rank.rank)
        case "node":
            return sorted(ranks, key=lambda rank: (rank.node, rank.rank))


def grouped(ranks: Iterable[RankNow], by: Kind, world_size: int = 1) -> list[Group]:
    """Return groups, those first whose worst rank deserves a look.

    by: alike (in the same state and section) or node."""
    found: dict[tuple[str, ...], list[RankNow]] = {}
    for rank in order(ranks, "staleness", world_size):
        key = (rank.node,) if by == "node" else (rank.state, _where(rank))
        found.setdefault(key, []).append(rank)
    return [_group(members) for members in found.values()]


def _group(members: list[RankNow]) -> Group:
    steps = [rank.step for rank in members if rank.step is not None]
    states = Counter(rank.state for rank in members)
    places = {_where(rank) for rank in members}
    return Group(
        ranks=tuple(sorted(rank.rank for rank in members)),
        nodes=len({rank.node for rank in members}),
        state=members[0].state if len(states) == 1 else ", ".join(f"{n} {state}" for state, n in states.most_common()),
        where=places.pop() if len(places) == 1 else f"{len(places)} places",
        low=min(steps, default=None),
        high=max(steps, default=None),
        worst=members[0],
    )


def _where(rank: RankNow) -> str:
    if rank.section is not None:
        return rank.section.name
    return "" if rank.doing in ("", "run") else f"({rank.doing})"
