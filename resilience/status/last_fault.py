"""Which fault of a job is the last one?  For `status.state`, which reads only the two ends of each file.

The newest iteration or cycle with a fault of a rank's own counts, and in it the rank that failed first, as in the
report. Iterations have the order of their numbers, and faults of one iteration that of their arrival in the store: the
clocks of two nodes may differ. The end of a worker that the launcher stopped is no fault. The end of a file may begin
after the fault that the present iteration follows. Then another rank's record says which rank was first, and that
rank's file is read further back."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from resilience.attribution.symptoms import symptom
from resilience.facts import events
from resilience.facts.identity import owner_of
from resilience.facts.interruptions import Interruption
from resilience.facts.records import Record
from resilience.history.cycles import Cycle, CycleHistory
from resilience.telemetry.recording import READ_AT_ONCE, RecordTail

FIRST, MORE = 64 << 10, 8  # bytes of a file's end that are read first, and the factor by which they grow
ASKED = 3  # ranks that are asked which rank was first
KEPT = 4  # iterations and cycles whose faults are kept: it takes the agent's records to know which workers it stopped

Iteration = tuple[int, int, int, int]
"""Attempt, cycle, call, iteration."""
Place = tuple[Cycle, int | None, int | None]
"""Cycle, call and iteration; call and iteration are None for a fault outside of a Wrapper's iterations."""


class SeenFault(NamedTuple):
    """A fault. at_ns: UTC. call, iteration: None for a fault in a launched worker without a Wrapper."""

    at_ns: int
    rank: int
    kind: Interruption
    what: str
    node: str
    cycle: Cycle
    call: int | None
    iteration: int | None

    @property
    def place(self) -> Place:
        return self.cycle, self.call, self.iteration


class LastFault:
    """The faults of an attempt that have been read so far."""

    def __init__(self) -> None:
        self._found: dict[Place, list[SeenFault]] = {}  # without ends of processes
        self._ends: dict[Cycle, list[SeenFault]] = {}
        self._arrived: dict[Place, dict[tuple[int, Interruption], int]] = {}  # positions in the store
        self._iterations: set[Iteration] = set()  # the newest ones of which a fault is known

    def take(self, record: Record) -> None:
        """Add a record."""
        origin, event = record.origin, record.event
        if isinstance(event, events.RankInterrupted) and symptom(event.record).is_own:
            self._add(record, event)
        elif isinstance(event, events.InterruptionArrived):
            place: Place = (origin.attempt, origin.cycle), origin.call, event.iteration
            arrived, key = self._arrived.setdefault(place, {}), (event.initial_rank, event.interruption)
            arrived[key] = min(event.position, arrived.get(key, event.position))
            if len(self._arrived) > KEPT:
                del self._arrived[min(self._arrived, key=_order)]

    def _add(self, record: Record, event: events.RankInterrupted) -> None:
        origin, seen = record.origin, event.record
        what = seen.message if seen.exception is None else seen.exception.in_words
        cycle = origin.attempt, origin.cycle
        iteration = origin.iteration if seen.iteration is None else seen.iteration
        call = None if iteration is None else origin.call
        at_ns, kind = seen.detected_wall_ns or record.wall_ns, seen.interruption
        fault = SeenFault(at_ns, seen.rank, kind, what, origin.node, cycle, call, iteration)
        if iteration is not None:
            self._iterations = set(sorted({*self._iterations, (*cycle, origin.call, iteration)})[-KEPT:])
        if seen.interruption is not Interruption.TERMINATED:
            self._found.setdefault(fault.place, []).append(fault)
            if len(self._found) > KEPT:
                del self._found[min(self._found, key=_order)]
            return
        self._ends.setdefault(cycle, []).append(fault)
        if len(self._ends) > KEPT:
            del self._ends[min(self._ends)]

    def look_back(self, present: Iteration, files: Sequence[Path]) -> None:
        """Read further back if no fault of the iteration before the present one is known. files: of all ranks."""
        before = (*present[:3], present[3] - 1)
        if before[3] < 0 or before in self._iterations:
            return
        decided = next(filter(None, (_find(path, events.IterationDecided, before) for path in files[:ASKED])), None)
        if decided is None or not isinstance(decided.event, events.IterationDecided):
            return
        for path in files:
            if owner_of(path.stem).rank == decided.event.by:
                first = _find(path, events.RankInterrupted, before)
                if first is not None and isinstance(first.event, events.RankInterrupted):
                    self._add(first, first.event)

    def newest(self, cycles: CycleHistory) -> SeenFault | None:
        """Return the last fault. cycles: they know which workers the launcher stopped."""
        faults = [fault for found in self._found.values() for fault in found]
        for cycle, ends in self._ends.items():
            stopped = {node: cycles.part(node, cycle).stopped for node in {fault.node for fault in ends}}
            faults += [fault for fault in ends if fault.rank not in stopped[fault.node]]
        if not faults:
            return None
        newest = max(fault.cycle for fault in faults)
        places = [fault.place for fault in faults if fault.cycle == newest and fault.iteration is not None]
        shown = ((newest, None, None), max(places, key=_order, default=None))
        last = max((fault for fault in faults if fault.place in shown), key=_age)
        together = [fault for fault in faults if fault.place == last.place]
        agreed = cycles.mover(last.cycle) if last.iteration is None else None
        arrived = self._arrived.get(last.place, {})

        def order(fault: SeenFault) -> tuple[bool, float, int]:
            return fault.rank != agreed, arrived.get((fault.rank, fault.kind), math.inf), fault.at_ns

        first = min(together, key=order).rank
        return max((fault for fault in together if fault.rank == first), key=_age)


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


def _order(place: Place) -> tuple[Cycle, float, float]:
    """Return a place in the order of places. A fault outside of iterations is the last one of its cycle."""
    cycle, call, iteration = place
    return cycle, math.inf if call is None else call, math.inf if iteration is None else iteration


def _age(fault: SeenFault) -> int:
    return fault.at_ns


def _place(record: Record) -> Iteration | None:
    origin, event = record.origin, record.event
    iteration = event.record.iteration if isinstance(event, events.RankInterrupted) else None
    iteration = origin.iteration if iteration is None else iteration
    return None if iteration is None else (origin.attempt, origin.cycle, origin.call, iteration)
