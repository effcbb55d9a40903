"""How does output look on a terminal?  Styled lines, tables and numbers that fit its width.

A line is a tuple of pieces: a text and the name of its style, or ''. Texts are untrusted: all output passes through
`facts.printable` here, and no other module of the commands writes text to a stream. Everything here is pure except
`show`, `say` and `say_json`. Colours appear only on a terminal, and only if NO_COLOR is not set."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime, timezone
from typing import TextIO

from resilience.facts import encoding
from resilience.facts.printable import printable, printable_json, printable_line

Piece = tuple[str, str]
Line = tuple[Piece, ...]

NARROWEST, WIDEST = 60, 120
NARROWEST_COLUMN = 8  # of a column that is shortened
_STYLES = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33", "cyan": "36"}


def width_of_terminal() -> int:
    """Return the maximum width of lines: from COLUMNS or the terminal, else 80."""
    return min(max(shutil.get_terminal_size((80, 24)).columns, NARROWEST), WIDEST)


def may_paint(stream: TextIO) -> bool:
    """Return True if colours are allowed. Source: no-color.org."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def show(lines: Iterable[Line], stream: TextIO | None = None) -> None:
    """Write lines."""
    out = sys.stdout if stream is None else stream
    paint = may_paint(out)
    for line in lines:
        out.write(painted(line, paint) + "\n")
    out.flush()


def say(text: str, stream: TextIO | None = None) -> None:
    """Write a text and a newline, with control characters escaped."""
    out = sys.stdout if stream is None else stream
    out.write(printable(text) + "\n")


def complain(text: str) -> None:
    """Write a text to stderr, unless that is closed. (For `say`, no stream means stdout.)"""
    if sys.stderr is not None:
        say(text, sys.stderr)


def say_json(data: bytes | str, stream: TextIO | None = None) -> None:
    """Write JSON, newlines included. Terminal control characters become JSON escapes."""
    out = sys.stdout if stream is None else stream
    out.write(printable_json(encoding.text(data)))
    out.flush()


def painted(line: Line, paint: bool) -> str:
    """Return a line as text, with escape sequences if `paint`."""
    if not paint:
        return plain(line)
    return "".join(
        f"\x1b[{';'.join(_STYLES[name] for name in style.split())}m{text}\x1b[0m" if style else text
        for text, style in printable_pieces(line)
    )


def plain(line: Line) -> str:
    return "".join(text for text, _ in printable_pieces(line)).rstrip()


def printable_pieces(line: Line) -> Line:
    """Return a line with all control characters escaped."""
    return tuple((printable_line(text), style) for text, style in line)


def field(label: str, text: str, width: int, style: str = "", indent: int = 3, gutter: int = 11) -> list[Line]:
    """Return a labelled paragraph; further lines are indented under the text."""
    text_column = indent + gutter
    wrapped = wrap(text, width - text_column) or [""]
    first: Line = ((" " * indent, ""), (label.ljust(gutter), "dim"), (wrapped[0], style))
    return [first, *(((" " * text_column, ""), (line, style)) for line in wrapped[1:])]


def wrap(text: str, width: int) -> list[str]:
    """Return the lines of a text. A word that is too long for a line, such as a path, is broken and not cut."""
    lines: list[str] = []
    for paragraph in printable(text).split("\n"):
        lines += textwrap.wrap(paragraph, width, break_on_hyphens=False, drop_whitespace=True) or [""]
    return lines


def table(header: Sequence[str], rows: Sequence[Sequence[str]], width: int, wide: int, *others: int) -> list[Line]:
    """Return a table. wide: the column that is shortened first if the line is too narrow; others: the next ones.
    Cells that differ are shortened so that they still do, if the middle of them is all that is left out."""
    rows = [tuple(map(printable_line, row)) for row in rows]
    sizes = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
    excess = sum(sizes) + 2 * len(sizes) - width
    for column in (wide, *others):
        cut_off = min(max(0, excess), max(0, sizes[column] - NARROWEST_COLUMN))
        sizes[column] -= cut_off
        excess -= cut_off
    columns = [_cut_column(column, size) for column, size in zip(zip(header, *rows, strict=True), sizes, strict=True)]
    lines: list[Line] = []
    for number, cells in enumerate(zip(*columns, strict=True)):
        lines.append((("  " + "  ".join(cells).rstrip(), "" if number else "dim"),))
    return lines


def _cut_column(cells: Sequence[str], size: int) -> list[str]:
    shortened = [cut(cell, size) for cell in cells]
    if len(set(shortened)) < len(set(cells)):
        shortened = [cut_middle(cell, size) for cell in cells]
    return [cell.ljust(size) for cell in shortened]


def cut(text: str, size: int) -> str:
    """Shorten a text to `size` characters, with an ellipsis."""
    text = printable(text)
    return text if len(text) <= size else text[: max(0, size - 1)] + "…"


def cut_middle(text: str, size: int) -> str:
    """Shorten a text to `size` characters, with an ellipsis in its middle."""
    text = printable(text)
    head = (size - 1) // 2
    return text if len(text) <= size else f"{text[:head]}…{text[len(text) - (size - 1 - head) :]}"


def cut_line(line: Line, width_left: int) -> Line:
    """Shorten a line to `width` columns."""
    pieces = []
    for text, style in printable_pieces(line):
        pieces.append((text[:width_left], style))
        width_left -= len(pieces[-1][0])
    return tuple(pieces)


def short_path(path: str, parts: int = 2) -> str:
    """Return the last parts of a path."""
    return "/".join(path.split("/")[-parts:])


def brief(value: float) -> str:
    """Return a duration in six characters at most: 21ms, 3.0s, 2m05s, 3h20m, 12d."""
    if value < 0.95:
        return f"{value * 1000:.0f}ms"
    if value < 59.95:
        return f"{value:.1f}s"
    whole = round(value)
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 48 * 3600:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d"


def phase_name(name: str) -> str:
    """Return the display name of a restart phase. Phase `import` covers the whole start of the script."""
    return "script start" if name == "import" else name


def clock(wall_ns: int | None) -> str:
    """Return the time of day, UTC."""
    return "?" if wall_ns is None else _at(wall_ns).strftime("%H:%M:%S")


def moments(first_ns: int | None, last_ns: int | None) -> Callable[[int | None], str]:
    """Return how times of a run are written: the time of day, with the date if the run spans several days of UTC."""
    is_one_day = first_ns is None or last_ns is None or _at(first_ns).date() == _at(last_ns).date()
    return clock if is_one_day else _day_and_clock


def _day_and_clock(wall_ns: int | None) -> str:
    return "?" if wall_ns is None else _at(wall_ns).strftime("%Y-%m-%d %H:%M:%S")


def date(wall_ns: int | None) -> str:
    """Return date and time, UTC."""
    return "?" if wall_ns is None else _at(wall_ns).strftime("%Y-%m-%d %H:%M:%S UTC")


def _at(wall_ns: int) -> datetime:
    return datetime.fromtimestamp(wall_ns / 1e9, timezone.utc)
