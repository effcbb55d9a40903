"""Which interruptions of a node came first, and which followed from others?  What the node's metrics count.

Each death counts once, and each iteration or cycle that failed has at most one first interruption on a node. A Wrapper
inside the launcher sees most faults before the launcher does: then the launcher's records of the same fault are left
out, or followed from it. A node knows only its own records; `attribution.verdict` compares all ranks."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from resilience.attribution.launch_incidents import WISHED
from resilience.attribution.symptoms import category_of, gives_up, symptom
from resilience.core import events
from resilience.core.attribution import Interruption, InterruptionRecord
from resilience.core.records import Record
from resilience.history.cycles import NODE_LOST, Cycle, NodeCycle
from resilience.history.phases import Place

KEPT = 256  # iterations of which late records still change what was counted
Labels = tuple[str, str, str]
"""Kind, category, and "first" or "cascade"."""


class _Seen(NamedTuple):
    """What a Wrapper has on record. is_own: None means that it is, if the job's store has this record first."""

    rank: int
    pid: int | None
    kind: str
    category: str
    is_own: bool | None
    gives_up: bool

    @property
    def is_end(self) -> bool:
        return self.kind == Interruption.TERMINATED.value


class Interruptions:
    """The interruptions of one or more nodes, in whatever order files are read."""

    def __init__(self) -> None:
        self._seen: defaultdict[tuple[str, Place], list[_Seen]] = defaultdict(list)
        self._by: dict[tuple[str, Place], int] = {}  # whose record the store has first
        self._last: dict[tuple[str, Cycle], Place] = {}  # the last iteration that began
        self._over: set[tuple[Cycle, int]] = set()  # ranks whose monitor has ended
        self._settled: Counter[Labels] = Counter()

    def take(self, record: Record) -> None:
        """Add what a Wrapper or its monitor says. Records of agents are in the history's cycles."""
        origin, event = record.origin, record.event
        if origin.is_launchers:
            return
        cycle = origin.attempt, origin.cycle
        place = (*cycle, origin.call, -1 if origin.iteration is None else origin.iteration)
        match event:
            case events.IterationStarted():
                self._last[origin.node, cycle] = max(place, self._last.get((origin.node, cycle), place))
            case events.Interrupted(seen):
                place = place if seen.iteration is None else (*place[:3], seen.iteration)
                self._seen[origin.node, place].append(_seen(seen))
            case events.OutcomeSeen(by=int(by)):
                self._by[origin.node, place] = by
            case events.MonitorEnded() | events.MonitorLost() if origin.initial_rank is not None:
                self._over.add((cycle, origin.initial_rank))

    def counted(self, nodes: Mapping[str, Mapping[Cycle, NodeCycle]]) -> Counter[Labels]:
        """Return how many there are by kind, category and place. nodes: the launcher's cycles, by node."""
        found = Counter(self._settled)
        deaths: set[tuple[str, Cycle, int, int | None]] = set()
        firsts: set[tuple[str, Place]] = set()
        excess = len(self._seen) - KEPT
        for number, (node, place) in enumerate(sorted(self._seen)):
            part = nodes.get(node, {}).get(place[:2], NodeCycle())
            once = []
            for seen in self._seen[node, place]:
                death = (node, place[:2], seen.rank, seen.pid)
                if not seen.is_end or (death not in deaths and not _is_launchers(seen, part)):
                    once.append(seen)
                    deaths |= {death} if seen.is_end else set()
            labels = Counter(self._of_iteration(node, place, once))
            firsts |= {(node, place)} if any(each[2] == "first" for each in labels) else set()
            found += labels
            if number < excess:
                self._settled += labels
                del self._seen[node, place]
        for node, parts in nodes.items():
            for cycle, part in parts.items():
                if part.ended is not None:
                    found.update(_of_cycle(part, is_known=self._is_known(node, cycle, part, firsts)))
        return found

    def _of_iteration(self, node: str, place: Place, seen: Sequence[_Seen]) -> Iterator[Labels]:
        by = self._by.get((node, place))
        if by is None and not any((place[:2], each.rank) in self._over for each in seen):
            return  # nobody knows yet which record the store has first
        own = [each for each in seen if each.is_own or (each.is_own is None and by in (None, each.rank))]
        first = min(own, key=lambda each: (each.rank != by, not each.is_own, each.rank), default=None)
        for each in seen:
            yield each.kind, each.category, "first" if each is first else "cascade"

    def _is_known(self, node: str, cycle: Cycle, part: NodeCycle, firsts: set[tuple[str, Place]]) -> bool:
        """Whether a Wrapper on this node or another one has counted the fault that ended a cycle."""
        place = self._last.get((node, cycle))
        while place is not None:
            seen, by = self._seen.get((node, place), []), self._by.get((node, place))
            if (node, place) in firsts or (by is not None and by not in part.workers):
                return True
            has_given_up = seen and all(each.gives_up for each in seen) and place[3] > 0
            place = (*place[:3], place[3] - 1) if has_given_up else None
        return False


def _seen(record: InterruptionRecord) -> _Seen:
    found = symptom(record)
    # What only echoes another rank's fault is never the first; a death, or an error that is known to be the rank's
    # own, is a fault of its own.
    is_own = None if found.is_own else False
    if gives_up(record):
        is_own = False
    elif found.is_own and (found.rule == 1 or record.origin == "own"):
        is_own = True
    return _Seen(record.rank, record.pid, record.interruption.value, category_of(record), is_own, gives_up(record))


def _is_launchers(seen: _Seen, part: NodeCycle) -> bool:
    """Whether the launcher ended a worker on purpose; as long as its agent has not said so, that is not known."""
    if part.started is None:
        return False  # there is no launcher
    worker = part.workers.get(seen.rank)
    end = None if worker is None else worker.exit
    return part.ended is None if end is None else seen.rank in part.stopped


def _of_cycle(part: NodeCycle, is_known: bool) -> Iterator[Labels]:
    """Yield the interruptions of a node's cycle that has ended. is_known: a Wrapper has counted the first one."""
    is_wished = part.ended is not None and part.ended.outcome in WISHED  # then ranks end, and none of them failed
    for record, is_first in () if is_wished else _places(part):
        yield record.interruption.value, category_of(record), "first" if is_first and not is_known else "cascade"
    if part.decided is not None and part.decided.fingerprint.startswith(NODE_LOST):  # the lost node cannot count it
        yield Interruption.UNRESPONSIVE.value, "host", "cascade" if is_known else "first"


def _places(part: NodeCycle) -> list[tuple[InterruptionRecord, bool]]:
    """A cycle's interruptions that no Wrapper has on record, and of each whether it was the first."""
    seen = [each.record for each in sorted(part.seen, key=lambda each: each.at_ns)]
    own = [record for record in seen if (record.rank, record.pid) not in part.handled]
    first = part.mover
    is_elsewhere = part.is_failed and part.decided is None
    if first is None and not is_elsewhere:
        first = next((record.rank for record in own if symptom(record).is_own), None)
    places: list[tuple[InterruptionRecord, bool]] = []
    known: set[tuple[int, bool]] = set()
    for record in own:
        is_end = record.interruption is Interruption.TERMINATED
        if (record.rank, is_end) in known:
            continue  # its monitor and the agent have both seen it
        # An end after a limit fired is that limit's doing.
        is_first = record.rank == first and not (is_end and (record.rank, False) in known)
        known.add((record.rank, is_end))
        places.append((record, is_first))
    return places
