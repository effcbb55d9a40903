"""`resilience report RUN --html FILE`: the report as one self-contained page.

The verdict comes first, then the activity of each rank and the step rate over time, where the time went and what would
have saved some of it, section durations next to their limits, and each incident with its restart, evidence and stacks.
The page contains all text and drawings. A short script adds zooming and keyboard navigation; everything is readable
without it. The page follows the system's light or dark mode and can be printed."""

from __future__ import annotations

import functools
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template
from markupsafe import Markup

from resilience.attribution.advice import named
from resilience.attribution.incident import Incident
from resilience.attribution.stack_groups import StackGroup, stack_groups
from resilience.attribution.verdict_words import verdict_statements
from resilience.attribution.waterfall import Waterfall, waterfall
from resilience.errors import ConfigurationError
from resilience.facts.encoding import text
from resilience.facts.in_words import about_in_words, count, seconds
from resilience.facts.interruptions import InterruptionRecord
from resilience.facts.printable import printable
from resilience.facts.user_frames import is_ours
from resilience.history.phases import who_in_words
from resilience.report.condensed import Report, report
from resilience.report.counterfactual import what_if_in_words
from resilience.report.drawings import (
    lanes_figure,
    section_bars,
    throughput_figure,
    times_figure,
    waterfall_figure,
)
from resilience.report.evidence import last_lines
from resilience.report.log_lines import MOST_LINES, lines_around
from resilience.report.rank_lanes import lanes
from resilience.report.repeats import by_cost, known_cost
from resilience.report.sections import SectionSummary
from resilience.report.terminal import (
    TIMES_UNKNOWN,
    as_of_in_words,
    at_most_in_words,
    incident_lines,
    report_lines,
    unknown_in_words,
    unread_in_words,
)
from resilience.report.throughput import throughput_of
from resilience.run_folder.load import Reader, incomplete_in_words
from resilience.run_folder.merge import clocks_of, history_of
from resilience.system import files
from resilience.system.render import date, moments, phase_name, short_path

_HERE = Path(__file__).parent
TEXT_WIDTH, UNWRAPPED = 100, 10_000
MOST_DETAILED = 200  # incidents shown in full; the table lists the others
MOST_OPEN = 3  # incidents that are expanded initially
MOST_RECORDS, MOST_GROUPS = 12, 8
HEAD, MOST_LINKS = 3, 8  # kinds of incidents in the headline, most expensive first; links per kind


class ReportPage:
    """The page of one run."""

    def __init__(self, folder: Path) -> None:
        """Read the run once."""
        reader, clocks = Reader(folder), clocks_of(folder)
        self._clocks = clocks
        self.history = history_of(folder, reader.records, clocks)
        self.found = report(reader, self.history)
        self._moment = moments(self.found.started_wall_ns, self.found.last_wall_ns)
        self.lines = lines_around(folder, self.found.incidents, clocks)
        self.lanes = lanes(self.history, self.found.incidents)
        self.rates = throughput_of(folder, clocks)

    def page(self) -> str:
        """Return the whole page."""
        condensed, now_ns = self.found, time.time_ns()
        world = "? ranks" if condensed.world_size is None else count(condensed.world_size, "rank")
        style, script = ((_HERE / name).read_text("utf-8") for name in ("report.css", "report.js"))
        return _template().render(
            report=condensed,
            style=style,
            script=script,
            headline=_headline(condensed, now_ns),
            most_links=MOST_LINKS,
            at_most=at_most_in_words(condensed.unknown_rework),
            detailed={incident.number for incident in condensed.incidents[:MOST_DETAILED]},
            about=f"{', '.join(condensed.functions)} · {world} on "
            f"{_ranks_or(condensed.nodes)} · from {date(condensed.started_wall_ns)} to {date(condensed.last_wall_ns)}",
            lanes=lanes_figure(self.lanes, self._moment),
            throughput=throughput_figure(self.rates, self.lanes, self._moment),
            times=None if condensed.times is None else times_figure(condensed.times, condensed.unknown_rework),
            times_unknown=TIMES_UNKNOWN,
            formulas=list({answer.kind: answer for answer in condensed.what_ifs}.values()),
            sections=_sections(condensed.sections),
            incidents=[self._incident(incident) for incident in condensed.incidents[:MOST_DETAILED]],
            text=report_lines(condensed, TEXT_WIDTH, now_ns),
        )

    def _incident(self, incident: Incident) -> dict[str, Any]:
        restart = waterfall(self.history, incident, self._clocks)
        # The browser wraps the lines to the width of the screen.
        title, *lines = list(incident_lines(incident, UNWRAPPED, is_whole=True, with_phases=restart is None))
        cost = incident.cost.lost_s
        groups, logged = stack_groups(self.history, incident), self.lines.get(incident.number, [])
        return {
            "number": incident.number,
            "is_open": incident.number <= MOST_OPEN,
            "title": title,
            "about": self._moment(incident.detected_wall_ns) + ("" if cost is None else f", cost {seconds(cost)}"),
            "lines": lines,
            "restart": None if restart is None else _restart(restart),
            "places": [_place(group) for group in groups[:MOST_GROUPS]],
            "more_places": len(groups) - MOST_GROUPS,
            "records": [_cells(record) for record in incident.records[:MOST_RECORDS]],
            "record_count": len(incident.records),
            **_last_lines(incident),
            "logged": logged[:MOST_LINES],
            "has_more_logged": len(logged) > MOST_LINES,
        }


def write(path: Path, folder: Path) -> None:
    """Write the page of a run. Raises: ConfigurationError if that fails."""
    if reason := files.why_not_replaced(path, text(ReportPage(folder).page()).encode()):
        raise ConfigurationError(f"cannot write {path}: {reason}; {files.TO_REPLACE}")


@functools.cache
def _template() -> Template:
    def shown(value: Any) -> Any:
        return printable(value) if isinstance(value, str) and not isinstance(value, Markup) else value

    environment = Environment(
        autoescape=True,
        undefined=StrictUndefined,
        finalize=shown,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        loader=FileSystemLoader(_HERE),
    )
    environment.filters |= {"seconds": seconds, "signed": _signed, "counted": count, "what_if": what_if_in_words}
    return environment.get_template("report.html.j2")


# -- first of all ----------------------------------------------------------------------------------


def _headline(condensed: Report, now_ns: int) -> dict[str, Any]:
    about = about_in_words(condensed.completeness.has_all_records)
    none = "no incident" if condensed.completeness.has_all_records else "no incident in the readable records"
    incidents_text = about + count(len(condensed.incidents), "incident") if condensed.incidents else none
    cost = "" if condensed.lost_s is None or not condensed.incidents else f", {about}{seconds(condensed.lost_s)} lost"
    cost += unknown_in_words(condensed.unknown_cost, condensed.unknown_rework)
    ettr = None if condensed.times is None else condensed.times.ettr
    at_most = at_most_in_words(condensed.unknown_rework)
    kinds = _kinds(condensed.incidents)
    return {
        # A lost rank is not bad in itself: others may have completed the job without it.
        "is_bad": bool(condensed.left or (set(condensed.lost).difference(condensed.asked) and not condensed.completed))
        or (condensed.launched is not None and bool(condensed.launched.exit_code) and not condensed.launched.is_clean),
        "missing": incomplete_in_words(condensed.records_completeness),
        "unread": unread_in_words(condensed),
        "as_of": as_of_in_words(condensed, now_ns),
        "incidents": incidents_text + cost,
        "share": "" if ettr is None else f"; {at_most}{ettr:.1%} of the time was productive",
        "kinds": kinds[:HEAD],
        "more_kinds": len(kinds) - HEAD,
    }


def _kinds(incidents: Sequence[Incident]) -> list[dict[str, Any]]:
    """Return the kinds of incidents, the most expensive first."""
    by_line: defaultdict[str, list[Incident]] = defaultdict(list)
    for incident in incidents:
        by_line[_in_a_line(incident)].append(incident)
    kinds = [
        {
            "line": line,
            "numbers": [incident.number for incident in alike],
            "lost_s": known_cost(alike),
        }
        for line, alike in by_line.items()
    ]
    return sorted(kinds, key=lambda kind: by_cost(kind["lost_s"]))


def _in_a_line(incident: Incident) -> str:
    """Return verdict, place and first advice of an incident, in one line."""
    verdict = verdict_statements(incident)[0]
    where = f", at {short_path(incident.where.file, 1)}:{incident.where.line}" if incident.where is not None else ""
    advice = f" {incident.advice[0][:1].upper() + incident.advice[0][1:]}." if incident.advice else ""
    return f"{verdict + where}.{advice}"


def _ranks_or(nodes: Sequence[str]) -> str:
    """Return the names of up to four nodes, else their number."""
    return ", ".join(nodes) if len(nodes) <= 4 else f"{len(nodes)} nodes"


# -- time and durations ----------------------------------------------------------------------------


def _signed(value: float) -> str:
    return f"-{seconds(-value)}" if value < 0 else seconds(value)


def _sections(sections: Sequence[SectionSummary]) -> dict[str, Any] | None:
    used_sections = [section for section in sections if section.count]
    if not used_sections:
        return None
    low = min(end for section in used_sections for end, _ in section.bins) / 1.3
    high = max(max(section.max_s, section.limit_s or 0.0) for section in used_sections) * 1.3
    return {"low": low, "high": high, "rows": [_section(section, low, high) for section in used_sections]}


def _section(section: SectionSummary, low: float, high: float) -> dict[str, Any]:
    limit = "none" if section.limit_s is None else seconds(section.limit_s)
    used = "" if not section.limit_s else f"{section.max_s / section.limit_s:.0%}"
    durations = map(seconds, (section.p50_s, section.p99_s, section.max_s))
    return {
        "name": section.name or "between heartbeats",
        "bars": section_bars(section, low, high),
        "cells": (f"{section.count:,}", *durations, limit, used),
    }


# -- incidents -------------------------------------------------------------------------------------


def _restart(restart: Waterfall) -> dict[str, Any]:
    path = sorted(restart.path, key=lambda step: -step.seconds)[:4]
    steps = ", ".join(f"{seconds(step.seconds)} {phase_name(step.name)} ({who_in_words(step.who)})" for step in path)
    return {"seconds": restart.seconds, "figure": waterfall_figure(restart), "steps": steps}


def _place(group: StackGroup) -> dict[str, str]:
    """Return the stack of some ranks, which is the same for all of them."""
    outer = [frame for frame in group.stack if not (is_ours(frame) or frame.file.startswith("<"))]
    outer = outer or list(group.stack)
    return {
        "title": f"{named(group.ranks)}: {short_path(outer[-1].file)}:{outer[-1].line} {outer[-1].function}",
        "frames": "\n".join(f"{frame.file}:{frame.line} {frame.function}" for frame in group.stack),
    }


def _last_lines(incident: Incident) -> dict[str, Any]:
    """Return the last lines that the incident's first rank has printed."""
    if not incident.records:
        return {"last_lines": "", "last_lines_rank": None}
    chief = incident.records[0]
    return {"last_lines": "\n".join(last_lines(chief.log_tail or ())), "last_lines_rank": chief.rank}


def _cells(record: InterruptionRecord) -> tuple[str, ...]:
    """Return the row of the evidence's table for a record."""
    description = record.message
    if record.exception is not None:
        description = record.exception.in_words
    elif record.exit is not None and (record.exit.signal or record.exit.code is not None):
        description = record.exit.signal or f"exit code {record.exit.code}"
    process = record.process
    return (
        str(record.rank),
        description[:160] or record.interruption.value,
        "" if record.detector is None else record.detector.name,
        record.stage or "",
        "" if record.step is None else str(record.step),
        ", ".join(f"{section.name} {seconds(section.open_s)}" for section in record.open_sections),
        "" if process is None or process.state is None else f"state {process.state}",
    )
