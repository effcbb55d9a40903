"""What does a person at the terminal of a running job read?  A sentence for each thing that matters.

A sink beside the record file: events for people become a line on standard error, from `--ft-log-level` on. One node
says what all nodes know, because a job's terminal shows the lines of all. A restart is one line, written when the new
cycle runs: by then the records of all ranks tell who failed first. If the next cycle does not come soon, a line says
what it waits for. A reader that is too slow loses lines; the agent never waits for it. `--quiet` switches everything
off."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from resilience.adapters import terminal
from resilience.adapters.environment import is_quiet
from resilience.attribution.first_failure import cause_in_words
from resilience.core import events
from resilience.core.attribution import InterruptionRecord
from resilience.core.printable import printable, printable_line
from resilience.core.records import Record
from resilience.core.watched import suspicion_in_words, watched_in_words
from resilience.launcher import telling
from resilience.monitor.config import LOG_LEVELS
from resilience.telemetry.restart_lines import Line

LONGEST = 1000  # bytes of a line
TOGETHER = 30.0  # seconds in which ranks that wait for a hung one are suspected too
PATIENCE = 2.0  # seconds that a reader is given for the last words
SOON = 5.0  # seconds after which a restart that has not begun is worth a line


def say(text: str) -> None:
    """Show why the launcher cannot do what it is asked to, `--quiet` or not. Waits a moment for the reader."""
    data = printable(f"resilience run: {text}\n").encode()
    terminal.put(terminal.stream(terminal.STDERR), data, time.monotonic() + PATIENCE)


def note(text: str) -> None:
    """Show a line before there is an account."""
    if not is_quiet():
        say(text)


class Console:
    """Lines of one agent. Main thread only."""

    def __init__(
        self, level: int, folder: Path, descriptor: int | None = None, restarts_all: bool = True, quiet: bool = False
    ) -> None:
        """level: the least that is shown, as in `logging`; folder: of the run; descriptor: or stderr. restarts_all:
        each failure of a rank leads to a restart, whose line names it."""
        self._level, self._folder = level, folder
        self._restarts_all, self._is_quiet = restarts_all, quiet
        self._descriptor = terminal.stream(terminal.STDERR) if descriptor is None else descriptor
        self._met: events.RendezvousCompleted | None = None
        self._left_out = 0
        self._watched: events.HangsWatched | None = None
        self._suspected_at = float("-inf")
        self._has_said_unkept = False
        self._same = 1  # failures in a row that were alike
        self._detail = ""  # of the cycle before
        self._late: threading.Timer | None = None
        self._line: Line | None = None  # of the last restart
        self.emit: Callable[[events.Event], object] = lambda event: None  # states what only this console finds out

    def take(self, record: Record) -> bool:
        """Show an event if it is for people. Always taken: what is not shown here is in the record file."""
        event = record.event
        if isinstance(event, events.RendezvousCompleted):
            self._met = event
        if isinstance(event, events.HangsWatched):
            self._watched = event
        self._follow(record)
        text = self._sentence(record)
        if text:
            self._show(event.level, text)
        if isinstance(event, events.CycleStarted) and event.why == "first" and self._watched is not None and text:
            self._show(event.level, watched_in_words(self._watched))
        return True

    def found(self, record: InterruptionRecord) -> None:
        """Show that a rank failed, if no restart follows from it whose line would name it."""
        if not self._restarts_all:
            where = f"rank {record.rank}" + (f" on {record.node}" if record.node else "")
            self._show("error", f"{where} failed ({cause_in_words(record)})")

    def suspected(self, rank: int, suspicion: events.HangSuspected) -> None:
        """Show that a rank may hang; of ranks that fall silent together, one line."""
        now = time.monotonic()
        if now - self._suspected_at >= TOGETHER:
            self._suspected_at = now
            self._show(suspicion.level, suspicion_in_words(rank, suspicion))

    def losses(self, sentences: Sequence[str]) -> None:
        """Show what was lost of the workers' output, always: it is missing in what the reader has."""
        for sentence in sentences:
            self._put(f"resilience run: {sentence}")

    def completed(self, text: str) -> None:
        """Show that the job is complete; one node says so."""
        self._finish_line()
        if self.is_first and self._level <= LOG_LEVELS["INFO"]:
            self.last_words(text)

    def last_words(self, text: str) -> None:
        """Show why the job is over, at any level."""
        self._finish_line()
        if not self._is_quiet:
            self._put(text)

    @property
    def has_nodes(self) -> bool:
        """Return True if the job is on several nodes."""
        return self._met is not None and self._met.nodes > 1

    def _finish_line(self) -> None:
        if self._line is not None:
            self._line.finish()

    def _put(self, text: str) -> None:
        terminal.put(self._descriptor, printable(f"{text}\n").encode(), time.monotonic() + PATIENCE)

    # -- restarts -------------------------------------------------------------------------------

    @property
    def is_first(self) -> bool:
        """Whether this node says what all know."""
        return self._met is not None and self._met.group_rank == 0

    def _follow(self, record: Record) -> None:
        """Say of a restart what is to be said: when its cycle has begun, or when that does not happen soon."""
        event = record.event
        match event:
            case events.RestartDecided("restart"):
                self._same = event.same_in_a_row
                self._late = threading.Timer(SOON, self._say_late)
                self._late.daemon = True
                self._late.start()
            case events.CycleEnded():
                self._detail = event.detail
            case events.CycleStarted() | events.JobEnded() if self._late is not None:
                self._late.cancel()
                self._late = None
        if isinstance(event, events.CycleStarted):
            if event.why == "failure" and self.is_first:
                met, same, detail = self._met, self._same, self._detail
                assert met is not None
                self._line = telling.of_restart(
                    self._folder,
                    record.origin,
                    self.has_nodes,
                    lambda why: self._show("warning", _restart(event, why or detail, met, same)),
                    self.emit,
                )
            self._same = 1

    def _say_late(self) -> None:
        self._show("warning", f"{self._detail or 'a rank failed'}; waiting for the nodes of the next cycle")

    def _sentence(self, record: Record) -> str:
        """One line for an event, empty for what is no news to a person."""
        event = record.event
        match event:
            case events.CycleStarted(why) if self.is_first and self._met is not None and why != "failure":
                if why == "first":
                    return f"{_size(self._met)}; records in {self._folder}"
                return f"all workers start again after {_WHY[why]}: {_size(self._met)}"
            case events.NodeUnhealthy(check, detail):
                return f"node {record.origin.node} is unhealthy ({check}): {detail}"
            case events.NodeWarned(check, detail):
                return f"node {record.origin.node}: warning ({check}): {detail}"
            case events.OutputLost("file", path, _, why) if not self._has_said_unkept:
                self._has_said_unkept = True
                return f"workers' output cannot be kept in {path}: {why}; the job goes on, see the terminal for it"
            case events.DrainLost(pid, why):
                return f"process {pid}, which read the workers' output, is gone ({why}); another one goes on"
            case events.DrainStopped(pid):
                return f"process {pid}, which reads the workers' output, had been stopped; it goes on"
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
            case events.ModulesPreloaded(_, refused, why, is_learned=False) if refused:
                return f"{', '.join(refused)} cannot be preloaded ({why}); each worker imports it"
            case events.VariablesTooLate(rank, package, names):
                return (
                    f"rank {rank} has set {', '.join(names)} before it imported {package}, which a warm worker has "
                    "imported already: without effect in this cycle, workers start cold from the next one on; set it "
                    "for the launcher, or use --cold"
                )
            case events.ZygoteLost(why):
                return f"workers start cold from now on: {why}"
        return ""

    def _show(self, level: str, text: str) -> None:
        if self._is_quiet or LOG_LEVELS[level.upper()] < self._level:
            return
        if self._left_out:
            text = f"({_count(self._left_out, 'line')} not shown) {text}"
        line = printable_line(" ".join(f"resilience run: {text}".split())).encode()[: LONGEST - 1] + b"\n"
        if terminal.put(self._descriptor, line, time.monotonic()) == len(line):
            self._left_out = 0
        else:
            self._left_out += 1


_WHY = {"membership": "a change of nodes", "request": "a request"}


def _restart(event: events.CycleStarted, why: str, met: events.RendezvousCompleted, same: int) -> str:
    again = f", the same failure {same} times in a row" if same > 1 else ""
    return f"restart {event.restarts_used} of {event.max_restarts}: {why}{again}, {_size(met)}"


def _size(met: events.RendezvousCompleted) -> str:
    return f"{_count(met.world_size, 'rank')} on {_count(met.nodes, 'node')}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + ("" if number == 1 else "s")
