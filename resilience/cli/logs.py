"""`resilience logs RUN`: what all ranks, monitors and agents said, in one timeline.

Merges records, log lines and the workers' output; like lines of many ranks become one (`--no-fold` tells
each). The lines go to stdout; how sure their order is, and what was not understood, to stderr."""

from __future__ import annotations

import argparse
import itertools
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime, timezone
from pathlib import Path

from resilience.analysis.entries import entry_of, said_entry, utc
from resilience.analysis.folding import Said, fold, template, templates
from resilience.analysis.lines import LEVELS, Line, fields_of, said
from resilience.analysis.merge import Choice, Timeline, history_of, last_ns, window
from resilience.analysis.query import Answer, asked
from resilience.attribution.advice import ranks_in_words
from resilience.attribution.incidents import incidents_of
from resilience.cli.render import (
    NARROWEST,
    count,
    cut,
    may_paint,
    painted,
    printable_pieces,
    seconds,
    width_of_terminal,
    wrap,
)
from resilience.cli.render import Line as Row
from resilience.cli.run_argument import add_run, find_run
from resilience.core import encoding
from resilience.core.printable import printable_json, printable_line
from resilience.errors import ConfigurationError

NOTHING_MATCHED = 1  # exit status
POLL_S = 0.2  # how often --follow looks for new lines
COLUMNS = (
    "time",
    "date",
    "level",
    "who",
    "text",
    "rank",
    "node",
    "role",
    "cycle",
    "iteration",
    "kind",
    "event",
    "file",
)
DEFAULT = ("time", "level", "who", "text")
_WHO = 12
_STYLES = {"warning": "yellow", "error": "red", "critical": "bold red", "debug": "dim"}
_SHORT = {"warning": "warn", "critical": "crit"}
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_AGO = re.compile(r"(\d+(?:\.\d+)?)(s|m|min|h|d)")
_UNITS = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}
SIZED = 200  # rows of a table that decide on its columns' widths
_NAMED = 5  # files named in a note


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.description = "Merge what all ranks, monitors and agents of a run said into one timeline."
    add_run(parser)
    choose = parser.add_argument_group("which lines")
    choose.add_argument("--rank", metavar="RANKS", help="initial ranks, as 0-7,12")
    choose.add_argument("--level", choices=LEVELS, help="this level and above")
    choose.add_argument("--event", metavar="PATTERN", help="tags and messages by shell pattern, as 'rank.*'")
    choose.add_argument("--iteration", type=int, metavar="N", help="lines that name this iteration")
    choose.add_argument("--cycle", type=int, metavar="N", help="lines of this start of the workers")
    choose.add_argument(
        "--since", metavar="WHEN", help="a UTC time (2026-01-31T12:00:00, 12:00), or 10m: before the run's last line"
    )
    choose.add_argument("--around", type=int, metavar="INCIDENT", help="from 5 s before to 5 s after this incident")
    choose.add_argument("--grep", metavar="REGEX", help="lines whose text matches")
    choose.add_argument("--diff", metavar="OTHER_RUN", help="only lines the like of which OTHER_RUN does not have")
    form = parser.add_argument_group("how they are shown")
    form.add_argument("--fold", action=argparse.BooleanOptionalAction, help="tell like lines of many ranks once")
    form.add_argument("--columns", metavar="NAMES", help=f"of {','.join(COLUMNS)}, or fields by name; tells each line")
    form.add_argument("--json", action="store_true", help="one JSON object a line; tells each line unless --fold")
    form.add_argument("--follow", "-f", action="store_true", help="go on as the run goes on; Ctrl-C ends it")
    form.add_argument("--sql", metavar="QUERY", help="ask DuckDB instead: views logs, records, timings (docs/logs.md)")


def run(arguments: argparse.Namespace) -> int:
    """Print the timeline; return the exit status.

    Raises: ConfigurationError for an argument that cannot be understood, or names no run or incident."""
    folder = find_run(arguments.run)
    if arguments.sql is not None:
        return _ask(folder, arguments.sql, arguments.json)
    columns = _columns(arguments.columns)
    is_folded = arguments.fold if arguments.fold is not None else not (arguments.json or arguments.columns)
    matches = _pattern(arguments.grep)
    timeline = Timeline(folder, _choice(arguments, folder))
    known = None if arguments.diff is None else templates(Timeline(find_run(arguments.diff)))
    _tell(_before(timeline))
    lines: Iterable[Line | None] = timeline.follow(_wait) if arguments.follow else timeline
    if known is not None:
        lines = (line for line in lines if line is None or hash(template(line)) not in known)
    if matches is not None:
        lines = (line for line in lines if line is None or matches(said(line)))
    counted = _Counted(lines)
    lines = counted
    each = (line for line in lines if line is not None)
    try:
        if arguments.json:
            plain = map(said_entry, fold(lines)) if is_folded else (entry_of(line, timeline.clocks) for line in each)
            _write((printable_json(encoding.to_json_text(entry, str)) for entry in plain), arguments.follow)
        else:
            rows = folded_rows(fold(lines)) if is_folded else rows_of(each, columns)
            _write(_texts(rows), arguments.follow)
    except KeyboardInterrupt:
        pass  # whoever followed has seen enough
    _tell(_after(timeline))
    if counted.lines:
        return 0
    filters = _filters(arguments, timeline.choice)
    _tell([f"no line of {folder} matches {filters}" if filters else f"{folder} has no lines"])
    return NOTHING_MATCHED if filters else 0


class _Counted:
    """Lines that are counted as they go by. None between them is none."""

    def __init__(self, lines: Iterable[Line | None]) -> None:
        self.lines = 0
        self._lines = lines

    def __iter__(self) -> Iterator[Line | None]:
        for line in self._lines:
            self.lines += line is not None
            yield line


def _filters(arguments: argparse.Namespace, choice: Choice) -> str:
    """Return the options that choose lines, as they were given; with the times that they mean."""
    names = ("rank", "level", "event", "iteration", "cycle", "since", "around", "grep", "diff")
    given = [f"--{name} {getattr(arguments, name)}" for name in names if getattr(arguments, name) is not None]
    if choice.since_ns is not None:
        until = f" to {utc(choice.until_ns)}" if choice.until_ns is not None else ""
        given[-1] += f" (from {utc(choice.since_ns)}{until})"
    return ", ".join(given)


def _ask(folder: Path, sql: str, as_json: bool) -> int:
    """Print the answer to a question in SQL."""
    with asked(folder, sql) as answer:
        if as_json:
            rows = (dict(zip(answer.columns, row, strict=True)) for row in answer.rows)
            _write((printable_json(encoding.to_json_text(row, str)) for row in rows), False)
        else:
            _write(_table(answer), False)
        if answer.bad:
            _tell([f"{count(answer.bad, 'line')} not understood and left out; without --sql they are shown"])
    return 0


def _table(answer: Answer) -> Iterator[str]:
    """A table as wide as its values; the first rows decide on the width of its columns."""
    rows = (tuple("" if value is None else printable_line(str(value)) for value in row) for row in answer.rows)
    first = list(itertools.islice(rows, SIZED))
    sizes = [max(len(row[column]) for row in (answer.columns, *first)) for column in range(len(answer.columns))]
    for row in itertools.chain([answer.columns], first, rows):
        yield "  ".join(cell.ljust(size) for cell, size in zip(row, sizes, strict=True)).rstrip()


def folded_rows(lines: Iterable[Said]) -> Iterator[Row]:
    """Yield folded lines for a terminal. What stands out has a mark."""
    day = ""
    for one in lines:
        if (today := utc(one.line.at_ns)[:10]) != day:
            day = today
            yield ((f"{day} UTC", "dim"),)
        style = _STYLES.get(one.line.level, "")
        if one.stands_out:
            style = f"bold {style}".strip() if "bold" not in style else style
        yield (
            (_time(one.line) + ("! " if one.stands_out else "  "), style if one.stands_out else "dim"),
            (f"{_SHORT.get(one.line.level, one.line.level):5}  ", style),
            (f"{_whose(one):{_WHO}}  ", "cyan"),
            (one.text, style),
        )


def rows_of(lines: Iterable[Line], columns: tuple[str, ...]) -> Iterator[Row]:
    """Yield each line for a terminal, in these columns."""
    day = ""
    for line in lines:
        if (today := utc(line.at_ns)[:10]) != day and "time" in columns:
            day = today
            yield ((f"{day} UTC", "dim"),)
        style = _STYLES.get(line.level, "")
        fields = {} if set(columns) <= set(COLUMNS) else fields_of(line)
        cells = [_cell(line, name, fields) for name in columns]
        yield ((f"{'  '.join(cells[:-1])}  " if len(cells) > 1 else "", "dim"), (cells[-1].rstrip(), style))


def _cell(line: Line, name: str, fields: dict[str, object]) -> str:
    match name:
        case "time":
            return _time(line)
        case "date":
            return utc(line.at_ns) + ("~" if line.is_placed else " ")
        case "level":
            return f"{_SHORT.get(line.level, line.level):5}"
        case "who":
            return f"{_who(line):{_WHO}}"
        case "text":
            return said(line)
        case "rank" | "cycle" | "iteration":
            value = getattr(line, name)
            return f"{'-' if value is None else value:>4}"
        case "node" | "role" | "kind" | "event":
            return f"{getattr(line, name) or '-':8}"
        case "file":
            return f"{line.file}:{line.number}"
        case _:
            return str(fields.get(name, "-"))


def _time(line: Line) -> str:
    return utc(line.at_ns)[11:23] + ("~" if line.is_placed else " ")


def _who(line: Line) -> str:
    if line.rank is None:
        return f"{line.role or ''} {line.node or line.file}".strip()
    return f"{'monitor' if line.role == 'monitor' else 'rank'} {line.rank}"


def _whose(one: Said) -> str:
    if not one.ranks:
        return f"{one.line.role or ''} {','.join(one.nodes[:_NAMED])}".strip()
    role = "monitor" if one.line.role == "monitor" else "rank"
    return f"{role}{'s' if len(one.ranks) > 1 else ''} {ranks_in_words(one.ranks, 4).replace(', ', ',')}"


def _texts(rows: Iterable[Row]) -> Iterator[str]:
    """Paint on a terminal, and wrap there under the text; elsewhere one line stays one line. Workers' own colours are
    left out. Of a progress bar the terminal gets the last state only."""
    is_terminal = sys.stdout.isatty()
    paint = may_paint(sys.stdout)
    width = width_of_terminal()
    for row in rows:
        if not row:
            yield ""
            continue
        *before, (text, style) = row
        text = _COLOURS.sub("", text)
        if not is_terminal:
            yield painted((*before, (text, style)), paint)
            continue
        text = text.rsplit("\r", 1)[-1].expandtabs(4)
        *head, (text, style) = printable_pieces((*before, (text, style)))
        indent = min(sum(len(piece) for piece, _ in head), NARROWEST // 2)
        room = max(20, width - sum(len(piece) for piece, _ in head))
        first, *_ = wrap(text, room) or [""]
        yield painted((*head, (first, style)), paint)
        for more in wrap(text[len(first) :].lstrip(), width - indent):
            yield painted(((" " * indent, ""), (more, style)), paint)


def _write(texts: Iterable[str], is_flushed: bool) -> None:
    """Write lines that can be shown as they are."""
    for text in texts:
        sys.stdout.write(text + "\n")
        if is_flushed:
            sys.stdout.flush()


# -- arguments ---------------------------------------------------------------------------------


def _choice(arguments: argparse.Namespace, folder: Path) -> Choice:
    since, until = None, None
    if arguments.around is not None:
        incidents = incidents_of(history_of(folder))
        found = next((incident for incident in incidents if incident.number == arguments.around), None)
        if found is None:
            have = f"has incidents 1 to {len(incidents)}" if incidents else "has no incidents"
            raise ConfigurationError(f"--around {arguments.around}: {folder} {have}")
        since, until = window(found) or (None, None)
    if arguments.since is not None:
        asked = since_ns(arguments.since, last_ns(folder))
        since = asked if since is None else max(since, asked)
    return Choice(
        ranks=None if arguments.rank is None else ranks_of(arguments.rank),
        level=arguments.level,
        event=arguments.event,
        iteration=arguments.iteration,
        cycle=arguments.cycle,
        since_ns=since,
        until_ns=until,
    )


def ranks_of(text: str) -> frozenset[int]:
    """Return the ranks of "0-7,12". Raises: ConfigurationError."""
    found: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()) or (dash and int(last) < int(first)):
            raise ConfigurationError(f"--rank {text}: {part!r} is no rank and no range; write ranks as 0-7,12")
        found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)


def since_ns(text: str, last: int) -> int:
    """Return a point in time, UTC nanoseconds. last: of the run's last line, which "10m" counts from.

    Raises: ConfigurationError."""
    ago = _AGO.fullmatch(text)
    if ago is not None:
        return last - round(float(ago[1]) * _UNITS[ago[2]] * 1e9)
    day = datetime.fromtimestamp(last / 1e9, timezone.utc).strftime("%Y-%m-%dT")
    try:
        at = datetime.fromisoformat((text if "-" in text else day + text).replace("Z", "+00:00"))
    except ValueError:
        raise ConfigurationError(
            f"--since {text}: no time; write 2026-01-31T12:00:00 or 12:00 (UTC), or 90s, 10m, 2h before the last line"
        ) from None
    return round((at if at.tzinfo is not None else at.replace(tzinfo=timezone.utc)).timestamp() * 1e9)


def _columns(text: str | None) -> tuple[str, ...]:
    return DEFAULT if text is None else tuple(name.strip() for name in text.split(",") if name.strip()) or DEFAULT


def _pattern(text: str | None) -> Callable[[str], object] | None:
    if text is None:
        return None
    try:
        return re.compile(text).search
    except re.error as error:
        raise ConfigurationError(f"--grep {text}: no regular expression: {error}") from None


def _wait() -> bool:
    sys.stdout.flush()
    time.sleep(POLL_S)
    return True


# -- notes -------------------------------------------------------------------------------------


def _before(timeline: Timeline) -> Iterator[str]:
    """How sure the order of lines is."""
    if not timeline.clocks:
        return
    corrected = [clock for clock in timeline.clocks if clock.offset_ns]
    for clock in corrected[:_NAMED]:
        sure = "" if clock.uncertainty_ns is None else f" ± {seconds(clock.uncertainty_ns / 1e9)}"
        way = "ahead" if clock.offset_ns > 0 else "behind"
        yield f"clock of {clock.node} was {seconds(abs(clock.offset_ns) / 1e9)}{sure} {way}; taken off"
    if len(corrected) > _NAMED:
        yield f"… and {count(len(corrected) - _NAMED, 'more clock')}"
    unknown = [clock.node for clock in timeline.clocks if clock.uncertainty_ns is None]
    bounds = [clock.uncertainty_ns for clock in timeline.clocks if clock.uncertainty_ns is not None]
    if len(bounds) > 1:
        sure = f"to within {seconds(max(bounds) / 1e9)}"
        yield f"{count(len(timeline.clocks), 'node')}: their clocks agree {sure}, by {_meetings(timeline)}"
    if unknown:
        named = cut(", ".join(unknown), 60)
        yield f"nothing is known of the clock of {named}: its lines stand where its own clock puts them"


def _meetings(timeline: Timeline) -> str:
    return count(max(clock.meetings for clock in timeline.clocks), "meeting") + " of all ranks"


def _after(timeline: Timeline) -> Iterator[str]:
    """What was not understood."""
    bad = timeline.bad
    if bad:
        names = ", ".join(f"{name} ({number})" for name, number in sorted(bad.items())[:_NAMED])
        more = f" and {count(len(bad) - _NAMED, 'more file')}" if len(bad) > _NAMED else ""
        yield f"{count(sum(bad.values()), 'line')} not understood, shown as they are: {names}{more}"
    for name, why in sorted(timeline.unreadable.items())[:_NAMED]:
        yield f"{name} {why}"


def _tell(notes: Iterable[str]) -> None:
    paint = may_paint(sys.stderr)
    for note in notes:
        sys.stderr.write(painted(((note, "dim"),), paint) + "\n")
