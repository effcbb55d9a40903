"""What did ranks log around each incident?  For the page, a bounded number of lines, as a person would read them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from resilience.analysis.entries import utc
from resilience.analysis.lines import said
from resilience.analysis.load import RECORDS
from resilience.analysis.merge import LOGS, OUTPUT, Choice, Timeline, window
from resilience.attribution.incident import Incident

MOST_INCIDENTS = 20  # whose lines are shown
MOST_LINES = 200  # of one incident
MOST_BYTES = 128 << 20  # of a run whose lines are read for this; a larger one has `resilience logs`
LONGEST = 500  # characters of a line


def lines_around(folder: Path, incidents: Sequence[Incident]) -> dict[int, list[str]]:
    """Return the lines that programs wrote around the first incidents, by the incident's number.

    Empty for a run that is too large to be read once more. One line more than MOST_LINES says that there are more."""
    windows = {each.number: found for each in incidents[:MOST_INCIDENTS] if (found := window(each)) is not None}
    if not windows or _size(folder) > MOST_BYTES:
        return {}
    choice = Choice(
        kinds=frozenset(("log", "text")),
        since_ns=min(begin for begin, _ in windows.values()),
        until_ns=max(end for _, end in windows.values()),
    )
    lines: dict[int, list[str]] = {number: [] for number in windows}
    for line in Timeline(folder, choice):
        for number, (begin, end) in windows.items():
            if begin <= line.at_ns <= end and len(lines[number]) <= MOST_LINES:
                whose = f"rank {line.rank}" if line.rank is not None else line.node or line.file
                lines[number].append(f"{utc(line.at_ns)[11:23]} {line.level:8} {whose:9} {said(line)}"[:LONGEST])
    return {number: found for number, found in lines.items() if found}


def _size(folder: Path) -> int:
    """Return how many bytes the lines of a run have, at least; reading stops where they are too many."""
    total = 0
    for name in (RECORDS, LOGS, OUTPUT):
        try:
            for path in (folder / name).rglob("*"):
                total += path.stat().st_size
                if total > MOST_BYTES:
                    return total
        except OSError:
            continue
    return total
