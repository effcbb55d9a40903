"""Writes a rank's file of histograms, from durations that a test names."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from resilience.facts import encoding
from resilience.facts.deadlines import HEARTBEAT, of_section
from resilience.system import files
from resilience.telemetry.durations import Durations, Header, Series
from resilience.telemetry.timings import Histogram, Timings


def write(folder: Path, node: str, rank: int, timings: Timings) -> Path:
    """Write the file that the rank's monitor would have left in this run folder; return its path."""
    path = folder / "timings" / f"{node}-{rank}.hist"
    assert files.replace(path, encoding.to_json(durations_of(timings, folder.name, node, rank)))
    return path


def add_durations(timings: Timings, entries: Iterable[tuple[str, float]]) -> None:
    """Add (name, duration in seconds) pairs."""
    for name, duration in entries:
        timings.sections.setdefault(name, Histogram()).add(duration)


def add_failed(timings: Timings, entries: Iterable[tuple[str, float]]) -> None:
    """Add (name, duration in seconds) pairs of sections that an exception left."""
    for name, duration in entries:
        timings.failed.setdefault(name, Histogram()).add(duration)


def durations_of(timings: Timings, run: str = "run", node: str = "node", rank: int = 0) -> Durations:
    """Return what a rank with these histograms has recorded."""
    deadlines: dict[str, Series] = {}
    for name, histogram in timings.sections.items():
        deadlines.setdefault(_deadline(name), Series()).total = histogram
    for name, histogram in timings.failed.items():
        deadlines.setdefault(_deadline(name), Series()).failed = histogram
    return Durations(header=Header(run=run, node=node, rank=rank, world_size=1), began_at=0.0, deadlines=deadlines)


def _deadline(name: str) -> str:
    return of_section(name) if name else HEARTBEAT
