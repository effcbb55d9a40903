"""What do the records of a Wrapper add to the evidence on a cycle of the launcher?

A rank in a Wrapper records where it is when it learns of an interruption, before its abort. The launcher's monitors
look at ranks too, before they end one. Of the two, the earlier one counts: the later one may show the restart.
`attribution.launch_incidents` judges the cycle."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

import msgspec

from resilience.attribution.evidence import Evidence
from resilience.history.cycles import NodeCycle
from resilience.history.iterations import Iteration

T = TypeVar("T")


def with_accounts(evidence: Evidence, inside: Sequence[Iteration], parts: Iterable[NodeCycle]) -> Evidence:
    """Return the evidence on a cycle with a Wrapper's records of its ranks. The earliest evidence wins: the fault began
    there. inside: the Wrapper's iterations that belong to the cycle, in order. parts: the cycle on each node, with the
    looks of the launcher's monitors."""
    looked_ns = {rank: worker.looked_ns for part in parts for rank, worker in part.workers.items()}
    answered = [iteration.answered for iteration in inside]

    def earliest(looks: Mapping[int, T], accounts: Sequence[Mapping[int, T]]) -> dict[int, T]:
        known: dict[int, T] = {}
        for account in reversed(accounts):
            known |= account
        known |= looks
        for account, at_ns in zip(reversed(accounts), reversed(answered), strict=True):
            known |= {rank: own for rank, own in account.items() if at_ns[rank] < looked_ns.get(rank, 0)}
        return known

    evidence = msgspec.structs.replace(
        evidence,
        stacks=earliest(evidence.stacks, [iteration.stacks for iteration in inside]),
        sections=earliest(evidence.sections, [iteration.sections for iteration in inside]),
        hangs=earliest(evidence.hangs, [iteration.hangs for iteration in inside]),
        collectives=earliest(evidence.collectives, [iteration.collectives for iteration in inside]),
    )
    for iteration in inside:
        evidence = msgspec.structs.replace(
            evidence,
            steps=iteration.steps | evidence.steps,
            signalled=iteration.signalled | evidence.signalled,
            freed_before_look=iteration.freed_before_look | evidence.freed_before_look,
        )
        if evidence.first in iteration.answered:  # the Wrapper was restarting when this rank ended the cycle
            evidence = msgspec.structs.replace(
                evidence,
                first=iteration.first_reporter,
                answered=frozenset(iteration.answered),
                after_answer=frozenset(iteration.after_answer),
            )
    return _without_ranks_that_left_before(evidence, inside)


def _without_ranks_that_left_before(evidence: Evidence, inside: Sequence[Iteration]) -> Evidence:
    """Return the evidence without ranks that an earlier iteration of the cycle has excluded."""
    last = inside[-1] if inside else None
    if last is None or len(last.started) != last.world_size:
        return evidence  # no Wrapper, or not all ranks of its last iteration are known
    active = frozenset(rank for rank, state in last.started.items() if state == "active")
    inactive = frozenset(last.started) - active
    return msgspec.structs.replace(evidence, active=active, inactive=inactive, is_alone=len(active) == 1)
