"""What do users of Python's `logging` see of restarts, and what does a person at the terminal read of a rank?

The logger `resilience` warns once per restart on each rank, for users who look there. Without a handler
of their own it is silent. Advice about the configuration, and what is watched for hangs, is one line each on standard
error. All of them are views of records, which are kept in the record file in any case."""

from __future__ import annotations

import logging
import sys

from resilience.adapters.environment import Launcher
from resilience.core import events
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
    """Write a line for the person at this rank's terminal."""
    try:
        sys.stderr.write(printable(f"resilience: {line}\n"))
    except (OSError, ValueError, AttributeError):
        pass  # closed, full, or none at all
