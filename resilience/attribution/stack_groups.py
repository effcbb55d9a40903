"""Where was every rank at the time of the fault?  Groups ranks with equal stacks.

The stacks come from three sources: what ranks recorded when they learned that their iteration was over, what monitors
recorded before their workers were stopped, and the incident's own records. The smallest group, the odd one, comes
first."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from resilience.attribution.incident import Incident
from resilience.attribution.symptoms import main_stack
from resilience.facts.interruptions import Frame
from resilience.history.history import History


class StackGroup(msgspec.Struct, frozen=True):
    """Ranks whose main threads had the same stack. stack: innermost frame last."""

    ranks: tuple[int, ...]
    stack: tuple[Frame, ...]


def stack_groups(history: History, incident: Incident) -> list[StackGroup]:
    """Return the groups of an incident, the smallest first."""
    groups: dict[tuple[Frame, ...], set[int]] = {}
    known: set[int] = set()
    for rank, stack in _stacks(history, incident):
        if stack and rank not in known:
            groups.setdefault(stack, set()).add(rank)
            known.add(rank)
    stack_groups = [StackGroup(tuple(sorted(ranks)), stack) for stack, ranks in groups.items()]
    return sorted(stack_groups, key=lambda group: (len(group.ranks), group.ranks))


def _stacks(history: History, incident: Incident) -> Iterator[tuple[int, tuple[Frame, ...]]]:
    if incident.is_of_lost_monitors:
        return  # the looks of the cycle are those at another fault
    if incident.layer == "launcher":
        for part in history.cycles.parts((incident.attempt, incident.cycle)).values():
            yield from ((rank, worker.seen.stack) for rank, worker in part.workers.items() if worker.seen is not None)
    else:
        place = (incident.attempt, incident.cycle, incident.call, incident.iteration)
        yield from history.iterations[place].stacks.items()
    yield from ((record.rank, main_stack(record)) for record in incident.records)
