"""Which phases did each rank's restarts have?  All of a run's, kept small: five numbers a phase.

Records pass by once; afterwards the legs of one incident (`of`), from which `analysis.waterfall` draws its picture,
and those of some ranks over the whole run (`within`). Times are UTC nanoseconds, clocks' offsets taken off."""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping

from resilience.analysis.waterfall import Leg, Who
from resilience.attribution.incident import Incident
from resilience.core import events
from resilience.core.records import Record

Place = tuple[int, int, int, int]
"""Attempt, cycle, call, iteration; of the launcher's, call and iteration are -1."""

_FIELDS = 5  # name, who, node, start, end
_LATER = frozenset(("gate", "rendezvous", "spawn", "import"))  # belong to the cycle that they lead to
_PHASES = frozenset(events.PHASES)


class Legs:
    """Takes the records of a run in the order of each file."""

    def __init__(self, offsets: Mapping[str, int] | None = None) -> None:
        """offsets: how far each node's clock is ahead, in nanoseconds."""
        self._offsets = {} if offsets is None else offsets
        self._numbers: dict[str, int] = {}
        self._names: list[str] = []
        self._kept: dict[Place, array[int]] = {}
        self._restarting: dict[tuple[int, int, int, int], Place] = {}  # rank's call -> where its restart began
        self._node_of: dict[int, str] = {}

    def take(self, record: Record) -> None:
        """Add what a record says."""
        origin, event = record.origin, record.event
        if origin.is_launchers:
            self._take_of_launcher(record)
        elif origin.initial_rank is not None:
            if isinstance(event, events.StageEnded):
                self._ended(record, event, origin.initial_rank)
            elif isinstance(event, events.StageStarted) and event.stage == "restart":
                place = (origin.attempt, origin.cycle, origin.call, origin.iteration or 0)
                who = (*place[:3], origin.initial_rank)
                self._restarting[who] = place

    def of(self, incident: Incident) -> Iterator[Leg]:
        """Yield the legs of one incident's restart."""
        if incident.layer == "inprocess":
            yield from self._at((incident.attempt, incident.cycle, incident.call, incident.iteration))
            return
        detected = incident.detected_wall_ns
        for leg in self._at((incident.attempt, incident.cycle, -1, -1)):
            if leg.name == "run" and detected is not None:
                detected_ns = detected - self._offsets.get(leg.node, 0)
                if detected_ns < leg.end_ns:
                    yield Leg("detect", leg.who, leg.node, detected_ns, leg.end_ns)
            elif leg.name == "stop":
                yield leg
        following = self._at((incident.attempt, incident.cycle + 1, -1, -1))
        yield from (leg for leg in following if leg.name in _LATER)

    def within(self, ranks: Collection[int]) -> dict[int, list[Leg]]:
        """Return the legs of some ranks in the whole run, those of their nodes with them."""
        found: dict[int, list[Leg]] = {rank: [] for rank in ranks}
        on_node: defaultdict[str, list[int]] = defaultdict(list)
        for rank in ranks:
            on_node[self._node_of.get(rank, "")].append(rank)
        for place in self._kept:
            for leg in self._at(place, found.keys()):
                for rank in [leg.who] if isinstance(leg.who, int) else on_node.get(leg.who, ()):
                    if leg.name != "run":
                        found[rank].append(leg)
        return found

    def _take_of_launcher(self, record: Record) -> None:
        origin, event = record.origin, record.event
        place = (origin.attempt, origin.cycle, -1, -1)
        match event:
            case events.CyclePhaseEnded(phase="run" | "stop" | "gate" | "rendezvous" | "spawn" as phase):
                self._add(place, phase, origin.node, origin.node, record.wall_ns, event.duration_s)
            case events.WorkerStarted():
                self._node_of[event.worker_rank] = origin.node
            case events.WorkerProgressed() if origin.initial_rank is not None:
                end = record.wall_ns - round(event.ago_s * 1e9)
                self._add(place, "import", origin.initial_rank, origin.node, end, event.after_s)

    def _ended(self, record: Record, event: events.StageEnded, rank: int) -> None:
        origin = record.origin
        who = (origin.attempt, origin.cycle, origin.call, rank)
        if event.stage == "restart":
            self._restarting.pop(who, None)
        elif event.stage in _PHASES and who in self._restarting:
            end = record.wall_ns - round(event.ended_ago_s * 1e9)
            self._add(self._restarting[who], event.stage, rank, origin.node, end, event.duration_s)

    def _add(self, place: Place, name: str, who: Who, node: str, end: int, seconds: float) -> None:
        kept = self._kept.get(place)
        if kept is None:
            kept = self._kept[place] = array("q")
        end -= self._offsets.get(node, 0)
        of = self._number(node)
        number = who if isinstance(who, int) else -1 - of
        kept.extend((self._number(name), number, of, end - round(seconds * 1e9), end))

    def _number(self, name: str) -> int:
        number = self._numbers.get(name)
        if number is None:
            number = self._numbers[name] = len(self._names)
            self._names.append(name)
        return number

    def _at(self, place: Place, ranks: Collection[int] | None = None) -> Iterator[Leg]:
        """Yield what is kept of a place; of these ranks only, and of all nodes."""
        kept = self._kept.get(place, ())
        for at in range(0, len(kept), _FIELDS):
            who = kept[at + 1]
            if ranks is None or who < 0 or who in ranks:
                name, _, node, start, end = kept[at : at + _FIELDS]
                yield Leg(self._names[name], self._names[-1 - who] if who < 0 else who, self._names[node], start, end)
