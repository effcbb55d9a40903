"""Which interruptions of a node came first, and which followed from others?  The counts in the node's metrics.

Each death counts once. Each failed iteration or cycle has at most one first interruption on a node. A Wrapper under
the launcher notices most faults before the launcher does: the launcher's records of the same fault are then left out
or count as a cascade. A node knows only its own records. About another node it knows which rank's own fault came first
in the store; then nothing on this node came first. `attribution.verdict` compares all ranks."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from resilience.attribution.launch_incidents import WISHED, is_preempted
from resilience.attribution.symptoms import category_of, gives_up, symptom
from resilience.facts import events
from resilience.facts.interruptions import Interruption, InterruptionRecord
from resilience.facts.records import Record
from resilience.history.cycles import Cycle, NodeCycle
from resilience.history.phases import Place

KEPT = 256  # iterations whose counts late records can still change; earlier ones are settled
_MOST = 8  # times KEPT: the entries with which earlier iterations are settled
Labels = tuple[str, str, str]
"""Kind, category, and "first" or "cascade"."""


class _Reported(NamedTuple):
    """A Wrapper's record of an interruption. is_own: None means True if the rank was first in the store."""

    rank: int
    pid: int | None
    kind: str
    category: str
    is_own: bool | None
    gives_up: bool

    @property
    def is_end(self) -> bool:
        return self.kind == Interruption.TERMINATED.value


class _Tally(NamedTuple):
    """What was counted in iterations. deaths: by node, cycle, rank and pid. places: for each iteration, whether its
    first interruption was counted there, and whether all ranks gave up."""

    labels: Counter[Labels]
    deaths: set[tuple[str, Cycle, int, int | None]]
    places: dict[tuple[str, Place], tuple[bool, bool]]

    def copy(self) -> _Tally:
        return _Tally(self.labels.copy(), self.deaths.copy(), self.places.copy())


class Interruptions:
    """The interruptions of one or more nodes. Files may be read in any order."""

    def __init__(self, nodes: Mapping[str, Mapping[Cycle, NodeCycle]] = MappingProxyType({})) -> None:
        """nodes: the launcher's cycles, by node, as the history has them at any time."""
        self._nodes = nodes
        self._most = _MOST * KEPT
        self._seen: defaultdict[tuple[str, Place], list[_Reported]] = defaultdict(list)
        self._by: dict[tuple[str, Place], tuple[int, bool]] = {}  # rank that was first in the store; own fault?
        self._here: set[tuple[str, int | None]] = set()  # nodes and their ranks
        self._last: dict[tuple[str, Cycle], Place] = {}  # the last iteration that began
        self._over: set[tuple[Cycle, int]] = set()  # ranks whose monitor has ended
        self._settled = _Tally(Counter(), set(), {})

    def take(self, record: Record) -> None:
        """Add a record of a Wrapper or its monitor. Records of agents are in the history's cycles."""
        origin, event = record.origin, record.event
        if origin.is_launchers:
            return
        cycle = origin.attempt, origin.cycle
        place = (*cycle, origin.call, -1 if origin.iteration is None else origin.iteration)
        match event:
            case events.IterationStarted():
                self._here.add((origin.node, origin.initial_rank))
                self._last[origin.node, cycle] = max(place, self._last.get((origin.node, cycle), place))
            case events.RankInterrupted(interruption):
                place = place if interruption.iteration is None else (*place[:3], interruption.iteration)
                self._seen[origin.node, place].append(_seen(interruption))
                self._stay_small()
            case events.InterruptionArrived(iteration=iteration, fault_of=int(fault_of)):
                self._by[origin.node, (*place[:3], iteration)] = fault_of, True
                self._stay_small()
            case events.IterationDecided(by=int(by), is_own=is_own):
                self._by.setdefault((origin.node, place), (by, is_own))
                self._stay_small()
            case events.MonitorEnded() | events.MonitorLost() if origin.initial_rank is not None:
                self._over.add((cycle, origin.initial_rank))

    def counted(self) -> Counter[Labels]:
        """Return the number of interruptions by kind, category and place."""
        self._settle()
        counted = self._settled.copy()
        for node, place in self._in_order():
            self._count(node, place, counted)
        for node, parts in self._nodes.items():
            newest = dict(sorted(cycle for cycle, part in parts.items() if part.started is not None))
            for cycle, part in parts.items():
                for number in range(len(part.lost_monitors)):  # no other fault of the cycle has to do with them
                    origin = "cascade" if number else "first"
                    counted.labels[Interruption.MONITOR_PROCESS_EXCEPTION.value, "host", origin] += 1
                # An agent that was killed has no record of the end. If there are other nodes, one saw it lost.
                is_cut = part.ended is None and part.started is not None and cycle[1] < newest[cycle[0]]
                if part.ended is not None or is_cut:
                    is_known = is_cut and part.met is not None and part.met.nodes > 1
                    is_known = is_known or self._is_known(node, cycle, part, counted)
                    counted.labels.update(_of_cycle(part, is_known))
        return counted.labels

    def _stay_small(self) -> None:
        """Settle earlier iterations from time to time. Nobody may ever ask for the counts."""
        if len(self._seen) + len(self._by) > self._most:
            self._settle()
            self._most = max(_MOST * KEPT, 2 * (len(self._seen) + len(self._by)))

    def _in_order(self) -> list[tuple[str, Place]]:
        return sorted(self._seen, key=lambda key: (key[1], key[0]))

    def _settle(self) -> None:
        """Count all iterations but the last ones for good."""
        for node, place in self._in_order()[:-KEPT]:
            self._count(node, place, self._settled)
            del self._seen[node, place]
        self._forget()

    def _forget(self) -> None:
        """Forget the settled iterations of a cycle that are well before its last one: only those just before it say
        whether a Wrapper has counted the fault that ended the cycle."""
        for known in (self._by, self._settled.places):
            for node, place in list(known):
                last = self._last.get((node, place[:2]), place)
                is_old = place[2] < last[2] - 1 or (place[2] == last[2] and place[3] < last[3] - 2 * KEPT)
                if is_old and (node, place) not in self._seen:
                    del known[node, place]

    def _count(self, node: str, place: Place, counted: _Tally) -> None:
        """Count an iteration's interruptions. `counted` has the earlier iterations."""
        part = self._nodes.get(node, {}).get(place[:2], NodeCycle())
        distinct, entries = [], self._seen[node, place]
        # Ranks leave by the exception of a handler of the signal that stops the job.
        if self._last.get((node, place[:2])) == place and is_preempted([part]):
            entries = [entry for entry in entries if entry.kind != Interruption.BASE_EXCEPTION.value]
        for entry in entries:
            death = (node, place[:2], entry.rank, entry.pid)
            if not entry.is_end or (death not in counted.deaths and not _is_launchers(entry, part)):
                distinct.append(entry)
                if entry.is_end:
                    counted.deaths.add(death)
        # If the iteration was settled before, these are late records.
        had_first, had_given_up = counted.places.get((node, place), (False, True))
        labels = list(self._of_iteration(node, place, distinct, had_first))
        has_first = any(label[2] == "first" for label in labels)
        have_given_up = had_given_up and all(entry.gives_up for entry in entries)
        counted.places[node, place] = had_first or has_first, have_given_up
        counted.labels.update(labels)

    def _of_iteration(self, node: str, place: Place, entries: Sequence[_Reported], had_first: bool) -> Iterator[Labels]:
        by, is_own = self._by.get((node, place), (None, False))
        if by is None and not any((place[:2], entry.rank) in self._over for entry in entries):
            return  # it is not yet known which rank was first in the store
        own_faults = [entry for entry in entries if entry.is_own or (entry.is_own is None and by in (None, entry.rank))]
        if is_own and (node, by) not in self._here and by not in [entry.rank for entry in entries]:
            own_faults = []  # that rank's node counts it
        own_faults = [] if had_first else own_faults
        first = min(own_faults, key=lambda entry: (entry.rank != by, not entry.is_own, entry.rank), default=None)
        for entry in entries:
            yield entry.kind, entry.category, "first" if entry is first else "cascade"

    def _is_known(self, node: str, cycle: Cycle, part: NodeCycle, counted: _Tally) -> bool:
        """Return True if a Wrapper on this or another node has counted the fault that ended a cycle."""
        place = self._last.get((node, cycle))
        while place is not None:
            has_first, have_given_up = counted.places.get((node, place), (False, False))
            by, _ = self._by.get((node, place), (None, False))
            if has_first or (by is not None and by not in part.workers):
                return True
            place = (*place[:3], place[3] - 1) if have_given_up and place[3] > 0 else None
        return False


def _seen(record: InterruptionRecord) -> _Reported:
    shown = symptom(record)
    # An echo of another rank's fault is never first. A death, or an error known to be the rank's own, is an own fault.
    is_own = None if shown.is_own else False
    if gives_up(record):
        is_own = False
    elif shown.is_own and (shown.rule == 1 or record.origin == "own"):
        is_own = True
    return _Reported(record.rank, record.pid, record.interruption.value, category_of(record), is_own, gives_up(record))


def _is_launchers(reported: _Reported, part: NodeCycle) -> bool:
    """Return True if the launcher ended a worker on purpose. Before the agent's record of the exit arrives, this is
    assumed while the cycle runs."""
    if part.started is None:
        return False  # no launcher
    worker = part.workers.get(reported.rank)
    end = None if worker is None else worker.exit
    return part.ended is None if end is None else reported.rank in part.stopped


def _of_cycle(part: NodeCycle, is_known: bool) -> Iterator[Labels]:
    """Yield the interruptions of a node's ended cycle. is_known: a Wrapper or another node has counted the first one.
    If the end of the agent has ended the workers, it comes before theirs."""
    is_wished = part.ended is not None and part.ended.outcome in WISHED  # ranks end, but none of them failed
    orphans = [rank for rank, worker in part.workers.items() if worker.lost_its_agent and part.ended is None]
    has_first = is_known
    for record, is_first in () if is_wished else _places(part):
        is_counted_first = is_first and not is_known and record.rank not in orphans
        has_first |= is_counted_first
        yield record.interruption.value, category_of(record), "first" if is_counted_first else "cascade"
    if part.lost_node is not None or (orphans and not has_first):  # the lost node cannot count it
        yield Interruption.UNRESPONSIVE.value, "host", "cascade" if is_known else "first"


def _places(part: NodeCycle) -> list[tuple[InterruptionRecord, bool]]:
    """Return a cycle's interruptions that no Wrapper recorded, each with True if it was the first."""
    records = [sighting.record for sighting in sorted(part.seen, key=lambda sighting: sighting.at_ns)]
    own = [record for record in records if (record.rank, record.pid) not in part.handled]
    first = part.mover
    is_elsewhere = part.is_failed and part.decided is None
    if first is None and not is_elsewhere:
        first = next((record.rank for record in own if symptom(record).is_own), None)
    places: list[tuple[InterruptionRecord, bool]] = []
    known: set[tuple[int, bool]] = set()
    for record in own:
        is_end = record.interruption is Interruption.TERMINATED
        if (record.rank, is_end) in known:
            continue  # both its monitor and the agent recorded it
        # If a limit fired before the process ended, the limit caused the end.
        is_first = record.rank == first and not (is_end and (record.rank, False) in known)
        known.add((record.rank, is_end))
        places.append((record, is_first))
    return places
