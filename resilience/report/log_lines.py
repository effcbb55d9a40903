"""What did ranks log around each incident?  A bounded number of readable lines for the HTML page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from resilience.attribution.incident import Incident
from resilience.history.clocks import NodeClock
from resilience.run_folder.entries import utc
from resilience.run_folder.lines import line_text
from resilience.run_folder.load import RECORDS
from resilience.run_folder.merge import LOGS, OUTPUT, LineFilter, MergedLines, window

MOST_INCIDENTS = 20  # incidents with log lines
MOST_LINES = 200  # of one incident
MOST_BYTES = 128 << 20  # of record, log and output files; a larger run needs `resilience logs`
LONGEST = 500  # characters of a line


def lines_around(folder: Path, incidents: Sequence[Incident], clocks: tuple[NodeClock, ...]) -> dict[int, list[str]]:
    """Return the lines that programs wrote around the first incidents, by incident number. clocks: of the run's nodes.

    Empty if the run is too large to read again. MOST_LINES + 1 lines mean that there are more."""
    windows = {
        incident.number: around for incident in incidents[:MOST_INCIDENTS] if (around := window(incident)) is not None
    }
    if not windows or _size(folder) > MOST_BYTES:
        return {}
    choice = LineFilter(
        kinds=frozenset(("log", "text")),
        since_ns=min(begin for begin, _ in windows.values()),
        until_ns=max(end for _, end in windows.values()),
    )
    lines: dict[int, list[str]] = {number: [] for number in windows}
    for line in MergedLines(folder, choice, clocks):
        for number, (begin, end) in windows.items():
            if begin <= line.at_ns <= end and len(lines[number]) <= MOST_LINES:
                speaker = f"rank {line.rank}" if line.rank is not None else line.node or line.file
                lines[number].append(f"{utc(line.at_ns)[11:23]} {line.level:8} {speaker:9} {line_text(line)}"[:LONGEST])
    return {number: texts for number, texts in lines.items() if texts}


def _size(folder: Path) -> int:
    """Return the size of a run's line files in bytes. Counting stops above MOST_BYTES."""
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
