"""What happened on this node, as its agent reports it.

One record file per node, `records/<node>-agent.jsonl`, complete without any server, and a few lines for people on
standard error. The agent reports when a cycle and its phases begin and end; an exception closes open phases as
failed."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from resilience.core import cycle
from resilience.core.cycle import CycleDecision
from resilience.errors import ConfigurationError, NodeRefused, error_in_words
from resilience.facts.events import (
    CycleEnded,
    CycleOutcome,
    CyclePhase,
    CyclePhaseEnded,
    CyclePhaseStarted,
    Event,
    JobEnded,
    Outcome,
)
from resilience.facts.identity import FileOwner, Origin
from resilience.launcher.console import Console
from resilience.telemetry.emitter import Emitter, Sink
from resilience.telemetry.recording import RecordFile


class NodeEvents:
    """The agent's event reporter. Main thread only."""

    def __init__(self, folder: Path, job_id: str, node: str, attempt: int, console: Console) -> None:
        self.folder = folder
        self.node = node
        self._file = RecordFile(folder / "records" / f"{FileOwner(node, is_agent=True).name}.jsonl")
        origin = Origin(job_id=job_id, node=node, role="agent", pid=os.getpid(), attempt=attempt)
        self._emitter = Emitter(origin, [self._file, console])
        self.console = console
        console.emit = self.emit
        self._cycle_began = time.monotonic()
        self._has_ended = False

    @property
    def origin(self) -> Origin:
        """Return the origin of the agent's events; job, attempt and cycle apply to the whole node."""
        return self._emitter.origin

    def show(self, exports: Sink) -> None:
        """Pass all further events to the exporters too."""
        self._emitter.replace_sinks([self._file, self.console, exports])

    def emit(self, *events: Event) -> None:
        self._emitter.emit(*events)

    def emit_of(self, initial_rank: int | None, event: Event) -> None:
        """Report an event that concerns one rank of this node."""
        self._emitter.move(initial_rank=initial_rank)
        self._emitter.emit(event)
        self._emitter.move(initial_rank=None)

    def emit_of_cycle(self, cycle: int | None, event: Event) -> None:
        """Report an event of another cycle; None: of the cycle that this agent is in."""
        own = self.origin.cycle
        self._emitter.move(cycle=own if cycle is None else cycle)
        self._emitter.emit(event)
        self._emitter.move(cycle=own)

    def cycle(self, number: int) -> None:
        """Report events under this cycle from now on; start its clock if the cycle is new."""
        if number != self.origin.cycle:
            self._cycle_began = time.monotonic()
        self._emitter.move(cycle=number)

    def cycle_ended(self, verdict: CycleDecision, step: int) -> None:
        """Report the end of the cycle on this node. step: the highest one that a worker here reported, -1 if none."""
        failure = verdict.failure
        silent_for_s = None if failure is None else failure.silent_for_s
        failed_node = failure.node if failure is not None and failure.rank >= 0 else ""
        duration_s = time.monotonic() - self._cycle_began
        detail, known = verdict.detail[:500], step if step >= 0 else None
        self.emit(CycleEnded(verdict.outcome, duration_s, detail, silent_for_s, known, failed_node))

    @contextmanager
    def phase(self, phase: CyclePhase) -> Iterator[None]:
        """Report the start, end, outcome and duration of one phase of the cycle."""
        began = time.monotonic()
        outcome: Outcome = "failed"
        self.emit(CyclePhaseStarted(phase))
        try:
            yield
            outcome = "completed"
        finally:
            self.emit(CyclePhaseEnded(phase, outcome, time.monotonic() - began))

    def job_ended(self, verdict: CycleDecision, is_clean: bool) -> None:
        """Report how the job ended on this node: the last record. is_clean: as in `JobEnded`."""
        self._has_ended = True
        self.emit(JobEnded(verdict.outcome, verdict.exit_code, verdict.detail[:500], is_clean))

    def agent_failed(self, error: Exception, leaves: bool = False) -> None:
        """Report that the agent ends by an exception of its own, unless the end of the job is already on record.

        leaves: the job may continue without this node."""
        if not self._has_ended:
            outcome: CycleOutcome = "excluded" if leaves or isinstance(error, NodeRefused) else "failed"
            code = cycle.WRONG_USE if isinstance(error, ConfigurationError) else cycle.FAILED
            self.job_ended(
                CycleDecision(outcome, self.node, exit_code=code, detail=why_failed(self.node, error)), False
            )

    def close(self) -> None:
        self._file.close()


def why_failed(node: str, error: Exception) -> str:
    """Return the reason for the end of a job whose agent has raised this."""
    return f"the agent of {node} failed: {error_in_words(error)}"
