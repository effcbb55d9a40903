"""`resilience logs RUN`: the records, log lines and output of a run in one timeline.

Folds similar lines of many ranks into one (`--no-fold` prints each). Lines go to stdout. Notes go to stderr: how far
the order between nodes can be trusted, and which lines could not be parsed."""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime, timedelta, timezone
from pathlib import Path

from resilience.attribution.incidents import incidents_of
from resilience.cli.arguments import refuse_together
from resilience.cli.incomplete import checked_history, say_incomplete
from resilience.cli.run_argument import add_run, find_run, no_such_incident, refuse_unlisted
from resilience.errors import ConfigurationError
from resilience.facts import encoding
from resilience.facts.in_words import count
from resilience.facts.printable import printable_json
from resilience.logs.folding import fold, folded_entry, template, templates
from resilience.logs.notes import clock_notes, unlisted_notes, unparsed_notes
from resilience.logs.terminal import COLUMNS, folded_rows, rows_of, table_of, texts_of, write
from resilience.run_folder.entries import entry_of, utc
from resilience.run_folder.lines import LEVELS, Line, line_text, shown_fields
from resilience.run_folder.load import RECORDS
from resilience.run_folder.merge import LOGS, OUTPUT, LineFilter, MergedLines, last_ns, window
from resilience.run_folder.query import run_query
from resilience.run_folder.rank_ranges import ranks_of
from resilience.system.render import show

NOTHING_MATCHED = 1  # exit status
POLL_S = 0.2  # how often --follow looks for new lines
LATER_NS = 60 * 10**9  # output that nobody collected may be this much later than the last line with a known time
SELECTION = ("rank", "level", "event", "iteration", "cycle", "since", "around", "grep", "diff")  # options
DEFAULT = ("time", "level", "who", "text")
_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
_AGO = re.compile(r"(\d+(?:\.\d+)?)(s|m|min|h|d)")
_UNITS = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.description = (
        "Merge the records, log lines and output of all ranks, monitors and agents of a run into one timeline."
    )
    add_run(parser)
    choose = parser.add_argument_group("selection")
    choose.add_argument("--rank", metavar="RANKS", help="lines of these initial ranks, such as 0-7,12")
    choose.add_argument("--level", choices=LEVELS, help="lines of this level and above")
    choose.add_argument(
        "--event", metavar="PATTERN", help="event tags or messages that match a shell pattern, such as 'rank.*'"
    )
    choose.add_argument("--iteration", type=int, metavar="N", help="lines of this iteration")
    choose.add_argument("--cycle", type=int, metavar="N", help="lines of this cycle (start of the workers)")
    choose.add_argument(
        "--since",
        metavar="WHEN",
        help="lines since a UTC time, such as 2026-01-31T12:00:00, or 12:00 before the run's last line; "
        "10m: the run's last 10 minutes",
    )
    choose.add_argument(
        "--around", type=int, metavar="INCIDENT", help="lines from 5 s before to 5 s after this incident"
    )
    choose.add_argument("--grep", metavar="REGEX", help="lines whose text matches a regular expression")
    choose.add_argument("--diff", metavar="OTHER_RUN", help="lines that have no similar line in OTHER_RUN")
    form = parser.add_argument_group("output")
    form.add_argument(
        "--fold",
        action=argparse.BooleanOptionalAction,
        help="print similar lines of many ranks once; default: --fold, unless --json or --columns is given",
    )
    form.add_argument("--columns", metavar="NAMES", help=f"columns from {', '.join(COLUMNS)}, or names of fields")
    form.add_argument("--json", action="store_true", help="print one JSON object per line")
    form.add_argument("--follow", "-f", action="store_true", help="wait for new lines until Ctrl-C")
    form.add_argument(
        "--sql",
        metavar="QUERY",
        help="run a DuckDB query instead; views: logs, records, timings and others (docs/logs.md)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Print the timeline; return the exit status.

    Raises: ConfigurationError for an invalid argument, or one that names no run or incident."""
    if arguments.sql is not None:
        names = (*SELECTION, "fold", "columns", "follow")
        refuse_together("--sql", "; select in the query", **{name: getattr(arguments, name) for name in names})
    if arguments.columns is not None:
        refuse_together("--columns", fold=arguments.fold, json=arguments.json)
    folder = find_run(arguments.run)
    if arguments.sql is not None:
        return _query(folder, arguments.sql, arguments.json)
    columns = _columns(arguments.columns)
    is_folded = arguments.fold if arguments.fold is not None else not (arguments.json or arguments.columns)
    matches = _pattern(arguments.grep)
    timeline = MergedLines(folder, _choice(arguments, folder))
    known_templates = None if arguments.diff is None else _templates_of(find_run(arguments.diff))
    _print_notes(clock_notes(timeline))
    lines: Iterable[Line | None] = timeline.follow(_wait) if arguments.follow else timeline
    if known_templates is not None:
        lines = (line for line in lines if line is None or hash(template(line)) not in known_templates)
    if matches is not None:
        lines = (line for line in lines if line is None or matches(line_text(line)))
    counted = _Counted(lines, [name for name in columns if name not in COLUMNS])
    lines = counted
    present = (line for line in lines if line is not None)
    try:
        if arguments.json:
            plain = (
                map(folded_entry, fold(lines)) if is_folded else (entry_of(line, timeline.clocks) for line in present)
            )
            write((printable_json(encoding.to_json_text(entry, str)) for entry in plain), arguments.follow)
        else:
            rows = folded_rows(fold(lines)) if is_folded else rows_of(present, columns)
            write(texts_of(rows, sys.stdout), arguments.follow)
    except KeyboardInterrupt:
        pass  # Ctrl-C ends --follow
    if not counted.lines:
        refuse_unlisted(folder, RECORDS, LOGS, OUTPUT)
    _print_notes(unparsed_notes(timeline))
    return _status(arguments, timeline, counted)


def _templates_of(folder: Path) -> frozenset[int]:
    refuse_unlisted(folder, RECORDS, LOGS, OUTPUT)  # otherwise every line would differ
    return templates(MergedLines(folder))


class _Counted:
    """Passes lines on and counts them. None entries do not count. missing: those of the fields that no line has."""

    def __init__(self, lines: Iterable[Line | None], fields: Sequence[str]) -> None:
        self.lines = 0
        self.missing = list(fields)
        self._lines = lines

    def __iter__(self) -> Iterator[Line | None]:
        for line in self._lines:
            self.lines += line is not None
            if line is not None and self.missing:
                present = shown_fields(line)
                self.missing = [name for name in self.missing if name not in present]
            yield line


def _status(arguments: argparse.Namespace, timeline: MergedLines, counted: _Counted) -> int:
    """Name the options that match nothing; return the exit status."""
    if counted.lines and not counted.missing:
        return 0
    if counted.lines:
        missing = ", ".join(counted.missing)
        _print_notes([f"no line shown has the field {missing}; columns are {', '.join(COLUMNS)}, and fields of lines"])
        return NOTHING_MATCHED
    folder, filters = timeline.folder, _filters(arguments, timeline.choice)
    _print_notes([f"no line of {folder} matches {filters}" if filters else f"{folder} has no lines"])
    return NOTHING_MATCHED if filters else 0


def _filters(arguments: argparse.Namespace, choice: LineFilter) -> str:
    """Return the selection options as given, with the times that they mean."""
    options = {name: f"--{name} {value}" for name in SELECTION if (value := getattr(arguments, name)) is not None}
    if choice.since_ns is not None:
        until = f" to {utc(choice.until_ns)}" if choice.until_ns is not None else ""
        options["around" if "around" in options else "since"] += f" (from {utc(choice.since_ns)}{until})"
    return ", ".join(options.values())


def _query(folder: Path, sql: str, as_json: bool) -> int:
    """Print the result of an SQL query."""
    _print_notes(unlisted_notes(folder))
    with run_query(folder, sql) as answer:
        say_incomplete(folder, answer.completeness)
        if as_json:
            rows = (dict(zip(answer.columns, row, strict=True)) for row in answer.rows)
            write((printable_json(encoding.to_json_text(row, str)) for row in rows), False)
        else:
            write(table_of(answer), False)
        if answer.bad:
            _print_notes([f"{count(answer.bad, 'line')} could not be parsed, left out; without --sql they are shown"])
    return 0


# -- arguments ---------------------------------------------------------------------------------


def _choice(arguments: argparse.Namespace, folder: Path) -> LineFilter:
    since, until = None, None
    if arguments.around is not None:
        refuse_unlisted(folder, RECORDS)
        incidents = incidents_of(checked_history(folder))
        selected = next((incident for incident in incidents if incident.number == arguments.around), None)
        if selected is None:
            raise no_such_incident("--around", arguments.around, folder, len(incidents))
        since, until = window(selected) or (None, None)
    if arguments.since is not None:
        requested = since_ns(arguments.since, last_ns(folder))
        if until is not None and requested > until:
            raise ConfigurationError(
                f"--around {arguments.around} ends at {utc(until)}, before --since {arguments.since} "
                f"({utc(requested)}): leave one of them out"
            )
        since = requested if since is None else max(since, requested)
    return LineFilter(
        ranks=None if arguments.rank is None else ranks_of(arguments.rank),
        level=arguments.level,
        event=arguments.event,
        iteration=arguments.iteration,
        cycle=arguments.cycle,
        since_ns=since,
        until_ns=until,
    )


def since_ns(text: str, last: int) -> int:
    """Return a point in time, UTC nanoseconds. last: time of the run's last line; "10m" is 10 minutes before it, but
    not before 1970. A time without a date is the last one before it, or at most LATER_NS later.

    Raises: ConfigurationError."""
    ago = _AGO.fullmatch(text)
    if ago is not None:
        return last - round(min(float(ago[1]) * _UNITS[ago[2]] * 1e9, last))
    day = datetime.fromtimestamp(last / 1e9, timezone.utc).strftime("%Y-%m-%dT")
    has_date = "-" in text[:5]  # later it begins a time zone
    try:
        at = datetime.fromisoformat((text if has_date else day + text).replace("Z", "+00:00"))
        at = at.astimezone(timezone.utc) if at.tzinfo is not None else at.replace(tzinfo=timezone.utc)
    except (ValueError, OverflowError):  # OverflowError: not in the years 1 to 9999 in UTC
        raise ConfigurationError(
            f"--since {text}: not a time; write 2026-01-31T12:00:00, 12:00 (UTC), or 90s, 10m, 2h before the last line"
        ) from None
    at_ns = (at - _EPOCH) // timedelta(microseconds=1) * 1000
    if not has_date:
        day_ns = _UNITS["d"] * 10**9
        at_ns -= -(-(at_ns - last - LATER_NS) // day_ns) * day_ns
    return at_ns


def _columns(text: str | None) -> tuple[str, ...]:
    if text is None:
        return DEFAULT
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    if not names:
        raise ConfigurationError(
            f"--columns names no column; write some of {', '.join(COLUMNS)}, or names of fields, separated by commas"
        )
    return names


def _pattern(text: str | None) -> Callable[[str], object] | None:
    if text is None:
        return None
    try:
        return re.compile(text).search
    except re.error as error:
        raise ConfigurationError(f"--grep {text}: not a regular expression: {error}") from None


def _wait() -> bool:
    sys.stdout.flush()
    time.sleep(POLL_S)
    return True


def _print_notes(notes: Iterable[str]) -> None:
    if sys.stderr is not None:  # else it is closed
        show((((note, "dim"),) for note in notes), sys.stderr)
