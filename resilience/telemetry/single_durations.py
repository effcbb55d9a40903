"""Which single durations did a rank record?  Reads the file of them, line by line.

`telemetry.durations` defines the lines and writes them. A disk that was full for a moment cuts a line off, and the file
goes on with the next one, if another process writes it in the same line. A line that was cut off is left out and
counted. Anything else that is no line of the file is an error:
partial data would give wrong limits."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from resilience.errors import DecodeError
from resilience.facts import encoding
from resilience.telemetry.durations import Header, Started, Value

Line = Header | Started | Value

_line = encoding.reader(Line)
_lines = encoding.lines_reader(Line)
_BEGIN = b'{"kind":"'  # of each line; within a line, its quotes would be escaped
_STRING = re.compile(rb'"(?:[^"\\]|\\.)*"')


class Lines(NamedTuple):
    """The lines of a file of single values. cut_off: number of lines that are left out, because a full disk cut them
    off."""

    lines: list[Line]
    cut_off: int


def read_values(path: Path) -> Iterator[tuple[int, Line]]:
    """Yield (line number, line) of a file of single values. Lines that a full disk cut off are left out, and so is a
    torn last line.

    Raises: OSError, DecodeError with the number of the line in front."""
    with path.open("rb") as file:
        for number, line in _values(file):
            if line is not None:
                yield number, line


def read_lines(path: Path) -> Lines:
    """Return what `read_values` yields, but much faster. Raises: OSError, DecodeError with the line number."""
    whole, newline, _ = path.read_bytes().rpartition(b"\n")
    content = whole + newline
    try:
        return Lines(_lines(content), 0)
    except DecodeError:
        lines = [line for _, line in _values(io.BytesIO(content))]
        return Lines([line for line in lines if line is not None], lines.count(None))


def _values(lines: Iterable[bytes]) -> Iterator[tuple[int, Line | None]]:
    """Yield (line number, line); None stands for a line that was cut off."""
    for number, line in enumerate(lines, 1):
        if not line.endswith(b"\n"):
            return
        try:
            yield number, _line(line)
        except DecodeError as error:
            if not _is_cut_off(line):
                raise DecodeError(f"line {number}: {error}") from error
            yield number, None
            if line.rfind(_BEGIN) > 0:
                with contextlib.suppress(DecodeError):
                    yield number, _line(line[line.rfind(_BEGIN) :])


def _is_cut_off(line: bytes) -> bool:
    """Return True if only the first part of a line was written. Another process, which did not know, may have added
    its line to that."""
    next_line = line.rfind(_BEGIN)
    part = line[:next_line] if next_line > 0 else line.removesuffix(b"\n")
    outside_strings = _STRING.sub(b"", part)
    is_open = b'"' in outside_strings or outside_strings.count(b"{") > outside_strings.count(b"}")
    is_ours = part.startswith(_BEGIN) or _BEGIN.startswith(part)
    return is_ours and (next_line > 0 or is_open or not part)
