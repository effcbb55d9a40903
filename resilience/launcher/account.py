"""What happened on this node, told by its agent.

One record file a node, `records/<node>-agent.jsonl`, complete without any server, and a few lines for people
on standard error. The agent says when a cycle and its phases begin and end; an exception closes what it
leaves open as failed."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from resilience.core.cycle import Verdict
from resilience.core.events import (
    CycleEnded,
    CyclePhase,
    CyclePhaseEnded,
    CyclePhaseStarted,
    Event,
    Outcome,
)
from resilience.core.identity import Origin
from resilience.launcher.console import Console
from resilience.telemetry.emitter import Emitter
from resilience.telemetry.recording import RecordFile


class Account:
    """The agent's voice. Main thread only."""

    def __init__(self, folder: Path, job_id: str, node: str, attempt: int, console: Console) -> None:
        self.folder = folder
        self.node = node
        self._file = RecordFile(folder / "records" / f"{node}-agent.jsonl")
        origin = Origin(job_id=job_id, node=node, role="agent", pid=os.getpid(), attempt=attempt)
        self._emitter = Emitter(origin, [self._file, console])
        self.console = console
        console.emit = self.emit
        self._cycle_began = time.monotonic()

    @property
    def origin(self) -> Origin:
        """Who speaks: job, attempt and cycle are everybody's on this node."""
        return self._emitter.origin

    def emit(self, *events: Event) -> None:
        self._emitter.emit(*events)

    def emit_of(self, initial_rank: int | None, event: Event) -> None:
        """State what concerns one rank of this node."""
        self._emitter.move(initial_rank=initial_rank)
        self._emitter.emit(event)
        self._emitter.move(initial_rank=None)

    def cycle(self, number: int) -> None:
        """Speak of this cycle from now on; its time begins now unless it has begun."""
        if number != self.origin.cycle:
            self._cycle_began = time.monotonic()
        self._emitter.move(cycle=number)

    def cycle_ended(self, verdict: Verdict) -> None:
        failure = verdict.failure
        step = failure.step if failure is not None and failure.step >= 0 else None
        silent_for_s = None if failure is None else failure.silent_for_s
        failed_node = failure.node if failure is not None and failure.rank >= 0 else ""
        took = time.monotonic() - self._cycle_began
        self.emit(CycleEnded(verdict.outcome, took, verdict.detail[:500], silent_for_s, step, failed_node))

    @contextmanager
    def phase(self, phase: CyclePhase) -> Iterator[None]:
        """Time one leg of the cycle."""
        began = time.monotonic()
        outcome: Outcome = "failed"
        self.emit(CyclePhaseStarted(phase))
        try:
            yield
            outcome = "completed"
        finally:
            self.emit(CyclePhaseEnded(phase, outcome, time.monotonic() - began))

    def close(self) -> None:
        self._file.close()
