"""How far can the timeline of a run be trusted?  Notes on clocks, on unparsed lines and on unreadable files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from resilience.facts.in_words import count, seconds
from resilience.history.clocks import largest_difference_ns
from resilience.run_folder.load import RECORDS, unlisted_in
from resilience.run_folder.merge import LOGS, OUTPUT, MergedLines
from resilience.system.render import cut

_NAMED = 5  # files named in a note


def clock_notes(timeline: MergedLines) -> Iterator[str]:
    """Yield notes on clock corrections and on how far the order of lines can be trusted."""
    if not timeline.clocks:
        return
    corrected = [clock for clock in timeline.clocks if clock.offset_ns]
    for clock in corrected[:_NAMED]:
        bound = "" if clock.uncertainty_ns is None else f" ± {seconds(clock.uncertainty_ns / 1e9)}"
        direction = "ahead" if clock.offset_ns > 0 else "behind"
        yield f"the clock of {clock.node} was {seconds(abs(clock.offset_ns) / 1e9)}{bound} {direction}; corrected"
    if len(corrected) > _NAMED:
        yield f"… and {count(len(corrected) - _NAMED, 'more clock')}"
    were_set = [clock.node for clock in timeline.clocks if clock.was_set]
    if were_set:
        # Of two clocks, nothing shows which one was set.
        names = (
            " or ".join(clock.node for clock in timeline.clocks) if len(timeline.clocks) == 2 else ", ".join(were_set)
        )
        yield f"the clock of {cut(names, 60)} was set during the run: not corrected, its lines may be out of order"
    unknown = [clock.node for clock in timeline.clocks if clock.uncertainty_ns is None]
    known = [clock for clock in timeline.clocks if clock.uncertainty_ns is not None and not clock.was_set]
    largest = largest_difference_ns(known)
    if largest is not None:
        precision = f"to within {seconds(largest / 1e9)}"
        compared = f"{len(known)} of " if len(known) < len(timeline.clocks) else ""
        nodes = f"{compared}{count(len(timeline.clocks), 'node')}"
        yield f"{nodes}: their clocks agree {precision}, by {_barriers(timeline)}"
    if unknown:
        named = cut(", ".join(unknown), 60)
        yield f"the clock of {named} cannot be compared: its lines are placed by its own time"


def _barriers(timeline: MergedLines) -> str:
    return count(max(clock.meetings for clock in timeline.clocks), "barrier") + " of all ranks"


def unparsed_notes(timeline: MergedLines) -> Iterator[str]:
    """Yield notes on lines that could not be parsed, and on folders and files that could not be read."""
    bad = timeline.bad
    if bad:
        names = ", ".join(f"{name} ({number})" for name, number in sorted(bad.items())[:_NAMED])
        more = f" and {count(len(bad) - _NAMED, 'more file')}" if len(bad) > _NAMED else ""
        yield f"{count(sum(bad.values()), 'line')} could not be parsed, shown unchanged: {names}{more}"
    yield from unlisted_notes(timeline.folder)
    for name, reason in sorted(timeline.unreadable.items())[:_NAMED]:
        yield f"{name} {reason}"


def unlisted_notes(folder: Path) -> Iterator[str]:
    """Yield notes on folders of a run that could not be read."""
    for unlisted in unlisted_in(folder, RECORDS, LOGS, OUTPUT):
        yield f"{unlisted.file} {unlisted.what}"
