"""A logger for user code that knows rank, iteration and step; and records as log lines.

Inside a wrapped function, and anywhere in a worker of `resilience run`, each line goes, as one JSON object
(`LogLine`), to the rank's own log file; elsewhere, and where the file cannot be written, to stderr. structlog is
imported at the first use, so that a rank that never logs never pays for it; OpenTelemetry is asked for the current span
only if user code has imported it. Logging never raises."""

from __future__ import annotations

import itertools
import os
import sys
import time
from collections.abc import Callable, Mapping, MutableMapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Literal

import msgspec

from resilience.adapters.background import WRITER, BackgroundFile
from resilience.adapters.environment import Exporting, LaunchedWorker
from resilience.core import encoding
from resilience.core.identity import Origin, Role
from resilience.core.printable import printable
from resilience.core.records import Record
from resilience.errors import DecodeError
from resilience.telemetry import progress, span

SCHEMA = 1
LINE_LIMIT = 0.5  # seconds that a line waits for the disk, once: until it answers again, further lines do not wait
Context = Mapping[str, Any]
_Launched = tuple[BackgroundFile, Callable[[], Context], span.Trace | None]


class LogLine(msgspec.Struct, omit_defaults=True):
    """What every line holds, beside the event's own fields. Times of one host compare by mono_ns; seq
    counts the lines of one process, so that lost ones show.

    event: the tag of a record, or the message of user code. section: the innermost open one."""

    ts: str
    mono_ns: int
    seq: int
    level: Literal["debug", "info", "warning", "error", "critical"]
    event: str
    schema: int
    pid: int
    job_id: str | None = None
    attempt: int | None = None
    cycle: int | None = None
    iteration: int | None = None
    step: int | None = None
    section: str | None = None
    role: Role | None = None
    node: str | None = None
    rank: int | None = None
    initial_rank: int | None = None
    world_size: int | None = None
    trace_id: str | None = None
    span_id: str | None = None


OWN = frozenset(LogLine.__struct_fields__)
_LEVELS = {"warn": "warning", "exception": "error", "err": "error", "fatal": "critical", "msg": "info"}
_file: BackgroundFile | None = None
_context: Callable[[], Context] | None = None
_parent: span.Trace | None = None
_launched: _Launched | None = None
_is_launched_known = False
_numbers = itertools.count()
_placed: tuple[Origin, span.Trace | None, dict[str, Any]] | None = None
_spelled: tuple[int, str] = (-1, "")


def configure(path: Path | None, context: Callable[[], Context] | None) -> None:
    """Let loggers write to `path`; None: to where they did before, the file of a launched worker or stderr.

    context: answers {"origin": Origin} and, where known, "step" and "section" of this moment."""
    global _file, _context, _parent
    if _file is not None:
        _file.close()
        WRITER.end()  # a thread that stays would keep the next call from forking its monitor
    _file = None if path is None else BackgroundFile(path)
    _context = context
    _parent = None if path is None else span.parse_traceparent(Exporting.from_environment().traceparent)


def get_logger(**values: Any) -> Any:
    """Return a structlog logger with `values` bound to it."""
    import structlog

    return structlog.wrap_logger(
        None,
        processors=[structlog.processors.format_exc_info, _write],
        wrapper_class=structlog.make_filtering_bound_logger(0),
        context_class=dict,
        cache_logger_on_first_use=False,
    ).bind(**values)


def as_people_read(text: str) -> str:
    """Return a line that a logger of ours wrote as a person would read it; any other text as it is."""
    try:
        line = encoding.from_json(text, dict[str, Any])
    except DecodeError:
        return text
    if not all(isinstance(line.get(name), str) for name in ("ts", "level", "event")):
        return text
    return _in_words(line, {name: value for name, value in line.items() if name not in OWN}, whose="").rstrip("\n")


def line_of(record: Record) -> dict[str, Any]:
    """Return a record as a log line: a pure view."""
    fields = msgspec.to_builtins(record.event)
    message = fields.pop("event")
    line = _line(record.wall_ns, record.mono_ns, record.sequence, record.event.level, message)
    line |= _place(record.origin, None)
    line["pid"] = record.origin.pid
    return _with_fields(line, fields)


# -- user code ---------------------------------------------------------------------------------


def _write(_: Any, level: str, event: MutableMapping[str, Any]) -> Any:
    """The last processor: writes the line itself, so there is nothing left for structlog to do."""
    import structlog

    fields = dict(event)
    message = str(fields.pop("event", ""))
    line = _line(time.time_ns(), time.monotonic_ns(), next(_numbers), _LEVELS.get(level, level), message)
    file, ask, parent = _destination()
    context = _asked(ask)
    origin = context.get("origin")
    if isinstance(origin, Origin):
        line |= _user_place(origin, parent)
    line |= {name: context[name] for name in ("step", "section") if context.get(name) is not None}
    line |= _current_span()
    if file is None or not file.write_now(_encoded(_with_fields(line, fields)), LINE_LIMIT):
        _show(line, fields)
    raise structlog.DropEvent


def _destination() -> tuple[BackgroundFile | None, Callable[[], Context] | None, span.Trace | None]:
    """Return where lines go at this moment, who says what they are about, and the span that the job is part of."""
    global _launched, _is_launched_known
    if _file is not None or _context is not None:
        return _file, _context, _parent
    if not _is_launched_known:
        _is_launched_known = True
        _launched = _of_launched_worker()
    return (None, None, None) if _launched is None else _launched


def _of_launched_worker() -> _Launched | None:
    """Where lines of a worker of the launcher go that are not of a wrapped function, None in any other process."""
    worker = LaunchedWorker.from_environment()
    if worker is None:
        return None
    origin = Origin(
        worker.job_id,
        worker.node,
        "rank",
        os.getpid(),
        attempt=worker.attempt,
        cycle=worker.cycle,
        initial_rank=worker.rank,
        rank=worker.rank,
        world_size=worker.world_size,
        layer="launcher",
    )
    file = BackgroundFile(worker.folder / "logs" / f"{worker.node}-{worker.rank}.jsonl")
    parent = span.parse_traceparent(Exporting.from_environment().traceparent)
    return file, lambda: {"origin": origin, **progress.shown()}, parent


def _asked(ask: Callable[[], Context] | None) -> Context:
    try:
        return {} if ask is None else ask()
    except Exception:  # between two calls what it reads may be gone: the line goes without
        return {}


def _user_place(origin: Origin, parent: span.Trace | None) -> dict[str, Any]:
    """The place of a line of user code, which is the same for many of them."""
    global _placed
    placed = _placed
    if placed is None or placed[0] is not origin or placed[1] is not parent:
        _placed = placed = (origin, parent, _place(origin, parent))
    return placed[2]


def _second(second: int) -> str:
    """A second of UTC as text, which is the same for many lines."""
    global _spelled
    spelled = _spelled
    if spelled[0] != second:
        text = datetime.fromtimestamp(second, timezone.utc).strftime("%Y-%m-%dT%H:%M:%S")
        _spelled = spelled = (second, text)
    return spelled[1]


def _line(wall_ns: int, mono_ns: int, number: int, level: str, event: str) -> dict[str, Any]:
    return {
        "ts": f"{_second(wall_ns // 10**9)}.{wall_ns // 1000 % 10**6:06d}Z",
        "mono_ns": mono_ns,
        "seq": number,
        "level": level,
        "event": event,
        "schema": SCHEMA,
        "pid": os.getpid(),
    }


def _place(origin: Origin, parent: span.Trace | None) -> dict[str, Any]:
    """Who speaks: job, rank and iteration, and the span in which the function runs."""
    line: dict[str, Any] = {
        "job_id": origin.job_id,
        "attempt": origin.attempt,
        "cycle": origin.cycle,
        "iteration": origin.iteration,
        "step": origin.step,
        "role": origin.role,
        "node": origin.node,
        "rank": origin.rank,
        "initial_rank": origin.initial_rank,
        "world_size": origin.world_size,
        "trace_id": format(span.trace_id(origin, parent), "032x"),
    }
    if origin.iteration is not None and origin.initial_rank is not None:
        line["span_id"] = format(span.run_span_id(origin, origin.iteration, origin.initial_rank), "016x")
    return {name: value for name, value in line.items() if value is not None}


def _current_span() -> dict[str, Any]:
    """The user's own span, if their code uses OpenTelemetry."""
    trace = sys.modules.get("opentelemetry.trace")
    if trace is None:
        return {}
    try:
        found = trace.get_current_span().get_span_context()
        return (
            {"trace_id": format(found.trace_id, "032x"), "span_id": format(found.span_id, "016x")}
            if found.is_valid
            else {}
        )
    except Exception:  # a foreign library, half imported perhaps: the line goes without
        return {}


def _with_fields(line: dict[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """Add the event's own fields; a name that is ours already gets an underscore."""
    return line | {f"{name}_" if name in OWN else str(name): value for name, value in fields.items()}


def _encoded(line: Mapping[str, Any]) -> bytes:
    try:
        return encoding.to_json(line, repr) + b"\n"
    except Exception:  # values are the user's: odd keys, broken __repr__, nested without end, huge numbers
        return encoding.to_json({name: _spelt(value) for name, value in line.items()}) + b"\n"


def _spelt(value: object) -> Any:
    if value is None or isinstance(value, bool):
        return value
    try:
        if isinstance(value, int):
            return value if abs(value) < 2**63 else hex(value)
        return ascii(value) if not isinstance(value, str) else str(value)
    except Exception:
        return f"<{type(value).__name__} that cannot be shown>"


def _in_words(line: Mapping[str, Any], fields: Mapping[str, Any], whose: str) -> str:
    """A line for people, and an exception on lines of its own."""
    values = dict(fields)
    error = values.pop("exception", None)
    words = " ".join(f"{name}={_spelt(value)}" for name, value in values.items())
    text = f"{line['ts'][11:23]} {line['level']:8} {whose}{line['event']}{'  ' if words else ''}{words}\n"
    return text if error is None else f"{text}{error}\n"


def _show(line: Mapping[str, Any], fields: Mapping[str, Any]) -> None:
    """Write a line for people to stderr."""
    whose = f"[rank {line['initial_rank']}] " if "initial_rank" in line else ""
    try:
        sys.stderr.write(printable(_in_words(line, fields, whose)))
    except (OSError, ValueError, AttributeError):
        pass  # closed, full, or none at all: there is nobody left to tell
