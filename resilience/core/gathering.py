"""Which nodes make up the next cycle?  A log of who came and went, folded into one formation.

Every node that wants to take part writes that it has arrived; whoever leads reads the log, and forms the
cycle once every node of the last cycle has arrived, left or was lost, and enough nodes are there. A node
that finds no place waits on as a spare. Nodes of the last cycle go before spares, spares before each
other in the order of arrival. Who leads, who is lost and how long all this may take is seen by
`launcher.rendezvous`; what rank a node gets is decided by `core.group_ranks`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, cast

import msgspec

from resilience.core.encoding import reader, to_json_text

FIRST = -1  # number of the formation before the first


class Seat(msgspec.Struct, frozen=True, array_like=True):
    """A node that wants to take part. id: of this agent, never used again; node: name that a returning node
    has again; address, port: of the store that it holds ready for the next cycle; infra: its rank in the
    infrastructure's order, if that is given; workers: how many it starts, in this role."""

    id: str
    node: str
    address: str
    port: int
    infra: int | None = None
    workers: int = 1
    role: str = ""


class Arrived(msgspec.Struct, frozen=True, tag="arrived"):
    """This agent wants to take part in the next cycle. known: the last cycle that it knew of when it wrote this."""

    seat: Seat
    known: int = FIRST


class Left(msgspec.Struct, frozen=True, tag="left"):
    """This agent does not take part any more. is_lost: another agent writes it, because this one is silent."""

    id: str
    reason: str = ""
    is_lost: bool = False


class Excluded(msgspec.Struct, frozen=True, tag="excluded"):
    """This node takes part in no further cycle."""

    node: str
    reason: str = ""


class Nothing(msgspec.Struct, frozen=True, tag="nothing"):
    """Wakes the leader, or fills the place of an entry whose writer was too late."""


Entry = Arrived | Left | Excluded | Nothing


class Formation(msgspec.Struct, frozen=True, omit_defaults=True):
    """A cycle's nodes. seats: by group rank; spares: who waits, in order of arrival; holders: node that had
    each group rank last; entries: how much of the log it is made from; closed: why there is no such cycle
    and never will be another; error: what is wrong with the job, if that is why; by: id of the agent that formed
    it; before: of the agent that formed the cycle before."""

    cycle: int = FIRST
    seats: tuple[Seat, ...] = ()
    spares: tuple[Seat, ...] = ()
    holders: tuple[str, ...] = ()
    excluded: tuple[str, ...] = ()
    entries: int = 0
    closed: str = ""
    error: str = ""
    by: str = ""
    before: str = ""

    def rank_of(self, id: str) -> int | None:
        """Return the group rank of an agent, None if it does not take part."""
        return next((rank for rank, seat in enumerate(self.seats) if seat.id == id), None)


class Change(msgspec.Struct, frozen=True, omit_defaults=True):
    """A formation, as it differs from that of the cycle before. size: how many seats; seats: those that have changed,
    with their group ranks, None if most have; spares, excluded: None as before. The others as in `Formation`."""

    cycle: int
    by: str = ""
    before: str = ""
    entries: int = 0
    size: int = 0
    seats: tuple[tuple[int, Seat], ...] | None = ()
    spares: tuple[Seat, ...] | None = None
    excluded: tuple[str, ...] | None = None
    closed: str = ""
    error: str = ""


class Gathering(msgspec.Struct, frozen=True):
    """What is known of the next cycle. arrived: by id, in order; gone: ids that left since `last`; entries: how much of
    the log has been read; lost: agents that were taken for lost while they waited for a place, each with the place of
    the entry that says so. Such an agent may only have been stopped for a while. Then it has to arrive again."""

    last: Formation = Formation()
    arrived: Mapping[str, Seat] = {}
    gone: frozenset[str] = frozenset()
    excluded: frozenset[str] = frozenset()
    entries: int = 0
    lost: Mapping[str, int] = {}

    @property
    def candidates(self) -> list[Seat]:
        """Who could take part, those of the last cycle first."""
        seated = {seat.id for seat in self.last.seats}
        return sorted(self.arrived.values(), key=lambda seat: seat.id not in seated)

    @property
    def missing(self) -> list[Seat]:
        """Nodes of the last cycle that have neither arrived nor gone."""
        return [seat for seat in self.last.seats if seat.id not in self.arrived and not self.is_gone(seat)]

    def is_gone(self, seat: Seat) -> bool:
        """Return whether this agent has left, was lost or is excluded."""
        return seat.id in self.gone or seat.node in self.excluded

    def waiting(self, most: int) -> int:
        """Return how many nodes wait for the next cycle: those of this one that are through with it, and as
        many others as it has room for, if a cycle has at most `most`."""
        seated = {seat.id for seat in self.last.seats}
        living = sum(not self.is_gone(seat) for seat in self.last.seats)
        through = sum(id in seated for id in self.arrived)
        return through + max(0, min(len(self.arrived) - through, most - living))


class Around(NamedTuple):
    """What an agent sees while its workers run. waiting: nodes that would take part in a new cycle; lost: ids of
    agents of this cycle that left it or are lost; is_over: there is a next cycle, or none any more, or the
    others took this agent for lost; counter: what it holds."""

    waiting: int
    lost: frozenset[str]
    is_over: bool
    counter: int


class Assignment(msgspec.Struct, frozen=True):
    """What `form` asks for: who gets which group rank. previous: the rank an agent, or its node, had last."""

    seat: Seat
    previous: int | None


Assign = Callable[[Sequence[Assignment]], Mapping[str, int]]


def begin(last: Formation) -> Gathering:
    """Start to gather for the cycle after `last`."""
    return Gathering(
        last=last,
        arrived={seat.id: seat for seat in last.spares},
        excluded=frozenset(last.excluded),
        entries=last.entries,
    )


def fold(gathering: Gathering, entries: Sequence[Entry]) -> Gathering:
    """Take further entries of the log into account, in order."""
    arrived, gone, excluded = dict(gathering.arrived), set(gathering.gone), set(gathering.excluded)
    last, lost = gathering.last, dict(gathering.lost)
    for place, entry in enumerate(entries, gathering.entries):
        match entry:
            case Arrived(seat, known):
                is_used_up = known < last.cycle and last.rank_of(seat.id) is not None  # by its seat in that cycle
                if seat.node not in excluded and not is_used_up:
                    arrived[seat.id] = seat
                    gone.discard(seat.id)
                    lost.pop(seat.id, None)
            case Left(id, _, is_lost):
                if is_lost and id in arrived:
                    lost[id] = place
                arrived.pop(id, None)
                gone.add(id)
            case Excluded(node):
                excluded.add(node)
                arrived = {id: seat for id, seat in arrived.items() if seat.node != node}
            case Nothing():
                pass
    return Gathering(
        last=gathering.last,
        arrived=arrived,
        gone=frozenset(gone),
        excluded=frozenset(excluded),
        entries=gathering.entries + len(entries),
        lost=lost,
    )


def is_due(gathering: Gathering, least: int, most: int, last_call_is_over: bool) -> bool:
    """Return whether the cycle can be formed now.

    The first cycle waits for a last call, because its nodes start at different times; later ones do not:
    everybody who was there is there again, and a node that comes later is a reason for a cycle of its own."""
    count = len(gathering.arrived)
    if gathering.missing or count < least:
        return False
    return count >= most or gathering.last.cycle != FIRST or last_call_is_over


def form(gathering: Gathering, most: int, assign: Assign) -> Formation:
    """Return the next cycle. Raises: what `assign` raises, ConfigurationError if the ranks cannot be."""
    last = gathering.last
    candidates = gathering.candidates
    chosen, spares = candidates[:most], candidates[most:]
    ranks = assign(_with_previous(last, chosen))
    seats = tuple(sorted(chosen, key=lambda seat: ranks[seat.id]))
    holders = tuple(seat.node for seat in seats) + last.holders[len(seats) :]
    return Formation(
        cycle=last.cycle + 1,
        seats=seats,
        spares=tuple(spares),
        holders=holders,
        excluded=tuple(sorted(gathering.excluded)),
        entries=gathering.entries,
    )


def difference(last: Formation, new: Formation) -> Change:
    """Return how a formation differs from that of the cycle before."""
    if new.closed:
        return Change(new.cycle, new.by, new.before, closed=new.closed, error=new.error)
    before = dict(enumerate(last.seats))
    seats = tuple((rank, seat) for rank, seat in enumerate(new.seats) if before.get(rank) != seat)
    return Change(
        cycle=new.cycle,
        by=new.by,
        before=new.before,
        entries=new.entries,
        size=len(new.seats),
        seats=seats if 2 * len(seats) <= len(new.seats) else None,
        spares=None if new.spares == last.spares else new.spares,
        excluded=None if new.excluded == last.excluded else new.excluded,
    )


def changed(last: Formation, change: Change) -> Formation | None:
    """Return the formation after `last`, None if it has to be read as a whole."""
    if change.closed:
        return Formation(
            cycle=change.cycle, closed=change.closed, error=change.error, by=change.by, before=change.before
        )
    if change.seats is None:
        return None
    seats = dict(enumerate(last.seats[: change.size])) | dict(change.seats)
    return Formation(
        cycle=change.cycle,
        seats=tuple(seats[rank] for rank in range(change.size)),
        spares=last.spares if change.spares is None else change.spares,
        holders=tuple(seats[rank].node for rank in range(change.size)) + last.holders[change.size :],
        excluded=last.excluded if change.excluded is None else change.excluded,
        entries=change.entries,
        by=change.by,
        before=change.before,
    )


def present(gathering: Gathering, formation: Formation) -> set[str]:
    """Return the ids of agents that could take part in the next cycle: those of `formation` that are not gone, and
    those that wait."""
    return {seat.id for seat in formation.seats if not gathering.is_gone(seat)} | set(gathering.arrived)


def neighbour(gathering: Gathering, formation: Formation, id: str) -> Seat | None:
    """Return the nearest node before an agent's that is not gone."""
    seats, rank = formation.seats, formation.rank_of(id)
    if rank is None:
        return None
    before = (seats[rank - back] for back in range(1, len(seats)))
    return next((seat for seat in before if not gathering.is_gone(seat)), None)


def _with_previous(last: Formation, chosen: Sequence[Seat]) -> list[Assignment]:
    """An agent that took part last has its rank; a node that returns has the rank it had, if nobody has it."""
    taken = {rank for rank in map(last.rank_of, (seat.id for seat in chosen)) if rank is not None}
    made = []
    for seat in chosen:
        previous = last.rank_of(seat.id)
        if previous is None:
            held = (rank for rank, node in enumerate(last.holders) if node == seat.node and rank not in taken)
            previous = next(held, None)
            if previous is not None:
                taken.add(previous)
        made.append(Assignment(seat, previous))
    return made


_entry = reader(Entry)
_formation = reader(Formation)
_change = reader(Change)


def encode(value: Entry | Formation | Change) -> str:
    """Return an entry, a formation or a change as it stands in the store."""
    return to_json_text(value)


def decode_entry(text: str) -> Entry:
    """Read an entry. Raises: DecodeError."""
    return cast(Entry, _entry(text))


def decode_formation(text: str) -> Formation:
    """Read a formation. Raises: DecodeError."""
    return _formation(text)


def decode_change(text: str) -> Change:
    """Read a change. Raises: DecodeError."""
    return _change(text)
