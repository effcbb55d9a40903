"""`resilience report RUN --html FILE`: the report as one page that needs nothing else.

Verdict first, then what each rank did over time, where the time went, each incident with its restart, and
how long sections took. Text and drawings are in the page itself; a few lines of script add zooming, and
without them everything can still be read. Light and dark as the reader's system has it; prints."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from resilience.adapters import files
from resilience.analysis.lanes import Lane, lanes
from resilience.analysis.load import Run
from resilience.analysis.report import Report
from resilience.cli.render import Line, clock, count, date, seconds
from resilience.cli.report import incident_lines, report_lines
from resilience.core.advice import ranks_in_words
from resilience.core.incident import Incident
from resilience.errors import ConfigurationError
from resilience.telemetry import timings

WIDTH, LANE, LEFT = 1000, 18, 150
CAUSES = ("startup", "restart", "hang", "rework")
LIMITS = (5.0, 20.0, 60.0)  # seconds: what if every hang had been found so soon
TEXT_WIDTH = 100
MOST_DETAILED = 200  # incidents shown in full; further ones are in the table


def write(path: Path, run: Run, found: Report) -> None:
    """Write the page. Raises: ConfigurationError if that fails."""
    if not files.replace(path, page(run, found).encode()):
        raise ConfigurationError(f"{path} could not be written; is there space, and may this user write there?")


def page(run: Run, found: Report) -> str:
    """Return the whole page."""
    parts = [
        f"<h1>Run {escape(found.job_id)}</h1>",
        _headline(found),
        f'<p class="dim">{escape(", ".join(found.functions))} · {found.world_size or "?"} ranks on '
        f"{escape(ranks_or(found.nodes))} · from {date(found.started_wall_ns)} to {clock(found.last_wall_ns)}</p>",
        "<h2>What the ranks did</h2>",
        _lanes(lanes(run.records)),
        "<h2>Where the time went</h2>",
        _times(found),
        _incidents(found),
        _sections(Path(found.run)),
        "<h2>The whole report as text</h2><details><summary>as <code>resilience report</code> prints it</summary>"
        f"<pre>{_text(report_lines(found, TEXT_WIDTH))}</pre></details>",
    ]
    style, script = ((Path(__file__).parent / name).read_text() for name in ("report.css", "report.js"))
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(found.job_id)}: report</title><style>{style}</style></head><body><main>"
        + "\n".join(parts)
        + f"</main><script>{script}</script></body></html>\n"
    )


def ranks_or(nodes: Sequence[str]) -> str:
    """Return nodes by name, many of them by number."""
    return ", ".join(nodes) if len(nodes) <= 4 else f"{len(nodes)} nodes"


def _headline(found: Report) -> str:
    is_bad = bool(found.lost or found.left) or (found.launched is not None and bool(found.launched.exit_code))
    what = count(len(found.incidents), "incident") if found.incidents else "no incident"
    cost = "" if found.lost_s is None or not found.incidents else f", {seconds(found.lost_s)} lost"
    share = "" if found.times.ettr is None else f"; {found.times.ettr:.1%} of the time was productive"
    more = f"<br>{escape(found.end)}"
    return f'<p class="verdict{" bad" if is_bad else ""}"><b>{what}{cost}</b>{share}.{more}</p>'


# -- drawings --------------------------------------------------------------------------------------


def _lanes(shown: list[Lane]) -> str:
    stretches = [stretch for lane in shown for stretch in lane.stretches]
    if not stretches:
        return '<p class="dim">No iteration or worker is on record.</p>'
    first = min(stretch.begin_ns for stretch in stretches)
    last = max(stretch.end_ns for stretch in stretches)
    span, height = max(1, last - first), LANE * len(shown) + 24

    def x(at: int) -> float:
        return LEFT + (min(max(at, first), last) - first) / span * (WIDTH - LEFT - 10)

    parts = [
        f'<svg id="lanes" viewBox="0 0 {WIDTH} {height}" role="img" aria-label="Ranks over time: iterations, and '
        'where they were interrupted">'
    ]
    for tick in range(6):
        at = first + span * tick // 5
        parts.append(f'<line class="grid" x1="{x(at):.1f}" x2="{x(at):.1f}" y1="0" y2="{height - 18}"/>')
        parts.append(
            f'<text class="dim" x="{x(at):.1f}" y="{height - 5}" text-anchor="middle">'
            f"{seconds((at - first) / 1e9)}</text>"
        )
    for number, lane in enumerate(shown):
        y = number * LANE
        name = ("rank " if len(lane.ranks) == 1 else "ranks ") + ranks_in_words(lane.ranks)
        parts.append(
            f'<text x="4" y="{y + 13}">{escape(name if len(name) < 24 else f"{len(lane.ranks)} ranks")}</text>'
        )
        for stretch in lane.stretches:
            width = max(0.8, x(stretch.end_ns) - x(stretch.begin_ns) - 0.6)
            took = seconds((stretch.end_ns - stretch.begin_ns) / 1e9)
            parts.append(
                f'<rect class="{stretch.kind}" x="{x(stretch.begin_ns):.1f}" y="{y + 3}" width="{width:.1f}" '
                f'height="{LANE - 6}"><title>{escape(stretch.label)}: {stretch.kind}, {took}</title></rect>'
            )
        for mark in lane.marks:
            cross = f"M{x(mark.at_ns) - 4:.1f},{y + 5}l8,8m0,-8l-8,8"
            parts.append(f'<path class="mark" d="{cross}"><title>{escape(mark.label)}</title></path>')
    parts.append("</svg>")
    tools = "".join(
        f'<button hidden data-key="{key}" aria-label="{label}">{shown_as}</button> '
        for key, label, shown_as in (
            ("-", "zoom out", "−"),
            ("+", "zoom in", "+"),
            ("ArrowLeft", "earlier", "←"),
            ("ArrowRight", "later", "→"),
            ("Home", "all", "all"),
        )
    )
    legend = "green: completed, blue: interrupted, red: failed or lost, grey: no end on record, × its own fault"
    return f'<p>{tools}</p><div class="scroll">{"".join(parts)}</div><p class="dim">{legend}</p>'


def _times(found: Report) -> str:
    times = found.times
    causes = [("productive", times.productive_s), *((cause, getattr(times, f"{cause}_s")) for cause in CAUSES)]
    total = sum(value for _, value in causes) or 1.0
    at, parts = 0.0, []
    for cause, value in causes:
        width = value / total * WIDTH
        if width > 0:
            parts.append(
                f'<rect class="{cause}" x="{at:.1f}" y="0" width="{width:.1f}" height="22"><title>{cause}: '
                f"{seconds(value)}</title></rect>"
            )
        at += width
    rows = "".join(
        f'<tr><td>{cause}</td><td class="n">{seconds(value)}</td><td class="n">{value / total:.1%}</td></tr>'
        for cause, value in causes
    )
    bar = f'<svg viewBox="0 0 {WIDTH} 22" role="img" aria-label="Time by cause">{"".join(parts)}</svg>'
    return f'<div class="scroll">{bar}</div><table>{rows}</table>{_what_if(found)}'


def _what_if(found: Report) -> str:
    """What limits would have changed. Formula and inputs are in the text."""
    hangs = [hang for incident in found.incidents if (hang := incident.cost.hang_s)]
    if not hangs or found.times.ettr is None:
        return ""
    rows = []
    for limit in LIMITS:
        saved = sum(max(0.0, hang - limit) for hang in hangs)
        ettr = (found.times.productive_s + saved) / found.times.total_s
        rows.append(
            f'<tr><td class="n">{seconds(limit)}</td><td class="n">{seconds(saved)}</td>'
            f'<td class="n">{ettr:.1%}</td></tr>'
        )
    return (
        "<h2>If hangs had been found sooner</h2><table><tr><th class=n>limit</th><th class=n>saved</th>"
        f"<th class=n>productive</th></tr>{''.join(rows)}</table>"
        f'<p class="dim">{count(len(hangs), "hang")}, found after {", ".join(map(seconds, hangs[:6]))}. Saved: what of '
        "each "
        "lies beyond the limit; productive: (productive time + saved) / total.</p>"
    )


# -- incidents -------------------------------------------------------------------------------------


def _incidents(found: Report) -> str:
    if not found.incidents:
        return ""
    parts = [f"<h2>{count(len(found.incidents), 'incident').capitalize()}</h2>"]
    parts += [_incident(incident) for incident in found.incidents[:MOST_DETAILED]]
    if len(found.incidents) > MOST_DETAILED:
        more = len(found.incidents) - MOST_DETAILED
        parts.append(f'<p class="dim">{more} more: <code>resilience report RUN --incident N</code></p>')
    return "".join(parts)


def _incident(incident: Incident) -> str:
    title, *lines = list(incident_lines(incident, TEXT_WIDTH))
    head = "".join(_span(text, style) for text, style in title)
    cost = incident.cost.lost_s
    known = "" if cost is None else f", cost {seconds(cost)}"
    about = f' <span class="dim">{clock(incident.detected_wall_ns)}{known}</span>'
    is_open = " open" if incident.number <= 3 else ""
    return (
        f"<details{is_open}><summary>{head}{about}</summary>{_waterfall(incident)}<pre>{_text(lines)}</pre></details>"
    )


def _waterfall(incident: Incident) -> str:
    total = sum(phase.took.max_s for phase in incident.phases)
    if total <= 0:
        return ""
    at, rows = 0.0, []
    for number, phase in enumerate(incident.phases):
        x, width, y = LEFT + at / total * 700, max(1.0, phase.took.max_s / total * 700), number * 16
        who = phase.took.node or f"rank {phase.took.slowest}"
        rows.append(f'<text x="4" y="{y + 12}">{escape(phase.name)}</text>')
        rows.append(
            f'<rect class="restart" x="{x:.1f}" y="{y + 3}" width="{width:.1f}" height="10"><title>'
            f"{escape(phase.name)}: "
            f"{seconds(phase.took.max_s)}, slowest {escape(who)}</title></rect>"
        )
        rows.append(
            f'<text class="dim" x="{min(x + width + 4, WIDTH - 60):.1f}" y="{y + 12}">'
            f"{seconds(phase.took.max_s)}</text>"
        )
        at += phase.took.max_s
    height = 16 * len(incident.phases) + 4
    label = "Phases of the restart, slowest rank of each"
    drawn = f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{label}">{"".join(rows)}</svg>'
    return f'<div class="scroll">{drawn}</div>'


def _sections(folder: Path) -> str:
    total = timings.Timings()
    for path in sorted((folder / "timings").glob("*.json")):
        try:
            total.merge(timings.read(path))
        except (OSError, ValueError):
            continue  # half written, or of another version; the report does not stand or fall with it
    if not total.sections:
        return ""
    rows = []
    for name, histogram in sorted(total.sections.items()):
        marks = [timings.upper_bound(_bucket(histogram, share)) for share in (0.5, 0.99)]
        cells = (name or "heartbeat gaps", str(histogram.count), *map(seconds, (*marks, histogram.max)))
        rows.append(
            "<tr><td>"
            + escape(cells[0])
            + "</td>"
            + "".join(f'<td class="n">{cell}</td>' for cell in cells[1:])
            + "</tr>"
        )
    names = ("times", "median", "p99", "longest")
    head = "<tr><th>section</th>" + "".join(f'<th class="n">{name}</th>' for name in names) + "</tr>"
    return f'<h2>How long sections took</h2><div class="scroll"><table>{head}{"".join(rows)}</table></div>'


def _bucket(histogram: timings.Histogram, share: float) -> int:
    left = histogram.count * share
    for number in sorted(histogram.buckets):
        left -= histogram.buckets[number]
        if left <= 0:
            return number
    return max(histogram.buckets, default=0)


# -- text ------------------------------------------------------------------------------------------


def _text(lines: Iterable[Line]) -> str:
    return "\n".join("".join(_span(text, style) for text, style in line) for line in lines)


def _span(text: str, style: str) -> str:
    return f'<span class="{style}">{escape(text)}</span>' if style else escape(text)
