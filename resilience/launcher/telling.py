"""Which rank failed first?  The answer goes into the line of a restart and into the launcher's last message.

The answer is the report's verdict, from the records in the run folder. The agent does not wait for the disk: a thread
prints the line of a restart, and the question at the end of the job has a time limit. The sentence on the terminal is
also an event, so that every view uses the same words."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from pathlib import Path

from resilience.attribution.first_failure import judged
from resilience.attribution.incident import Incident
from resilience.errors import error_in_words
from resilience.facts import events
from resilience.facts.identity import Origin, owner_of
from resilience.facts.interruptions import InterruptionRecord
from resilience.facts.records import Record, beginnings
from resilience.system.call_with_timeout import returns_within
from resilience.telemetry import restart_lines
from resilience.telemetry.recording import RecordTail

_NO_CALLS = beginnings(*(kind for kind in events.CATALOGUE if kind not in (events.CallStarted, events.CallEnded)))
COUNT_LIMIT = 2.0  # seconds for the number of restarts in place; the ranks' monitors may still write
LOOK_EVERY = 0.05
LAST_LIMIT = 10.0  # seconds for the last message; only a disk or a host that hangs takes all of them


def of_restart(
    folder: Path, origin: Origin, has_nodes: bool, say: Callable[[str], object], emit: restart_lines.Emit
) -> restart_lines.RestartLine:
    """Print which rank failed first in the previous cycle, a while after the next one has started; an empty text if the
    records do not show it. Returns immediately. origin: of the agent, in the new cycle. has_nodes: the job runs on
    several nodes."""

    def line(hurry: threading.Event) -> str:
        incident = _incident(folder, origin.attempt, origin.cycle - 1, hurry)
        if incident is None:
            return ""
        verdict = judged(incident, has_nodes)
        emit(verdict)
        return verdict.sentence

    return restart_lines.RestartLine(line, say, emit)


def first_failure(
    folder: Path, origin: Origin, has_nodes: bool, emit: restart_lines.Emit, is_first_node: bool
) -> tuple[InterruptionRecord | None, str]:
    """Return the record of the rank that failed first in this cycle, None if the records do not show it; also the
    verdict as a sentence, empty if there is none. The first node records the verdict; each node records that it could
    not make one, because its own terminal then lacks the rank."""
    culprit_records: list[InterruptionRecord] = []
    sentences: list[str] = []

    def work() -> None:
        incident = _incident(folder, origin.attempt, origin.cycle, threading.Event())
        verdict = None if incident is None else incident.verdict
        culprits = [] if verdict is None else [suspect.rank for suspect in verdict.culprits or verdict.candidates]
        if incident is not None and culprits:
            culprit_records.extend(record for record in incident.records if record.rank in culprits)
        if incident is not None:
            judgement = judged(incident, has_nodes)
            if is_first_node:
                emit(judgement)
            sentences.append(judgement.sentence)

    try:
        if not returns_within(LAST_LIMIT, work, "resilience-last-words"):
            emit(events.AnalysisFailed(f"the records were not read and judged within {LAST_LIMIT:g} s"))
    except Exception as error:  # the edge to the analysis: the job has ended all the same
        emit(events.AnalysisFailed(error_in_words(error)))
    return next(iter(culprit_records), None), next(iter(sentences), "")


def restarts_in_place(folder: Path, origin: Origin) -> int:
    """Return how often a Wrapper restarted its function in the agent's present cycle, as far as the records of this
    node's ranks show it in time. origin: of the agent."""
    counts = [0]

    def work() -> None:
        until = time.monotonic() + COUNT_LIMIT
        tails = [
            RecordTail(path, without=_NO_CALLS)
            for path in (folder / "records").glob("*.jsonl")
            if owner_of(path.stem).node == origin.node and owner_of(path.stem).rank is not None
        ]
        open_calls = dict.fromkeys(range(len(tails)), 0)
        restarts = dict(open_calls)
        while True:
            for rank, tail in enumerate(tails):
                while added := tail.added():
                    for record in added:
                        if (record.origin.attempt, record.origin.cycle) == (origin.attempt, origin.cycle):
                            open_calls[rank] += isinstance(record.event, events.CallStarted)
                            if isinstance(record.event, events.CallEnded):
                                open_calls[rank] -= 1
                                restarts[rank] += record.event.iterations - 1
            counts.append(max(restarts.values(), default=0))
            if not any(open_calls.values()) or time.monotonic() >= until:
                return
            time.sleep(LOOK_EVERY)

    with contextlib.suppress(Exception):  # the edge to the disk: the job has ended all the same
        returns_within(COUNT_LIMIT, work, "resilience-restarts-in-place")
    return counts[-1]


def _incident(folder: Path, attempt: int, cycle: int, hurry: threading.Event) -> Incident | None:
    def wanted(record: Record) -> bool:
        return (record.origin.attempt, record.origin.cycle) == (attempt, cycle)

    def complete(records: list[Record]) -> bool:
        """Return True if all nodes have ended the cycle and the monitors of all workers have ended."""
        cycle_events = [record.event for record in records]
        nodes = max((event.nodes for event in cycle_events if isinstance(event, events.RendezvousCompleted)), default=1)
        ended = {record.origin.node for record in records if isinstance(record.event, events.CycleEnded)}
        watched = {record.origin.initial_rank for record in records if isinstance(record.event, events.MonitorStarted)}
        over = {record.origin.initial_rank for record in records if isinstance(record.event, events.MonitorEnded)}
        return len(ended) >= nodes and over >= watched

    def choose(incidents: tuple[Incident, ...]) -> Incident | None:
        of_cycle = (incident for incident in incidents if (incident.cycle, incident.layer) == (cycle, "launcher"))
        return next((incident for incident in of_cycle if not incident.is_of_lost_monitors), None)

    return restart_lines.incident(folder, wanted, complete, choose, hurry)
