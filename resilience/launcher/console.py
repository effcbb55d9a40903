"""What does a person at the terminal of a running job read?  One line for each event that matters.

The console is a sink beside the record file: events for people become a line on standard error, from
`--ft-log-level` on. One node prints what all nodes know, because a job's terminal shows the lines of all nodes. A
restart is one line, written when the new cycle runs: by then the records of all ranks show which rank failed first. If
the next cycle does not start soon, a line says what it waits for. If the reader is too slow, lines are dropped; the
agent never waits for it. With `--quiet` only lost output, and why the launcher cannot start, are printed."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from resilience.attribution import notes
from resilience.attribution.first_failure import cause_in_words
from resilience.core.cycle import CycleDecision
from resilience.core.watched import suspicion_in_words, unlearned_in_words, watched_in_words
from resilience.facts import events
from resilience.facts.in_words import count
from resilience.facts.interruptions import InterruptionRecord
from resilience.facts.printable import printable, printable_line
from resilience.facts.records import Record
from resilience.launcher import telling
from resilience.monitor.config import LOG_LEVELS
from resilience.system import terminal
from resilience.system.environment import is_quiet
from resilience.telemetry.restart_lines import RestartLine

LONGEST = 1000  # bytes of a line
TOGETHER = 30.0  # seconds in which ranks that wait for a hung rank become suspects too
PATIENCE = 2.0  # seconds that the last message waits for the reader
SOON = 5.0  # seconds after which a restart that waits for nodes gets a line
LATE = 30.0  # the same for the start of a job


def say(message: str) -> None:
    """Print why the launcher cannot do what the user asked for, also with `--quiet`. Waits briefly for the reader."""
    data = printable(f"resilience run: {message}\n").encode()
    terminal.put(terminal.stream(terminal.STDERR), data, time.monotonic() + PATIENCE)


def note(message: str) -> None:
    """Print a line before records exist, unless `--quiet` is set."""
    if not is_quiet():
        say(message)


class Console:
    """The terminal lines of one agent. Main thread only."""

    def __init__(
        self,
        level: int,
        folder: Path,
        descriptor: int | None = None,
        restarts_all: bool = True,
        quiet: bool = False,
        hosts_store: bool = True,
    ) -> None:
        """level: the lowest level printed, as in `logging`; folder: of the run; descriptor: default stderr.
        restarts_all: each failure of a rank leads to a restart, whose line names it. hosts_store: this node hosts the
        job's store, so it prints that the job waits for its first nodes: one line, however many nodes wait."""
        self._level, self._folder, self._hosts_store = level, folder, hosts_store
        self._restarts_all, self._is_quiet = restarts_all, quiet
        self._descriptor = terminal.stream(terminal.STDERR) if descriptor is None else descriptor
        self._rendezvous: events.RendezvousCompleted | None = None
        self._dropped = 0
        self._watched: events.HangsWatched | None = None
        self._suspected_at = float("-inf")
        self._has_said_unkept = False
        self.repeats = 1  # equal failures in a row, as the job's budget counts them
        self.cause: CycleDecision | None = None  # of the cycle that this node joins with the first place, as a newcomer
        self._detail = ""  # of the previous cycle
        self._cause = ""  # the failure after which this agent decided to restart
        self._is_joining = False  # this node waits for the nodes of the next cycle
        self._late_timer: threading.Timer | None = None
        self._line: RestartLine | None = None  # of the last restart
        self.emit: Callable[[events.Event], object] = (
            lambda event: None
        )  # records facts that only this console finds out

    def take(self, record: Record) -> bool:
        """Print an event if it is for people. Always return True: the record file holds every event."""
        event = record.event
        if isinstance(event, events.RendezvousCompleted):
            self._rendezvous = event
        if isinstance(event, events.HangsWatched):
            self._watched = event
        self._follow(record)
        line = self._sentence(record)
        if line:
            self._show(event.level, line)
        if isinstance(event, events.CycleStarted) and event.why == "first" and self._watched is not None and line:
            self._show(event.level, watched_in_words(self._watched))
        if isinstance(event, events.CycleStarted):
            self.cause = None
        return True

    def found(self, record: InterruptionRecord) -> None:
        """Print that a rank failed, unless a restart line will name it."""
        if not self._restarts_all:
            rank = f"rank {record.rank}" + (f" on {record.node}" if record.node else "")
            self._show("error", f"{rank} failed ({cause_in_words(record)})")

    def suspected(self, rank: int, suspicion: events.HangSuspected) -> None:
        """Print that a rank may hang; one line for ranks that fall silent together."""
        now = time.monotonic()
        if now - self._suspected_at >= TOGETHER:
            self._suspected_at = now
            self._show(suspicion.level, suspicion_in_words(rank, suspicion))

    def losses(self, sentences: Sequence[str]) -> None:
        """Print which output of workers was lost, also with `--quiet`: the reader's copy lacks it."""
        for sentence in sentences:
            self._put(f"resilience run: {sentence}")

    def completed(self, message: str) -> None:
        """Print that the job is complete, on one node."""
        self._finish_line()
        if self.is_first and self._level <= LOG_LEVELS["INFO"]:
            self.last_words(message)

    def last_words(self, message: str) -> None:
        """Print why the job is over, at any level."""
        self._finish_line()
        if not self._is_quiet:
            self._put(message)

    @property
    def has_nodes(self) -> bool:
        """Return True if the job runs on several nodes."""
        return self._rendezvous is not None and self._rendezvous.nodes > 1

    def _finish_line(self) -> None:
        if self._line is not None:
            self._line.finish()

    def _put(self, message: str) -> None:
        terminal.put(self._descriptor, printable(f"{message}\n").encode(), time.monotonic() + PATIENCE)

    # -- restarts -------------------------------------------------------------------------------

    @property
    def is_first(self) -> bool:
        """Return True if this node prints what all nodes know."""
        return self._rendezvous is not None and self._rendezvous.group_rank == 0

    def _follow(self, record: Record) -> None:
        """Print the line of a restart when its cycle starts, or a line about the delay if its nodes come late."""
        event = record.event
        match event:
            case events.RestartDecided("restart"):
                self._cause = event.why
                self._reset_timer()
            case events.CyclePhaseStarted("rendezvous"):
                self._is_joining = True
                self._reset_timer()
            case events.CyclePhaseEnded("rendezvous"):
                self._is_joining = False
                self._reset_timer()
            case events.CycleEnded():
                self._detail = event.detail
            case _:  # no other event matters here
                pass
        if isinstance(event, events.CycleStarted):
            if (event.why if self.cause is None else self.cause.again) == "failure" and self.is_first:
                rendezvous, repeats = self._rendezvous, self.repeats
                detail = self._detail if self.cause is None else self.cause.detail
                assert rendezvous is not None
                self._line = telling.of_restart(
                    self._folder,
                    record.origin,
                    self.has_nodes,
                    lambda cause: self._show("warning", _restart_line(event, cause or detail, rendezvous, repeats)),
                    self.emit,
                )
            self._cause = self._detail = ""

    def _reset_timer(self) -> None:
        """Measure how long this node waits for other nodes. At a restart, workers may need long to stop before that."""
        if self._late_timer is not None:
            self._late_timer.cancel()
            self._late_timer = None
        if self._is_joining and (self._cause or (self._rendezvous is None and self._hosts_store)):
            self._late_timer = threading.Timer(SOON if self._cause else LATE, self._show_delay, (self._cause,))
            self._late_timer.daemon = True
            with contextlib.suppress(RuntimeError):  # this host or process has no thread left: no line about the wait
                self._late_timer.start()

    def _show_delay(self, cause: str) -> None:
        if cause:
            self._show("warning", f"{cause}; waiting for the nodes of the next cycle")
        else:
            self._show("info", f"waiting for the other nodes of the job ({LATE:g} s so far)")

    def _sentence(self, record: Record) -> str:
        """Return the line for an event; empty if people need not see it."""
        event = record.event
        match event:
            case events.CycleStarted(why) if self.is_first and self._rendezvous is not None and why != "failure":
                if why == "first":
                    again = None if self.cause is None else self.cause.again
                    after = f" after {_WHY[again]}" if again in _WHY else ""
                    return f"{_size(self._rendezvous)}{after}; records in {self._folder}"
                return f"all workers restart after {_WHY[why]}: {_size(self._rendezvous)}"
            case events.NodeUnhealthy(check, detail):
                return f"node {record.origin.node} is unhealthy ({check}): {detail}"
            case events.NodeWarned(check, detail):
                return f"node {record.origin.node}: warning ({check}): {detail}"
            case events.OutputLost("file", path, _, why, is_shown) if not self._has_said_unkept:
                self._has_said_unkept = True
                elsewhere = "; the terminal still shows it" if is_shown else ""
                return f"workers' output cannot be kept in {path}: {why}{elsewhere}"
            case events.DrainLost(pid, why):
                return f"process {pid}, which reads the workers' output, is gone ({why}); a new process replaces it"
            case events.DrainStopped(pid):
                return f"process {pid}, which reads the workers' output, was stopped; it continues now"
            case events.NodeExcluded(why):
                return f"node {record.origin.node} leaves the job: {why}"
            case events.ControlRequested(action, description, local_rank):
                return f"local rank {local_rank} asks for {action}" + (f": {description}" if description else "")
            case events.StopRequested():
                return _stop_line(event)
            case events.MonitorLost(pid, why):
                return f"monitor {pid} of rank {record.origin.initial_rank} is gone ({why}); a new monitor starts"
            case events.ModulesPreloaded(_, refused, why, is_learned=False) if refused:
                return f"{', '.join(refused)} cannot be preloaded ({why}); each worker imports it"
            case events.ModulesTooLate(modules, waited_s):
                are, them = ("is", "it") if len(modules) == 1 else ("are", "them")
                waited = f"still being imported (--preload) after {waited_s:g} s"
                return f"{', '.join(modules)} {are} {waited}; workers start without {them}"
            case events.VariablesTooLate(rank, package, names):
                return (
                    f"rank {rank} set {', '.join(names)} before it imported {package}, but a warm worker imports "
                    f"{package} in advance: no effect in this cycle; from the next cycle on, workers start cold. Set "
                    "it for the launcher, or use --cold"
                )
            case events.TimeoutsUnlearned():
                return unlearned_in_words(event)
            case events.StoreProcessLost(pid, why, is_job_store=False):
                return f"process {pid}, which hosts this node's stores, is gone ({why}); a new process replaces it"
            case events.StoreProcessStopped(pid):
                return f"process {pid}, which hosts this node's stores, was stopped; it continues now"
            case events.WorkersNotForked(why):
                return f"workers start cold this time: {why}"
            case events.ExportFailed(is_at_start=True) | events.ExportStarted():
                return notes.note(event) or ""
            case events.ZygoteLost(why):
                return f"workers start cold from now on: {why}"
            case _:  # no other event matters here
                pass
        return ""

    def _show(self, level: str, message: str) -> None:
        if self._is_quiet or LOG_LEVELS[level.upper()] < self._level:
            return
        if self._dropped:
            message = f"({count(self._dropped, 'line')} not shown) {message}"
        line = printable_line(" ".join(f"resilience run: {message}".split())).encode()[: LONGEST - 1] + b"\n"
        if terminal.put(self._descriptor, line, time.monotonic()) == len(line):
            self._dropped = 0
        else:
            self._dropped += 1


_WHY = {"membership": "a change of nodes", "request": "a request"}


def _restart_line(event: events.CycleStarted, cause: str, rendezvous: events.RendezvousCompleted, repeats: int) -> str:
    repeated = f", the same failure {repeats} times in a row" if repeats > 1 else ""
    return f"restart {event.restarts_used} of {event.max_restarts}: {cause}{repeated}, {_size(rendezvous)}"


def _stop_line(event: events.StopRequested) -> str:
    return (
        f"{'this node leaves' if event.leaves else 'the job stops'} ({event.source}); workers that call "
        f"resilience.stop_requested() have at most {event.grace_s:g} s for a last checkpoint, then all workers get the "
        "signal"
    )


def _size(rendezvous: events.RendezvousCompleted) -> str:
    return f"{count(rendezvous.world_size, 'rank')} on {count(rendezvous.nodes, 'node')}"
