"""Which ranks do the others wait for?  The collectives that ranks have entered, compared.

Each rank numbers the collectives of each of its groups, so equal numbers are the same collective. A rank that waits in
one waits for the members of that group that have not come to this number. These edges lead to the ranks that do not
wait themselves (the wait-for walk), or round in a cycle. Members that are in collectives of the same number and of
different operations are out of step with each other.

A rank of which nothing is known gets no edge. A transfer between two ranks is a collective of two."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence, Set

import msgspec

from resilience.core.attribution import Collective

_BITS = 20
_MOST = 1 << _BITS
REPEATS = 3  # how often a pattern of operations is seen before the next one counts as expected

Last = Mapping[int, Sequence[Collective]]
"""The last collective of each group, and the first one that the rank has not left, by rank."""


def pack(ranks: Sequence[int], is_recorded: bool = False, is_transfer: bool = False) -> int:
    """Return the members of a group, and what kind of collective it is, as one word. Without a constant distance
    between the ranks, which usual device meshes have, they are left out."""
    kind = is_recorded << 3 * _BITS | is_transfer << 3 * _BITS + 1
    step = ranks[1] - ranks[0] if len(ranks) > 1 else 1
    first, size = min(ranks, default=0), len(ranks)
    is_regular = step > 0 and all(rank == first + step * at for at, rank in enumerate(ranks))
    if not is_regular or max(first, step, size) >= _MOST:
        return kind
    return first | step << _BITS | size << 2 * _BITS | kind


def entered(group: int, seq: int, op: str, left: bool, word: int, before: Sequence[str]) -> Collective:
    """Return a collective. word: what `pack` returned. before: the operations of the group before this one."""
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
    """Return the operation that continues the shortest pattern of the operations before; empty if there is none.

    The pattern must hold for REPEATS repetitions, and for the last third of what is known: so equal operations in a
    longer pattern, which has been seen three times, are not taken for the whole of it."""
    for period in range(1, len(before) // REPEATS + 1):
        recent = before[-max(REPEATS * period, len(before) // 3) :]
        if all(recent[at] == recent[at - period] for at in range(period, len(recent))):
            return recent[-period]
    return ""


class Mismatch(msgspec.Struct, frozen=True):
    """Ranks that wait in different operations, which should be one. odd: those that are out of step, by the operations
    before or by number; empty if neither tells."""

    ranks: tuple[int, ...]
    odd: tuple[int, ...]


class Walk(msgspec.Struct, frozen=True):
    """What the comparison shows. awaited: ranks that others wait for and that wait for nobody. cycle: ranks that wait
    for each other. behind: all ranks that others wait for."""

    awaited: tuple[int, ...] = ()
    cycle: tuple[int, ...] = ()
    behind: frozenset[int] = frozenset()
    mismatch: Mismatch | None = None


def walk(last: Last, waiting: Set[int], ranks: Mapping[int, int]) -> Walk:
    """Compare the ranks. last: of ranks of which something is known. waiting: those that wait in a collective; a rank
    there of which it is not known for what it waits is never `awaited`. ranks: by their numbers in torch."""
    mismatch = _mismatch(last, waiting)
    if mismatch is not None:
        return Walk(mismatch=mismatch)
    places = _Places(last, ranks)
    edges = {rank: targets for rank in sorted(waiting & last.keys()) if (targets := _targets(places, rank))}
    behind = frozenset().union(*set(edges.values()))  # most are one and the same set
    known = {rank for rank in waiting & last.keys() if any(_pending(last[rank]))}
    awaited = tuple(sorted(behind - edges.keys() - (waiting - known)))
    return Walk(awaited, () if awaited else _cycle(edges), behind)


class _Places:
    """Where each rank is in each group."""

    def __init__(self, last: Last, ranks: Mapping[int, int]) -> None:
        self.last = last
        self._ranks = ranks
        self.sequences = {
            (rank, each.group): each.seq
            for rank, entries in last.items()
            for each in sorted(entries, key=lambda entry: entry.seq)
        }
        self._kinds = {(rank, each.is_recorded) for rank, entries in last.items() for each in entries}
        self._behind: dict[tuple[int, int], frozenset[int]] = {}

    def behind(self, pending: Collective) -> frozenset[int]:
        """Return the members of the group that have not come to this collective."""
        key = pending.group, pending.seq
        if key not in self._behind:
            self._behind[key] = frozenset(
                rank
                for rank in self._members(pending)
                if (rank, pending.is_recorded) in self._kinds
                and self.sequences.get((rank, pending.group), -1) < pending.seq
            )
        return self._behind[key]

    def _members(self, pending: Collective) -> Iterator[int]:
        first, step, size = pending.members or (0, 1, 0)
        return (self._ranks[number] for number in range(first, first + step * size, step) if number in self._ranks)


def _targets(places: _Places, rank: int) -> frozenset[int]:
    sets = {places.behind(each) for each in _pending(places.last[rank])}
    found = next(iter(sets)) if len(sets) == 1 else frozenset().union(*sets)
    return found - {rank} if rank in found else found


def _pending(entries: Sequence[Collective]) -> Iterator[Collective]:
    """What a rank may wait in. Where torch's recorder knows it, it knows all but transfers."""
    has_recorded = any(each.is_recorded for each in entries)
    for each in entries:
        if not each.left and (each.is_recorded or not has_recorded or each.is_transfer):
            yield each


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
        for each in _pending(last[rank]):
            if not each.is_transfer:
                places[each.group, each.seq][rank] = each
    for here in places.values():
        operations = Counter(each.op for each in here.values())
        if len(operations) > 1:
            return Mismatch(tuple(here), _odd(here, operations))
    return None


def _odd(here: Mapping[int, Collective], operations: Counter[str]) -> tuple[int, ...]:
    unusual = [rank for rank, each in here.items() if each.expected and each.op != each.expected]
    usual = [rank for rank, each in here.items() if each.expected and each.op == each.expected]
    if unusual and usual and len(unusual) + len(usual) == len(here):
        return tuple(unusual)
    (most, count), (_, second) = operations.most_common(2)
    return tuple(rank for rank, each in here.items() if each.op != most) if count > second else ()
