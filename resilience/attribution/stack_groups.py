"""Where was every rank when it broke?  Equal stacks become one group, with the ranks that were there.

From what ranks recorded when they learned that their iteration is over, from what monitors saw of workers before these
were stopped, and from the incident's own records. The smallest group comes first: it did something else."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from resilience.attribution.incident import Incident
from resilience.attribution.symptoms import main_stack
from resilience.core.attribution import Frame
from resilience.history.history import History


class Group(msgspec.Struct, frozen=True):
    """Ranks whose main threads were at the same place. stack: innermost frame last."""

    ranks: tuple[int, ...]
    stack: tuple[Frame, ...]


def stack_groups(history: History, incident: Incident) -> list[Group]:
    """Return the groups of an incident, the smallest first."""
    groups: dict[tuple[Frame, ...], set[int]] = {}
    known: set[int] = set()
    for rank, stack in _stacks(history, incident):
        if stack and rank not in known:
            groups.setdefault(stack, set()).add(rank)
            known.add(rank)
    made = [Group(tuple(sorted(ranks)), stack) for stack, ranks in groups.items()]
    return sorted(made, key=lambda group: (len(group.ranks), group.ranks))


def _stacks(history: History, incident: Incident) -> Iterator[tuple[int, tuple[Frame, ...]]]:
    if incident.layer == "launcher":
        for part in history.cycles.parts((incident.attempt, incident.cycle)).values():
            yield from ((rank, worker.seen.stack) for rank, worker in part.workers.items() if worker.seen is not None)
    else:
        place = (incident.attempt, incident.cycle, incident.call, incident.iteration)
        yield from history.iterations[place].stacks.items()
    yield from ((record.rank, main_stack(record)) for record in incident.records)
