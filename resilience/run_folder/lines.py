"""Which lines does one file of a run contain?  Records, log lines and plain text in one form.

A `FileLines` reads one file forwards in pieces and keeps no descriptor open in between: ten thousand files need ten
thousand small buffers and no handles. It yields every line. A line that is neither a record nor a log line, and a torn
last line, is passed on unchanged and counted. Only the parts that ordering and filters need are decoded; `fields_of`
decodes the rest when a line is shown.

A plain line has the time at its beginning, if any, else the time at which the launcher read it (`run_folder.stamps`).
If neither is known, it has the time of the previous line in its file. Otherwise its position between the start of its
process and the file's last change gives an estimate (`is_placed`). `run_folder.merge` orders lines between files."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Iterator, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Literal

import msgspec

from resilience.errors import DecodeError
from resilience.facts import encoding, tracebacks
from resilience.facts.events import CATALOGUE
from resilience.facts.identity import Nanoseconds
from resilience.run_folder.stamps import Stamps
from resilience.system import files
from resilience.system.files import ROTATED
from resilience.telemetry.log import OWN

Kind = Literal["record", "log", "text", "bad"]
LEVELS = ("debug", "info", "warning", "error", "critical")
LONGEST = 1 << 20  # bytes; a longer line, such as a progress bar without newlines, is split
LAST_LINES = 20  # searched for a complete line
LISTED = 60  # characters of a list shown in a line of text; for longer lists only the number of items
_KNOWN_BY = 256  # bytes before the place where reading goes on, which tell a rotated file
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
AHEAD_NS = 3600 * 10**9  # a time this much after the file's end comes from a broken clock
_DAY_NS = 24 * 3600 * 10**9  # a time this much before the process's start, whose year is a guess, is of the next year

LEVEL_OF: Mapping[str, str] = {str(kind.__struct_config__.tag): kind.level for kind in CATALOGUE}
_SAYS_LEVEL = re.compile(r"^.{0,80}?\b(DEBUG|INFO|WARNING|WARN|ERROR|CRITICAL|FATAL)\b|^\[?([IWEF])\d{4} ")
_LEVEL_WORDS = {"WARN": "warning", "FATAL": "critical", "I": "info", "W": "warning", "E": "error", "F": "critical"}
# Fields shown of an interruption; `resilience report` shows the others.
_OF_INTERRUPTION = ("interruption", "message", "hang", "stage", "step", "silent_for_s")
_BREAKS = re.compile(r"(?<!\s)\s*[\r\n]\s*")  # searched from the first of many spaces only
_RAISED = re.compile(r"^[A-Za-z_][\w.]*(Error|Exception|Interrupt|Exit)\b(: |$)")
_STAMP = re.compile(
    r"^\W?(\d{4})-(\d\d)-(\d\d)[T ](\d\d):(\d\d):(\d\d)(?:[.,](\d{1,9}))? ?(Z|[+-]\d\d:?\d\d)?(?!\d)", re.ASCII
)
_GLOG = re.compile(r"^\[?[IWEF](\d\d)(\d\d) (\d\d:\d\d:\d\d)\.(\d{1,9})", re.ASCII)  # glog's and torch's: no year


class Line(msgspec.Struct, gc=False):
    """One line of one file. at_ns: UTC, corrected by the clock's offset. rank: initial rank.

    event: a record's tag, a log line's message, or the text. is_placed: its time is an estimate."""

    at_ns: int
    kind: Kind
    file: str
    number: int  # from 1
    raw: bytes
    level: str
    event: str
    rank: int | None = None
    node: str | None = None
    role: str | None = None
    cycle: int | None = None
    iteration: int | None = None
    is_placed: bool = False


class _LinePlace(msgspec.Struct, gc=False):
    node: str | None = None
    role: str | None = None
    cycle: int = 0
    iteration: int | None = None
    initial_rank: int | None = None


class _Tag(msgspec.Struct, gc=False):
    event: str


class _RecordHead(msgspec.Struct, gc=False):
    wall_ns: Nanoseconds
    origin: _LinePlace
    event: _Tag


class _LogHead(msgspec.Struct, gc=False):
    ts: str
    level: str
    event: str
    node: str | None = None
    role: str | None = None
    cycle: int | None = None
    iteration: int | None = None
    initial_rank: int | None = None


class KnownFile(msgspec.Struct, frozen=True):
    """Facts about a file before it is read. kind: "text" for output of workers.

    offset_ns: how far its node's clock is ahead. began_ns: start of the process that wrote it."""

    name: str
    kind: Kind
    rank: int | None = None
    node: str | None = None
    cycle: int | None = None
    offset_ns: int = 0
    began_ns: int | None = None


_decode_record = encoding.reader(_RecordHead)
_decode_log = encoding.reader(_LogHead)
_decode_any = encoding.reader(dict[str, Any])


class FileLines:
    """Reads one file forwards. chunk: bytes per read. bad: number of lines so far that could not be parsed."""

    def __init__(self, path: Path, known: KnownFile, chunk: int) -> None:
        self.known = known
        self.bad = 0
        self.key = 0  # time of the last line, never decreasing: the order within a file is kept
        self.error = ""
        self._path = path
        self._chunk = chunk
        self._read = 0  # bytes read from the file
        self._inode: int | None = None  # of the file that they were read from
        self._end = b""  # the last ones of them
        self._rest = b""
        self._at = 0  # start of the next line in `_rest`
        self._number = 0
        self._size = 0
        self._changed_ns = 0
        self._last_ns: int | None = None  # the file's last time, by its own lines
        self._stamp: int | None = None  # the last stamp of a plain line
        self._stamps = Stamps(path) if known.kind == "text" else None
        self._in_traceback = False
        self._in_group = False

    def next(self, is_final: bool = True) -> Line | None:
        """Return the next line, None at the end. is_final: return a last line without a newline too."""
        while True:
            raw = self._next_raw(is_final)
            if raw is None:
                return None
            self._number += 1
            if raw:
                end = self._read - len(self._rest) + self._at
                line = self._text(raw, end) if self.known.kind == "text" else self._json(raw)
                self.key = max(self.key, line.at_ns)
                return line

    @property
    def is_unplaced(self) -> bool:
        """True for the output of a worker of which nobody knows yet when and where it was started."""
        return self.known.kind == "text" and self.known.rank is not None and self.known.node is None

    def last_time(self) -> int | None:
        """Return the time of the last complete line that has one, UTC; None if there is none.

        A time of a broken clock does not count."""
        latest_ns = time.time_ns() - self.known.offset_ns
        with contextlib.suppress(OSError):
            latest_ns = max(latest_ns, self._path.stat().st_mtime_ns)
        times = (stamp - self.known.offset_ns for stamp in _last_stamps(self._path, self.known.kind))
        return next((at for at in times if 0 <= at <= latest_ns + AHEAD_NS), None)

    # -- bytes ----------------------------------------------------------------------------------

    def _next_raw(self, is_final: bool) -> bytes | None:
        scanned = self._at
        while True:
            end = self._rest.find(b"\n", scanned)
            if end >= 0:
                raw = self._rest[self._at : end]
                self._at = end + 1
                return raw
            if len(self._rest) - self._at >= LONGEST:
                raw = self._rest[self._at : self._at + LONGEST]
                self._at += LONGEST
                return raw
            scanned = len(self._rest) - self._at
            if not self._fill():
                break
        if not is_final or self._at == len(self._rest):
            return None
        raw, self._rest, self._at = self._rest[self._at :], b"", 0
        return raw

    def _fill(self) -> bool:
        """Read the next chunk. Return False if there is none."""
        try:
            more = self._more()
        except OSError as error:
            self.error = f"cannot be read: {error.strerror or error}"
            return False
        if not more:
            return False
        self._read += len(more)
        self._end = (self._end + more[-_KNOWN_BY:])[-_KNOWN_BY:]
        self._rest = self._rest[self._at :] + more
        self._at = 0
        return True

    def _more(self) -> bytes:
        """Return the next bytes. After a rotation, return the rest of the old file first. Raises: OSError."""
        with self._path.open("rb", buffering=0) as file:
            status = os.fstat(file.fileno())
            if self._is_replaced(status):
                return b""
            is_shorter = status.st_size < self._read
            if is_shorter or self._inode not in (None, status.st_ino):
                rest = self._rest_of_rotated(is_shorter)
                if rest:
                    return rest
                if is_shorter or rest is not None:
                    self._read, self._end = 0, b""
                    self._stamps = None if self._stamps is None else Stamps(self._path)
            self._inode = status.st_ino
            file.seek(self._read)
            if more := file.read(self._chunk):
                self._size, self._changed_ns = status.st_size, status.st_mtime_ns
            return more

    def _is_replaced(self, status: os.stat_result) -> bool:
        """Return True if a rotated file, which does not change, has been replaced by the next rotation.

        The new file is the one that its source reads under the name without `ROTATED`."""
        if not self._read or not self._path.name.endswith(ROTATED):
            return False
        return (status.st_size, status.st_mtime_ns) != (self._size, self._changed_ns)

    def _rest_of_rotated(self, is_shorter: bool) -> bytes | None:
        """Return the next bytes of the file that was read so far; None unless it is the rotated file now.

        Another inode alone proves no rotation: rsync replaces each file that has grown, and some network file systems
        number a file anew whenever it is opened. If the present file is shorter, the rotated one is known by the
        last bytes that were read."""
        with contextlib.suppress(OSError), open(f"{self._path}{ROTATED}", "rb", buffering=0) as rotated:
            status = os.fstat(rotated.fileno())
            rotated.seek(self._read - len(self._end))
            if status.st_ino == self._inode or (is_shorter and self._end and rotated.read(len(self._end)) == self._end):
                self._inode = status.st_ino
                rotated.seek(self._read)
                return rotated.read(self._chunk)
        return None

    # -- meaning --------------------------------------------------------------------------------

    def _json(self, raw: bytes) -> Line:
        known = self.known
        try:
            if known.kind == "record":
                head = _decode_record(raw)
                origin, tag = head.origin, head.event.event
                return Line(
                    self._sane(head.wall_ns - known.offset_ns),
                    "record",
                    known.name,
                    self._number,
                    raw,
                    LEVEL_OF.get(tag, "info"),
                    tag,
                    origin.initial_rank,
                    origin.node,
                    origin.role,
                    origin.cycle,
                    origin.iteration,
                )
            log = _decode_log(raw)
            at = _from_iso(log.ts)
            return Line(
                self._sane(at - known.offset_ns),
                "log",
                known.name,
                self._number,
                raw,
                log.level if log.level in LEVELS else "info",
                log.event,
                known.rank if log.initial_rank is None else log.initial_rank,
                known.node if log.node is None else log.node,
                log.role,
                log.cycle,
                log.iteration,
            )
        except (DecodeError, ValueError):
            self.bad += 1
            return self._line("bad", raw, self.key or self._changed_ns, "warning", is_placed=True)

    def _sane(self, at: int) -> int:
        return at if self._is_sane(at) else self.key or self._changed_ns

    def _is_sane(self, at: int) -> bool:
        """Return True if a time is not from a broken clock. The time of a copied file may be anything."""
        if at <= self._changed_ns + AHEAD_NS:
            return True
        if self._last_ns is None:
            now = time.time_ns()
            last = last_stamp(self._path, self.known.kind) or (0 if self._is_change_known else now)
            self._last_ns = min(last, now) - self.known.offset_ns
        return at <= self._last_ns + AHEAD_NS

    def _text(self, raw: bytes, end: int) -> Line:
        text = tracebacks.without_prefix(without_colours(encoding.text(raw[:200])))
        stamp = self._stamp_of(text, end - 1)
        if stamp is None:
            stamp = self._read_at(end - 1)
        if stamp is not None:
            self._stamp = stamp
        at = self._stamp if self._stamp is not None else self._placed(end)
        return self._line("text", raw, at, self._level_of(text), is_placed=stamp is None)

    def _read_at(self, position: int) -> int | None:
        """Return when the launcher read the byte at this position."""
        at = None if self._stamps is None else self._stamps.at(position)
        return None if at is None else at - self.known.offset_ns

    def _placed(self, end: int) -> int:
        """Estimate a time from the position of a line, between the process's start and the file's last change."""
        last, start = self._changed_ns, self.known.began_ns
        if start is None or start >= last or end >= self._size:
            return max(last, start or 0)
        return start + (last - start) * end // self._size

    @property
    def _is_change_known(self) -> bool:
        """Return False if the file's last change was long before its process began, or at 0: a copy has lost it. The
        clock of a file server may be a bit behind."""
        return self._changed_ns > max(0, (self.known.began_ns or 0) - AHEAD_NS)

    def _stamp_of(self, text: str, position: int) -> int | None:
        """Return the time that a line of text says itself. position: of its last byte."""
        glog = _GLOG.match(text)
        if glog is None:
            return self._sane_time(text)
        began_ns = self.known.began_ns
        known_ns = self._read_at(position) or (self._changed_ns if self._is_change_known else began_ns)
        if known_ns is None:
            return None
        year, rest = datetime.fromtimestamp(known_ns / 1e9).year, f"-{glog[1]}-{glog[2]} {glog[3]}.{glog[4]}"
        at = self._sane_time(f"{year}{rest}")
        if at is not None and began_ns is not None and at < began_ns - _DAY_NS:
            return self._sane_time(f"{year + 1}{rest}")
        return at

    def _sane_time(self, text: str) -> int | None:
        """Return the time with which a text begins, None if there is none or if it is from a broken clock."""
        match = _STAMP.match(text)
        if match is None:
            return None
        try:
            at = _whole_seconds(match) * 10**9 + int((match[7] or "").ljust(9, "0"))
        except (ValueError, OverflowError, OSError):
            return None
        at -= self.known.offset_ns
        return at if at >= 0 and self._is_sane(at) else None

    def _level_of(self, text: str) -> str:
        """Return the level that a line names. All lines of an uncaught exception are errors."""
        self._in_group = tracebacks.is_of_group(text, self._in_group)
        if text.startswith(tracebacks.BEGIN):
            self._in_traceback = True
            return "error"
        if self._in_traceback:
            self._in_traceback = not text[:1].strip()
            return "error"
        if self._in_group:
            return "error"
        if _RAISED.match(text):
            return "error"
        match = _SAYS_LEVEL.match(text)
        word = (match[1] or match[2]) if match is not None else "INFO"
        return _LEVEL_WORDS.get(word, word.lower())

    def _line(self, kind: Kind, raw: bytes, at: int, level: str, is_placed: bool) -> Line:
        known = self.known
        text = without_colours(encoding.text(raw))
        rank, node, cycle = known.rank, known.node, known.cycle
        return Line(at, kind, known.name, self._number, raw, level, text, rank, node, None, cycle, None, is_placed)


def without_colours(text: str) -> str:
    """Return a text without colours. Other control characters stay."""
    return _COLOURS.sub("", text)


def last_stamp(path: Path, kind: Kind) -> int | None:
    """Return the time of the last complete line of a file by its node's clock; None if there is none."""
    return next(_last_stamps(path, kind), None)


def _last_stamps(path: Path, kind: Kind) -> Iterator[int]:
    """Yield the times of the last complete lines of a file by its node's clock, the last one first."""
    for raw in reversed(files.tail(files.times_of(path) if kind == "text" else path, LAST_LINES)):
        try:
            if kind == "text":
                yield int(raw.split()[1])
            else:
                yield _decode_record(raw).wall_ns if kind == "record" else _from_iso(_decode_log(raw).ts)
        except (DecodeError, ValueError, IndexError):
            continue


def fields_of(line: Line) -> dict[str, Any]:
    """Return all fields of a line except its message: those of an event, or of a log line."""
    if line.kind in ("text", "bad"):
        return {}
    try:
        plain = _decode_any(line.raw)
    except DecodeError:  # in a part that ordering and filters do not use
        return {"undecodable": encoding.text(line.raw)}
    if line.kind == "record":
        plain = plain.get("event") or {}
    return {name: value for name, value in plain.items() if name != "event"}


def line_text(line: Line) -> str:
    """Return a line as text: the message, and its own fields as name=value.

    Nested values are flattened, and long lists are given by their length; `--json` has everything."""
    fields = fields_of(line)
    if isinstance(record := fields.get("record"), dict) and line.kind == "record":
        fields = {name: record[name] for name in _OF_INTERRUPTION if name in record}
    elif line.kind == "log":
        fields = {name: value for name, value in fields.items() if name not in OWN}
    words = " ".join(_words(name, value) for name, value in fields.items())
    text = f"{line.event}  {words}" if words else line.event
    return _BREAKS.sub(" ⏎ ", without_colours(text)) if line.kind in ("record", "log") else text.rstrip("\r")


def shown_fields(line: Line) -> dict[str, Any]:
    """Return all fields of a line, and those of its interruption by the names that its text has, such as `step`."""
    fields = fields_of(line)
    record = fields.get("record")
    if line.kind == "record" and isinstance(record, dict):
        return {name: record[name] for name in _OF_INTERRUPTION if name in record} | fields
    return fields


def _words(name: str, value: Any) -> str:
    match value:
        case dict():
            return " ".join(_words(f"{name}.{key}", inner) for key, inner in value.items())
        case list() if any(isinstance(item, (dict, list)) for item in value) or len(str(value)) > LISTED:
            return f"{name}=[{len(value)}]"
        case list():
            return f"{name}={','.join(map(str, value))}"
        case float():
            return f"{name}={value:.6g}"
        case bool() | None:
            return f"{name}={str(value).lower()}"
        case str() if not value or " " in value:
            return f'{name}="{value}"'
        case _:
            return f"{name}={value}"


def _from_iso(text: str) -> int:
    """Return UTC nanoseconds. Raises: ValueError."""
    match = _STAMP.match(text)
    if match is None:
        raise ValueError(f"{text[:40]!r} is not a time")
    return _whole_seconds(match, naive_is_utc=True) * 10**9 + int((match[7] or "").ljust(9, "0"))


_seconds_of: dict[tuple[str, bool], int] = {}  # a cache of one entry: consecutive lines often have the same second


def _whole_seconds(match: re.Match[str], naive_is_utc: bool = False) -> int:
    """Return Unix seconds. A time without a zone is local time of this machine, as Python's logging writes it."""
    key = (match.string[match.start(1) : match.end(6)] + (match[8] or ""), naive_is_utc)
    cached = _seconds_of.get(key)
    if cached is None:
        year, month, day, hour, minute, second = (int(match[group]) for group in range(1, 7))
        at = datetime(year, month, day, hour, minute, second)
        zone = match[8]
        if zone == "Z" or (zone is None and naive_is_utc):
            at = at.replace(tzinfo=timezone.utc)
        elif zone is not None:
            at = datetime.fromisoformat(f"{at.isoformat()}{zone[:3]}:{zone[-2:]}")
        cached = int(at.timestamp())
        _seconds_of.clear()
        _seconds_of[key] = cached
    return cached
