"""The drawing of `calibrate --plot`: the distribution of each deadline's durations, and its limit.

One panel per deadline, both axes logarithmic: the share of occurrences that took longer than x, the bound of the
fitted tail up to the limit, the largest value, five times that value, and hangs as crosses. Plain SVG, readable in
light and dark mode, with a title for each mark."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from resilience.calibrate.observed import pool_of, warm_up
from resilience.calibrate.timings import Input
from resilience.calibration import fitting
from resilience.calibration.limits_file import Deadline, Timeouts
from resilience.calibration.pool import Pool
from resilience.errors import ConfigurationError
from resilience.facts.deadlines import parse_name
from resilience.facts.encoding import text
from resilience.facts.in_words import count, seconds
from resilience.facts.printable import escape
from resilience.system import files

WIDTH, HEIGHT = 560, 300  # of a panel
LEFT, RIGHT, TOP, BOTTOM = 64, 20, 44, 44
COLUMNS = 2
POINTS = 400
STYLE = """
svg{background:#fff;font:12px system-ui,sans-serif;fill:#1f2328}
.axis{stroke:#8c959f;stroke-width:1;fill:none}.grid{stroke:#d0d7de;stroke-width:.5}
.seen{stroke:#0969da;stroke-width:2;fill:none}.tail{stroke:#8250df;stroke-width:1.5;stroke-dasharray:5 4;fill:none}
.limit{stroke:#1a7f37;stroke-width:2}.max{stroke:#57606a;stroke-width:1}.five{stroke:#9a6700;stroke-dasharray:2 3}
.hang{stroke:#cf222e;stroke-width:2}.mode{fill:#0969da}.small{font-size:10px}.title{font-weight:600;font-size:13px}
@media(prefers-color-scheme:dark){svg{background:#0d1117;fill:#e6edf3}.grid{stroke:#30363d}.seen{stroke:#58a6ff}
.tail{stroke:#bc8cff}.limit{stroke:#3fb950}.max{stroke:#8b949e}.five{stroke:#d29922}.hang{stroke:#f85149}.mode{fill:#58a6ff}}
"""


def write(path: Path, observed: Input, timeouts: Timeouts) -> None:
    """Draw every deadline with enough durations in these runs. Raises: ConfigurationError if the file cannot be
    written."""
    pools = {
        name: pool
        for name, deadline in timeouts.deadlines.items()
        if parse_name(name)[1] is None
        and deadline.n >= fitting.FEWEST
        and (pool := _observed(name, observed)).n  # a limit that is kept from an earlier file may have none
    }
    rows = max(1, math.ceil(len(pools) / COLUMNS))
    width, height = COLUMNS * WIDTH, rows * HEIGHT + 30
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img" aria-label="Durations and limits">',
        f"<style>{STYLE}</style>",
        _legend(height - 12),
    ]
    for number, (name, pool) in enumerate(pools.items()):
        x, y = number % COLUMNS * WIDTH, number // COLUMNS * HEIGHT
        parts.append(f'<g transform="translate({x},{y})">{_panel(name, timeouts, pool)}</g>')
    if not pools:
        parts.append('<text x="20" y="30">No deadline has enough durations to draw.</text>')
    if reason := files.why_not_replaced(path, text("\n".join([*parts, "</svg>"]) + "\n").encode()):
        raise ConfigurationError(f"cannot write {path}: {reason}; {files.TO_REPLACE}")


class _Axes:
    """Maps a duration and a share to coordinates in a panel."""

    def __init__(self, low: float, high: float, least: float) -> None:
        self.low, self.high = math.log10(low), math.log10(high)
        self.least = math.log10(least)

    def x(self, value: float) -> float:
        share = (math.log10(value) - self.low) / (self.high - self.low)
        return LEFT + min(1.0, max(0.0, share)) * (WIDTH - LEFT - RIGHT)

    def y(self, share: float) -> float:
        down = math.log10(max(share, 1e-300)) / self.least
        return TOP + min(1.0, max(0.0, down)) * (HEIGHT - TOP - BOTTOM)


def _observed(name: str, observed: Input) -> Pool:
    """Return the durations of a deadline in these runs, without the first ones; empty if no run has it."""
    observations = [run.deadlines[name] for run in observed.runs if name in run.deadlines]
    return pool_of(observations, warm_up(name, observations))


def _panel(name: str, timeouts: Timeouts, pool: Pool) -> str:
    deadline = timeouts.deadlines[name]
    top, limit = pool.descending[0][0], deadline.timeout_s or pool.descending[0][0]
    bottom = pool.descending[-1][0]
    hangs = [seconds_ for seconds_ in deadline.excluded_hangs if seconds_ > 0]
    axes = _Axes(bottom / 1.3, max(fitting.FACTOR * top, limit, *hangs) * 1.3, min(0.3 / pool.n, deadline.p) / 3)
    parts = [
        f'<text class="title" x="{LEFT}" y="18">{escape(name)}</text>',
        f'<text class="small" x="{LEFT}" y="33">{escape(_caption(deadline))}</text>',
        _grid(axes),
        f'<polyline class="seen" points="{_survival(pool.descending, axes)}"/>',
    ]
    tail = _tail(deadline, timeouts.ranks, axes)
    if tail:
        parts.append(f'<polyline class="tail" points="{tail}"/>')
    marks = [("max", top, "longest"), ("five", fitting.FACTOR * top, "5 times the longest")]
    if deadline.timeout_s is not None:
        marks.append(("limit", deadline.timeout_s, "limit"))
    parts += [_mark(kind, value, label, axes) for kind, value, label in marks]
    for mode in deadline.modes:
        x, y = axes.x(mode.median), HEIGHT - BOTTOM
        about = f"mode: {mode.count} around {seconds(mode.median)}"
        parts.append(f'<circle class="mode" cx="{x:.1f}" cy="{y}" r="3"><title>{about}</title></circle>')
    for value in hangs:
        x, y = axes.x(value), TOP + 8
        cross = f"M{x - 4:.1f},{y - 4}l8,8m0,-8l-8,8"
        parts.append(
            f'<path class="hang" d="{cross}"><title>a hang that was ended after {seconds(value)}</title></path>'
        )
    return "".join(parts)


def _caption(deadline: Deadline) -> str:
    limit = "no limit" if deadline.timeout_s is None else f"limit {seconds(deadline.timeout_s)}"
    upper = deadline.expected_false_alarms_per_month.model_upper
    rate = "no rate stated" if upper is None else f"at most {upper:.2g} false alarms in 30 d"
    return f"{limit}, {deadline.status}: {rate} ({deadline.n} in {count(deadline.runs, 'run')})"


def _survival(descending: Sequence[tuple[float, int]], axes: _Axes) -> str:
    """Return at most POINTS points of the survival curve: for each duration, the share that took at least as long."""
    n = sum(number for _, number in descending)
    points, above, last = [], 0, (-9.0, -9.0)
    for value, number in descending:
        above += number
        point = (axes.x(value), axes.y(above / n))
        if abs(point[0] - last[0]) + abs(point[1] - last[1]) > 1.0:
            points.append(point)
            last = point
    points.append((axes.x(descending[-1][0]), axes.y(1.0)))
    step = max(1, len(points) // POINTS)
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points[::step] + points[-1:])


def _tail(deadline: Deadline, ranks: int, axes: _Axes) -> str:
    """Return the line from the largest value, at share 1 / n, to the limit, at its stated bound. ranks: of the job that
    the bound is stated for; the curve is of the observed ranks."""
    upper, limit = deadline.false_alarms_per_occurrence.model_upper, deadline.timeout_s
    if upper is None or limit is None:
        return ""
    share = upper / max(1.0, ranks / max(1, deadline.ranks))
    first = f"{axes.x(deadline.max_s):.1f},{axes.y(1 / deadline.n):.1f}"
    return f"{first} {axes.x(limit):.1f},{axes.y(share):.1f}"


def _mark(kind: str, value: float, label: str, axes: _Axes) -> str:
    x = axes.x(value)
    title = f"<title>{label}: {seconds(value)}</title>"
    return f'<line class="{kind}" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}">{title}</line>'


def _grid(axes: _Axes) -> str:
    parts = []
    left, right, top, bottom = LEFT, WIDTH - RIGHT, TOP, HEIGHT - BOTTOM
    for value in _ticks(axes.low, axes.high):
        x = axes.x(value)
        parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{bottom}"/>')
        parts.append(f'<text class="small" x="{x:.1f}" y="{bottom + 14}" text-anchor="middle">{seconds(value)}</text>')
    step = max(1, round(-axes.least / 5))
    for power in range(0, math.floor(-axes.least) + 1, step):
        y = axes.y(10.0**-power)
        label = "1" if not power else f"1e-{power}"
        parts.append(f'<line class="grid" x1="{left}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="small" x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{label}</text>')
    parts.append(f'<path class="axis" d="M{left},{top}V{bottom}H{right}"/>')
    parts.append(f'<text class="small" x="{right}" y="{bottom + 30}" text-anchor="end">took at least</text>')
    parts.append(
        f'<text class="small" transform="translate(14,{(top + bottom) / 2}) rotate(-90)" '
        'text-anchor="middle">share</text>'
    )
    return "".join(parts)


def _ticks(low: float, high: float) -> list[float]:
    """Return round values between two powers of ten; more of them for a narrow range."""
    steps = (1, 2, 5) if high - low < 2 else (1,)
    values = [step * 10.0**power for power in range(math.floor(low), math.floor(high) + 1) for step in steps]
    return [value for value in values if low <= math.log10(value) <= high]


def _legend(y: int) -> str:
    items = [
        ("seen", "observed"),
        ("tail", "bound of the tail"),
        ("max", "longest"),
        ("limit", "limit"),
        ("five", "5 × longest"),
        ("hang", "hang (excluded)"),
    ]
    parts = []
    for number, (kind, label) in enumerate(items):
        x = LEFT + number * 150
        parts.append(f'<line class="{kind}" x1="{x}" x2="{x + 26}" y1="{y - 4}" y2="{y - 4}"/>')
        parts.append(f'<text x="{x + 32}" y="{y}">{label}</text>')
    return "".join(parts)
