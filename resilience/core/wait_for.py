"""Which ranks do the others wait for?  Compares the collectives that ranks have entered.

Each rank numbers the collectives of each of its groups, so equal numbers mean the same collective. A rank inside a
collective waits for the members of its group that have not reached this number. These edges lead to ranks that do not
wait themselves (the wait-for walk), or form a cycle. Members that are in different operations with the same number are
out of step with each other, and so are members that all wait in their group with different numbers.

A rank about which nothing is known gets no edge. A transfer between two ranks counts as a collective of two."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set

import msgspec

from resilience.facts.interruptions import Collective

_BITS = 20
_MOST = 1 << _BITS
REPEATS = 3  # repetitions of a pattern of operations before the next operation counts as expected

Last = Mapping[int, Sequence[Collective]]
"""By rank: the last collective of each group, and the first one that the rank has not left."""


def pack(ranks: Sequence[int], is_recorded: bool = False, is_transfer: bool = False) -> int:
    """Return the members of a group and the kind of collective as one integer. The members are left out unless the
    distance between their ranks is constant, as in usual device meshes."""
    kind = is_recorded << 3 * _BITS | is_transfer << 3 * _BITS + 1
    step = ranks[1] - ranks[0] if len(ranks) > 1 else 1
    first, size = min(ranks, default=0), len(ranks)
    is_regular = step > 0 and all(rank == first + step * index for index, rank in enumerate(ranks))
    if not is_regular or max(first, step, size) >= _MOST:
        return kind
    return first | step << _BITS | size << 2 * _BITS | kind


def entered(group: int, seq: int, op: str, left: bool, word: int, before: Sequence[str]) -> Collective:
    """Return a collective. word: a result of `pack`. before: the group's earlier operations."""
    first, step, size = word % _MOST, (word >> _BITS) % _MOST, (word >> 2 * _BITS) % _MOST
    return Collective(
        group,
        seq,
        op,
        left,
        members=(first, step, size) if size else None,
        expected=expected(before),
        is_recorded=bool(word >> 3 * _BITS & 1),
        is_transfer=bool(word >> 3 * _BITS & 2),
    )


def expected(before: Sequence[str]) -> str:
    """Return the operation that continues the shortest pattern of the earlier operations; empty if there is none.

    The pattern must hold for REPEATS repetitions and for the last third of the known operations. So a run of equal
    operations inside a longer pattern that occurred three times does not count as the whole pattern."""
    for period in range(1, len(before) // REPEATS + 1):
        recent = before[-max(REPEATS * period, len(before) // 3) :]
        if all(recent[index] == recent[index - period] for index in range(period, len(recent))):
            return recent[-period]
    return ""


class Mismatch(msgspec.Struct, frozen=True):
    """Ranks that wait in different operations, or with different numbers, in what should be one collective. odd: the
    ranks that are out of step, judged by the earlier operations or by the majority; empty if neither decides."""

    ranks: tuple[int, ...]
    odd: tuple[int, ...]


class Walk(msgspec.Struct, frozen=True):
    """The result of the comparison. awaited: ranks that others wait for and that wait for no rank. cycle: ranks that
    wait for each other. behind: all ranks that others wait for. unknown: ranks that others may wait for as well: it is
    not on record how far they came in a group in which ranks wait."""

    awaited: tuple[int, ...] = ()
    cycle: tuple[int, ...] = ()
    behind: frozenset[int] = frozenset()
    unknown: frozenset[int] = frozenset()
    mismatch: Mismatch | None = None


def walk(last: Last, waiting: Set[int], ranks: Mapping[int, int]) -> Walk:
    """Compare the ranks. last: of the ranks with known collectives. waiting: ranks that wait in a collective; if what
    such a rank waits for is unknown, it is never `awaited`. ranks: initial ranks by torch's ranks."""
    places = _Places(last, ranks)
    mismatch = _mismatch(last, waiting) or _shifted(places, waiting)
    if mismatch is not None:
        return Walk(mismatch=mismatch)
    edges = {rank: targets for rank in sorted(waiting & last.keys()) if (targets := _targets(places, rank))}
    behind = frozenset().union(*set(edges.values()))  # most of these sets are equal
    pending = {rank: entries for rank in waiting & last.keys() if (entries := list(_pending(last[rank])))}
    unknown = {rank: _union(map(places.unknown, entries)) for rank, entries in pending.items()}
    known = {rank for rank in pending if not unknown[rank]}  # else it may wait for one of these
    awaited = tuple(sorted(behind - edges.keys() - (waiting - known)))
    cycle = () if awaited else _cycle(edges)
    return Walk(awaited, cycle, behind, frozenset().union(*set(unknown.values())))


def _union(sets: Iterable[frozenset[int]]) -> frozenset[int]:
    """Return the union of these sets, and the set itself if all are equal: there are thousands of them."""
    different = set(sets)
    return different.pop() if len(different) == 1 else frozenset().union(*different)


def ahead(last: Last, ranks: Mapping[int, int]) -> frozenset[int]:
    """Return the ranks that have entered a collective of torch's recorder which other members have not reached. ranks:
    initial ranks by torch's ranks."""
    places = _Places(last, ranks)
    pending = {
        rank: [entry for entry in entries if entry.is_recorded and not entry.left] for rank, entries in last.items()
    }
    return frozenset(
        rank for rank, entries in pending.items() if any(places.behind(entry) - {rank} for entry in entries)
    )


def are_together(last: Last, ranks: Set[int]) -> bool:
    """Return True if all of these ranks are in one common collective."""
    places = [{(entry.group, entry.seq) for entry in _pending(last.get(rank, ()))} for rank in ranks]
    return bool(places) and bool(set.intersection(*places))


class _Places:
    """The position of each rank in each group."""

    def __init__(self, last: Last, ranks: Mapping[int, int]) -> None:
        self.last = last
        self._ranks = ranks
        self.sequences = {
            (rank, entry.group): entry.seq
            for rank, entries in last.items()
            for entry in sorted(entries, key=lambda entry: entry.seq)
        }
        self._kinds = {(rank, entry.is_recorded) for rank, entries in last.items() for entry in entries}
        self._compared: dict[tuple[int, int], tuple[frozenset[int], frozenset[int]]] = {}

    def behind(self, pending: Collective) -> frozenset[int]:
        """Return the members of the group that have not reached this collective."""
        return self._compare(pending)[0]

    def unknown(self, pending: Collective) -> frozenset[int]:
        """Return the members of the group of which it is not on record whether they have reached this collective."""
        return self._compare(pending)[1]

    def _compare(self, pending: Collective) -> tuple[frozenset[int], frozenset[int]]:
        key = pending.group, pending.seq
        if key not in self._compared:
            behind, unknown = [], []
            for rank in self.members(pending):
                sequence = self.sequences.get((rank, pending.group))
                if sequence is None and (rank, pending.is_recorded) not in self._kinds:
                    unknown.append(rank)
                elif sequence is None or sequence < pending.seq:
                    behind.append(rank)
            self._compared[key] = frozenset(behind), frozenset(unknown)
        return self._compared[key]

    def members(self, pending: Collective) -> Iterator[int]:
        first, step, size = pending.members or (0, 1, 0)
        return (self._ranks[number] for number in range(first, first + step * size, step) if number in self._ranks)


def _targets(places: _Places, rank: int) -> frozenset[int]:
    targets = _union(places.behind(pending) for pending in _pending(places.last[rank]))
    return targets - {rank} if rank in targets else targets


def _pending(entries: Sequence[Collective]) -> Iterator[Collective]:
    """Yield the collectives in which a rank may wait. If torch's recorder has any, it has all except transfers."""
    has_recorded = any(entry.is_recorded for entry in entries)
    for entry in entries:
        if not entry.left and (entry.is_recorded or not has_recorded or entry.is_transfer):
            yield entry


def _cycle(edges: Mapping[int, frozenset[int]]) -> tuple[int, ...]:
    if not edges:
        return ()
    path: dict[int, None] = {}
    rank = min(edges)
    while rank not in path:
        path[rank] = None
        following = sorted(target for target in edges[rank] if target in edges)
        if not following:
            return ()  # it leads to a rank that waits for something unknown
        rank = following[0]
    ranks = list(path)
    return tuple(sorted(ranks[ranks.index(rank) :]))


def _mismatch(last: Last, waiting: Set[int]) -> Mismatch | None:
    places: defaultdict[tuple[int, int], dict[int, Collective]] = defaultdict(dict)
    for rank in sorted(waiting & last.keys()):
        for pending in _pending(last[rank]):
            if not pending.is_transfer:
                places[pending.group, pending.seq][rank] = pending
    for entries in places.values():
        operations = Counter(entry.op for entry in entries.values())
        if len(operations) > 1:
            return Mismatch(tuple(entries), _odd(entries, operations))
    return None


def _shifted(places: _Places, waiting: Set[int]) -> Mismatch | None:
    """Return the ranks of a group that all wait in it, but with different numbers: one of them has skipped a
    collective, or has left one that failed."""
    inside = {rank: entry for rank in sorted(waiting & places.last.keys()) if (entry := _only_pending(places, rank))}
    for entry in {entry.group: entry for entry in inside.values()}.values():
        size = 0 if entry.members is None else entry.members[2]
        members = [rank for rank in places.members(entry) if rank in inside and inside[rank].group == entry.group]
        numbers = Counter(inside[rank].seq for rank in members)
        if size == len(members) and len(numbers) > 1:
            (most, count), (_, second) = numbers.most_common(2)
            odd = [rank for rank in members if inside[rank].seq != most] if count > second else []
            return Mismatch(tuple(members), tuple(odd))
    return None


def _only_pending(places: _Places, rank: int) -> Collective | None:
    """Return the collective in which a rank waits, None if it may wait in more than one."""
    entries = list(_pending(places.last[rank]))
    if len(entries) != 1 or entries[0].is_transfer:
        return None
    return entries[0] if places.sequences[rank, entries[0].group] == entries[0].seq else None


def _odd(entries: Mapping[int, Collective], operations: Counter[str]) -> tuple[int, ...]:
    unusual = [rank for rank, entry in entries.items() if entry.expected and entry.op != entry.expected]
    usual = [rank for rank, entry in entries.items() if entry.expected and entry.op == entry.expected]
    if unusual and usual and len(unusual) + len(usual) == len(entries):
        return tuple(unusual)
    (most, count), (_, second) = operations.most_common(2)
    return tuple(rank for rank, entry in entries.items() if entry.op != most) if count > second else ()
