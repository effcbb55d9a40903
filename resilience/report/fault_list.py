"""How do faults that occurred repeatedly look on a terminal?  A list, the most expensive first."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from resilience.attribution.symptoms import CLASSES
from resilience.facts.in_words import count, seconds
from resilience.report.repeats import KnownRun, RepeatedFault
from resilience.report.terminal import rework_unknown_in_words
from resilience.run_folder.load import incomplete_in_words
from resilience.system.render import Line, cut, date, field, wrap

NAMED = 4  # runs, nodes or ranks of one fault; the others are only counted


def incomplete_lines(known: Iterable[KnownRun], width: int, most: int | None) -> Iterator[Line]:
    """Yield at most `most` runs whose records are incomplete: they may have more incidents."""
    incomplete = [run for run in known if not run.completeness.has_all_records]
    for run in incomplete[:most]:
        text = f"{run.name} is {incomplete_in_words(run.completeness)}"
        yield from (((line, "bold yellow"),) for line in wrap(text, width))
    if most is not None and len(incomplete) > most:
        yield ((f"{count(len(incomplete) - most, 'more incomplete run')}: --all shows them", "dim"),)


def fault_lines(repeated: list[RepeatedFault], runs: int, width: int, most: int | None) -> Iterator[Line]:
    """Yield at most `most` faults for a terminal of `width` columns."""
    total = sum(fault.count for fault in repeated)
    yield ((f"{count(total, 'incident')} of {count(len(repeated), 'fault')} in {count(runs, 'run')}", "bold"),)
    for fault in repeated[:most]:
        yield ()
        cost = "cost unknown" if fault.lost_s is None else f"{seconds(fault.lost_s)} lost"
        title = f"{fault.fingerprint}  {fault.count} x {CLASSES[fault.what]}, {cost}"
        yield ((cut(title, width), "bold"),)
        if fault.unknown_rework:
            yield from field("cost", rework_unknown_in_words(fault.unknown_rework), width)
        if fault.cause:
            yield from field("cause", fault.cause, width)
        if len(fault.runs) > 1:
            later = _named(fault.runs, fault.first_run)
            yield from field("seen", f"before in run {fault.first_run}, then in {later}", width)
        elif fault.runs:
            yield from field("seen", f"in run {fault.first_run}", width)
        until = "" if fault.first_ns == fault.last_ns else f" to {date(fault.last_ns)}"
        yield from field("when", f"{date(fault.first_ns)}{until}", width)
        if fault.nodes:
            yield from field("nodes", _counted(fault.nodes), width)
        if fault.ranks:
            yield from field("ranks", _counted(fault.ranks), width)
    if most is not None and len(repeated) > most:
        yield ()
        yield ((f"{count(len(repeated) - most, 'more fault')}: --all shows them", "dim"),)


def _named(runs: dict[str, int], first: str) -> str:
    later_runs = [run for run in runs if run != first]
    more_note = f" and {len(later_runs) - NAMED} more" if len(later_runs) > NAMED else ""
    return ", ".join(later_runs[:NAMED]) + more_note


def _counted(counts: dict[str, int] | dict[int, int]) -> str:
    ordered = sorted(counts.items(), key=lambda item: (-item[1], str(item[0])))
    more_note = f", {len(ordered) - NAMED} more" if len(ordered) > NAMED else ""
    return ", ".join(f"{name} ({number} x)" for name, number in ordered[:NAMED]) + more_note
