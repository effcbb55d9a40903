"""Which node gets which group rank?  The infrastructure's order, or a deterministic one of our own.

`choose` says once, before the first cycle, where this node's rank comes from; `assign` then seats the nodes
of each cycle, and is what `core.gathering.form` asks for. Infrastructure: each node brings its rank and
keeps it, whatever it had before; there is one rank for each place, hence no spares. Deterministic: a node
keeps the rank it had if there still is such a rank, the others fill the gaps, first those that had one,
then new ones by name. Who takes part, and who is a spare, is decided before, by `gathering`."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import msgspec

from resilience.core.gathering import Assignment, Seat
from resilience.errors import ConfigurationError

SOURCES = "SLURM_PROCID or GROUP_RANK"


class Choice(msgspec.Struct, frozen=True):
    """rank: the infrastructure's, None for a deterministic one. why: for the log. warning: empty if all is well."""

    mode: Literal["infrastructure", "deterministic"]
    rank: int | None
    why: str
    warning: str = ""


def choose(wanted: bool | None, given: int | None, least: int, most: int) -> Choice:
    """Return where this node's group rank comes from.

    wanted: --ft-use-infra-group-rank, None if it was not said. given: the infrastructure's rank, None if it
    set none. least, most: nodes of a cycle. Raises: ConfigurationError."""
    if wanted and given is None:
        raise ConfigurationError(
            "--ft-use-infra-group-rank asks for the infrastructure's group rank, and neither SLURM_PROCID nor "
            "GROUP_RANK is set; set one of them on every node, or leave the option out"
        )
    if given is None:
        return Choice("deterministic", None, f"neither {SOURCES.replace(' or ', ' nor ')} is set")
    if wanted is False:
        return Choice("deterministic", None, "--no-ft-use-infra-group-rank")
    if wanted is None and most == 1:
        # A task of a larger allocation may run a job of its own on its node: its number there says nothing here.
        return Choice("deterministic", None, "there is only one node")
    if not 0 <= given < most:
        raise ConfigurationError(
            f"this node's rank of the infrastructure ({SOURCES}) is {given}, expected 0 to {most - 1} for at most "
            f"{most} nodes; start one launcher a node, or pass --no-ft-use-infra-group-rank"
        )
    warning = ""
    if least < most:
        warning = (
            f"--nnodes {least}:{most} with group ranks of the infrastructure ({SOURCES}): there are no hot spares, and "
            "a cycle of fewer nodes needs their ranks to be 0 and up without a gap; pass "
            "--no-ft-use-infra-group-rank for spares"
        )
    return Choice("infrastructure", given, f"{SOURCES} is set", warning)


class Ranks(msgspec.Struct, frozen=True):
    """Of a node's workers: the first one's rank, and how many there are, among all and among those of its role."""

    first: int
    size: int
    first_of_role: int
    size_of_role: int


def worker_ranks(seats: Sequence[Seat], group_rank: int) -> Ranks:
    """Return the ranks of a node's workers: they follow one another in the order of the nodes' group ranks."""
    before, role = seats[:group_rank], seats[group_rank].role

    def count(of: Sequence[Seat]) -> int:
        return sum(seat.workers for seat in of)

    def same(of: Sequence[Seat]) -> list[Seat]:
        return [seat for seat in of if seat.role == role]

    return Ranks(count(before), count(seats), count(same(before)), count(same(seats)))


def assign(wanted: Sequence[Assignment]) -> Mapping[str, int]:
    """Return the group rank of each agent, by id; each of 0 to n-1 once. Raises: ConfigurationError."""
    if any(each.seat.infra is not None for each in wanted):
        return _of_infrastructure(wanted)
    return _deterministic(wanted)


def _of_infrastructure(wanted: Sequence[Assignment]) -> Mapping[str, int]:
    given = {each.seat.id: each.seat.infra for each in wanted if each.seat.infra is not None}
    most = len(wanted) - 1
    wrong = []
    without = sorted(each.seat.node for each in wanted if each.seat.infra is None)
    if without:
        wrong.append(f"{_nodes(without)} without a rank")
    for rank, count in sorted(Counter(given.values()).items()):
        nodes = sorted(each.seat.node for each in wanted if each.seat.infra == rank)
        if count > 1:
            wrong.append(f"rank {rank} for each of {_nodes(nodes)}")
        elif not 0 <= rank <= most:
            wrong.append(f"rank {rank} for {_nodes(nodes)}")
    if wrong:
        raise ConfigurationError(
            f"the infrastructure's group ranks ({SOURCES}) must be 0 to {most}, each once, for {len(wanted)} nodes; "
            f"there is {'; '.join(wrong)}"
        )
    return given


def _deterministic(wanted: Sequence[Assignment]) -> Mapping[str, int]:
    size = len(wanted)
    holders: dict[int, str] = {}
    for each in wanted:
        if each.previous is not None and each.previous < size:
            holders.setdefault(each.previous, each.seat.id)
    ranks = {id: rank for rank, id in holders.items()}
    gaps = [rank for rank in range(size) if rank not in holders]
    movers = sorted((each for each in wanted if each.seat.id not in ranks), key=_order)
    return ranks | {each.seat.id: rank for each, rank in zip(movers, gaps, strict=True)}


def _order(each: Assignment) -> tuple[bool, int, list[tuple[int, str]], str]:
    """Those that had a rank first; names as people sort them, so that node2 is before node10."""
    name = [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", each.seat.node)]
    return each.previous is None, each.previous or 0, name, each.seat.id


def _nodes(names: Iterable[str]) -> str:
    return f"node {', '.join(names)}"
