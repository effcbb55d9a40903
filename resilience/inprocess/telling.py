"""One line for each restart of a Wrapper's job: which rank failed first, and how many go on.

The monitor of the rank that is rank 0 after the restart says it, by way of that rank's stderr. So it is one line for
the job, with any launcher. That holds for a restart in place, and for one by a launcher that starts the ranks anew,
such as torchrun; our own launcher has a line for its restarts itself."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from resilience.adapters.environment import has_agent, is_quiet, torchrun_restarts_left
from resilience.attribution.first_failure import judged
from resilience.attribution.incident import Incident
from resilience.core import events
from resilience.core.identity import Origin
from resilience.core.records import Record
from resilience.history.iterations import AT_ENTRY
from resilience.telemetry.restart_lines import Line, incident

Emit = Callable[[events.Event], object]
UNKNOWN = "the account does not show which rank failed first"


def of_restart(folder: Path, origin: Origin, say: Callable[[str], object], emit: Emit) -> Line | None:
    """Say which rank failed first, some time after an iteration has begun, if that was a restart and this is rank 0.
    The verdict is stated as an event too, so that every view has the same words.

    origin: of the rank, in the new iteration. Returns at once; None if there is nothing to say."""
    if origin.rank != 0:
        return None
    say = (lambda line: None) if is_quiet() else say
    if origin.iteration:
        return Line(lambda hurry: _in_place(folder, origin, hurry, emit), say)
    if origin.cycle and not origin.call and not has_agent():
        return Line(lambda hurry: _by_a_launcher(folder, origin, hurry, emit), say)
    return None


def ends_with_ranks() -> bool:
    """Return True if the job is over once none of its ranks goes on. torchrun may start them again. Our own launcher
    says itself how the job ends."""
    return not (has_agent() or is_quiet() or torchrun_restarts_left())


def _in_place(folder: Path, origin: Origin, hurry: threading.Event, emit: Emit) -> str:
    assert origin.iteration is not None
    call = (origin.attempt, origin.cycle, origin.call)
    before = origin.iteration - 1

    def wanted(record: Record) -> bool:
        place = record.origin
        return (place.attempt, place.cycle, place.call) == call and (
            before <= (AT_ENTRY if place.iteration is None else place.iteration) <= before + 1
        )

    def complete(records: list[Record]) -> bool:
        ended = {
            record.origin.initial_rank
            for record in records
            if isinstance(record.event, events.IterationEnded) and record.origin.iteration == before
        }
        sizes = [record.origin.world_size for record in records if record.origin.iteration == before]
        return len(ended) >= max((size for size in sizes if size), default=len(ended) + 1)

    def choose(incidents: tuple[Incident, ...]) -> Incident | None:
        return next((each for each in incidents if (each.call, each.iteration) == (origin.call, before)), None)

    told = incident(folder, wanted, complete, choose, hurry)
    return f"restart {origin.iteration} in place: {_why(told, emit)}, {_size(origin)}"


def _by_a_launcher(folder: Path, origin: Origin, hurry: threading.Event, emit: Emit) -> str:
    place = (origin.attempt, origin.cycle - 1)

    def wanted(record: Record) -> bool:
        return (record.origin.attempt, record.origin.cycle) == place

    def choose(incidents: tuple[Incident, ...]) -> Incident | None:
        """The first one in which a process ended: the launcher then ends the others, by SIGTERM."""
        ended = (each for each in incidents if each.kind == "terminated" and each.verdict.what != "told_to_stop")
        return next(ended, incidents[-1] if incidents else None)

    def complete(records: list[Record]) -> bool:
        """The ranks of the cycle before are gone, but a monitor may not have written yet how its rank ended."""
        known = {record.event.record.rank for record in records if isinstance(record.event, events.Interrupted)}
        known |= {
            record.origin.initial_rank or 0 for record in records if isinstance(record.event, events.MonitorEnded)
        }
        sizes = [record.origin.world_size for record in records]
        return len(known) >= max((size for size in sizes if size), default=len(known) + 1)

    told = incident(folder, wanted, complete, choose, hurry)
    return f"started again by the launcher (cycle {origin.cycle}): {_why(told, emit)}, {_size(origin)}"


def _why(told: Incident | None, emit: Emit) -> str:
    if told is None:
        return UNKNOWN
    verdict = judged(told)
    emit(verdict)
    return verdict.sentence


def _size(origin: Origin) -> str:
    return "1 rank goes on" if origin.world_size == 1 else f"{origin.world_size} ranks go on"
