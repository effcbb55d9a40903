"""Where was every rank when it broke?  Equal stacks become one, with the ranks that were there.

From what ranks told when they learned that their iteration is over, from what monitors saw of workers before these
were stopped, and from the incident's own records. The smallest group comes first: it is who did something else."""

from __future__ import annotations

from collections import defaultdict

import msgspec

from resilience.attribution.incident import Incident
from resilience.attribution.symptoms import main_stack
from resilience.core import events
from resilience.core.attribution import Frame
from resilience.core.records import Record

Stack = tuple[Frame, ...]
_Place = tuple[int, int, int, int]


class Group(msgspec.Struct, frozen=True):
    """Ranks whose main threads were at the same place. stack: innermost frame last."""

    ranks: tuple[int, ...]
    stack: Stack


class Whereabouts:
    """Takes the records of a run, in any order."""

    def __init__(self) -> None:
        self._seen: defaultdict[_Place, defaultdict[Stack, set[int]]] = defaultdict(lambda: defaultdict(set))

    def take(self, record: Record) -> None:
        """Add what a record says."""
        origin, event = record.origin, record.event
        if isinstance(event, events.OutcomeSeen) and event.stack and origin.initial_rank is not None:
            place = (origin.attempt, origin.cycle, origin.call, origin.iteration or 0)
            self._seen[place][event.stack].add(origin.initial_rank)
        elif isinstance(event, events.WorkerSeen) and event.stack and origin.initial_rank is not None:
            self._seen[origin.attempt, origin.cycle, -1, -1][event.stack].add(origin.initial_rank)

    def of(self, incident: Incident) -> list[Group]:
        """Return the groups of an incident, the smallest first."""
        place = (incident.attempt, incident.cycle, incident.call, incident.iteration)
        if incident.layer == "launcher":
            place = (incident.attempt, incident.cycle, -1, -1)
        groups = {stack: set(ranks) for stack, ranks in self._seen.get(place, {}).items()}
        told = {rank for ranks in groups.values() for rank in ranks}
        for record in incident.records:
            stack = main_stack(record)
            if stack and record.rank not in told:
                groups.setdefault(stack, set()).add(record.rank)
                told.add(record.rank)
        made = [Group(tuple(sorted(ranks)), stack) for stack, ranks in groups.items()]
        return sorted(made, key=lambda group: (len(group.ranks), group.ranks))
