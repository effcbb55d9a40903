"""One line for each restart of a Wrapper's job: which rank failed first, and how many ranks continue.

The monitor of the rank that is rank 0 after the restart prints it on that rank's stderr. So there is one line for the
job, with any launcher. It covers a restart in place, and a restart by a launcher that starts the ranks again, such as
torchrun. Our own launcher prints its own line for its restarts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from resilience.attribution.first_failure import judged
from resilience.attribution.incident import Incident
from resilience.facts import events
from resilience.facts.identity import Origin
from resilience.facts.records import Record
from resilience.history.places import AT_ENTRY
from resilience.system.environment import has_agent, is_quiet, torchrun_restarts_left
from resilience.telemetry.restart_lines import Emit, Hurry, Make, RestartLine, incident

UNKNOWN = "the records do not show which rank failed first"
BEHIND = "first failing rank not determined (the job restarted again)"


def of_restart(
    folder: Path, origin: Origin, say: Callable[[str], object], emit: Emit, last: RestartLine | None = None
) -> RestartLine | None:
    """Prepare the line that names the first failed rank, if this was a restart and this is rank 0. It is printed some
    time after the function was entered. The verdict is also an event, so that every view uses the same words.

    origin: the rank's, in the new iteration. last: the line of the last restart, which this one may have to follow.
    Returns at once; None if there is nothing to print."""
    if origin.rank != 0:
        return None
    say = (lambda line: None) if is_quiet() else say
    if origin.iteration:
        return _after(last, lambda hurry: _in_place(folder, origin, hurry, emit), say, emit)
    if origin.cycle and not origin.call and not has_agent():
        return _after(last, lambda hurry: _by_a_launcher(folder, origin, hurry, emit), say, emit)
    return None


def _after(last: RestartLine | None, make: Make, say: Callable[[str], object], emit: Emit) -> RestartLine:
    return last if last is not None and last.follow(make) else RestartLine(make, say, emit)


def ends_with_ranks() -> bool:
    """Return True if the job is over when none of its ranks continues. That is not so under torchrun, which may start
    them again, or under our own launcher, which itself prints how the job ends."""
    return not (has_agent() or is_quiet() or torchrun_restarts_left())


def _in_place(folder: Path, origin: Origin, hurry: Hurry, emit: Emit) -> str:
    assert origin.iteration is not None
    call = (origin.attempt, origin.cycle, origin.call)
    before = origin.iteration - 1

    def is_wanted(record: Record) -> bool:
        place = record.origin
        return (place.attempt, place.cycle, place.call) == call and (
            before <= (AT_ENTRY if place.iteration is None else place.iteration) <= before + 1
        )

    def is_complete(records: list[Record]) -> bool:
        ended_ranks = {
            record.origin.initial_rank
            for record in records
            if isinstance(record.event, events.IterationEnded) and record.origin.iteration == before
        }
        sizes = [record.origin.world_size for record in records if record.origin.iteration == before]
        return len(ended_ranks) >= max((size for size in sizes if size), default=len(ended_ranks) + 1)

    def choose(incidents: tuple[Incident, ...]) -> Incident | None:
        return next((entry for entry in incidents if (entry.call, entry.iteration) == (origin.call, before)), None)

    cause = incident(folder, is_wanted, is_complete, choose, hurry)
    return f"restart {origin.iteration} in place: {_verdict_sentence(cause, hurry, emit)}, {_ranks_left(origin)}"


def _by_a_launcher(folder: Path, origin: Origin, hurry: Hurry, emit: Emit) -> str:
    place = (origin.attempt, origin.cycle - 1)

    def is_wanted(record: Record) -> bool:
        return (record.origin.attempt, record.origin.cycle) == place

    def choose(incidents: tuple[Incident, ...]) -> Incident | None:
        """Choose the first incident in which a process ended: the launcher then ends the others by SIGTERM."""
        ended = (entry for entry in incidents if entry.kind == "terminated" and entry.verdict.what != "told_to_stop")
        return next(ended, incidents[-1] if incidents else None)

    def is_complete(records: list[Record]) -> bool:
        """Return True once all ends are on record. A monitor writes how its rank ended after the rank is gone."""
        known = {record.event.record.rank for record in records if isinstance(record.event, events.RankInterrupted)}
        known |= {
            record.origin.initial_rank or 0 for record in records if isinstance(record.event, events.MonitorEnded)
        }
        sizes = [record.origin.world_size for record in records]
        return len(known) >= max((size for size in sizes if size), default=len(known) + 1)

    cause = incident(folder, is_wanted, is_complete, choose, hurry)
    sentence = _verdict_sentence(cause, hurry, emit)
    return f"started again by the launcher (cycle {origin.cycle}): {sentence}, {_ranks_left(origin)}"


def _verdict_sentence(cause: Incident | None, hurry: Hurry, emit: Emit) -> str:
    if cause is None:
        return BEHIND if hurry.is_behind else UNKNOWN
    verdict = judged(cause)
    emit(verdict)
    return verdict.sentence


def _ranks_left(origin: Origin) -> str:
    return "1 rank continues" if origin.world_size == 1 else f"{origin.world_size} ranks continue"
