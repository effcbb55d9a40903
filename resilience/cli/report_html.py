"""`resilience report RUN --html FILE`: the report as one page that needs nothing else.

Verdict first, then what each rank did over time and how many steps the job made, where the time went and what would
have changed that, how long sections took beside their limits, and each incident with its restart, evidence and stacks.
Text and drawings are in the page itself; a few lines of script add zooming and reading by keyboard, and without them
everything can still be read. Light and dark as the reader's system has it; prints."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

from resilience.adapters import files
from resilience.analysis.counterfactual import WhatIf
from resilience.analysis.lanes import lanes
from resilience.analysis.load import Reader
from resilience.analysis.merge import history_of
from resilience.analysis.report import Report, report
from resilience.analysis.sections import Section
from resilience.analysis.throughput import throughput_of
from resilience.analysis.waterfall import Waterfall, waterfall
from resilience.attribution.advice import named
from resilience.attribution.incident import Incident
from resilience.attribution.stack_groups import Group, stack_groups
from resilience.cli.evidence import last_lines
from resilience.cli.markup import escape
from resilience.cli.render import Line, clock, count, date, phase_name, plain, seconds, short_path
from resilience.cli.report import (
    TIMES_UNKNOWN,
    as_of_in_words,
    incident_lines,
    incomplete_in_words,
    report_lines,
    what_if_in_words,
)
from resilience.cli.report_drawings import (
    lanes_figure,
    section_bars,
    throughput_figure,
    times_figure,
    waterfall_figure,
    who_in_words,
)
from resilience.cli.report_logs import MOST_LINES, lines_around
from resilience.core.attribution import InterruptionRecord
from resilience.core.encoding import text
from resilience.core.user_frames import is_ours
from resilience.errors import ConfigurationError

TEXT_WIDTH, UNWRAPPED = 100, 10_000
MOST_DETAILED = 200  # incidents shown in full; further ones are in the table
MOST_OPEN = 3  # incidents that are unfolded from the start
MOST_RECORDS, MOST_GROUPS = 12, 8
HEAD, MOST_LINKS = 3, 8  # what the headline tells of, the dearest, and of how many incidents each


class Told:
    """A run as the page tells it."""

    def __init__(self, folder: Path) -> None:
        """Read the run, once."""
        reader = Reader(folder)
        self.history = history_of(folder, reader.records)
        self.found = report(reader, self.history)
        self.lines = lines_around(folder, self.found.incidents)
        self.lanes = lanes(self.history, self.found.incidents)
        self.rates = throughput_of(folder)

    def page(self) -> str:
        """Return the whole page."""
        found, now_ns = self.found, time.time_ns()
        parts = [
            f"<h1>Run {escape(found.job_id)}{f', attempt {found.attempt}' if found.attempt else ''}</h1>",
            _headline(found, now_ns),
            f'<p class="dim">{escape(", ".join(found.functions))} · {found.world_size or "?"} ranks on '
            f"{escape(_ranks_or(found.nodes))} · from {date(found.started_wall_ns)} to {clock(found.last_wall_ns)}</p>",
            "<h2>What the ranks did</h2>",
            lanes_figure(self.lanes),
            throughput_figure(self.rates, self.lanes),
            "<h2>Where the time went</h2>",
            f"<p>{TIMES_UNKNOWN}</p>" if found.times is None else times_figure(found.times),
            _what_ifs(found.what_ifs),
            _sections(found.sections),
            self._incidents(),
            "<h2>The whole report as text</h2><details><summary>as <code>resilience report</code> prints it</summary>"
            f"<pre tabindex=0>{_text(report_lines(found, TEXT_WIDTH, now_ns))}</pre></details>",
        ]
        style, script = ((Path(__file__).parent / name).read_text("utf-8") for name in ("report.css", "report.js"))
        return (
            '<!doctype html><html lang="en"><head><meta charset="utf-8">'
            '<meta name="viewport" content="width=device-width,initial-scale=1"><link rel="icon" href="data:,">'
            f"<title>{escape(found.job_id)}: report</title><style>{style}</style></head><body><main>"
            + "\n".join(part for part in parts if part)
            + f"</main><script>{script}</script></body></html>\n"
        )

    def _incidents(self) -> str:
        incidents = self.found.incidents
        if not incidents:
            return ""
        parts = [f"<h2>{count(len(incidents), 'incident').capitalize()}</h2>"]
        parts += [self._incident(incident) for incident in incidents[:MOST_DETAILED]]
        if len(incidents) > MOST_DETAILED:
            more = len(incidents) - MOST_DETAILED
            parts.append(f'<p class="dim">{more} more: <code>resilience report RUN --incident N</code></p>')
        return "".join(parts)

    def _incident(self, incident: Incident) -> str:
        went = waterfall(self.history, incident)
        # The browser wraps, as wide as the screen is.
        title, *lines = list(incident_lines(incident, UNWRAPPED, is_whole=True, with_phases=went is None))
        head = "".join(_span(text, style) for text, style in title)
        cost = incident.cost.lost_s
        known = "" if cost is None else f", cost {seconds(cost)}"
        about = f' <span class="dim">{clock(incident.detected_wall_ns)}{known}</span>'
        is_open = " open" if incident.number <= MOST_OPEN else ""
        return (
            f'<details class="incident" id="incident-{incident.number}"{is_open}><summary>{head}{about}</summary>'
            f'<div class="facts">{_rows(lines)}</div>{"" if went is None else _restart(went)}'
            f"{_stack_groups(stack_groups(self.history, incident))}{_evidence(incident)}"
            f"{_logged(self.lines.get(incident.number, []))}</details>"
        )


def write(path: Path, folder: Path) -> None:
    """Write the page of a run. Raises: ConfigurationError if that fails."""
    if not files.replace(path, text(Told(folder).page()).encode()):
        raise ConfigurationError(f"{path} could not be written; is there space, and may this user write there?")


# -- first of all ----------------------------------------------------------------------------------


def _headline(found: Report, now_ns: int) -> str:
    is_bad = bool(found.lost or found.left) or (
        found.launched is not None and bool(found.launched.exit_code) and not found.launched.is_clean
    )
    least = "" if found.completeness.is_whole else "at least "
    none = "no incident" if found.completeness.is_whole else "no incident in what can be read"
    what = least + count(len(found.incidents), "incident") if found.incidents else none
    cost = "" if found.lost_s is None or not found.incidents else f", {seconds(found.lost_s)} lost"
    ettr = None if found.times is None else found.times.ettr
    share = "" if ettr is None else f"; {ettr:.1%} of the time was productive"
    missing = incomplete_in_words(found.completeness)
    as_of = as_of_in_words(found, now_ns)
    alike: defaultdict[str, list[Incident]] = defaultdict(list)
    for incident in found.incidents:
        alike[_in_a_line(incident)].append(incident)
    dearest = sorted(alike.items(), key=lambda item: -sum(each.cost.lost_s or 0.0 for each in item[1]))
    told = "".join(f"<li>{_links(incidents)}: {line}</li>" for line, incidents in dearest[:HEAD])
    said = f"<ul>{told}</ul>" if told else ""
    more = f"<p>… and {count(len(dearest) - HEAD, 'other kind')} of incident.</p>" if len(dearest) > HEAD else ""
    return (
        f'<div class="verdict{" bad" if is_bad else " unsure" if missing else ""}">'
        + (f"<p><b>Records are {escape(missing)}</b>; what follows is what can be read.</p>" if missing else "")
        + (f"<p><b>As of {as_of}</b>, when this page was written.</p>" if as_of else "")
        + f"<p><b>{what}{cost}</b>{share}.</p>{said}{more}"
        f"<p>{escape(found.end)}</p></div>"
    )


def _in_a_line(incident: Incident) -> str:
    """Who, what, where, and what to do."""
    lines = [plain(line).strip() for line in incident_lines(incident, 10_000)]
    verdict = next(
        (line.removeprefix("verdict").strip() for line in lines if line.startswith("verdict")), incident.kind
    )
    where = f", at {short_path(incident.where.file, 1)}:{incident.where.line}" if incident.where is not None else ""
    advice = f" {escape(incident.advice[0][:1].upper() + incident.advice[0][1:])}." if incident.advice else ""
    return f"{escape(verdict + where)}.{advice}"


def _links(incidents: Sequence[Incident]) -> str:
    lost = sum(each.cost.lost_s or 0.0 for each in incidents)
    links = ", ".join(f'<a href="#incident-{each.number}">{each.number}</a>' for each in incidents[:MOST_LINKS])
    more = "" if len(incidents) <= MOST_LINKS else f" and {len(incidents) - MOST_LINKS} more"
    return f"{'incident' if len(incidents) == 1 else 'incidents'} {links}{more} ({seconds(lost)})"


def _ranks_or(nodes: Sequence[str]) -> str:
    """Nodes by name, many of them by number."""
    return ", ".join(nodes) if len(nodes) <= 4 else f"{len(nodes)} nodes"


# -- time and durations ----------------------------------------------------------------------------


def _what_ifs(answers: Sequence[WhatIf]) -> str:
    if not answers:
        return ""
    rows = "".join(
        f'<tr><td>{escape(what_if_in_words(each))}</td><td class="n">{_signed(each.saved_s)}</td>'
        f'<td class="n">{each.ettr:.1%}</td><td>if {escape(each.assumes)}</td></tr>'
        for each in answers
    )
    formulas = {each.kind: each for each in answers}
    how = "".join(
        f"<li><code>{escape(each.formula)}</code><br>{escape(each.inputs)}</li>" for each in formulas.values()
    )
    return (
        '<h3>What if</h3><div class="scroll"><table><tr><th>with …</th><th class="n">saved</th>'
        f'<th class="n">productive</th><th></th></tr>{rows}</table></div>'
        '<p class="dim">Productive: (productive time + saved) / '
        f"total. The faults stay as they were; it is no forecast.</p><ul>{how}</ul>"
    )


def _signed(value: float) -> str:
    return f"-{seconds(-value)}" if value < 0 else seconds(value)


def _sections(sections: Sequence[Section]) -> str:
    shown = [section for section in sections if section.count]
    if not shown:
        return ""
    low = min(end for section in shown for end, _ in section.bins) / 1.3
    high = max(max(section.max_s, section.limit_s or 0.0) for section in shown) * 1.3
    rows = "".join(_section(section, low, high) for section in shown)
    names = ("times", "median", "p99", "longest", "limit", "used")
    head = "<tr><th>section</th><th>durations</th>" + "".join(f'<th class="n">{name}</th>' for name in names) + "</tr>"
    return (
        f'<h2>How long sections took</h2><div class="scroll"><table>{head}{rows}</table></div>'
        f'<p class="dim">All ranks; logarithmic, from {seconds(low)} to {seconds(high)}; the line is the limit that '
        "held in the end, used is the longest by it. A section that was cut off is told by its incident.</p>"
    )


def _section(section: Section, low: float, high: float) -> str:
    limit = "none" if section.limit_s is None else seconds(section.limit_s)
    used = "" if not section.limit_s else f"{section.max_s / section.limit_s:.0%}"
    cells = (
        f"{section.count:,}",
        *map(seconds, (section.p50_s, section.p99_s, section.max_s)),
        limit,
        used,
    )
    name = escape(section.name) or "between heartbeats"
    return (
        f"<tr><td>{name}</td><td>{section_bars(section, low, high)}</td>"
        + "".join(f'<td class="n">{cell}</td>' for cell in cells)
        + "</tr>"
    )


# -- incidents -------------------------------------------------------------------------------------


def _restart(went: Waterfall) -> str:
    path = sorted(went.path, key=lambda step: -step.seconds)[:4]
    told = ", ".join(f"{seconds(step.seconds)} {phase_name(step.name)} ({who_in_words(step.who)})" for step in path)
    return (
        f"<h3>The restart: {seconds(went.seconds)}</h3>{waterfall_figure(went)}"
        f'<p class="dim">On the critical path: {escape(told)}</p>'
    )


def _stack_groups(groups: Sequence[Group]) -> str:
    """Where everybody was, equal stacks told once."""
    if not groups:
        return ""
    parts = []
    for group in groups[:MOST_GROUPS]:
        outer = [frame for frame in group.stack if not (is_ours(frame) or frame.file.startswith("<"))]
        outer = outer or list(group.stack)
        at = f"{short_path(outer[-1].file)}:{outer[-1].line} {outer[-1].function}"
        frames = "\n".join(f"{frame.file}:{frame.line} {frame.function}" for frame in group.stack)
        parts.append(
            f"<details><summary>{escape(named(group.ranks))}: {escape(at)}</summary>"
            f"<pre tabindex=0>{escape(frames)}</pre></details>"
        )
    more = len(groups) - MOST_GROUPS
    rest = f'<p class="dim">… and {count(more, "place")} more</p>' if more > 0 else ""
    return f"<h3>Where everybody was</h3>{''.join(parts)}{rest}"


def _evidence(incident: Incident) -> str:
    if not incident.records:
        return ""
    rows = "".join(_record(record) for record in incident.records[:MOST_RECORDS])
    more = len(incident.records) - MOST_RECORDS
    rest = f'<p class="dim">… and {count(more, "record")} more; --json has them all</p>' if more > 0 else ""
    chief = incident.records[0]
    tail = ""
    if chief.log_tail:
        last = "\n".join(last_lines(chief.log_tail))
        tail = f"<p>Last lines of rank {chief.rank}</p><pre tabindex=0>{escape(last)}</pre>"
    head = "".join(f"<th>{name}</th>" for name in ("rank", "seen", "by", "stage", "step", "sections", "process"))
    return (
        f"<details><summary>Evidence: {count(len(incident.records), 'record')}</summary>"
        f'<div class="scroll"><table class="top"><tr>{head}</tr>{rows}</table></div>{rest}{tail}</details>'
    )


def _record(record: InterruptionRecord) -> str:
    seen = record.message
    if record.exception is not None:
        seen = f"{record.exception.type}: {record.exception.message}"
    elif record.exit is not None and (record.exit.signal or record.exit.code is not None):
        seen = record.exit.signal or f"exit code {record.exit.code}"
    process = record.process
    cells = (
        str(record.rank),
        seen[:160] or record.interruption.value,
        "" if record.detector is None else record.detector.name,
        record.stage or "",
        "" if record.step is None else str(record.step),
        ", ".join(f"{section.name} {seconds(section.open_s)}" for section in record.open_sections),
        "" if process is None or process.state is None else f"state {process.state}",
    )
    return f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>"


# -- text ------------------------------------------------------------------------------------------


def _logged(lines: Sequence[str]) -> str:
    """What programs wrote around an incident; a script adds a search."""
    if not lines:
        return ""
    rows = "".join(f"<div>{escape(line)}</div>" for line in lines[:MOST_LINES])
    more = "" if len(lines) <= MOST_LINES else '<p class="dim">more: <code>resilience logs RUN --around N</code></p>'
    return (
        f"<details class=logs><summary>Log lines from 5 s before to 5 s after: {min(len(lines), MOST_LINES)}</summary>"
        '<label hidden>Search <input type="search"> <output></output></label>'
        f'<div class="lines" tabindex=0>{rows}</div>{more}</details>'
    )


def _rows(lines: Iterable[Line]) -> str:
    return "".join(f"<div>{''.join(_span(text, style) for text, style in line)}</div>" for line in lines)


def _text(lines: Iterable[Line]) -> str:
    return "\n".join("".join(_span(text, style) for text, style in line) for line in lines)


def _span(text: str, style: str) -> str:
    return f'<span class="{style}">{escape(text)}</span>' if style else escape(text)
