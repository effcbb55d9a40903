"""How does one restart look on a terminal?  Phase by phase, with its critical path."""

from __future__ import annotations

from collections.abc import Iterator

from resilience.attribution.waterfall import MEETINGS, NOTICE, PhaseRow, Step, Waterfall
from resilience.facts.in_words import count, seconds
from resilience.history.phases import who_in_words
from resilience.system.render import Line, cut, date, phase_name, wrap

_NAME = 14
_NUMBERS = 30  # columns of the table's numbers
STEPS = 12  # shown of the critical path: the longest ones


def waterfall_lines(restart: Waterfall, width: int) -> Iterator[Line]:
    """Yield one restart for a terminal of `width` columns."""
    yield (
        (f"Restart after incident {restart.incident}", "bold"),
        (f"  {restart.kind}, {date(restart.start_ns)}", "dim"),
    )
    for text in wrap(summary(restart), width - 2):
        yield ((f"  {text}", "bold"),)
    yield ()
    bar = max(10, width - _NAME - _NUMBERS - 4)
    scale = f"0{seconds(restart.seconds):>{bar - 1}}"
    yield ((f"  {'':{_NAME}}{scale}  {'median':>8}{'slowest':>9}", "dim"),)
    for row in restart.rows:
        times = f"{seconds(row.median_s):>8} {seconds(row.max_s):>8}  "
        numbers = times + cut(who_in_words(row.slowest), max(0, 28 - len(times)))
        before, full, light = _bar(row, restart.seconds, bar)
        after = " " * (bar - before - full - light)
        yield (
            (f"  {phase_name(row.name):{_NAME}}{' ' * before}", ""),
            ("█" * full, "cyan"),
            ("░" * light, "yellow"),
            (f"{after}  {numbers}", ""),
        )
    yield ((f"  {'':{_NAME}}█ until half had finished the phase, ░ until the last one had", "dim"),)
    yield ()
    yield (("  Critical path", "bold"),)
    longest_steps = sorted(sorted(restart.path, key=lambda step: -step.seconds)[:STEPS], key=lambda step: step.start_ns)
    for step in longest_steps:
        at = (step.start_ns - restart.start_ns) / 1e9
        share = round(100 * step.seconds / restart.seconds) if restart.seconds else 0
        text = f"  {seconds(at):>9}  {seconds(step.seconds):>9} {share:>3} %  {_step_in_words(step)}"
        yield ((cut(text, width), "bold" if step == restart.longest else ""),)
    if len(restart.path) > STEPS:
        yield ((f"  … and {count(len(restart.path) - STEPS, 'shorter step')}", "dim"),)
    if restart.trace_id:
        yield ((f"  Trace {restart.trace_id}", "dim"),)
    if restart.left_out:
        nodes = cut(", ".join(restart.left_out), 60)
        yield ((f"  Without {nodes}: a clock was set during the run, so its times cannot be compared.", "dim"),)
    elif restart.uncertainty_s is not None:
        yield ((f"  Clocks of two nodes may differ by {seconds(restart.uncertainty_s)}.", "dim"),)


def summary(restart: Waterfall) -> str:
    """Return one sentence on where most of the time went."""
    longest = restart.longest
    if longest is None:
        return f"{seconds(restart.seconds)} in all"
    return f"of {seconds(restart.seconds)}, {seconds(longest.seconds)} {_step_in_words(longest)}"


def _step_in_words(step: Step) -> str:
    if step.name == NOTICE:
        return f"until {who_in_words(step.who)} was notified"
    if step.name in MEETINGS:
        return f"in {step.name}, after the last rank or node arrived"
    return f"waiting for {who_in_words(step.who)} in {phase_name(step.name)}"


def _bar(row: PhaseRow, total: float, size: int) -> tuple[int, int, int]:
    """Return the columns before the bar, in its full part and in its light part. The bar is never empty."""
    scale = size / total if total > 0 else 0.0
    start = min(size - 1, round(row.start_s * scale))
    half = max(start + 1, min(size, round(row.half_s * scale)))
    return start, half - start, max(half, min(size, round(row.end_s * scale))) - half
