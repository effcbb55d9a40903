"""How long did the ranks' sections, steps and heartbeat intervals take?  The histograms of a run folder, file by file.

A file that cannot be read is left out and noted, so that a reader can say what its numbers lack."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from resilience.errors import DecodeError
from resilience.run_folder.load import TIMINGS, Missing, reason_in_words
from resilience.telemetry import durations
from resilience.telemetry.durations import Durations

HISTOGRAMS = ".hist"


class TimingsReader:
    """Reads the histograms of a run folder, one file in memory at a time. No content of the folder raises.

    unread: what could not be read so far, by file."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / TIMINGS
        self.unread: dict[str, Missing] = {}

    @property
    def histograms(self) -> Iterator[tuple[Path, Durations]]:
        """Yield the path and content of each readable file, by name."""
        for path in self._listed():
            if path.suffix == durations.UNREADABLE:
                self._note(path, "was damaged when the run continued it")
            elif path.suffix == HISTOGRAMS:
                try:
                    recorded = durations.read_histograms(path)
                except (OSError, DecodeError) as error:
                    self.note(path, error)
                else:
                    yield path, recorded

    def _listed(self) -> list[Path]:
        try:
            return sorted(self._folder.iterdir())
        except FileNotFoundError:
            return []  # nothing has been written
        except OSError as error:
            self.unread[TIMINGS] = Missing(TIMINGS, reason_in_words(error))
            return []

    def note(self, path: Path, error: Exception) -> None:
        """Note a file of the folder that cannot be read, or only in part."""
        self._note(path, reason_in_words(error))

    def _note(self, path: Path, reason: str) -> None:
        self.unread[path.name] = Missing(f"{TIMINGS}/{path.name}", reason)
