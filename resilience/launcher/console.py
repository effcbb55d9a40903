"""What does a person at the terminal of a running job read?  A sentence for each thing that matters.

A sink beside the record file: of the agent's own events, and of what monitors find, those for people
become a line on standard error, from `--ft-log-level` on. What all nodes know alike is told by one of them,
for a job's terminal shows the lines of all. Whoever reads too slowly loses lines, and never holds the agent."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from resilience.adapters import terminal
from resilience.core import events
from resilience.core.attribution import InterruptionRecord
from resilience.core.printable import printable, printable_line
from resilience.core.records import Record
from resilience.core.watched import suspicion_in_words, watched_in_words
from resilience.monitor.config import LOG_LEVELS

LONGEST = 1000  # bytes of a line
TOGETHER = 30.0  # seconds in which ranks that wait for a hung one are suspected too
PATIENCE = 2.0  # seconds that a reader is given for the last words


def say(text: str) -> None:
    """Show a line on standard error before there is a run folder, or after the job. Waits a moment for the reader."""
    data = printable(f"resilience run: {text}\n").encode()
    terminal.put(terminal.stream(terminal.STDERR), data, time.monotonic() + PATIENCE)


class Console:
    """Lines of one agent. Main thread only."""

    def __init__(self, level: int, folder: Path, descriptor: int | None = None) -> None:
        """level: the least that is shown, as in `logging`; folder: of the run, told once; descriptor: or stderr."""
        self._level, self._folder = level, folder
        self._descriptor = terminal.stream(terminal.STDERR) if descriptor is None else descriptor
        self._met: events.RendezvousCompleted | None = None
        self._left_out = 0
        self._watched: events.HangsWatched | None = None
        self._suspected_at = float("-inf")
        self._has_said_unkept = False

    def take(self, record: Record) -> bool:
        """Show an event if it is for people. Always taken: what is not shown here is in the record file."""
        event = record.event
        if isinstance(event, events.RendezvousCompleted):
            self._met = event
        if isinstance(event, events.HangsWatched):
            self._watched = event
        text = self._sentence(record)
        if text:
            self._show(event.level, text)
        if isinstance(event, events.CycleStarted) and event.why == "first" and self._watched is not None and text:
            self._show(event.level, watched_in_words(self._watched))
        return True

    def found(self, record: InterruptionRecord) -> None:
        """Show what a monitor found out about its rank."""
        self._show("error", _interruption(record))

    def suspected(self, rank: int, suspicion: events.HangSuspected) -> None:
        """Show that a rank may hang; of ranks that fall silent together, one line."""
        now = time.monotonic()
        if now - self._suspected_at >= TOGETHER:
            self._suspected_at = now
            self._show(suspicion.level, suspicion_in_words(rank, suspicion))

    def losses(self, sentences: Sequence[str]) -> None:
        """Show what was lost of the workers' output, at any level."""
        for sentence in sentences:
            self.last_words(f"resilience run: {sentence}")

    def last_words(self, text: str) -> None:
        """Show why the job is over, at any level."""
        terminal.put(self._descriptor, printable(f"{text}\n").encode(), time.monotonic() + PATIENCE)

    def _sentence(self, record: Record) -> str:
        """One line for an event, empty for what is no news to a person."""
        event = record.event
        is_first = self._met is not None and self._met.group_rank == 0
        match event:
            case events.CycleStarted(why, used, most) if is_first and self._met is not None:
                size = f"{_count(self._met.world_size, 'rank')} on {_count(self._met.nodes, 'node')}"
                if why == "first":
                    return f"{size}; records in {self._folder}"
                return f"cycle {record.origin.cycle} after {_WHY[why]}: {size}, {used} of {most} restarts used"
            case events.RestartDecided("restart", _, _, _, left, same):
                again = f"; the same failure {same} times in a row" if same > 1 else ""
                return f"all workers start again, {_count(left, 'restart')} left{again}"
            case events.Interrupted(found):
                return _interruption(found)
            case events.NodeUnhealthy(check, detail):
                return f"node {record.origin.node} is unhealthy ({check}): {detail}"
            case events.NodeWarned(check, detail):
                return f"node {record.origin.node}: warning ({check}): {detail}"
            case events.OutputLost("file", path, _, why) if not self._has_said_unkept:
                self._has_said_unkept = True
                return f"workers' output cannot be kept in {path}: {why}; the job goes on, see the terminal for it"
            case events.DrainLost(pid, why):
                return f"process {pid}, which read the workers' output, is gone ({why}); another one goes on"
            case events.NodeExcluded(why):
                return f"node {record.origin.node} takes no further part: {why}"
            case events.ControlRequested(action, description, local_rank):
                return f"local rank {local_rank} asks for {action}" + (f": {description}" if description else "")
            case events.StopRequested(source, grace, leaves):
                if leaves:
                    return f"this node leaves ({source}); workers have {grace:g} s to write a checkpoint"
                return f"the job stops ({source}); workers have {grace:g} s to write a checkpoint"
            case events.MonitorLost(pid, why):
                return f"monitor {pid} of rank {record.origin.initial_rank} is gone: {why}; another one starts"
            case events.ModulesPreloaded(_, refused, why) if refused:
                return f"{', '.join(refused)} cannot be preloaded ({why}); each worker imports it"
            case events.ZygoteLost(why):
                return f"workers start cold from now on: {why}"
        return ""

    def _show(self, level: str, text: str) -> None:
        if LOG_LEVELS[level.upper()] < self._level:
            return
        if self._left_out:
            text = f"({_count(self._left_out, 'line')} not shown) {text}"
        line = printable_line(" ".join(f"resilience run: {text}".split())).encode()[: LONGEST - 1] + b"\n"
        if terminal.put(self._descriptor, line, time.monotonic()) == len(line):
            self._left_out = 0
        else:
            self._left_out += 1


_WHY = {"failure": "a failure", "membership": "a change of nodes", "request": "a request"}


def _interruption(record: InterruptionRecord) -> str:
    where = f"rank {record.rank}" + (f" on {record.node}" if record.node else "")
    said = record.message or record.interruption.value
    error = record.exception
    if error is not None and error.type not in said:
        said += f": {error.type}: {error.message}"
    return f"{where}: {said}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + ("" if number == 1 else "s")
