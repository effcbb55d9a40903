"""Draws each dashboard as a picture for the docs, from what a real Prometheus answers about a job with real faults.

`python -m tests.draw_dashboards` runs the job and writes `docs/pictures/dashboards/<name>.svg`, and beside each
the answers that it was drawn from. It is no rendering of Grafana's: it shows that the queries answer, and what."""

from __future__ import annotations

import json
import math
import re
import tempfile
from html import escape
from pathlib import Path
from typing import Any

from dashboards.generator.boards import BOARDS
from dashboards.generator.panels import Board, GridPlace, Panel, places

PICTURES = Path(__file__).parents[1] / "docs" / "pictures" / "dashboards"
JOB = "inprocess"  # of the two jobs the one that is drawn
UNIT_W, UNIT_H = 50, 26  # pixels of a cell of the grid
PALETTE = ("#3366cc", "#dc3912", "#109618", "#ff9900", "#990099", "#0099c6", "#dd4477", "#66aa00", "#b82e2e", "#316395")
COLORS = {
    "green": "#1a7f37",
    "yellow": "#8a6d00",
    "orange": "#b45309",
    "red": "#c0262d",
    "blue": "#3366cc",
    "text": "#222",
}
MOST_ROWS, MOST_NAMES = 7, 6
STEP, LENGTH = 5, 150  # seconds between two points of a graph, and of the whole
INSTANT = ("stat", "table", "gauge")

Series = dict[str, Any]


def answers(scene: Any, board: Board) -> dict[str, list[list[Series]]]:
    """Return what each panel's queries answer, by title."""
    return {
        panel.title: [scene.series(query.expr, JOB, panel.view in INSTANT, STEP) for query in panel.queries]
        for panel in board.panels()
    }


def draw(board: Board, found: dict[str, list[list[Series]]]) -> str:
    """Return a dashboard as SVG. found: see `answers`."""
    parts = []
    bottom = 0
    for row, (heading, within) in zip(board.rows, places(board), strict=True):
        parts.append(_text(10, heading.y * UNIT_H + 18, row.title, 14, "bold"))
        for panel, place in zip(row.panels, within, strict=True):
            parts.append(_panel(panel, place, found[panel.title]))
            bottom = max(bottom, (place.y + place.h) * UNIT_H)
    width, note = (
        24 * UNIT_W,
        "Drawn from the answers of a real Prometheus to this dashboard's queries; not Grafana's own rendering.",
    )
    parts.append(_text(10, bottom + 18, note, 11, color="#555"))
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {bottom + 28}" font-family="sans-serif">'
    label = f"<title>{escape(board.title)}</title><desc>{escape(board.description)}</desc>"
    return (
        "\n".join([head, label, f'<rect width="{width}" height="{bottom + 28}" fill="#f4f5f5"/>', *parts, "</svg>"])
        + "\n"
    )


def _panel(panel: Panel, place: GridPlace, found: list[list[Series]]) -> str:
    x, y, w, h = place.x * UNIT_W + 4, place.y * UNIT_H + 4, place.w * UNIT_W - 8, place.h * UNIT_H - 8
    parts = [f'<rect x="{x}" y="{y}" width="{w}" height="{h}" fill="#fff" stroke="#d8d9da" rx="3"/>']
    parts.append(_text(x + 8, y + 17, panel.title, 12, "bold"))
    named = [
        (_name(query.legend, series), series)
        for query, each in zip(panel.queries, found, strict=True)
        for series in each
    ]
    inner = (x + 8, y + 26, w - 16, h - 34)
    if not named:
        parts.append(_text(x + w / 2, y + h / 2, panel.empty, 11, color="#666", anchor="middle"))
    elif panel.view == "stat":
        parts += _stat(panel, named, inner)
    elif panel.view in ("table", "gauge"):
        parts += _rows(panel, named, inner)
    elif panel.view == "heatmap":
        parts += _heatmap(panel, named, inner)
    else:
        parts += _graph(panel, named, inner)
    return "\n".join(parts)


Box = tuple[float, float, float, float]
Named = list[tuple[str, Series]]


def _stat(panel: Panel, named: Named, box: Box) -> list[str]:
    x, y, w, h = box
    value = float(named[0][1]["value"][1])
    color = next((COLORS[name] for at, name in reversed(panel.steps) if at is None or value >= at), "#222")
    return [_text(x + w / 2, y + h / 2 + 10, shown(value, panel.unit), 28, "bold", color, "middle")]


def _rows(panel: Panel, named: Named, box: Box) -> list[str]:
    x, y, w, _ = box
    parts = []
    largest = max(float(series["value"][1]) for _, series in named) or 1.0
    is_sorted = all(query.expr.startswith("sort") for query in panel.queries)  # and stays as it was answered
    ordered = named if is_sorted else sorted(named, key=lambda each: -float(each[1]["value"][1]))
    for number, (name, series) in enumerate(ordered[:MOST_ROWS]):
        value, at = float(series["value"][1]), y + 18 + number * 19
        if panel.view == "gauge":
            parts.append(f'<rect x="{x}" y="{at - 12}" width="{w * value / largest:.1f}" height="16" fill="#cfe0fa"/>')
        parts.append(_text(x + 2, at, name or "all", 11))
        parts.append(_text(x + w, at, shown(value, panel.unit), 11, anchor="end"))
    if ordered[MOST_ROWS:]:
        parts.append(_text(x + 2, y + 18 + MOST_ROWS * 19, f"and {len(ordered) - MOST_ROWS} more", 10, color="#666"))
    return parts


def _graph(panel: Panel, named: Named, box: Box) -> list[str]:
    x, y, w, h = box[0] + 46, box[1] + 2, box[2] - 50, box[3] - 34
    points = [(name, {at: float(v) for at, v in s["values"] if not math.isnan(float(v))}) for name, s in named]
    times = sorted({at for _, values in points for at in values})
    is_stacked = panel.view in ("stacked", "bars")
    top = max(
        (sum(v.get(at, 0.0) for _, v in points) if is_stacked else max(v.get(at, 0.0) for _, v in points))
        for at in times
    )
    top = (panel.maximum or top * 1.1) or 1.0
    span = (times[-1] - times[0]) or 1.0

    def place(at: float, value: float) -> tuple[float, float]:
        return x + w * (at - times[0]) / span, y + h - h * min(value / top, 1.0)

    parts = [f'<path d="M{x} {y}V{y + h}H{x + w}" fill="none" stroke="#999"/>']
    parts += [
        _text(x - 4, y + h - h * part + 4, shown(top * part, panel.unit), 10, anchor="end") for part in (0, 0.5, 1)
    ]
    under = dict.fromkeys(times, 0.0)
    for number, (_, values) in enumerate(points):
        color = PALETTE[number % len(PALETTE)]
        if panel.view == "bars":
            for at, value in values.items():
                (left, low), (_, high) = place(at, under[at]), place(at, under[at] + value)
                parts.append(
                    f'<rect x="{left - 5:.1f}" y="{high:.1f}" width="10" height="{low - high:.1f}" fill="{color}"/>'
                )
        else:
            line = [place(at, value + (under[at] if is_stacked else 0.0)) for at, value in sorted(values.items())]
            path = " ".join(f"{left:.1f},{at:.1f}" for left, at in line)
            parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="1.6"/>')
            parts += [f'<circle cx="{left:.1f}" cy="{at:.1f}" r="2" fill="{color}"/>' for left, at in line]
        if is_stacked:
            for at, value in values.items():
                under[at] += value
    return parts + _legend([name for name, _ in points], box)


def _legend(names: list[str], box: Box) -> list[str]:
    x, at = box[0], box[1] + box[3] - 4
    parts = []
    for number, name in enumerate(names[:MOST_NAMES]):
        parts.append(f'<rect x="{x}" y="{at - 8}" width="8" height="8" fill="{PALETTE[number % len(PALETTE)]}"/>')
        parts.append(_text(x + 11, at, name, 10))
        x += 22 + 5.6 * len(name)
    if names[MOST_NAMES:]:
        parts.append(_text(x, at, f"and {len(names) - MOST_NAMES} more", 10, color="#666"))
    return parts


def _heatmap(panel: Panel, named: Named, box: Box) -> list[str]:
    x, y, w, h = box[0] + 46, box[1] + 2, box[2] - 50, box[3] - 20
    edges = sorted(named, key=lambda each: float(each[1]["metric"]["le"]))
    values = [{at: float(v) for at, v in series["values"]} for _, series in edges]
    times = sorted({at for each in values for at in each})
    cells = [
        (column, row, each.get(at, 0.0) - (values[row - 1].get(at, 0.0) if row else 0.0))
        for row, each in enumerate(values)
        for column, at in enumerate(times)
    ]
    most = max((count for *_, count in cells), default=0.0) or 1.0
    wide, high = w / len(times), h / len(edges)
    parts = [f'<rect x="{x}" y="{y}" width="{w}" height="{h}" fill="#fafafa" stroke="#ddd"/>']
    for column, row, count in cells:
        if count > 0:
            left, at = x + column * wide, y + h - (row + 1) * high
            strength = 0.25 + 0.75 * count / most
            parts.append(
                f'<rect x="{left:.1f}" y="{at:.1f}" width="{wide:.1f}" height="{high:.1f}" '
                f'fill="#1f60c4" opacity="{strength:.2f}"/>'
            )
    for row in range(0, len(edges), 2):
        edge = edges[row][1]["metric"]["le"]
        label = "more" if edge == "+Inf" else "≤ " + shown(float(edge), panel.unit)
        parts.append(_text(x - 4, y + h - (row + 0.3) * high, label, 9, anchor="end"))
    return parts


def shown(value: float, unit: str) -> str:
    """Return a value as a person reads it."""
    if unit == "percentunit":
        return f"{value:.1%}"
    if unit == "s":
        return (
            f"{value * 1000:.3g} ms" if 0 < value < 1 else f"{value:.3g} s" if value < 120 else f"{value / 60:.3g} min"
        )
    return f"{value:,.0f}" if value >= 100 or value == round(value) else f"{value:.3g}"


def _name(legend: str, series: Series) -> str:
    labels = series["metric"]
    if not legend:
        return "  ".join(f"{name} {value}" for name, value in sorted(labels.items()) if value)
    return re.sub(r"{{(\w+)}}", lambda found: labels.get(found[1], ""), legend).strip()


def _text(
    x: float, y: float, text: str, size: int, weight: str = "normal", color: str = "#222", anchor: str = "start"
) -> str:
    style = f'font-size="{size}" font-weight="{weight}" fill="{color}" text-anchor="{anchor}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(text)}</text>'


def main() -> None:
    from tests.process.dashboard_scene import stage
    from tests.support.server import ForkServer

    PICTURES.mkdir(parents=True, exist_ok=True)
    server = ForkServer()
    try:
        with tempfile.TemporaryDirectory() as folder, stage(server, Path(folder)) as scene:
            scene.watching.prometheus.await_query(f"vector(time()) > {scene.began + LENGTH}", 2 * LENGTH)
            for board in BOARDS:
                found = answers(scene, board)
                plain = json.dumps(found, separators=(",", ":")).replace(folder, "/home/me")
                (PICTURES / f"{board.name}.json").write_text(plain + "\n")
                (PICTURES / f"{board.name}.svg").write_text(draw(board, json.loads(plain)))
    finally:
        server.close()


if __name__ == "__main__":
    main()
