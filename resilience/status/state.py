"""What is the state of a job right now?  Repeated reads of its run folder.

`Watcher` follows the growing record files and reads the snapshots that monitors write of their ranks. A read costs only
what was added since the last one. Of a long file, the first read covers the beginning and the end, because the last
records show what a rank or agent does now. It needs no server and works on any host that can read the folder; ages use
the clock of that host. States are those of `history.rank_states`. `order` sorts ranks by how long they have shown
nothing new, `grouped` condenses many ranks to few lines."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from resilience.attribution.symptoms import were_stopped
from resilience.facts import events
from resilience.facts.identity import Origin, owner_of
from resilience.facts.in_words import seconds
from resilience.facts.records import Record
from resilience.history.cycles import Cycle
from resilience.history.history import History
from resilience.history.job_end import job_end
from resilience.history.rank_states import HEALTHY, LOST
from resilience.status.first_read import opened
from resilience.status.last_fault import Iteration, LastFault
from resilience.telemetry import rank_snapshot
from resilience.telemetry.recording import RecordTail

SILENT_LOOKS = 8  # intervals without a sign of life after which a job counts as lost
ORPHANED = 5.0  # seconds in which a live agent records the end of its workers; usually it takes milliseconds
BETWEEN_CALLS = 5.0  # seconds after a call in which the same processes may start another one
FILES_AHEAD = 60.0  # seconds that the file system's clock may be ahead of ours
LIST_EVERY = 5.0  # seconds between two searches for new files
SUFFIX = ".jsonl"  # of record files
STARTED_AFTER = 60.0  # seconds of a run after which all ranks and agents that have started have records
_FOLLOWED = ("failed", "interrupted")  # outcomes of a cycle after which another one may begin
_WRONG = ("suspect", "terminated", "excluded", "unmonitored")

Phase = Literal["starting", "running", "restarting", "ended", "lost"]
Sort = Literal["staleness", "limit", "step", "rank", "node"]
Kind = Literal["alike", "node"]


class Section(msgspec.Struct, frozen=True, omit_defaults=True):
    """An open section. open_s: minimum seconds that it has been open. limit_s: None without a limit."""

    name: str
    open_s: float
    limit_s: float | None = None

    @property
    def share(self) -> float:
        """The used share of its limit; 0 without a limit."""
        return self.open_s / self.limit_s if self.limit_s else 0.0


class RankNow(msgspec.Struct, frozen=True, omit_defaults=True):
    """A rank now. silent_s: how long it had been silent when its monitor last looked, None if it owes no sign of life.
    section: the open section that is closest to its limit, else the innermost. shown_s: seconds since the monitor last
    looked. pid: of its process on its node, None if it has ended or is unknown. is_old: its monitor does not write, so
    step, section and silence are as old as shown_s."""

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
    is_old: bool = False

    @property
    def is_well(self) -> bool:
        return self.state in HEALTHY

    @property
    def share(self) -> float:
        """The used share of its open section's limit."""
        return self.section.share if self.section is not None else 0.0


class Group(msgspec.Struct, frozen=True):
    """Ranks on one line. state: their common state, or the count of each state. where: their common section or
    activity. low, high: of their steps. worst: the first rank in order of staleness."""

    ranks: tuple[int, ...]
    nodes: int
    state: str
    where: str
    low: int | None
    high: int | None
    worst: RankNow


class FaultNow(msgspec.Struct, frozen=True):
    """The last fault."""

    what: str
    rank: int
    ago_s: float


class Now(msgspec.Struct, frozen=True, omit_defaults=True):
    """A job now. restarts: by the launcher; iterations: restarts in place since the current cycle began, of all calls
    that were read. states: number of ranks in each state. outcome: how the job ended, as the launcher reports it;
    without the launcher completed, stopped (the ranks were asked to) or failed. phase "lost": no process of the job is
    left and no end is recorded; detail gives the evidence. damaged: lines that were read and are no records.
    unreadable: names of the record files that cannot be read, each with the reason. absent: initial ranks that must
    have records by now, but have none; absent_agents: nodes whose agent must have. old: ranks whose monitors do not
    write: what is shown of them is as old as `shown_s`."""

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
    failure: FaultNow | None = None
    attempt: int = 0
    damaged: int = 0
    unreadable: tuple[str, ...] = ()
    absent: tuple[int, ...] = ()
    absent_agents: tuple[str, ...] = ()
    old: tuple[int, ...] = ()

    @property
    def has_all_records(self) -> bool:
        """True if no records are known to be missing. Otherwise numbers of restarts may be wrong."""
        return not (self.damaged or self.unreadable or self.absent or self.absent_agents)

    @property
    def is_well(self) -> bool:
        """True if the job runs or has completed."""
        return self.phase not in ("ended", "lost") or self.outcome == "completed"


class Watcher:
    """Follows one run folder."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.time) -> None:
        """clock: UTC seconds."""
        self._folder = folder
        self._clock = clock
        self._tails: dict[str, RecordTail | None] = {}  # by file name; None: not read yet
        self._list_at = float("-inf")
        self._job_id = folder.name
        self._begin(0)

    def _begin(self, attempt: int) -> None:
        """Forget earlier attempts."""
        self._attempt = attempt
        self._history = History(has_details=False)
        self._first_ns: int | None = None
        self._last_ns = 0
        self._calls: dict[int, str] = {}  # initial rank -> outcome of its last call, empty while it runs
        self._left: set[int] = set()  # ranks whose process has ended
        self._outside: set[int] = set()  # ranks whose call is over; their process may continue with other work
        self._node: dict[int, str] = {}
        self._launched: dict[str, int] = {}  # nodes whose agent has started a worker -> UTC of the first record of that
        self._recorded: set[int] = set()  # ranks with a record of their own or of their monitor
        self._place: dict[int, Cycle] = {}  # of the last known worker of each rank
        self._pid: dict[int, int] = {}
        self._size: int | None = None
        self._newest = (0, 0)  # attempt and cycle of any rank
        self._iteration: Iteration = (0, 0, 0, 0)
        self._in_place: dict[int, int] = {}  # call of the present cycle -> its highest iteration
        self._last_fault = LastFault()

    def look(self) -> Now | None:
        """Return the current state of the job; None while there are no records."""
        now = self._clock()
        if now >= self._list_at:
            self._list_at = now + LIST_EVERY
            self._list()
        records, is_first_look = self._folder / "records", None in self._tails.values()
        for name, tail in self._tails.items():
            if tail is None:
                self._tails[name], added = opened(f"{records}/{name}")
            else:
                added = tail.added()
            self._take_all(added)
        if is_first_look:
            self._last_fault.look_back(self._iteration, [records / name for name in self._tails])
        return None if self._first_ns is None else self._now(now, self._first_ns)

    def _list(self) -> None:
        try:
            names = sorted(name for name in os.listdir(self._folder / "records") if name.endswith(SUFFIX))
        except OSError:
            return
        for name in names:
            self._tails.setdefault(name, None)

    # -- records --------------------------------------------------------------------------------

    def _take_all(self, records: Sequence[Record]) -> None:
        """Add records of one file. An earlier attempt may have left some; they do not count."""
        attempt = max((record.origin.attempt for record in records), default=self._attempt)
        if attempt > self._attempt:
            self._begin(attempt)
        records = [record for record in records if record.origin.attempt == self._attempt]
        self._history.take_all(records)
        origin, is_newest = None, False
        for record in records:
            if record.origin != origin:
                origin = record.origin
                is_newest = self._take_origin(origin, record.wall_ns)
            self._first_ns = record.wall_ns if self._first_ns is None else min(self._first_ns, record.wall_ns)
            self._last_ns = max(self._last_ns, record.wall_ns)
            if type(record.event) in _SHOWN:
                self._take_event(record, is_newest)

    def _take_origin(self, origin: Origin, wall_ns: int) -> bool:
        """Note where records come from. Return False if they say nothing about the present worker of a rank."""
        self._job_id, rank = origin.job_id, origin.initial_rank
        if rank is None:
            return False
        self._recorded.add(rank)
        if origin.is_launchers:
            self._launched[origin.node] = min(wall_ns, self._launched.get(origin.node, wall_ns))
        self._note_cycle(rank, origin)
        if not self._is_newest(rank, origin):
            return False
        self._node[rank] = origin.node
        if origin.role == "rank" and rank not in self._left:
            self._pid[rank] = origin.pid
            self._size = origin.world_size if self._size is None else self._size
        self._newest = max(self._newest, (origin.attempt, origin.cycle))
        if origin.iteration is not None:
            self._enter((origin.attempt, origin.cycle, origin.call, origin.iteration))
        return True

    def _take_event(self, record: Record, is_newest: bool) -> None:
        """Add an event. is_newest: it says something about the present worker of its rank."""
        origin, event, rank = record.origin, record.event, record.origin.initial_rank
        self._last_fault.take(record)
        if isinstance(event, events.WorkerStarted):
            self._note_cycle(event.worker_rank, origin)
            if self._is_newest(event.worker_rank, origin):
                self._pid[event.worker_rank] = event.worker_pid
        if rank is None or not is_newest:
            return
        match event:
            case events.MonitorStarted() | events.CallStarted():
                self._left.discard(rank)
                self._outside.discard(rank)
                self._calls[rank] = ""
                if isinstance(event, events.CallStarted) and (origin.attempt, origin.cycle) == self._newest:
                    self._size = event.world_size
                self._pid[rank] = event.rank_pid if isinstance(event, events.MonitorStarted) else origin.pid
            case events.CallEnded(outcome=outcome):
                self._calls[rank] = outcome
                self._outside.add(rank)  # its monitor may be lost, and not record that it stopped watching
            case events.MonitorEnded() if not origin.is_launchers:
                self._outside.add(rank)
            case events.RankExited():
                self._left.add(rank)
                self._pid.pop(rank, None)
            case _:  # no other event matters here
                pass

    def _note_cycle(self, rank: int, origin: Origin) -> None:
        """Note the newest cycle in which this rank has a record."""
        place = (origin.attempt, origin.cycle)
        self._place[rank] = max(place, self._place.get(rank, place))

    def _is_newest(self, rank: int, origin: Origin) -> bool:
        """Return True if this rank has no record of a later cycle. A rank may have moved to another node, whose file is
        read earlier."""
        return (origin.attempt, origin.cycle) == self._place[rank]

    def _is_in_last_cycle(self, rank: int) -> bool:
        """Return False if torchrun has begun a later cycle, which has too few ranks for this one."""
        return self._size is None or rank < self._size or self._place[rank] >= self._newest

    def _is_expected(self, rank: int) -> bool:
        """Return False if the job goes on without this rank, and may end without it."""
        excluded_in = self._history.excluded.get(rank)
        is_excluded = excluded_in is not None and excluded_in[:2] >= self._place[rank]
        return not is_excluded and self._is_in_last_cycle(rank)

    def _enter(self, iteration: Iteration) -> None:
        """Note an iteration of any rank."""
        *cycle, call, number = iteration
        present = list(self._iteration[:2])
        if cycle > present:
            self._in_place.clear()
        if cycle >= present:
            self._in_place[call] = max(self._in_place.get(call, 0), number)
        self._iteration = max(self._iteration, iteration)

    # -- the present ----------------------------------------------------------------------------

    def _now(self, now: float, first_ns: int) -> Now:
        snapshots = {
            rank: snapshot
            for rank, snapshot in rank_snapshot.read_all(self._folder).items()
            if (snapshot.origin.attempt, snapshot.origin.cycle) >= self._newest  # otherwise from an earlier worker
        }
        phase, outcome, detail = self._phase(now)
        ranks = self._ranks(now, snapshots)
        if phase == "ended":  # a process may live on, with other work
            ranks = tuple(rank for rank in ranks if not rank.is_well or rank.rank not in self._outside)
        states = Counter(rank.state for rank in ranks)
        place = self._history.cycles.places[-1] if self._history.cycles.places else None
        parts = {} if place is None else self._history.cycles.parts(place)
        starts = [part.started for part in parts.values() if part.started is not None]
        by_torchrun = self._history.restarts_left.get(self._newest)
        restarts = self._newest[1] if by_torchrun is not None else self._newest[1] or None
        restarts_left = [part.restarts_left for part in parts.values() if part.restarts_left is not None]
        old = self._old(now, ranks) if phase == "running" else ()
        ranks = tuple(msgspec.structs.replace(rank, is_old=True) if rank.rank in old else rank for rank in ranks)
        evidence = self._evidence_of_loss(now, snapshots.values()) if phase != "ended" else ""
        if evidence:
            phase, detail = "lost", evidence
        is_present = place is None or self._iteration[:2] == place
        fault = self._last_fault.newest(self._history.cycles)
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
            cycle=restarts if place is None else place[1],
            restarts=max((event.restarts_used for event in starts), default=restarts),
            restarts_left=min(restarts_left, default=by_torchrun),
            iterations=sum(self._in_place.values()) if is_present else 0,
            outcome=outcome,
            detail=detail,
            damaged=sum(tail.damaged for tail in self._tails.values() if tail is not None),
            unreadable=tuple(f"{name}: {error}" for name, error in sorted(self._unreadable.items())),
            failure=None if fault is None else FaultNow(fault.what, fault.rank, max(0.0, now - fault.at_ns / 1e9)),
            absent=self._absent() if self._is_settled(now, first_ns) else (),
            absent_agents=self._absent_agents(now),
            old=old if phase == "running" else (),
        )

    def _is_settled(self, now: float, first_ns: int) -> bool:
        """Return True once all that have started must have records: some time after the nodes of the cycle began to
        run their workers, without the launcher after the first record."""
        cycles = self._history.cycles
        parts = cycles.parts(cycles.places[-1]).values() if cycles.places else ()
        began_ns = max((part.run_began_wall_ns for part in parts), default=first_ns)
        return now - began_ns / 1e9 > STARTED_AFTER

    def _absent(self) -> tuple[int, ...]:
        """Return the ranks that have no records, although all nodes of the cycle run their workers, or ranks have
        entered their function, for which all of them meet."""
        cycles, size = self._history.cycles, self._size if self._in_place else None
        if cycles.places:
            place = cycles.places[-1]
            parts = cycles.parts(place).values()
            size = cycles.world_size(place) if all(part.run_began_ns is not None for part in parts) else None
        known = self._recorded | {owner_of(name.removesuffix(SUFFIX)).rank for name in self._unreadable}
        return tuple(rank for rank in range(size or 0) if rank not in known)

    def _absent_agents(self, now: float) -> tuple[str, ...]:
        """Return the nodes whose agent has no records, although it started a worker some time ago."""
        settled = {node for node, first_ns in self._launched.items() if now - first_ns / 1e9 > STARTED_AFTER}
        owners = [owner_of(name.removesuffix(SUFFIX)) for name in self._unreadable]
        known = {*self._history.cycles.agents, *(owner.node for owner in owners if owner.is_agent)}
        return tuple(sorted(settled - known))

    @property
    def _unreadable(self) -> dict[str, str]:
        """Return why record files cannot be read, by their names."""
        return {name: tail.error for name, tail in self._tails.items() if tail is not None and tail.error}

    def _old(self, now: float, ranks: Sequence[RankNow]) -> tuple[int, ...]:
        """Return the ranks whose monitors do not write, although they should: since long before another one of the same
        node wrote, or since long ago by the clock of the file system. The node's clock may be behind ours."""
        limit = rank_snapshot.old_after(len(ranks))
        shown_s = {
            rank.rank: (rank.node, rank.shown_s)
            for rank in ranks
            if rank.shown_s is not None and rank.state not in LOST and rank.doing != rank_snapshot.OUTSIDE
        }
        late = [rank for rank, (_, age_s) in shown_s.items() if age_s > limit]
        if not late or _modified_ago(now, self._folder / "timings") > limit:
            return tuple(late)
        newest: dict[str, float] = {}
        for node, age_s in shown_s.values():
            newest[node] = min(age_s, newest.get(node, age_s))
        return tuple(rank for rank in late if shown_s[rank][1] - newest[shown_s[rank][0]] > limit)

    def _phase(self, now: float) -> tuple[Phase, str | None, str]:
        """Return the phase of the job; after its end, also outcome and detail."""
        cycles = self._history.cycles
        if not cycles.agents:
            ended = self._left
            if self._is_quiet(now, BETWEEN_CALLS):
                ended = ended | self._outside
            ended = {rank for rank in ended if self._is_in_last_cycle(rank)}
            if ended and ended >= {rank for rank in self._calls if self._is_expected(rank)}:
                outcomes = {self._calls.get(rank) for rank in ended}
                # Other ranks may have replaced a dead rank, so the outcomes of the last calls decide.
                if "completed" in outcomes:
                    return "ended", "completed", ""
                calls = self._history.last_calls()
                asked = {rank for rank in ended if rank in calls and calls[rank].is_asked}
                at = {rank: (rank in calls and calls[rank].ended_ns / 1e9) or now for rank in ended}
                are_asked = were_stopped([at[rank] for rank in asked], (at[rank] for rank in ended - asked))
                is_young = now - self._last_ns / 1e9 <= STARTED_AFTER
                if is_young and not are_asked and self._history.restarts_left.get(self._newest):
                    return "restarting", None, ""
                return "ended", "stopped" if are_asked else "failed", ""
            return ("running" if self._iteration != (0, 0, 0, 0) or self._calls else "starting"), None, ""
        attempt = max(agents[-1].attempt for agents in cycles.agents.values())
        end = job_end(self._history, attempt)
        if end is not None and end.is_recorded:
            return "ended", end.outcome, end.detail
        if not cycles.places or cycles.places[-1][0] != attempt:
            return "starting", None, ""
        if self._is_between_cycles():
            return "restarting", None, ""
        parts = cycles.parts(cycles.places[-1]).values()
        if end is not None and self._is_quiet(now, ORPHANED):
            return "ended", end.outcome, end.detail
        return ("running" if any(part.run_began_ns is not None for part in parts) else "starting"), None, ""

    def _is_quiet(self, now: float, limit: float) -> bool:
        """Return True if nothing was recorded for this many seconds, by the clock of the node with the last record and
        by the file system's. The node's clock may be behind ours."""
        return now - self._last_ns / 1e9 > limit and _modified_ago(now, self._folder / "records") > limit

    def _evidence_of_loss(self, now: float, snapshots: Collection[rank_snapshot.RankSnapshot]) -> str:
        """Return the evidence that no process of an unfinished job is alive, "" if some may be."""
        quiet = now - self._last_ns / 1e9
        parts = self._history.cycles.last_parts()
        if self._is_between_cycles():
            return ""  # no monitor has a rank to watch, and agents may wait for nodes for long
        if (
            parts
            and all(part.is_undecided for part in parts)
            and (all(part.has_lost_its_agent for part in parts) or self._is_quiet(now, ORPHANED))
        ):
            return f"all ranks ended {seconds(quiet)} ago, but no agent recorded it"
        alive_times = [snapshot.wall(snapshot.alive_at) for snapshot in snapshots if snapshot.alive_at is not None]
        interval_s = rank_snapshot.alive_every(
            max((snapshot.origin.world_size or 1 for snapshot in snapshots), default=1)
        )
        silent, limit = min([quiet, *(now - at for at in alive_times)]), SILENT_LOOKS * interval_s
        is_silent = bool(alive_times) and silent > limit and self._is_quiet(now, limit)
        if is_silent and _modified_ago(now, self._folder / "timings") > limit:
            return f"no sign of life for {seconds(silent)}; expected every {seconds(interval_s)}"
        return ""

    def _is_between_cycles(self) -> bool:
        """Return True if a node has ended the last cycle in a way that another one may follow, and its agent has not
        recorded the end of the job."""
        cycles = self._history.cycles
        place = cycles.places[-1] if cycles.places else None
        parts = {} if place is None else cycles.parts(place)
        waiting = [part.ended for node, part in parts.items() if (node, self._attempt) not in cycles.over]
        return any(ended is not None and ended.outcome in _FOLLOWED for ended in waiting)

    def _ranks(self, now: float, snapshots: dict[int, rank_snapshot.RankSnapshot]) -> tuple[RankNow, ...]:
        by_rank: dict[int, RankNow] = {}
        places = self._history.cycles.places
        size = self._history.cycles.world_size(places[-1]) if places else None
        for node in sorted(self._history.nodes):
            for rank, state in self._history.states(node).items():
                is_present = self._is_in_last_cycle(rank) if size is None else rank < size
                if not is_present:
                    continue  # the launcher went on without it
                previous = by_rank.get(rank)
                # A rank that moved has its state on the new node.
                if previous is None or self._node.get(rank) == node:
                    by_rank[rank] = _rank_now(rank, node, state, now, snapshots.get(rank))
        pids = {rank: pid for rank, pid in self._pid.items() if rank not in self._left}
        return tuple(msgspec.structs.replace(by_rank[rank], pid=pids.get(rank)) for rank in sorted(by_rank))


def _modified_ago(now: float, folder: Path) -> float:
    """Return the seconds since the last change of a file in a folder, by the clock of the file system, which need not
    be that of the writer. inf if this is unknown, or if that clock is far ahead of ours."""
    try:
        with os.scandir(folder) as entries:
            ago = min((now - entry.stat().st_mtime for entry in entries), default=float("inf"))
    except OSError:
        return float("inf")
    return ago if ago >= -FILES_AHEAD else float("inf")


_SHOWN = frozenset(
    (
        events.RankInterrupted,
        events.InterruptionArrived,
        events.IterationDecided,
        events.IncidentJudged,
        events.WorkerStarted,
        events.MonitorStarted,
        events.MonitorLost,
        events.CallStarted,
        events.CallEnded,
        events.MonitorEnded,
        events.RankExited,
    )
)
"""Events that change the state shown here, besides what the history knows."""


def _rank_now(rank: int, node: str, state: str, now: float, snapshot: rank_snapshot.RankSnapshot | None) -> RankNow:
    if snapshot is None or snapshot.origin.node != node:
        return RankNow(rank, node, state)
    # Snapshots of a large job are updated rarely: a short section may have ended long ago.
    sections = [Section(section.name, snapshot.open_for(section), section.limit_s) for section in snapshot.sections]
    nearest = max(reversed(sections), key=lambda section: section.share, default=None)
    is_gone = state in ("terminated", "excluded")
    return RankNow(
        rank=rank,
        node=node,
        state=state,
        doing="" if is_gone else snapshot.doing,
        step=snapshot.step,
        silent_s=snapshot.silent_for(),
        section=None if is_gone else nearest,
        sections=0 if is_gone else len(sections) + snapshot.sections_more,
        shown_s=max(0.0, now - snapshot.wall(snapshot.known_until)),
    )


def order(ranks: Iterable[RankNow], by: Sort = "staleness", world_size: int = 1) -> list[RankNow]:
    """Return ranks, most suspicious first.

    by: staleness (lost or suspect ranks, then those without news for longest, then those closest to a limit), limit
    (used share), step (lowest first), rank or node. world_size: determines how often ranks update their snapshots, and
    so from which age on a snapshot is stale."""
    usual = 2 * rank_snapshot.pause(world_size)

    def staleness(rank: RankNow) -> tuple[int, float, float, float, int]:
        wrong = _WRONG.index(rank.state) if rank.state in _WRONG else len(_WRONG)
        silent_s = rank.silent_s or 0.0
        return wrong, -silent_s if silent_s > usual else 0.0, -rank.share, -silent_s, rank.rank

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
    """Return groups, most suspicious worst rank first.

    by: alike (the same state and section) or node."""
    groups: dict[tuple[str, ...], list[RankNow]] = {}
    for rank in order(ranks, "staleness", world_size):
        key = (rank.node,) if by == "node" else (rank.state, _where(rank))
        groups.setdefault(key, []).append(rank)
    return [_group(members) for members in groups.values()]


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
