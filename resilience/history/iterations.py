"""What is known about each iteration of a job?  Collects the records of ranks by the iteration they belong to.

A restart extends into the next iteration. A death between two iterations may be recorded in one and interrupt the
other. A rank that its monitor ends may die late. This module assigns each record to the right iteration.
`attribution.incidents` builds one incident from each interrupted iteration."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Set
from typing import Any

import msgspec

from resilience.facts import events
from resilience.facts.interruptions import Collective, Frame, Hang, Interruption, InterruptionRecord
from resilience.facts.records import Record
from resilience.history.cycles import CycleHistory
from resilience.history.other_launchers import OtherLaunchers
from resilience.history.phases import PhaseTimes, Place, RankRestart, TimedPhase
from resilience.history.places import AT_ENTRY, judged_place

_Call = tuple[int, int, int, int]
"""Attempt, cycle, call, initial rank."""
_ACROSS = ("regroup", "resume")  # phases that extend into the next iteration
_PHASES = frozenset(events.PHASES)


class Iteration:
    """What is known about one iteration, by initial rank."""

    def __init__(self) -> None:
        self.reported: list[InterruptionRecord] = []  # as they came
        self.records: list[InterruptionRecord] = []  # each death once, with its position in the order of arrival
        self.arrivals: dict[tuple[int, Interruption], int] = {}
        self.first: Counter[int] = Counter()
        self.answered: dict[int, int] = {}  # when each rank recorded the decision, before its abort (monotonic ns)
        self.looked: dict[tuple[int, int | None], int] = {}  # when a monitor had seen how its rank hung (monotonic ns)
        self.after_answer: set[tuple[int, Interruption]] = set()  # records of ranks that had answered by then
        self.stacks: dict[int, tuple[Frame, ...]] = {}
        self.steps: dict[int, int] = {}
        self.sections: dict[int, tuple[str, ...]] = {}  # open sections
        self.collectives: dict[int, tuple[Collective, ...]] = {}  # the last collectives
        self.hangs: dict[int, Hang] = {}  # of ranks that exceeded no limit
        self.seats: dict[int, int] = {}  # initial ranks by the ranks of this iteration
        self.started: dict[int, str] = {}
        self.nodes: dict[int, str] = {}
        self.is_judged = False  # a verdict on it that names nodes is on record
        self.world_size: int | None = None
        self.active_world_size: int | None = None
        self.ended: dict[int, str] = {}
        self.stopped: Set[int] = frozenset()  # by the launcher, on purpose: not a failure
        self.runs: dict[int, tuple[str, float]] = {}
        self.first_steps: dict[int, tuple[int, float]] = {}  # of the call, and after how many seconds in the function
        self.restarts: dict[int, _Restarted] = {}
        self.unseen: set[int] = set()  # ranks that were not looked at before anything was cut
        self.sent: dict[int, tuple[str, tuple[str, ...]]] = {}  # reason and signals that a monitor sent to its rank
        self.signalled: dict[int, str] = {}  # ranks that their monitor ended, in this iteration or before, and why
        self.excluded: set[int] = set()
        self.left: dict[int, str] = {}
        self.stacks_by: dict[str, list[int]] = defaultdict(list)
        self.swallowed: list[tuple[int, str]] = []
        self.stuck: dict[int, str] = {}
        self.lost_store_ns: dict[int, int] = {}  # when each rank's process noticed it (UTC nanoseconds)
        self.store_lost: Set[int] = frozenset()  # ranks; without those whose launcher had ended the store
        self.unmonitored: set[int] = set()
        self.wall_ns: int | None = None  # when the interruption, or the loss of the store, was first noticed

    def noticed(self, at_ns: int) -> None:
        """Note that the interruption was detected, or that a rank learned of it, at this time."""
        self.wall_ns = at_ns if self.wall_ns is None else min(self.wall_ns, at_ns)

    @property
    def first_reporter(self) -> int | None:
        """Return the initial rank whose record reached the store first."""
        for record in self.records:
            if record.arrival_order == 1:
                return record.rank
        return self.first.most_common(1)[0][0] if self.first else None

    @property
    def is_interrupted(self) -> bool:
        return bool(self.answered) or any(
            outcome != "completed" and not (outcome == "lost" and rank in self.stopped)
            for rank, outcome in self.ended.items()
        )

    @property
    def freed_before_look(self) -> frozenset[tuple[int, int | None]]:
        """Return the hung ranks, each with its iteration, that had answered before their monitor had seen how they
        hung: their own abort may have freed them by then."""
        return frozenset(place for place, ns in self.looked.items() if self.answered.get(place[0], ns) < ns)

    def is_stopped(self, record: InterruptionRecord) -> bool:
        """Return True if the launcher caused the recorded end. The Wrapper's monitor could not know that."""
        return record.rank in self.stopped and record.interruption is Interruption.TERMINATED

    @property
    def is_incident(self) -> bool:
        return bool(self.records) or self.is_interrupted or bool(self.store_lost and not self.ended)


class _Restarted(msgspec.Struct, frozen=True, gc=False):
    """A restart that is over. step: with which the rank continued, if it is known."""

    duration_s: float
    step: int | None = None


class IterationHistory:
    """All iterations of a job, and what is known about each rank across them."""

    def __init__(self) -> None:
        self.phases = PhaseTimes()
        self.other_launchers = OtherLaunchers()
        self.finished: set[_Call] = set()  # calls that ended
        self.seen: set[_Call] = set()
        self._iterations: dict[Place, Iteration] = {}
        self._restart: dict[_Call, Place] = {}  # the iteration that a rank's present phases belong to
        self._began: dict[_Call, Place] = {}  # the iteration in which its open restart began
        self._ended_restart: dict[_Call, Place] = {}  # the iteration whose restart has ended last
        self._stacks: dict[tuple[Frame, ...], tuple[Frame, ...]] = {}  # equal stacks are kept once
        self._signalled: dict[_Call, tuple[Place, str]] = {}  # the first iteration, and the reason
        self._judged: set[Place] = set()
        self.is_settled = True
        # Take a record of a rank or its monitor: place, rank, record, event and time (UTC). Only the order within each
        # rank's file matters.
        self.handlers: dict[type, Callable[[Place, _Call, Record, Any, int], None]] = {
            events.CallEnded: self._call_ended,
            events.RankExited: self._call_ended,
            events.IterationStarted: self._iteration_started,
            events.IterationEnded: self._iteration_ended,
            events.StageStarted: self._stage_started,
            events.StageEnded: self._stage_ended,
            events.RestartEnded: self._continued,
            events.RestartStep: self._continued,
            events.FirstStepReported: self._began_with,
            events.RankInterrupted: self._interrupted,
            events.InterruptionArrived: self._arrived,
            events.IterationDecided: self._decided,
            events.RankSignalled: self._rank_signalled,
            events.IncidentJudged: self._incident_judged,
            **dict.fromkeys(_RARE, self._rare),
        }

    def settled(self, cycles: CycleHistory) -> dict[Place, Iteration]:
        """Return all iterations. cycles: says which ranks the launcher ended on purpose."""
        if not self.is_settled:
            self._settle(cycles)
            self.is_settled = True
        return self._iterations

    def restart_phases(self, place: Place) -> Iterator[TimedPhase]:
        """Yield the phases of the restart after an iteration. Spares have no resume phase: they show no progress."""
        spares = self._spares((*place[:3], place[3] + 1))
        for phase in self.phases.at(place):
            if phase.name != "resume" or phase.who not in spares:
                yield phase

    def restarts_after(self, place: Place) -> Iterator[RankRestart]:
        """Yield the restarts of ranks after an iteration. A spare does not count: it shows no progress."""
        iteration, spares = self._iterations.get(place), self._spares((*place[:3], place[3] + 1))
        for rank, restart in () if iteration is None else iteration.restarts.items():
            if rank not in spares:
                yield RankRestart(place, rank, restart.duration_s)

    def _spares(self, place: Place) -> set[int]:
        iteration = self._iterations.get(place)
        return set() if iteration is None else {rank for rank, state in iteration.started.items() if state != "active"}

    # -- records ----------------------------------------------------------------------------------

    def _at(self, place: Place) -> Iteration:
        iteration = self._iterations.get(place)
        if iteration is None:
            iteration = self._iterations[place] = Iteration()
            self.other_launchers.began(place)
        return iteration

    def _call_ended(self, place: Place, who: _Call, record: Record, event: events.Event, at_ns: int) -> None:
        self.seen.add(who)
        self.finished.add(who)
        self.other_launchers.ended(place, at_ns)

    def _iteration_started(
        self, place: Place, who: _Call, record: Record, event: events.IterationStarted, at_ns: int
    ) -> None:
        self.seen.add(who)
        iteration = self._at(place)
        iteration.started[who[3]] = event.state
        iteration.nodes[who[3]] = record.origin.node
        if record.origin.rank is not None:
            iteration.seats[record.origin.rank] = who[3]
        iteration.world_size, iteration.active_world_size = record.origin.world_size, event.active_world_size

    def _iteration_ended(
        self, place: Place, who: _Call, record: Record, event: events.IterationEnded, at_ns: int
    ) -> None:
        self._at(place).ended[who[3]] = event.outcome

    def _stage_started(self, place: Place, who: _Call, record: Record, event: events.StageStarted, at_ns: int) -> None:
        if event.stage == "restart":
            self._began[who] = place
        elif event.stage == "run" and self._at(place).started.get(who[3]) != "inactive":
            self.other_launchers.entered(place, who[3], at_ns)

    def _stage_ended(self, place: Place, who: _Call, record: Record, event: events.StageEnded, at_ns: int) -> None:
        stage = event.stage
        if stage in _PHASES:
            home: Place | None = place
            if stage in _ACROSS:
                home = self._restart.get(who)
            else:
                self._restart[who] = place
            if home is not None and event.outcome != "lost":
                ended_ns = at_ns - round(event.ended_ago_s * 1e9) if event.ended_ago_s else at_ns
                self.phases.add(home, stage, who[3], record.origin.node, ended_ns, event.duration_s)
        elif stage == "run":
            self._at(place).runs[who[3]] = (event.outcome, max(0.0, event.duration_s))
        elif stage == "restart" and event.outcome == "completed":
            began = self._began.pop(who, None) or self._restart.get(who)
            if began is not None:
                self._at(began).restarts[who[3]] = _Restarted(max(0.0, event.duration_s))
                self._ended_restart[who] = began

    def _continued(
        self, place: Place, who: _Call, record: Record, event: events.RestartEnded | events.RestartStep, at_ns: int
    ) -> None:
        restarts = self._at(self._ended_restart.get(who, place)).restarts
        if (restart := restarts.get(who[3])) is not None and restart.step is None:
            restarts[who[3]] = msgspec.structs.replace(restart, step=event.step)

    def _began_with(
        self, place: Place, who: _Call, record: Record, event: events.FirstStepReported, at_ns: int
    ) -> None:
        self._at(place).first_steps.setdefault(who[3], (event.step, max(0.0, event.after_s)))

    def _interrupted(self, place: Place, who: _Call, record: Record, event: events.RankInterrupted, at_ns: int) -> None:
        self.seen.add(who)
        interruption = event.record
        if interruption.iteration is not None:
            place = (*place[:3], interruption.iteration)
        detected = (
            at_ns if interruption.detected_wall_ns is None else interruption.detected_wall_ns - (record.wall_ns - at_ns)
        )
        node = (
            record.origin.node
            if interruption.node is None and interruption.rank == record.origin.initial_rank
            else interruption.node
        )
        iteration = self._at(place)
        if interruption.rank == who[3]:
            if who[3] in iteration.answered:
                iteration.after_answer.add((interruption.rank, interruption.interruption))
            if interruption.interruption is Interruption.SOFT_TIMEOUT:
                iteration.looked[interruption.rank, interruption.iteration] = record.mono_ns
        iteration.noticed(detected)
        iteration.reported.append(msgspec.structs.replace(interruption, detected_wall_ns=detected, node=node))

    def _arrived(self, place: Place, who: _Call, record: Record, event: events.InterruptionArrived, at_ns: int) -> None:
        arrivals = self._at((*place[:3], event.iteration)).arrivals
        key = (event.initial_rank, event.interruption)
        arrivals[key] = min(event.position, arrivals.get(key, event.position))

    def _decided(self, place: Place, who: _Call, record: Record, event: events.IterationDecided, at_ns: int) -> None:
        iteration, rank = self._at(place), who[3]
        iteration.noticed(at_ns)
        iteration.answered.setdefault(rank, record.mono_ns)
        if event.by is not None:
            iteration.first[event.by] += 1
        if event.stack:
            iteration.stacks[rank] = self._stacks.setdefault(event.stack, event.stack)
        if event.step is not None:
            iteration.steps[rank] = event.step
        if event.sections:
            iteration.sections[rank] = event.sections
        if event.hang is not None:
            iteration.hangs[rank] = event.hang
        if event.collectives:
            iteration.collectives[rank] = event.collectives

    def _rank_signalled(
        self, place: Place, who: _Call, record: Record, event: events.RankSignalled, at_ns: int
    ) -> None:
        sent = self._at(place).sent
        sent[who[3]] = (event.reason, sent.get(who[3], ("", ()))[1] + event.signals)
        self._signalled.setdefault(who, (place, event.reason))

    def _incident_judged(
        self, place: Place, who: _Call, record: Record, event: events.IncidentJudged, at_ns: int
    ) -> None:
        call, iteration = judged_place(record.origin, event)
        if call is not None and event.nodes:
            self._judged.add((place[0], event.cycle, call, AT_ENTRY if iteration is None else iteration))

    def _rare(self, place: Place, who: _Call, record: Record, event: events.Event, at_ns: int) -> None:
        rank = who[3]
        match event:
            case events.RankStoodInFor(result="excluded" | "discarded"):
                self._at(place).excluded.add(event.initial_rank)
            case events.RankLeft():
                self._at(place).left[rank] = event.error
            case events.EvidenceCaptured():
                self._at(place).stacks_by[event.method].append(rank)
            case events.InterruptSwallowed():
                self._at(place).swallowed.append((rank, f"{event.file}:{event.line} ({event.function})"))
            case events.OthersSeen():
                self._at(place).unseen.update(event.missing)
            case events.AbortStuck():
                self._at(place).stuck[rank] = event.where
            case events.StoreLost():
                iteration = self._at(place)
                iteration.lost_store_ns[rank] = at_ns
                iteration.noticed(at_ns)
            case events.MonitorLost():
                self._at(place).unmonitored.add(rank)
            case _:  # no other event matters here
                pass

    # -- derived from all records -----------------------------------------------------------------

    def _settle(self, cycles: CycleHistory) -> None:
        stopped = cycles.stopped
        over_since = {place: cycles.over_since(place) for place in {place[:2] for place in self._iterations}}
        for place, iteration in self._iterations.items():
            iteration.stopped = stopped.get(place[:2], frozenset())
            over_ns = over_since[place[:2]]  # then the launcher ends the store
            lost_ns = iteration.lost_store_ns.items()
            iteration.store_lost = {rank for rank, ns in lost_ns if over_ns is None or ns < over_ns}
            iteration.is_judged = place in self._judged
            iteration.records = [
                _in_order(iteration, record) for record in iteration.reported if not iteration.is_stopped(record)
            ]
            iteration.signalled = {rank: reason for rank, (reason, _) in iteration.sent.items()}
        _once_each(self._iterations)
        for place, iteration in self._iterations.items():
            for record in iteration.records:  # a rank that its monitor ends may die one iteration later
                since, reason = self._signalled.get((*place[:3], record.rank), (place, ""))
                if record.interruption is Interruption.TERMINATED and since < place and reason:
                    iteration.signalled.setdefault(record.rank, reason)


_RARE = (
    events.RankStoodInFor,
    events.RankLeft,
    events.EvidenceCaptured,
    events.OthersSeen,
    events.InterruptSwallowed,
    events.AbortStuck,
    events.StoreLost,
    events.MonitorLost,
)


def _in_order(iteration: Iteration, record: InterruptionRecord) -> InterruptionRecord:
    """Return the record with its position in the store's order of arrival."""
    position = iteration.arrivals.get((record.rank, record.interruption), record.arrival_order)
    return record if position == record.arrival_order else msgspec.structs.replace(record, arrival_order=position)


def _once_each(iterations: dict[Place, Iteration]) -> None:
    """Keep one record of each death, in the iteration that it interrupted.

    A rank that dies between two iterations may be recorded in one and interrupt the other. Its own monitor and a
    neighbour's monitor may both have recorded the death."""
    deaths: defaultdict[tuple[object, int, int | None], list[Place]] = defaultdict(list)
    ordered = sorted(iterations)
    for place in ordered:
        for record in iterations[place].records:
            if record.interruption is Interruption.TERMINATED:
                deaths[place[:3], record.rank, record.pid].append(place)
    for (_, rank, _), places in deaths.items():
        since = [place for place in ordered if place[:3] == places[0][:3] and place >= places[0]]
        interrupted = _interrupted_by(rank, since, iterations)
        record = next(r for r in iterations[places[0]].records if _is_death(r, rank))
        for place in places:
            iterations[place].records = [r for r in iterations[place].records if not _is_death(r, rank)]
        iterations[interrupted].records.append(_in_order(iterations[interrupted], record))


def _interrupted_by(rank: int, places: list[Place], iterations: Mapping[Place, Iteration]) -> Place:
    """Return the iteration that the death of this rank interrupted.

    places: the iteration in which the death was recorded, and all later ones. If the store has the death, its last
    arrival counts. Else it is the first iteration that this rank was the first to report; a later one must have no
    other record.

    The death arrives twice if the other ranks include this rank in the next iteration just before its stand-in lists
    it as terminated. The stand-in then interrupts that iteration as well."""
    death = (rank, Interruption.TERMINATED)
    if arrived := [place for place in places if death in iterations[place].arrivals]:
        return arrived[-1]
    if iterations[places[0]].first_reporter == rank:
        return places[0]
    unexplained = [place for place in places[1:] if iterations[place].first_reporter == rank]
    return next((place for place in unexplained if not iterations[place].records), places[0])


def _is_death(record: InterruptionRecord, rank: int) -> bool:
    return record.rank == rank and record.interruption is Interruption.TERMINATED
