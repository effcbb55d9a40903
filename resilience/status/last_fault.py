"""Which fault of a job is the last one?  For `status.state`, which reads only the two ends of each file.

The newest iteration or cycle counts that has a fault of a rank's own, or a verdict that names a rank. The verdict on
record is that of the terminal: it also names a rank for which all others waited and which has no record, and it says if
no rank is to blame. Before it is written, the rank counts whose record reached the store first. Iterations have the
order of their numbers, and faults of one iteration that of their arrival in the store: the clocks of two nodes may
differ. The end of a worker that the launcher stopped is no fault. The end of a file may begin after the fault that the
present iteration follows. Then another rank's record says which rank was first, and that rank's file is read further
back."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

from resilience.attribution.first_failure import cause_in_words
from resilience.attribution.symptoms import CLASSES, TORCHRUN_STOPS_WITHIN, symptom
from resilience.facts import events
from resilience.facts.identity import owner_of
from resilience.facts.interruptions import Interruption
from resilience.facts.records import Record
from resilience.history.cycles import Cycle, CycleHistory
from resilience.history.places import judged_place
from resilience.telemetry.recording import READ_AT_ONCE, RecordTail

FIRST, MORE = 64 << 10, 8  # bytes of a file's end that are read first, and the factor by which they grow
ASKED = 3  # ranks that are asked which rank was first
KEPT = 4  # iterations and cycles whose faults are kept: it takes the agent's records to know which workers it stopped

_Value = TypeVar("_Value")
Iteration = tuple[int, int, int, int]
"""Attempt, cycle, call, iteration."""
Place = tuple[Cycle, int | None, int | None]
"""Cycle, call and iteration; call and iteration are None for a fault outside of a Wrapper's iterations."""


class SeenFault(NamedTuple):
    """A fault. at_ns: UTC. kind: None if only the verdict names the rank. call, iteration: None for a fault in a
    launched worker without a Wrapper."""

    at_ns: int
    rank: int
    kind: Interruption | None
    what: str
    node: str
    cycle: Cycle
    call: int | None
    iteration: int | None
    is_stop: bool = False  # a signal asked the process to end

    @property
    def place(self) -> Place:
        return self.cycle, self.call, self.iteration

    @property
    def is_lost_monitor(self) -> bool:
        return self.kind is Interruption.MONITOR_PROCESS_EXCEPTION


class LastFault:
    """The faults of an attempt that have been read so far."""

    def __init__(self) -> None:
        self._found: dict[Place, list[SeenFault]] = {}  # without ends of processes
        self._ends: dict[Cycle, dict[tuple[int, Place], SeenFault]] = {}  # by rank and place
        self._arrived: dict[Place, dict[tuple[int, Interruption], int]] = {}  # positions in the store
        self._iterations: set[Iteration] = set()  # the newest ones of which a fault is known
        self._first: dict[Place, int] = {}  # the rank that was first in the store, as the ranks learned it
        self._since: dict[Place, int] = {}  # when any rank was first interrupted, UTC
        # With their times. If the rank is None, none is to blame.
        self._verdicts: dict[Place, tuple[events.IncidentJudged, int]] = {}
        self._by_torchrun: set[Cycle] = set()

    def take(self, record: Record) -> None:
        """Add a record."""
        origin, event = record.origin, record.event
        if isinstance(event, events.RankInterrupted):
            self._interrupted(record, event)
        elif isinstance(event, events.MonitorLost):
            self._monitor_lost(record, event)
        elif isinstance(event, events.IncidentJudged):
            self._judged(record, event)
        elif isinstance(event, events.CallStarted):
            if event.restarts_left is not None:
                self._by_torchrun.add((origin.attempt, origin.cycle))
        elif isinstance(event, events.IterationDecided):
            if event.by is not None:
                decided: Place = (origin.attempt, origin.cycle), origin.call, origin.iteration
                _keep(self._first, decided, event.by)
        elif isinstance(event, events.InterruptionArrived):
            place: Place = (origin.attempt, origin.cycle), origin.call, event.iteration
            arrived, key = self._arrived.setdefault(place, {}), (event.initial_rank, event.interruption)
            arrived[key] = min(event.position, arrived.get(key, event.position))
            if len(self._arrived) > KEPT:
                del self._arrived[min(self._arrived, key=_order)]

    def _interrupted(self, record: Record, event: events.RankInterrupted) -> None:
        if symptom(event.record).is_own:
            self._add(record, event)
        self._note_time(record, event)

    def _monitor_lost(self, record: Record, event: events.MonitorLost) -> None:
        """Add a loss that the launcher's agent recorded; a Wrapper's rank records an interruption, too."""
        origin, what = record.origin, f"its monitor was lost: {event.reason}"
        if origin.role == "agent" and origin.initial_rank is not None and not event.is_replaced:
            kind, cycle = Interruption.MONITOR_PROCESS_EXCEPTION, (origin.attempt, origin.cycle)
            self._keep_fault(SeenFault(record.wall_ns, origin.initial_rank, kind, what, origin.node, cycle, None, None))

    def _note_time(self, record: Record, event: events.RankInterrupted) -> None:
        origin, interruption = record.origin, event.record
        iteration = origin.iteration if interruption.iteration is None else interruption.iteration
        place: Place = (origin.attempt, origin.cycle), None if iteration is None else origin.call, iteration
        at_ns = interruption.detected_wall_ns or record.wall_ns
        _keep(self._since, place, min(at_ns, self._since.get(place, at_ns)))

    def _judged(self, record: Record, event: events.IncidentJudged) -> None:
        call, iteration = judged_place(record.origin, event)
        place: Place = (record.origin.attempt, event.cycle), None if iteration is None else call, iteration
        _keep(self._verdicts, place, (event, record.wall_ns))

    def _add(self, record: Record, event: events.RankInterrupted) -> None:
        origin, interruption = record.origin, event.record
        what = interruption.message if interruption.exception is None else interruption.exception.in_words
        what = cause_in_words(interruption) if interruption.program_had_failed else what
        cycle = origin.attempt, origin.cycle
        iteration = origin.iteration if interruption.iteration is None else interruption.iteration
        call = None if iteration is None else origin.call
        at_ns, kind = interruption.detected_wall_ns or record.wall_ns, interruption.interruption
        is_stop = interruption.exit is not None and interruption.exit.is_stop
        fault = SeenFault(at_ns, interruption.rank, kind, what, origin.node, cycle, call, iteration, is_stop)
        if iteration is not None:
            self._iterations = set(sorted({*self._iterations, (*cycle, origin.call, iteration)})[-KEPT:])
        if interruption.interruption is not Interruption.TERMINATED:
            self._keep_fault(fault)
            return
        # If its rank's monitor was replaced, two have recorded it: the first record says when it was.
        ends, key = self._ends.setdefault(cycle, {}), (fault.rank, fault.place)
        ends[key] = min(fault, ends.get(key, fault), key=_age)
        if len(self._ends) > KEPT:
            del self._ends[min(self._ends)]

    def _keep_fault(self, fault: SeenFault) -> None:
        self._found.setdefault(fault.place, []).append(fault)
        if len(self._found) > KEPT:
            del self._found[min(self._found, key=_order)]

    def look_back(self, present: Iteration, files: Sequence[Path]) -> None:
        """Read further back if no fault of the iteration before the present one is known. files: of all ranks."""
        before = (*present[:3], present[3] - 1)
        if before[3] < 0:
            return
        place: Place = (before[:2], *before[2:])
        files = sorted(files, key=_by_rank)
        if place not in self._verdicts:
            verdict = next(filter(None, (_find(path, events.IncidentJudged, before) for path in files[:ASKED])), None)
            if verdict is not None:
                self.take(verdict)
        if before in self._iterations and place in self._arrived:
            return
        decided = next(filter(None, (_find(path, events.IterationDecided, before) for path in files[:ASKED])), None)
        if decided is None or not isinstance(decided.event, events.IterationDecided):
            return
        self.take(decided)
        for path in files if before not in self._iterations else ():
            if owner_of(path.stem).rank == decided.event.by:
                first = _find(path, events.RankInterrupted, before)
                if first is not None and isinstance(first.event, events.RankInterrupted):
                    self._add(first, first.event)
                    self._note_time(first, first.event)

    def newest(self, cycles: CycleHistory) -> SeenFault | None:
        """Return the last fault. cycles: they know which workers the launcher stopped."""
        faults = self._left_by_launcher(cycles)
        last = self._by_arrival(faults, cycles)
        naming = [place for place, (verdict, _) in self._verdicts.items() if verdict.rank is not None]
        named = max(naming, key=_order, default=None)
        if named is not None:
            is_older = last is not None and last.is_lost_monitor and last.at_ns <= self._verdicts[named][1]
            if last is None or is_older or _order(last.place) <= _order(named):
                return self._of_verdict(named, faults)
        if last is not None and last.place in self._verdicts and not last.is_lost_monitor:
            # It blames no rank: this one only reported the fault.
            verdict, _ = self._verdicts[last.place]
            return last._replace(what=f"{last.what}; {verdict.sentence}")
        return last

    def _of_verdict(self, place: Place, faults: Sequence[SeenFault]) -> SeenFault:
        """Return the fault of the rank that a verdict names. The launcher's incident has all records of its cycle."""
        verdict, at_ns = self._verdicts[place]
        rank = verdict.rank
        assert rank is not None
        faults = [fault for fault in faults if not fault.is_lost_monitor or verdict.what == "monitor_lost"]
        own = [fault for fault in faults if fault.rank == rank and fault.place == place]
        own = own or [fault for fault in faults if fault.rank == rank and place[2] is None and fault.cycle == place[0]]
        if own:
            return max(own, key=_age)
        what = CLASSES.get(verdict.what, verdict.what)  # type: ignore[call-overload]
        return SeenFault(self._since.get(place, at_ns), rank, None, what, "", *place)

    def _left_by_launcher(self, cycles: CycleHistory) -> list[SeenFault]:
        """Return the faults without the ends of workers that the launcher stopped."""
        faults = [fault for faults_at_place in self._found.values() for fault in faults_at_place]
        for cycle, ends_by_rank in self._ends.items():
            ends = ends_by_rank.values()
            stopped = {node: cycles.part(node, cycle).stopped for node in {fault.node for fault in ends}}
            faults += [fault for fault in ends if fault.rank not in stopped[fault.node]]
        return [fault for fault in faults if not self._is_by_torchrun(fault, faults)]

    def _is_by_torchrun(self, fault: SeenFault, faults: Sequence[SeenFault]) -> bool:
        """Return True if torchrun stopped a rank because another one had ended, or left its function."""
        return (
            fault.is_stop
            and fault.cycle in self._by_torchrun
            and any(
                other.rank != fault.rank
                and other.kind in (Interruption.TERMINATED, Interruption.BASE_EXCEPTION)
                and other.cycle == fault.cycle
                and 0 < fault.at_ns - other.at_ns <= TORCHRUN_STOPS_WITHIN * 1e9
                for other in faults
            )
        )

    def _by_arrival(self, faults: Sequence[SeenFault], cycles: CycleHistory) -> SeenFault | None:
        """Return the last fault as the order of arrival in the store shows it."""
        if not faults:
            return None
        newest = max(fault.cycle for fault in faults)
        of_cycle = [fault for fault in faults if fault.cycle == newest]
        faults = [fault for fault in of_cycle if not fault.is_lost_monitor] or of_cycle  # no cause of another fault
        places = [fault.place for fault in faults if fault.iteration is not None]
        shown = ((newest, None, None), max(places, key=_order, default=None))
        last = max((fault for fault in faults if fault.place in shown), key=_age)
        together = [fault for fault in faults if fault.place == last.place]
        agreed = cycles.mover(last.cycle) if last.iteration is None else None
        arrived, first_in_store = self._arrived.get(last.place, {}), self._first.get(last.place)
        has_cause = any(fault.kind is not Interruption.TERMINATED for fault in together)

        def order(fault: SeenFault) -> tuple[bool, bool, float, bool, int]:
            position = math.inf if fault.kind is None else arrived.get((fault.rank, fault.kind), math.inf)
            is_end = has_cause and fault.kind is Interruption.TERMINATED
            is_consequence = is_end and _is_ended_by_monitor(fault, cycles)
            return is_consequence, fault.rank != agreed, position, fault.rank != first_in_store, fault.at_ns

        first = min(together, key=order).rank
        return max((fault for fault in together if fault.rank == first), key=_age)


def _is_ended_by_monitor(fault: SeenFault, cycles: CycleHistory) -> bool:
    """Return True if a limit had fired, so that the end of the process says nothing about its rank."""
    worker = cycles.part(fault.node, fault.cycle).workers.get(fault.rank)
    return worker is not None and worker.signals is not None and not worker.lost_its_agent


def _find(path: Path, kind: type[events.Event], place: Iteration) -> Record | None:
    """Return the last record of this kind and iteration in a rank's file."""
    last = FIRST
    while True:
        records = RecordTail(path, last=last).added()
        for record in reversed(records):
            if type(record.event) is kind and _place(record) == place:
                return record
        if last >= READ_AT_ONCE or not records or records[0].sequence == 0:
            return None
        last *= MORE


def _by_rank(path: Path) -> tuple[bool, int]:
    """Return a file in the order of ranks: the rank that is 0 in an iteration, or its monitor, writes the verdict."""
    rank = owner_of(path.stem).rank
    return rank is None, rank or 0


def _order(place: Place) -> tuple[Cycle, float, float]:
    """Return a place in the order of places. A fault outside of iterations is the last one of its cycle."""
    cycle, call, iteration = place
    return cycle, math.inf if call is None else call, math.inf if iteration is None else iteration


def _keep(known: dict[Place, _Value], place: Place, value: _Value) -> None:
    """Store a value of a place, and forget those of the oldest places."""
    known[place] = value
    if len(known) > KEPT:
        del known[min(known, key=_order)]


def _age(fault: SeenFault) -> int:
    return fault.at_ns


def _place(record: Record) -> Iteration | None:
    origin, event = record.origin, record.event
    if isinstance(event, events.IncidentJudged):
        call, judged = judged_place(origin, event)
        return None if call is None or judged is None else (origin.attempt, event.cycle, call, judged)
    iteration = event.record.iteration if isinstance(event, events.RankInterrupted) else None
    iteration = origin.iteration if iteration is None else iteration
    return None if iteration is None else (origin.attempt, origin.cycle, origin.call, iteration)
