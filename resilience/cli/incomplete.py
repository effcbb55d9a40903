"""Which records of a run are missing?  One line on stderr, in the words of the report.

For commands whose output has no place for it: a restart, spans, rows of a query, one incident."""

from __future__ import annotations

from pathlib import Path

from resilience.history.completeness import Completeness
from resilience.history.history import History
from resilience.run_folder.load import Reader, incomplete_in_words
from resilience.run_folder.merge import history_of
from resilience.system.render import complain


def say_incomplete(folder: Path, completeness: Completeness) -> None:
    """Write the line if records are missing."""
    if not completeness.is_whole:
        complain(f"{folder} is {incomplete_in_words(completeness)}")


def checked_history(folder: Path) -> History:
    """Return the history of a run; write the line if records are missing."""
    reader = Reader(folder)
    history = history_of(folder, reader.records)
    say_incomplete(folder, reader.completeness)
    return history
