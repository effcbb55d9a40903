"""The drawings of `resilience report --html`: lanes, lost time, waterfalls, durations against their limits.

They are inline SVG. Zooming stretches only the inner drawing of the lanes, so names stay in place. Shapes are at least
one pixel wide."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from resilience.attribution.advice import ranks_in_words
from resilience.attribution.cost import Times, time_unknown_in_words
from resilience.attribution.waterfall import Waterfall
from resilience.facts.in_words import count, seconds
from resilience.facts.printable import escape
from resilience.history.phases import TimedPhase
from resilience.history.wrapped_rank import CAUSES
from resilience.report.rank_lanes import Lane, LaneChart, LaneStretch, Mark
from resilience.report.sections import SectionSummary
from resilience.report.throughput import Rate
from resilience.system.render import clock, phase_name

Moment = Callable[[int | None], str]
WIDTH, LANE, LEFT, RIGHT = 1000, 20, 150, 990
UNITS = 1_000_000  # width of the inner drawing; fine enough for a zoom of 2000
TICKS = 6
MOST_RECTS = 8000  # stretches with a title each; above this number, equal kinds of a lane become one shape
WORDS = {"startup": "start-up", "hang": "silence", "rework": "repeated steps"}


# -- lanes -----------------------------------------------------------------------------------------


def lanes_figure(lane_chart: LaneChart, moment: Moment = clock) -> str:
    """Return the lanes with their legend, and the same content as text. moment: writes a time."""
    visible_lanes = lane_chart.lanes
    stretches = [stretch for lane in visible_lanes for stretch in lane.stretches]
    if not stretches:
        return '<p class="dim">The records contain no iteration or worker.</p>'
    first = min(stretch.begin_ns for stretch in stretches)
    last = max(*(stretch.end_ns for stretch in stretches), first + 1)
    height = LANE * len(visible_lanes)
    is_many = len(stretches) > MOST_RECTS
    scale = _Scale(first, last)
    lanes = "".join(_lane(lane, number * LANE, scale, is_many, moment) for number, lane in enumerate(visible_lanes))
    names = "".join(
        f'<text x="4" y="{number * LANE + 14}">{escape(_name(lane))}</text>'
        for number, lane in enumerate(visible_lanes)
    )
    width = RIGHT - LEFT
    svg = (
        f'<svg id="lanes" viewBox="0 0 {WIDTH} {height + 22}" role="img" tabindex="0" '
        f'data-span="{(last - first) / 1e9}" '
        'aria-label="Ranks over time: iterations, the phases between them, and what went wrong">'
        f'{_grid(first, last, height)}{names}<svg id="bars" x="{LEFT}" y="0" width="{width}" height="{height}" '
        f'viewBox="0 0 {UNITS} {height}" preserveAspectRatio="none">{lanes}</svg></svg>'
    )
    left_out = ""
    if lane_chart.left_out:
        left_out = (
            f'<p class="dim">Not drawn: {count(len(lane_chart.left_out), "rank")} '
            f"({escape(ranks_in_words(lane_chart.left_out, 20))}), because there are too many different lanes.</p>"
        )
    return f'{_tools()}<div class="scroll">{svg}</div>{_LEGEND}{left_out}{_lanes_table(visible_lanes, moment)}'


def throughput_figure(rates: Sequence[Rate], lane_chart: LaneChart, moment: Moment = clock) -> str:
    """Return the steps per second over the time of the lanes; "" if no steps are recorded."""
    stretches = [stretch for lane in lane_chart.lanes for stretch in lane.stretches]
    highest = max((rate.steps_a_second for rate in rates), default=0.0)
    if not stretches or not highest:
        return ""
    first = min(stretch.begin_ns for stretch in stretches)
    scale = _Scale(first, max(*(stretch.end_ns for stretch in stretches), first + 1))
    width, height = (RIGHT - LEFT) / UNITS, 60
    bars = []
    for rate in rates:
        begin, end = (LEFT + scale(at) * width for at in (rate.begin_ns, rate.end_ns))
        tall = rate.steps_a_second / highest * (height - 4)
        bars.append(
            f'<rect class="bin" x="{begin:.1f}" y="{height - tall:.1f}" width="{max(1.0, end - begin - 1):.1f}" '
            f'height="{tall:.1f}"><title>{moment(rate.begin_ns)} to {moment(rate.end_ns)}: '
            f"{rate.steps_a_second:.3g} steps per second</title></rect>"
        )
    numbers = ", ".join(f"{moment(rate.begin_ns)} {rate.steps_a_second:.3g}" for rate in rates)
    return (
        f'<h3>Steps per second</h3><div class="scroll"><svg id="throughput" viewBox="0 0 {WIDTH} {height + 2}" '
        f'role="img" aria-label="Steps per second over time, at most {highest:.3g}">'
        f'<text x="4" y="14">at most {highest:.3g}</text>'
        f'<line class="grid" x1="{LEFT}" x2="{RIGHT}" y1="{height}" y2="{height}"/>{"".join(bars)}</svg></div>'
        f"<details><summary>Steps per second in numbers</summary><p>{numbers}</p></details>"
    )


class _Scale:
    def __init__(self, first: int, last: int) -> None:
        self._first, self._span = first, last - first

    def __call__(self, at: int) -> int:
        return round(min(max(0.0, (at - self._first) / self._span), 1.0) * UNITS)


def _name(lane: Lane) -> str:
    name = ("rank " if len(lane.ranks) == 1 else "ranks ") + ranks_in_words(lane.ranks)
    return name if len(name) < 22 else f"{len(lane.ranks):,} ranks"


def _grid(first: int, last: int, height: int) -> str:
    parts = []
    for tick in range(TICKS):
        x = LEFT + (RIGHT - LEFT) * tick / (TICKS - 1)
        at = (last - first) / 1e9 * tick / (TICKS - 1)
        parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{height}"/>')
        anchor = "end" if tick == TICKS - 1 else "middle"
        parts.append(
            f'<text class="dim tick" x="{x:.1f}" y="{height + 15}" text-anchor="{anchor}">{seconds(at)}</text>'
        )
    return "".join(parts)


def _lane(lane: Lane, y: int, x: _Scale, is_many: bool, moment: Moment) -> str:
    parts = [
        _merged_shapes(lane.stretches, y, x) if is_many else _single_shapes(lane.stretches, y, x),
        _phases(lane.phases, y, x),
    ]
    for mark in lane.marks:
        parts += [_silent(silent, y, x) for silent in mark.silent]
    for mark in lane.marks:
        kind = "own" if mark.is_own else "echo"
        title = f"<title>{escape(_mark_in_words(mark, moment))}</title>"
        parts.append(f'<path class="mark {kind}" d="M{x(mark.at_ns)} {y + LANE // 2}h0">{title}</path>')
    return f'<g data-say="{escape(_lane_in_words(lane, moment))}">{"".join(parts)}</g>'


def _single_shapes(stretches: Iterable[LaneStretch], y: int, x: _Scale) -> str:
    return "".join(
        f'<rect class="{stretch.kind}" x="{x(stretch.begin_ns)}" y="{y + 3}" '
        f'width="{max(1, x(stretch.end_ns) - x(stretch.begin_ns))}" height="{LANE - 6}"><title>'
        f"{escape(stretch.label)}: {stretch.kind} after {seconds((stretch.end_ns - stretch.begin_ns) / 1e9)}"
        "</title></rect>"
        for stretch in stretches
    )


def _merged_shapes(stretches: Iterable[LaneStretch], y: int, x: _Scale) -> str:
    shapes: dict[str, list[str]] = {}
    for stretch in stretches:
        begin, end = x(stretch.begin_ns), x(stretch.end_ns)
        shapes.setdefault(stretch.kind, []).append(f"M{begin} {y + 3}H{max(end, begin + 1)}v{LANE - 6}H{begin}z")
    return "".join(
        f'<path class="{kind}" d="{"".join(shape)}"><title>{count(len(shape), "time")} {kind}</title></path>'
        for kind, shape in shapes.items()
    )


def _phases(phases: Iterable[TimedPhase], y: int, x: _Scale) -> str:
    """Return one path per phase name of a lane. It lies below the middle, in the gaps between iterations."""
    shapes: dict[str, list[str]] = {}
    durations: dict[str, list[float]] = {}
    for phase in phases:
        begin, end = x(phase.start_ns), x(phase.end_ns)
        shapes.setdefault(phase.name, []).append(f"M{begin} {y + LANE - 5}H{max(end, begin + 1)}")
        durations.setdefault(phase.name, []).append(phase.seconds)
    return "".join(
        f'<path class="phase {name}" d="{"".join(shape)}"><title>{phase_name(name)}: {count(len(shape), "time")}, '
        f"{seconds(sum(durations[name]))} in total, at most {seconds(max(durations[name]))}</title></path>"
        for name, shape in shapes.items()
    )


def _silent(stretch: LaneStretch, y: int, x: _Scale) -> str:
    begin, end = x(stretch.begin_ns), x(stretch.end_ns)
    return (
        f'<rect class="section" x="{begin}" y="{y + 6}" width="{max(1, end - begin)}" height="{LANE - 12}"><title>'
        f"{escape(stretch.label)}</title></rect>"
    )


def _mark_in_words(mark: Mark, moment: Moment) -> str:
    ranks = "" if mark.ranks == 1 else f"{mark.ranks} ranks, "
    silent = "".join(f"; {stretch.label}" for stretch in mark.silent)
    return f"{moment(mark.at_ns)} {ranks}{'its own fault' if mark.is_own else 'consequence'}: {mark.label}{silent}"


def _lane_in_words(lane: Lane, moment: Moment) -> str:
    """Return a lane as text."""
    ends: dict[str, int] = {}
    for stretch in lane.stretches:
        ends[stretch.kind] = ends.get(stretch.kind, 0) + 1
    endings = ", ".join(f"{number} {kind}" for kind, number in ends.items())
    marks = "".join(f"; {_mark_in_words(mark, moment)}" for mark in lane.marks[:3])
    more = f"; {len(lane.marks) - 3} more" if len(lane.marks) > 3 else ""
    name = ("rank " if len(lane.ranks) == 1 else "ranks ") + ranks_in_words(lane.ranks, 8)
    return f"{name}: {endings}{marks}{more}"


def _lanes_table(visible_lanes: Sequence[Lane], moment: Moment) -> str:
    rows = "".join(f"<li>{escape(_lane_in_words(lane, moment))}</li>" for lane in visible_lanes)
    return f"<details><summary>The lanes in words</summary><ul>{rows}</ul></details>"


def _tools() -> str:
    buttons = "".join(
        f'<button type="button" hidden data-key="{key}" aria-label="{label}">{shown_as}</button> '
        for key, label, shown_as in (
            ("-", "zoom out", "−"),
            ("+", "zoom in", "+"),
            ("ArrowLeft", "earlier", "←"),
            ("ArrowRight", "later", "→"),
            ("ArrowUp", "the lane above", "↑"),
            ("ArrowDown", "the lane below", "↓"),
            ("Home", "all of it", "all"),
        )
    )
    return f'<p class="tools">{buttons}</p><output id="say" class="dim" hidden></output>'


_SWATCHES = (
    ("completed", "completed"),
    ("interrupted", "interrupted by others"),
    ("failed", "failed or lost"),
    ("open", "end not recorded"),
    ("section", "open section, silence"),
    ("phases", "phases of a restart"),
    ("own", "its own fault"),
    ("echo", "consequence"),
)
_LEGEND = (
    '<p class="legend">'
    + "".join(f'<span><i class="swatch {kind}"></i>{word}</span>' for kind, word in _SWATCHES)
    + "</p>"
)


# -- time ------------------------------------------------------------------------------------------


def times_figure(times: Times, unknown_rework: int = 0) -> str:
    """Return a bar and a table of where the time went. unknown_rework: number of incidents whose rework is unknown."""
    causes = [("productive", times.productive_s), *((cause, getattr(times, f"{cause}_s")) for cause in CAUSES)]
    total = times.total_s or 1.0
    at, parts, rows = 0.0, [], []
    for cause, known in causes:
        value, word = known or 0.0, WORDS.get(cause, cause)
        width = value / total * WIDTH
        if width > 0:
            parts.append(
                f'<rect class="{cause}" x="{at:.1f}" y="0" width="{width:.1f}" height="22"><title>{word}: '
                f"{seconds(value)}</title></rect>"
            )
        rows.append(
            f'<tr><td><i class="swatch {cause}"></i>{word}</td>'
            f'<td class="n">{"unknown" if known is None else seconds(known)}</td>'
            f'<td class="n">{"" if known is None else f"{known / total:.1%}"}</td></tr>'
        )
        at += width
    bar = (
        f'<svg viewBox="0 0 {WIDTH} 22" preserveAspectRatio="none" class="bar" role="img" aria-label="Time by cause">'
        f"{''.join(parts)}</svg>"
    )
    at_most = "at most " if unknown_rework else ""
    ettr = f'<p class="dim">Effective training time ratio (ETTR): {at_most}{times.ettr or 0.0:.1%}</p>'
    ettr = "" if times.ettr is None else ettr
    unknown = f'<p class="dim">Not in the table: {time_unknown_in_words(times)}</p>' if times.unknown_s else ""
    if unknown_rework:
        unknown += f'<p class="dim">Repeated steps of {count(unknown_rework, "incident")} unknown.</p>'
    return f"{bar}<table>{''.join(rows)}</table>{unknown}{ettr}"


# -- one restart -----------------------------------------------------------------------------------


def waterfall_figure(restart: Waterfall) -> str:
    """Return one restart: each phase from its first start to its last end, with the time when half had finished it."""
    total = restart.seconds or 1.0
    rows = []
    for number, row in enumerate(restart.rows):
        y = number * 18
        start, half, end = (LEFT + value / total * 700 for value in (row.start_s, row.half_s, row.end_s))
        slowest = f"rank {row.slowest}" if isinstance(row.slowest, int) else row.slowest
        rows.append(
            f"<g><title>{phase_name(row.name)}: median {seconds(row.median_s)}, slowest {escape(slowest)} "
            f"{seconds(row.max_s)}</title>"
            f'<text x="4" y="{y + 12}">{phase_name(row.name)}</text>'
            f'<rect class="late" x="{start:.1f}" y="{y + 3}" width="{max(1.0, end - start):.1f}" height="11"/>'
            f'<rect class="phase-bar" x="{start:.1f}" y="{y + 3}" width="{max(1.0, half - start):.1f}" height="11"/>'
            f'<text class="dim" x="{min(end + 5, WIDTH - 135):.1f}" y="{y + 12}">'
            f"{seconds(row.max_s)} {escape(slowest)}</text></g>"
        )
    height = 18 * len(restart.rows) + 4
    label = "Phases of the restart: dark until half of the ranks had finished it, light until the last one had"
    return (
        f'<div class="scroll"><svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{label}">'
        f"{''.join(rows)}</svg></div>"
    )


# -- durations -------------------------------------------------------------------------------------


def section_bars(section: SectionSummary, low: float, high: float) -> str:
    """Return one section's durations on a logarithmic scale from `low` to `high` seconds, with its limit."""
    span = math.log(high / low)

    def x(value: float) -> float:
        return min(1.0, max(0.0, math.log(max(value, low) / low) / span)) * 300

    highest_count = max((number for _, number in section.bins), default=1)
    bars = "".join(
        f'<rect class="bin" x="{x(end / 1.22):.1f}" y="{24 - 22 * math.sqrt(number / highest_count):.1f}" '
        f'width="{max(1.0, x(end) - x(end / 1.22)):.1f}" height="{22 * math.sqrt(number / highest_count):.1f}"/>'
        for end, number in section.bins
    )
    limit = ""
    if section.limit_s is not None:
        at = x(section.limit_s)
        limit = f'<line class="limit" x1="{at:.1f}" x2="{at:.1f}" y1="0" y2="26"/>'
    label = f"median {seconds(section.p50_s)}, longest {seconds(section.max_s)}, limit {seconds(section.limit_s)}"
    return (
        f'<svg class="spread" viewBox="0 0 304 26" role="img" aria-label="{label}"><title>{label}</title>'
        f'<line class="grid" x1="0" x2="304" y1="25" y2="25"/>{bars}{limit}</svg>'
    )
