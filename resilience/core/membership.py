"""Which nodes make up the next cycle?  A log of arrivals and departures, folded into one membership.

Every node that wants to take part writes an arrival into the log. The leader reads the log and forms the cycle once
every node of the last cycle has arrived, left or was lost, and enough nodes are present. A node without a place waits
as a spare. Nodes of the last cycle have precedence over spares; spares are served in the order of arrival.
`core.rendezvous` decides which agent leads, which is lost, and how long to wait; `core.group_ranks` assigns ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, cast

import msgspec

from resilience.facts.encoding import reader, to_json_text

FIRST = -1  # cycle number before the first cycle


class NodeSeat(msgspec.Struct, frozen=True, array_like=True):
    """A node that wants to take part. id: of this agent, never reused; node: name, which a returning node keeps;
    address, port: of the store that it has prepared for the next cycle; infra: its infrastructure rank, if given;
    workers: how many it starts, in this role."""

    id: str
    node: str
    address: str
    port: int
    infra: int | None = None
    workers: int = 1
    role: str = ""


class Arrived(msgspec.Struct, frozen=True, tag="arrived"):
    """This agent wants to take part in the next cycle. known: the last cycle that it knew when it wrote this entry."""

    seat: NodeSeat
    known: int = FIRST


class Left(msgspec.Struct, frozen=True, tag="left"):
    """This agent no longer takes part. is_lost: another agent wrote this entry, because the agent is silent."""

    id: str
    reason: str = ""
    is_lost: bool = False


class Excluded(msgspec.Struct, frozen=True, tag="excluded"):
    """This node takes part in no further cycle."""

    node: str
    reason: str = ""


class Nothing(msgspec.Struct, frozen=True, tag="nothing"):
    """Wakes the leader, or fills the place of an entry that its writer did not write in time."""


Entry = Arrived | Left | Excluded | Nothing


class Membership(msgspec.Struct, frozen=True, omit_defaults=True):
    """A cycle's nodes. seats: by group rank; spares: waiting nodes, in order of arrival; holders: the last node with
    each group rank; entries: number of log entries it was formed from; closed: why the rendezvous ended instead of
    forming this cycle; error: the job's misconfiguration, if that is the reason; by: id of the agent that formed it;
    before: id of the agent that formed the previous cycle."""

    cycle: int = FIRST
    seats: tuple[NodeSeat, ...] = ()
    spares: tuple[NodeSeat, ...] = ()
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
    """The difference between a membership and the previous cycle's. size: number of seats; seats: changed seats with
    their group ranks, None if most changed; spares, excluded: None if unchanged. Other fields as in `Membership`."""

    cycle: int
    by: str = ""
    before: str = ""
    entries: int = 0
    size: int = 0
    seats: tuple[tuple[int, NodeSeat], ...] | None = ()
    spares: tuple[NodeSeat, ...] | None = None
    excluded: tuple[str, ...] | None = None
    closed: str = ""
    error: str = ""


class Arrivals(msgspec.Struct, frozen=True):
    """What is known about the next cycle. arrived: by id, in order; gone: ids that left since `last`; left: those of
    them that said so themselves before they arrived again; entries: number of log entries read; lost: agents that were
    declared lost while they waited, each with the place of the entry that says so. Such an agent may only have been
    stopped for a while; then it must arrive again."""

    last: Membership = Membership()
    arrived: Mapping[str, NodeSeat] = {}
    gone: frozenset[str] = frozenset()
    left: frozenset[str] = frozenset()
    excluded: frozenset[str] = frozenset()
    entries: int = 0
    lost: Mapping[str, int] = {}

    @property
    def candidates(self) -> list[NodeSeat]:
        """Return the nodes that could take part, nodes of the last cycle first."""
        seated = {seat.id for seat in self.last.seats}
        return sorted(self.arrived.values(), key=lambda seat: seat.id not in seated)

    @property
    def missing(self) -> list[NodeSeat]:
        """Return the nodes of the last cycle that have neither arrived nor left."""
        return [seat for seat in self.last.seats if seat.id not in self.arrived and not self.is_gone(seat)]

    def is_gone(self, seat: NodeSeat) -> bool:
        """Return True if this agent has left, was lost or is excluded."""
        return seat.id in self.gone or seat.node in self.excluded

    def waiting(self, most: int) -> int:
        """Return how many nodes wait for the next cycle: nodes that are done with this cycle, and as many others as
        there is room for. most: nodes of a cycle."""
        seated = {seat.id for seat in self.last.seats}
        living = sum(not self.is_gone(seat) for seat in self.last.seats)
        done = sum(id in seated for id in self.arrived)
        return done + max(0, min(len(self.arrived) - done, most - living))


class Around(NamedTuple):
    """What an agent observes while its workers run. waiting: nodes that would take part in a new cycle; lost: ids of
    agents that left this cycle or are lost; is_over: there is a next cycle, or the rendezvous is closed, or the others
    declared this agent lost; counter: its value."""

    waiting: int
    lost: frozenset[str]
    is_over: bool
    counter: int


class Assignment(msgspec.Struct, frozen=True):
    """A node that `form` needs a group rank for. previous: the last rank of the agent, or of its node."""

    seat: NodeSeat
    previous: int | None


Assign = Callable[[Sequence[Assignment]], Mapping[str, int]]


def begin(last: Membership) -> Arrivals:
    """Return the arrivals at the start of the cycle after `last`."""
    return Arrivals(
        last=last,
        arrived={seat.id: seat for seat in last.spares},
        excluded=frozenset(last.excluded),
        entries=last.entries,
    )


def fold(arrivals: Arrivals, entries: Sequence[Entry]) -> Arrivals:
    """Return the arrivals after further entries of the log, in order."""
    arrived, gone, excluded = dict(arrivals.arrived), set(arrivals.gone), set(arrivals.excluded)
    last, left, lost = arrivals.last, set(arrivals.left), dict(arrivals.lost)
    for place, entry in enumerate(entries, arrivals.entries):
        match entry:
            case Arrived(seat, known):
                is_used_up = known < last.cycle and last.rank_of(seat.id) is not None  # it led to a seat in that cycle
                if seat.node not in excluded and not is_used_up:
                    arrived[seat.id] = seat
                    gone.discard(seat.id)
                    lost.pop(seat.id, None)
            case Left(id, _, is_lost):
                if is_lost and id in arrived:
                    lost[id] = place
                if not is_lost and id not in gone and id not in arrived:  # otherwise `last` has already lost it
                    left.add(id)
                arrived.pop(id, None)
                gone.add(id)
            case Excluded(node):
                excluded.add(node)
                arrived = {id: seat for id, seat in arrived.items() if seat.node != node}
            case Nothing():
                pass
    return Arrivals(
        last=arrivals.last,
        arrived=arrived,
        gone=frozenset(gone),
        left=frozenset(left),
        excluded=frozenset(excluded),
        entries=arrivals.entries + len(entries),
        lost=lost,
    )


def is_due(arrivals: Arrivals, least: int, most: int, last_call_is_over: bool) -> bool:
    """Return True if the cycle can be formed now.

    The first cycle waits for a last call, because its nodes start at different times. Later cycles do not: all former
    nodes have already arrived again, and a later node causes another cycle."""
    count = len(arrivals.arrived)
    if arrivals.missing or count < least:
        return False
    return count >= most or arrivals.last.cycle != FIRST or last_call_is_over


def form(arrivals: Arrivals, most: int, assign: Assign) -> Membership:
    """Return the next cycle. Raises: what `assign` raises: ConfigurationError for impossible ranks."""
    last = arrivals.last
    candidates = arrivals.candidates
    chosen, spares = candidates[:most], candidates[most:]
    ranks = assign(_with_previous(last, chosen))
    seats = tuple(sorted(chosen, key=lambda seat: ranks[seat.id]))
    holders = tuple(seat.node for seat in seats) + last.holders[len(seats) :]
    return Membership(
        cycle=last.cycle + 1,
        seats=seats,
        spares=tuple(spares),
        holders=holders,
        excluded=tuple(sorted(arrivals.excluded)),
        entries=arrivals.entries,
    )


def difference(last: Membership, new: Membership) -> Change:
    """Return the difference between a membership and the previous cycle's."""
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


def changed(last: Membership, change: Change) -> Membership | None:
    """Return the membership after `last`, None if it must be read as a whole."""
    if change.closed:
        return Membership(
            cycle=change.cycle, closed=change.closed, error=change.error, by=change.by, before=change.before
        )
    if change.seats is None:
        return None
    seats = dict(enumerate(last.seats[: change.size])) | dict(change.seats)
    if not all(rank in seats for rank in range(change.size)):
        return None
    return Membership(
        cycle=change.cycle,
        seats=tuple(seats[rank] for rank in range(change.size)),
        spares=last.spares if change.spares is None else change.spares,
        holders=tuple(seats[rank].node for rank in range(change.size)) + last.holders[change.size :],
        excluded=last.excluded if change.excluded is None else change.excluded,
        entries=change.entries,
        by=change.by,
        before=change.before,
    )


def present(arrivals: Arrivals, membership: Membership) -> set[str]:
    """Return the ids of agents that could take part in the next cycle: agents of `membership` that are not gone, and
    waiting agents."""
    return {seat.id for seat in membership.seats if not arrivals.is_gone(seat)} | set(arrivals.arrived)


def neighbour(arrivals: Arrivals, membership: Membership, id: str) -> NodeSeat | None:
    """Return the nearest node before this agent's node that is not gone."""
    seats, rank = membership.seats, membership.rank_of(id)
    if rank is None:
        return None
    before = (seats[rank - back] for back in range(1, len(seats)))
    return next((seat for seat in before if not arrivals.is_gone(seat)), None)


def _with_previous(last: Membership, chosen: Sequence[NodeSeat]) -> list[Assignment]:
    """Return the nodes with their previous ranks. An agent of the last cycle has its rank; a returning node has its
    former rank if no agent holds it."""
    taken = {rank for rank in map(last.rank_of, (seat.id for seat in chosen)) if rank is not None}
    assignments = []
    for seat in chosen:
        previous = last.rank_of(seat.id)
        if previous is None:
            held = (rank for rank, node in enumerate(last.holders) if node == seat.node and rank not in taken)
            previous = next(held, None)
            if previous is not None:
                taken.add(previous)
        assignments.append(Assignment(seat, previous))
    return assignments


_entry = reader(Entry)
_membership = reader(Membership)
_change = reader(Change)


def encode(value: Entry | Membership | Change) -> str:
    """Return an entry, a membership or a change as the store holds it."""
    return to_json_text(value)


def decode_entry(text: str) -> Entry:
    """Read an entry. Raises: DecodeError."""
    return cast(Entry, _entry(text))


def decode_membership(text: str) -> Membership:
    """Read a membership. Raises: DecodeError."""
    return _membership(text)


def decode_change(text: str) -> Change:
    """Read a change. Raises: DecodeError."""
    return _change(text)
