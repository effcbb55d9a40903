"""How do the lines of a run look on a terminal?  Folded lines, or every line in chosen columns."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable, Iterator
from typing import TextIO

from resilience.attribution.advice import ranks_in_words
from resilience.facts.printable import printable_line
from resilience.logs.folding import FoldedLine
from resilience.run_folder.entries import utc
from resilience.run_folder.lines import Line, line_text, shown_fields, without_colours
from resilience.run_folder.query import QueryResult
from resilience.system.render import NARROWEST, may_paint, painted, printable_pieces, width_of_terminal, wrap
from resilience.system.render import Line as Row

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
SIZED = 200  # leading rows that determine a table's column widths
_WHO = 12
_NODES_NAMED = 5
_STYLES = {"warning": "yellow", "error": "red", "critical": "bold red", "debug": "dim"}
_SHORT = {"warning": "warn", "critical": "crit"}


def folded_rows(lines: Iterable[FoldedLine]) -> Iterator[Row]:
    """Yield folded lines for a terminal. Lines of a minority of ranks are marked."""
    day = ""
    for folded in lines:
        if (today := utc(folded.line.at_ns)[:10]) != day:
            day = today
            yield ((f"{day} UTC", "dim"),)
        style = _STYLES.get(folded.line.level, "")
        if folded.stands_out:
            style = f"bold {style}".strip() if "bold" not in style else style
        yield (
            (_time(folded.line) + ("! " if folded.stands_out else "  "), style if folded.stands_out else "dim"),
            (f"{_SHORT.get(folded.line.level, folded.line.level):5}  ", style),
            (f"{_speakers(folded):{_WHO}}  ", "cyan"),
            (folded.text, style),
        )


def rows_of(lines: Iterable[Line], columns: tuple[str, ...]) -> Iterator[Row]:
    """Yield every line for a terminal, in these columns."""
    day = ""
    for line in lines:
        if (today := utc(line.at_ns)[:10]) != day and "time" in columns:
            day = today
            yield ((f"{day} UTC", "dim"),)
        style = _STYLES.get(line.level, "")
        fields = {} if set(columns) <= set(COLUMNS) else shown_fields(line)
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
            return f"{_speaker(line):{_WHO}}"
        case "text":
            return line_text(line)
        case "rank" | "cycle" | "iteration":
            value = getattr(line, name)
            return f"{'-' if value is None else value:>4}"
        case "node" | "role" | "kind" | "event":
            return f"{without_colours(getattr(line, name) or '-'):8}"
        case "file":
            return f"{line.file}:{line.number}"
        case _:
            return without_colours(str(fields.get(name, "-")))


def table_of(answer: QueryResult) -> Iterator[str]:
    """Yield the lines of a table. The first rows determine the width of its columns."""
    rows = (tuple("" if value is None else printable_line(str(value)) for value in row) for row in answer.rows)
    first = list(itertools.islice(rows, SIZED))
    sizes = [max(len(row[column]) for row in (answer.columns, *first)) for column in range(len(answer.columns))]
    for row in itertools.chain([answer.columns], first, rows):
        yield "  ".join(cell.ljust(size) for cell, size in zip(row, sizes, strict=True)).rstrip()


def texts_of(rows: Iterable[Row], stream: TextIO) -> Iterator[str]:
    """Yield the text of each row. On a terminal, add colours, wrap long lines under their text, and keep only the last
    state of a progress bar; elsewhere one row stays one line."""
    is_terminal = stream.isatty()
    paint = may_paint(stream)
    width = width_of_terminal()
    for row in rows:
        if not row:
            yield ""
            continue
        *prefix, (text, style) = row
        if not is_terminal:
            yield painted((*prefix, (text, style)), paint)
            continue
        text = text.rsplit("\r", 1)[-1].expandtabs(4)
        *head, (text, style) = printable_pieces((*prefix, (text, style)))
        indent = min(sum(len(piece) for piece, _ in head), NARROWEST // 2)
        room = max(20, width - sum(len(piece) for piece, _ in head))
        first, *_ = wrap(text, room) or [""]
        yield painted((*head, (first, style)), paint)
        for more in wrap(text[len(first) :].lstrip(), width - indent):
            yield painted(((" " * indent, ""), (more, style)), paint)


def write(texts: Iterable[str], is_flushed: bool) -> None:
    """Write lines that are already printable."""
    for text in texts:
        sys.stdout.write(text + "\n")
        if is_flushed:
            sys.stdout.flush()


def _time(line: Line) -> str:
    return utc(line.at_ns)[11:23] + ("~" if line.is_placed else " ")


def _speaker(line: Line) -> str:
    if line.rank is None:
        return f"{line.role or ''} {line.node or line.file}".strip()
    return f"{'monitor' if line.role == 'monitor' else 'rank'} {line.rank}"


def _speakers(folded: FoldedLine) -> str:
    if not folded.ranks:
        return f"{folded.line.role or ''} {','.join(folded.nodes[:_NODES_NAMED])}".strip()
    role = "monitor" if folded.line.role == "monitor" else "rank"
    return f"{role}{'s' if len(folded.ranks) > 1 else ''} {ranks_in_words(folded.ranks, 4).replace(', ', ',')}"
