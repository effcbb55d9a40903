"""What appears in Python's `logging` about restarts, and on the terminal about a rank?

The logger `resilience` warns once per restart on each rank, for users who look there. Without a handler of the user's
it is silent. On standard error, one rank prints where the records are, what is watched for hangs, which rank failed
first in each restart, and which command explains the run. No line waits for its reader; RESILIENCE_QUIET=1 switches all
of them off. The record files contain everything in any case."""

from __future__ import annotations

import atexit
import logging
import os
import sys
from pathlib import Path

from resilience.core.watched import watched_in_words
from resilience.facts import events
from resilience.facts.in_words import count
from resilience.facts.interruptions import Exit
from resilience.facts.printable import printable
from resilience.facts.records import Record
from resilience.system import terminal
from resilience.system.environment import Launcher, is_quiet

LOGGER = logging.getLogger("resilience")
LOGGER.addHandler(logging.NullHandler())  # otherwise Python itself writes warnings to stderr


def finalize_failed(function: str, error: BaseException) -> None:
    """Log that a function of ThreadedFinalize raised, with its traceback."""
    LOGGER.warning("finalize function %s raised; the restart continues", function, exc_info=error)


class StandardLog:
    """A sink of one rank's emitter. Called from the main thread and the watcher."""

    def __init__(self) -> None:
        self._failure = ""  # this rank's failure in the current iteration
        self._first = ""  # what the first record in the store shows

    def take(self, record: Record) -> bool:
        """Log a restart when this rank is about to regroup for it. Always return True."""
        match record.event:
            case events.RankInterrupted(interruption) if interruption.rank == record.origin.initial_rank:
                if interruption.origin in ("own", None):  # otherwise it may only have lost its peer
                    self._failure = interruption.message
            case events.IterationDecided(by=int(by), is_own=is_own):
                self._first = f"rank {by} failed" if is_own else f"rank {by} was reported first"
            case events.IterationEnded("interrupted"):
                LOGGER.warning("%s", self._sentence(record))
                self._failure = self._first = ""
            case events.ConfigurationAdvised(advice):
                show(advice)
            case events.TimeoutsLoaded() | events.HangsWatched() if Launcher.from_environment().policy:
                pass  # our launcher has printed it
            case events.TimeoutsLoaded(source, note=note) if note:
                show(f"RESILIENCE_TIMEOUTS={source}: {note}")
            case events.HangsWatched():
                show(watched_in_words(record.event))
            case _:  # no other event matters here
                pass
        return True

    def _sentence(self, record: Record) -> str:
        rank = record.origin.initial_rank
        reason = f"this rank failed: {self._failure}" if self._failure else self._first or "another rank failed"
        return f"rank {rank} restarts after iteration {record.origin.iteration}: {reason}"


def show(line: str) -> None:
    """Write a line to this rank's terminal, if the reader takes it immediately."""
    if not is_quiet():
        terminal.say(sys.stderr, printable(f"resilience: {line}\n"))


class JobEnd:
    """The line at the end of a job without the launcher: how it ended, and the command that explains it.

    The process that was rank 0 last prints it when its interpreter exits. If that process is killed within the call,
    its monitor prints it if stderr is a terminal: `end_of_killed`."""

    def __init__(self) -> None:
        self._pid = 0
        self._line = ""

    def ended(self, folder: Path, restarts: int, error: str) -> None:
        """Note that a call ended on rank 0. restarts: in place, in this call. error: the type of the exception that
        ended it, empty if the call completed."""
        outcome = "completed" if not error else f"failed ({error})"
        after = f" after {count(restarts, 'restart')} in place" if restarts else ""
        self._line = _end_line(outcome + after, folder)
        self._pid = os.getpid()

    def say(self) -> None:
        """Print the line, if a call has ended in this process."""
        if self._pid == os.getpid():  # a forked child that runs no other program exits its interpreter too
            show(self._line)


def end_of_killed(terminal_path: str, folder: Path, status: Exit) -> None:
    """Print that the job ended with the process of rank 0. status: how that process ended."""
    ending = status.signal or ("exit status unknown" if status.code is None else f"exit code {status.code}")
    terminal.say_at(terminal_path, printable(f"resilience: {_end_line(f'rank 0 ended ({ending})', folder)}\n"))


def _end_line(outcome: str, folder: Path) -> str:
    return f"{outcome}; to see what happened:\n  resilience report {folder}"


ENDING = JobEnd()
atexit.register(ENDING.say)  # here and not in a call, because a call must leave nothing behind
