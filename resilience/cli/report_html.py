"""`resilience report RUN --html FILE`: the report as one self-contained page.

The verdict comes first, then the activity of each rank and the step rate over time, where the time went and what would
have saved some of it, section durations next to their limits, and each incident with its restart, evidence and stacks.
The page contains all text and drawings. A short script adds zooming and keyboard navigation; everything is readable
without it. The page follows the system's light or dark mode and can be printed."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

from resilience.adapters import files
from resilience.analysis.counterfactual import WhatIf
from resilience.analysis.load import Reader
from resilience.analysis.merge import history_of
from resilience.analysis.rank_lanes import lanes
from resilience.analysis.report import Report, report
from resilience.analysis.sections import SectionSummary
from resilience.analysis.throughput import throughput_of
from resilience.analysis.waterfall import Waterfall, waterfall
from resilience.attribution.advice import named
from resilience.attribution.incident import Incident
from resilience.attribution.stack_groups import StackGroup, stack_groups
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
MOST_DETAILED = 200  # incidents shown in full; the table lists the others
MOST_OPEN = 3  # incidents that are expanded initially
MOST_RECORDS, MOST_GROUPS = 12, 8
HEAD, MOST_LINKS = 3, 8  # kinds of incidents in the headline, most expensive first; links per kind


class ReportPage:
    """The page of one run."""

    def __init__(self, folder: Path) -> None:
        """Read the run once."""
        reader = Reader(folder)
        self.history = history_of(folder, reader.records)
        self.found = report(reader, self.history)
        self.lines = lines_around(folder, self.found.incidents)
        self.lanes = lanes(self.history, self.found.incidents)
        self.rates = throughput_of(folder)

    def page(self) -> str:
        """Return the whole page."""
        condensed, now_ns = self.found, time.time_ns()
        parts = [
            f"<h1>Run {escape(condensed.job_id)}{f', attempt {condensed.attempt}' if condensed.attempt else ''}</h1>",
            _headline(condensed, now_ns),
            f'<p class="dim">{escape(", ".join(condensed.functions))} · {condensed.world_size or "?"} ranks on '
            f"{escape(_ranks_or(condensed.nodes))} · from {date(condensed.started_wall_ns)} to "
            f"{clock(condensed.last_wall_ns)}</p>",
            "<h2>What the ranks did</h2>",
            lanes_figure(self.lanes),
            throughput_figure(self.rates, self.lanes),
            "<h2>Where the time went</h2>",
            f"<p>{TIMES_UNKNOWN}</p>" if condensed.times is None else times_figure(condensed.times),
            _what_ifs(condensed.what_ifs),
            _sections(condensed.sections),
            self._incidents(),
            "<h2>The whole report as text</h2><details><summary>as <code>resilience report</code> prints it</summary>"
            f"<pre tabindex=0>{_text(report_lines(condensed, TEXT_WIDTH, now_ns))}</pre></details>",
        ]
        style, script = ((Path(__file__).parent / name).read_text("utf-8") for name in ("report.css", "report.js"))
        return (
            '<!doctype html><html lang="en"><head><meta charset="utf-8">'
            '<meta name="viewport" content="width=device-width,initial-scale=1"><link rel="icon" href="data:,">'
            f"<title>{escape(condensed.job_id)}: report</title><style>{style}</style></head><body><main>"
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
        restart = waterfall(self.history, incident)
        # The browser wraps the lines to the width of the screen.
        title, *lines = list(incident_lines(incident, UNWRAPPED, is_whole=True, with_phases=restart is None))
        head = "".join(_span(text, style) for text, style in title)
        cost = incident.cost.lost_s
        cost_note = "" if cost is None else f", cost {seconds(cost)}"
        about = f' <span class="dim">{clock(incident.detected_wall_ns)}{cost_note}</span>'
        is_open = " open" if incident.number <= MOST_OPEN else ""
        return (
            f'<details class="incident" id="incident-{incident.number}"{is_open}><summary>{head}{about}</summary>'
            f'<div class="facts">{_rows(lines)}</div>{"" if restart is None else _restart(restart)}'
            f"{_stack_groups(stack_groups(self.history, incident))}{_evidence(incident)}"
            f"{_logged(self.lines.get(incident.number, []))}</details>"
        )


def write(path: Path, folder: Path) -> None:
    """Write the page of a run. Raises: ConfigurationError if that fails."""
    if not files.replace(path, text(ReportPage(folder).page()).encode()):
        raise ConfigurationError(f"cannot write {path}; check free space and permissions")


# -- first of all ----------------------------------------------------------------------------------


def _headline(condensed: Report, now_ns: int) -> str:
    is_bad = bool(condensed.lost or condensed.left) or (
        condensed.launched is not None and bool(condensed.launched.exit_code) and not condensed.launched.is_clean
    )
    at_least = "" if condensed.completeness.is_whole else "at least "
    none = "no incident" if condensed.completeness.is_whole else "no incident in the readable records"
    incidents_text = at_least + count(len(condensed.incidents), "incident") if condensed.incidents else none
    cost = "" if condensed.lost_s is None or not condensed.incidents else f", {seconds(condensed.lost_s)} lost"
    ettr = None if condensed.times is None else condensed.times.ettr
    share = "" if ettr is None else f"; {ettr:.1%} of the time was productive"
    missing = incomplete_in_words(condensed.completeness)
    as_of = as_of_in_words(condensed, now_ns)
    by_line: defaultdict[str, list[Incident]] = defaultdict(list)
    for incident in condensed.incidents:
        by_line[_in_a_line(incident)].append(incident)
    kinds = sorted(by_line.items(), key=lambda item: -sum(incident.cost.lost_s or 0.0 for incident in item[1]))
    items = "".join(f"<li>{_links(incidents)}: {line}</li>" for line, incidents in kinds[:HEAD])
    item_list = f"<ul>{items}</ul>" if items else ""
    more = f"<p>… and {count(len(kinds) - HEAD, 'other kind')} of incident.</p>" if len(kinds) > HEAD else ""
    return (
        f'<div class="verdict{" bad" if is_bad else " unsure" if missing else ""}">'
        + (f"<p><b>Records are {escape(missing)}</b>; this page covers the readable records.</p>" if missing else "")
        + (f"<p><b>As of {as_of}</b>, when this page was written.</p>" if as_of else "")
        + f"<p><b>{incidents_text}{cost}</b>{share}.</p>{item_list}{more}"
        f"<p>{escape(condensed.end)}</p></div>"
    )


def _in_a_line(incident: Incident) -> str:
    """Return verdict, place and first advice of an incident, in one line."""
    lines = [plain(line).strip() for line in incident_lines(incident, 10_000)]
    verdict = next(
        (line.removeprefix("verdict").strip() for line in lines if line.startswith("verdict")), incident.kind
    )
    where = f", at {short_path(incident.where.file, 1)}:{incident.where.line}" if incident.where is not None else ""
    advice = f" {escape(incident.advice[0][:1].upper() + incident.advice[0][1:])}." if incident.advice else ""
    return f"{escape(verdict + where)}.{advice}"


def _links(incidents: Sequence[Incident]) -> str:
    lost = sum(incident.cost.lost_s or 0.0 for incident in incidents)
    links = ", ".join(
        f'<a href="#incident-{incident.number}">{incident.number}</a>' for incident in incidents[:MOST_LINKS]
    )
    more = "" if len(incidents) <= MOST_LINKS else f" and {len(incidents) - MOST_LINKS} more"
    return f"{'incident' if len(incidents) == 1 else 'incidents'} {links}{more} ({seconds(lost)})"


def _ranks_or(nodes: Sequence[str]) -> str:
    """Return the names of up to four nodes, else their number."""
    return ", ".join(nodes) if len(nodes) <= 4 else f"{len(nodes)} nodes"


# -- time and durations ----------------------------------------------------------------------------


def _what_ifs(answers: Sequence[WhatIf]) -> str:
    if not answers:
        return ""
    rows = "".join(
        f'<tr><td>{escape(what_if_in_words(answer))}</td><td class="n">{_signed(answer.saved_s)}</td>'
        f'<td class="n">{answer.ettr:.1%}</td><td>if {escape(answer.assumes)}</td></tr>'
        for answer in answers
    )
    by_kind = {answer.kind: answer for answer in answers}
    formulas = "".join(
        f"<li><code>{escape(answer.formula)}</code><br>{escape(answer.inputs)}</li>" for answer in by_kind.values()
    )
    return (
        '<h3>What if</h3><div class="scroll"><table><tr><th>with …</th><th class="n">saved</th>'
        f'<th class="n">productive</th><th></th></tr>{rows}</table></div>'
        '<p class="dim">Productive: (productive time + saved) / '
        f"total. This assumes the same faults; it is not a forecast.</p><ul>{formulas}</ul>"
    )


def _signed(value: float) -> str:
    return f"-{seconds(-value)}" if value < 0 else seconds(value)


def _sections(sections: Sequence[SectionSummary]) -> str:
    used_sections = [section for section in sections if section.count]
    if not used_sections:
        return ""
    low = min(end for section in used_sections for end, _ in section.bins) / 1.3
    high = max(max(section.max_s, section.limit_s or 0.0) for section in used_sections) * 1.3
    rows = "".join(_section(section, low, high) for section in used_sections)
    names = ("times", "median", "p99", "longest", "limit", "used")
    head = "<tr><th>section</th><th>durations</th>" + "".join(f'<th class="n">{name}</th>' for name in names) + "</tr>"
    return (
        f'<h2>How long sections took</h2><div class="scroll"><table>{head}{rows}</table></div>'
        f'<p class="dim">All ranks; logarithmic, from {seconds(low)} to {seconds(high)}. The line is the last limit; '
        "used: longest duration / limit. Interrupted sections are shown with their incident.</p>"
    )


def _section(section: SectionSummary, low: float, high: float) -> str:
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


def _restart(restart: Waterfall) -> str:
    path = sorted(restart.path, key=lambda step: -step.seconds)[:4]
    steps = ", ".join(f"{seconds(step.seconds)} {phase_name(step.name)} ({who_in_words(step.who)})" for step in path)
    return (
        f"<h3>The restart: {seconds(restart.seconds)}</h3>{waterfall_figure(restart)}"
        f'<p class="dim">On the critical path: {escape(steps)}</p>'
    )


def _stack_groups(groups: Sequence[StackGroup]) -> str:
    """Return the stacks of all ranks; ranks with equal stacks are grouped."""
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
    more_text = f'<p class="dim">… and {count(more, "place")} more</p>' if more > 0 else ""
    return f"<h3>Where each rank was</h3>{''.join(parts)}{more_text}"


def _evidence(incident: Incident) -> str:
    if not incident.records:
        return ""
    rows = "".join(_record(record) for record in incident.records[:MOST_RECORDS])
    more = len(incident.records) - MOST_RECORDS
    more_text = f'<p class="dim">… and {count(more, "record")} more; --json shows all</p>' if more > 0 else ""
    chief = incident.records[0]
    tail = ""
    if chief.log_tail:
        last = "\n".join(last_lines(chief.log_tail))
        tail = f"<p>Last lines of rank {chief.rank}</p><pre tabindex=0>{escape(last)}</pre>"
    head = "".join(
        f"<th>{name}</th>" for name in ("rank", "interruption", "detector", "stage", "step", "sections", "process")
    )
    return (
        f"<details><summary>Evidence: {count(len(incident.records), 'record')}</summary>"
        f'<div class="scroll"><table class="top"><tr>{head}</tr>{rows}</table></div>{more_text}{tail}</details>'
    )


def _record(record: InterruptionRecord) -> str:
    description = record.message
    if record.exception is not None:
        description = f"{record.exception.type}: {record.exception.message}"
    elif record.exit is not None and (record.exit.signal or record.exit.code is not None):
        description = record.exit.signal or f"exit code {record.exit.code}"
    process = record.process
    cells = (
        str(record.rank),
        description[:160] or record.interruption.value,
        "" if record.detector is None else record.detector.name,
        record.stage or "",
        "" if record.step is None else str(record.step),
        ", ".join(f"{section.name} {seconds(section.open_s)}" for section in record.open_sections),
        "" if process is None or process.state is None else f"state {process.state}",
    )
    return f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>"


# -- text ------------------------------------------------------------------------------------------


def _logged(lines: Sequence[str]) -> str:
    """Return the log lines around an incident. A script adds a search."""
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
