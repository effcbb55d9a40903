"""Who failed first?  Asked after a cycle that failed, for the line of a restart and for the launcher's last words.

The answer is the verdict of the report, from the records in the run folder. The agent does not wait for the disk: a
restart is told by a thread, and at the end of the job the answer has a limit. What the terminal shows is stated as an
event too, so that every view has the same words."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from resilience.adapters.limited import returns_within
from resilience.attribution.first_failure import judged
from resilience.attribution.incident import Incident
from resilience.core import events
from resilience.core.attribution import InterruptionRecord
from resilience.core.identity import Origin
from resilience.core.records import Record
from resilience.telemetry import restart_lines

LAST_LIMIT = 3.0  # seconds for the last words


Emit = Callable[[events.Event], object]


def of_restart(
    folder: Path, origin: Origin, has_nodes: bool, say: Callable[[str], object], emit: Emit
) -> restart_lines.Line:
    """Say who failed first in the cycle before, some time after the next one has begun; an empty text if the records do
    not show it. Returns at once. origin: of the agent, in the new cycle. has_nodes: the job is on several nodes."""

    def line(hurry: threading.Event) -> str:
        found = _incident(folder, origin.attempt, origin.cycle - 1, hurry)
        if found is None:
            return ""
        told = judged(found, has_nodes)
        emit(told)
        return told.sentence

    return restart_lines.Line(line, say)


def first_failure(folder: Path, origin: Origin, has_nodes: bool, emit: Emit) -> tuple[InterruptionRecord | None, str]:
    """Return the record of the rank that failed first in the present cycle, None if the records do not show it; and the
    verdict in a sentence, empty if there is none."""
    found: list[InterruptionRecord] = []
    sentences: list[str] = []

    def work() -> None:
        incident = _incident(folder, origin.attempt, origin.cycle, threading.Event())
        verdict = None if incident is None else incident.verdict
        culprits = [] if verdict is None else [each.rank for each in verdict.culprits or verdict.candidates]
        if incident is not None and culprits:
            found.extend(record for record in incident.records if record.rank in culprits)
        if incident is not None:
            told = judged(incident, has_nodes)
            emit(told)
            sentences.append(told.sentence)

    returns_within(LAST_LIMIT, work, "resilience-last-words")
    return next(iter(found), None), next(iter(sentences), "")


def _incident(folder: Path, attempt: int, cycle: int, hurry: threading.Event) -> Incident | None:
    def wanted(record: Record) -> bool:
        return (record.origin.attempt, record.origin.cycle) == (attempt, cycle)

    def complete(records: list[Record]) -> bool:
        """Return True if all nodes have ended the cycle, and the monitors of all workers have said what they know."""
        told = [record.event for record in records]
        nodes = max((event.nodes for event in told if isinstance(event, events.RendezvousCompleted)), default=1)
        ended = {record.origin.node for record in records if isinstance(record.event, events.CycleEnded)}
        watched = {record.origin.initial_rank for record in records if isinstance(record.event, events.MonitorStarted)}
        over = {record.origin.initial_rank for record in records if isinstance(record.event, events.MonitorEnded)}
        return len(ended) >= nodes and over >= watched

    def choose(incidents: tuple[Incident, ...]) -> Incident | None:
        return next((each for each in incidents if (each.cycle, each.layer) == (cycle, "launcher")), None)

    return restart_lines.incident(folder, wanted, complete, choose, hurry)
