"""Which node gets which group rank?  The infrastructure's rank, or a deterministic one.

Before the first cycle, `choose` decides where this node's rank comes from. `assign` then assigns the ranks of each
cycle's nodes; `core.membership.form` calls it. Infrastructure: each node brings its rank. If nodes are missing, the
others keep that order and close the gaps. There is one rank for each place, so there are no spares. Deterministic: a
node keeps its previous rank if that rank still exists. The other nodes fill the gaps: first those that had a rank, then
new nodes by name. `core.membership` decides before that which nodes take part and which are spares."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import msgspec

from resilience.core.membership import Assignment, NodeSeat
from resilience.errors import ConfigurationError
from resilience.facts import in_words

SOURCES = "SLURM_PROCID or GROUP_RANK"


class Choice(msgspec.Struct, frozen=True):
    """rank: the infrastructure's, None for a deterministic one. why: for the log. warning: empty if there is none."""

    mode: Literal["infrastructure", "deterministic"]
    rank: int | None
    why: str
    warning: str = ""


def choose(wanted: bool | None, given: tuple[str, int] | None, least: int, most: int) -> Choice:
    """Return where this node's group rank comes from.

    wanted: --ft-use-infra-group-rank, None if not given. given: the variable with the infrastructure's rank, and the
    rank; None if no variable is set. least, most: nodes of a cycle. Raises: ConfigurationError."""
    if wanted and given is None:
        raise ConfigurationError(
            "--ft-use-infra-group-rank asks for the infrastructure's group rank, but neither SLURM_PROCID nor "
            "GROUP_RANK is set; set one of them on every node, or omit the option"
        )
    if given is None:
        return Choice("deterministic", None, f"neither {SOURCES.replace(' or ', ' nor ')} is set")
    if wanted is False:
        return Choice("deterministic", None, "--no-ft-use-infra-group-rank")
    if wanted is None and most == 1:
        # A task of a larger allocation may run its own job on its node: its task number means nothing in that job.
        return Choice("deterministic", None, "there is only one node")
    variable, rank = given
    if not 0 <= rank < most:
        raise ConfigurationError(
            f"on this node {variable} is {rank}, expected 0 to {most - 1} for at most {in_words.count(most, 'node')}; "
            "start one launcher per node, or pass --no-ft-use-infra-group-rank"
        )
    warning = ""
    if least < most:
        warning = (
            f"--nnodes {least}:{most} with group ranks of the infrastructure ({variable}): there are no hot spares; "
            "pass --no-ft-use-infra-group-rank for spares"
        )
    return Choice("infrastructure", rank, f"{variable} is set", warning)


class Ranks(msgspec.Struct, frozen=True):
    """The ranks of a node's workers. first: the first worker's rank; size: number of workers in the job. first_of_role,
    size_of_role: the same among the workers of its role."""

    first: int
    size: int
    first_of_role: int
    size_of_role: int


def worker_ranks(seats: Sequence[NodeSeat], group_rank: int) -> Ranks:
    """Return the ranks of a node's workers. Ranks are consecutive in the order of the nodes' group ranks."""
    before, role = seats[:group_rank], seats[group_rank].role

    def count(nodes: Sequence[NodeSeat]) -> int:
        return sum(seat.workers for seat in nodes)

    def of_role(nodes: Sequence[NodeSeat]) -> list[NodeSeat]:
        return [seat for seat in nodes if seat.role == role]

    return Ranks(count(before), count(seats), count(of_role(before)), count(of_role(seats)))


def assign(assignments: Sequence[Assignment]) -> Mapping[str, int]:
    """Return the group rank of each agent, by id; each of 0 to n-1 once. Raises: ConfigurationError."""
    if any(assignment.seat.infra is not None for assignment in assignments):
        return _of_infrastructure(assignments)
    return _deterministic(assignments)


def _of_infrastructure(assignments: Sequence[Assignment]) -> Mapping[str, int]:
    ranks = {
        assignment.seat.id: assignment.seat.infra for assignment in assignments if assignment.seat.infra is not None
    }
    problems = []
    without = sorted(assignment.seat.node for assignment in assignments if assignment.seat.infra is None)
    if without:
        problems.append(f"{_nodes(without)} without a rank")
    for rank, count in sorted(Counter(ranks.values()).items()):
        nodes = sorted(assignment.seat.node for assignment in assignments if assignment.seat.infra == rank)
        if count > 1:
            problems.append(f"rank {rank} for each of {_nodes(nodes)}")
    if problems:
        raise ConfigurationError(
            f"each node needs its own group rank of the infrastructure ({SOURCES}); there is {'; '.join(problems)}"
        )
    return {id: place for place, id in enumerate(sorted(ranks, key=lambda id: ranks[id]))}


def _deterministic(assignments: Sequence[Assignment]) -> Mapping[str, int]:
    size = len(assignments)
    holders: dict[int, str] = {}
    for assignment in assignments:
        if assignment.previous is not None and assignment.previous < size:
            holders.setdefault(assignment.previous, assignment.seat.id)
    ranks = {id: rank for rank, id in holders.items()}
    gaps = [rank for rank in range(size) if rank not in holders]
    movers = sorted((assignment for assignment in assignments if assignment.seat.id not in ranks), key=_order)
    return ranks | {assignment.seat.id: rank for assignment, rank in zip(movers, gaps, strict=True)}


def _order(assignment: Assignment) -> tuple[bool, int, list[tuple[int, str]], str]:
    """Return the sort key: nodes that had a rank come first; names sort naturally, so node2 comes before node10."""
    name = [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", assignment.seat.node)]
    return assignment.previous is None, assignment.previous or 0, name, assignment.seat.id


def _nodes(names: Iterable[str]) -> str:
    return f"node {', '.join(names)}"
