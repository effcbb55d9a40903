"""In which iteration was a record written?  And of which iteration or cycle is a verdict?"""

from __future__ import annotations

from resilience.facts import events
from resilience.facts.identity import Origin
from resilience.history.phases import Place

AT_ENTRY = -1
"""The iteration of a place before the first iteration, while the ranks meet at the call."""
BESIDE_CALLS = -1
"""The call of a place in a cycle of the launcher that belongs to none of the workers' calls."""


def place_at(origin: Origin) -> Place:
    """Return the iteration of a record."""
    return (origin.attempt, origin.cycle, origin.call, AT_ENTRY if origin.iteration is None else origin.iteration)


def judged_place(origin: Origin, event: events.IncidentJudged) -> tuple[int | None, int | None]:
    """Return call and iteration of a verdict: both None for a cycle of the launcher, the iteration for a call's entry.

    Records from before the field `call` have their writer's call, and -1 for the entry. origin: of the writer."""
    if event.call is not None:
        return event.call, event.iteration
    if event.iteration is None:
        return None, None
    return origin.call, None if event.iteration == AT_ENTRY else event.iteration
