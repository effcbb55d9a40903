"""What do users of Python's `logging` see of restarts, and what does a person at the terminal read of a rank?

The logger `resilience` warns once per restart on each rank, for users who look there. Without a handler
of their own it is silent. On standard error one rank says where the records are, what is watched for hangs, who failed
first in each restart, and which command explains the run. No line waits for its reader; RESILIENCE_QUIET=1 switches all
of them off. The record files have all of it in any case."""

from __future__ import annotations

import atexit
import logging
import os
import sys
from pathlib import Path

from resilience.adapters import terminal
from resilience.adapters.environment import Launcher, is_quiet
from resilience.core import events
from resilience.core.attribution import Exit
from resilience.core.printable import printable
from resilience.core.records import Record
from resilience.core.watched import watched_in_words

LOGGER = logging.getLogger("resilience")
LOGGER.addHandler(logging.NullHandler())  # else Python itself writes warnings to stderr


class StandardLog:
    """A sink of one rank's emitter. Records may come from its main thread and its watcher."""

    def __init__(self) -> None:
        self._own = ""  # this rank's failure in the present iteration
        self._first: int | None = None  # initial rank of the first record in the store

    def take(self, record: Record) -> bool:
        """Log a restart when this rank is about to regroup for it. Always taken."""
        match record.event:
            case events.Interrupted(found) if found.rank == record.origin.initial_rank:
                self._own = found.message
            case events.OutcomeSeen(by):
                self._first = by
            case events.IterationEnded("interrupted"):
                LOGGER.warning("%s", self._sentence(record))
                self._own, self._first = "", None
            case events.ConfigurationAdvised(advice):
                show(advice)
            case events.HangsWatched() if not Launcher.from_environment().policy:  # our launcher has told it
                show(watched_in_words(record.event))
        return True

    def _sentence(self, record: Record) -> str:
        rank = record.origin.initial_rank
        if self._own:
            why = f"this rank failed: {self._own}"
        elif self._first is None:
            why = "another rank failed"
        else:
            why = f"rank {self._first} failed"
        return f"rank {rank} restarts after iteration {record.origin.iteration}: {why}"


def show(line: str) -> None:
    """Write a line for the person at this rank's terminal, if the reader takes it now."""
    if not is_quiet():
        terminal.say(sys.stderr, printable(f"resilience: {line}\n"))


class Ending:
    """The line at the end of a job without the launcher: how it ended, and the command that explains it.

    The process that was rank 0 last says it when its interpreter ends. If that process is killed within the call, its
    monitor says it where stderr is a terminal: `end_of_killed`."""

    def __init__(self) -> None:
        self._pid = 0
        self._line = ""

    def ended(self, folder: Path, restarts: int, error: str) -> None:
        """A call ended on rank 0. restarts: in place, in this call. error: what left it, empty if it completed."""
        how = "completed" if not error else f"failed ({error.partition(':')[0]})"
        count = f" after {restarts} restart{'' if restarts == 1 else 's'} in place" if restarts else ""
        self._line = _end(how + count, folder)
        self._pid = os.getpid()

    def say(self) -> None:
        """Say it, if a call has ended here."""
        if self._pid == os.getpid():  # a child that was forked without another program ends its interpreter too
            show(self._line)


def end_of_killed(terminal_path: str, folder: Path, status: Exit) -> None:
    """Say that the job ended with the process of rank 0. status: how that process ended."""
    how = status.signal or ("exit status unknown" if status.code is None else f"exit code {status.code}")
    terminal.say_at(terminal_path, printable(f"resilience: {_end(f'rank 0 was ended ({how})', folder)}\n"))


def _end(how: str, folder: Path) -> str:
    return f"{how}; to see what happened:\n  resilience report {folder}"


ENDING = Ending()
atexit.register(ENDING.say)  # here and not in a call, which leaves nothing behind
