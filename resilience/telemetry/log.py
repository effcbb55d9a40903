"""A logger for user code that knows rank, iteration and step; also renders records as log lines.

Inside a wrapped function, and anywhere in a worker of `resilience run`, each line goes to the rank's own log file, as
one JSON object (`LogLine`); elsewhere, and if the file cannot be written, it goes to stderr. structlog is imported at
first use, so a rank that never logs does not pay for it. OpenTelemetry is asked for the current span only if user code
has imported it. Logging never raises."""

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

from resilience.errors import DecodeError, message_of
from resilience.facts import encoding
from resilience.facts.identity import FileOwner, Origin, Role
from resilience.facts.printable import printable
from resilience.facts.records import Record
from resilience.system.background import WRITER, BackgroundFile
from resilience.system.environment import Exporting, LaunchedWorker
from resilience.telemetry import progress, span

SCHEMA = 1
LINE_LIMIT = 0.5  # seconds that a line waits for the disk; further lines do not wait until the disk answers again
Context = Mapping[str, Any]
_Launched = tuple[BackgroundFile, Callable[[], Context], span.Trace | None]


class LogLine(msgspec.Struct, omit_defaults=True):
    """The fields of every line, besides the event's own. Compare times of one host by mono_ns; seq counts the lines of
    one process, so that lost lines are visible.

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
_cached_fields: tuple[Origin, span.Trace | None, dict[str, Any]] | None = None
_cached_second: tuple[int, str] = (-1, "")


def configure(path: Path | None, context: Callable[[], Context] | None) -> None:
    """Let loggers write to `path`; None: back to the file of a launched worker, or stderr.

    context: returns {"origin": Origin} and, if known, the current "step" and "section"."""
    global _file, _context, _parent
    if _file is not None:
        _file.close()
        WRITER.end()  # a remaining thread would prevent the next call from forking its monitor
    _file = None if path is None else BackgroundFile(path)
    _context = context
    _parent = None if path is None else span.parse_traceparent(Exporting.from_environment().traceparent)


def get_logger(**values: Any) -> Any:
    """Return a structlog logger with `values` bound to it.

    A value whose name is one of the line's own fields, such as `step` or `rank`, gets an underscore: `step_`."""
    import structlog

    return structlog.wrap_logger(
        None,
        processors=[structlog.processors.format_exc_info, _write],
        wrapper_class=structlog.make_filtering_bound_logger(0),
        context_class=dict,
        cache_logger_on_first_use=False,
    ).bind(**values)


def as_people_read(text: str) -> str:
    """Return a line of our logger in human-readable form; any other text unchanged."""
    try:
        line = encoding.from_json(text, dict[str, Any])
    except DecodeError:
        return text
    if not all(isinstance(line.get(name), str) for name in ("ts", "level", "event")):
        return text
    return _human_line(line, {name: value for name, value in line.items() if name not in OWN}, prefix="").rstrip("\n")


def line_of(record: Record) -> dict[str, Any]:
    """Return a record as a log line."""
    fields = msgspec.to_builtins(record.event)
    message = fields.pop("event")
    line = _line(record.wall_ns, record.mono_ns, record.sequence, record.event.level, message)
    line |= _origin_fields(record.origin, None)
    line["pid"] = record.origin.pid
    return _with_fields(line, fields)


# -- user code ---------------------------------------------------------------------------------


def _write(_: Any, level: str, event: MutableMapping[str, Any]) -> Any:
    """Write the line, as the last processor; nothing is left for structlog to do."""
    import structlog

    fields = dict(event)
    event_value = fields.pop("event", "")
    message = event_value if isinstance(event_value, str) else message_of(event_value)
    line = _line(time.time_ns(), time.monotonic_ns(), next(_numbers), _LEVELS.get(level, level), message)
    file, get_context, parent = _destination()
    context = _context_of(get_context)
    origin = context.get("origin")
    if isinstance(origin, Origin):
        line |= _user_origin_fields(origin, parent)
    line |= {name: context[name] for name in ("step", "section") if context.get(name) is not None}
    line |= _current_span()
    if file is None or not file.write_now(_encoded(_with_fields(line, fields)), LINE_LIMIT):
        _show(line, fields)
    raise structlog.DropEvent


def _destination() -> tuple[BackgroundFile | None, Callable[[], Context] | None, span.Trace | None]:
    """Return the current file for lines, the function for their context, and the span that the job is part of."""
    global _launched, _is_launched_known
    if _file is not None or _context is not None:
        return _file, _context, _parent
    if not _is_launched_known:
        _launched = _of_launched_worker()
        _is_launched_known = True  # only now: another thread may look meanwhile
    return (None, None, None) if _launched is None else _launched


def _of_launched_worker() -> _Launched | None:
    """Return the destination for a launcher worker outside a wrapped function, None in any other process."""
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
    file = BackgroundFile(worker.folder / "logs" / f"{FileOwner(worker.node, worker.rank).name}.jsonl")
    parent = span.parse_traceparent(Exporting.from_environment().traceparent)
    return file, lambda: {"origin": origin, **progress.shown()}, parent


def _context_of(get_context: Callable[[], Context] | None) -> Context:
    try:
        return {} if get_context is None else get_context()
    except Exception:  # its data may be gone between two calls: the line has no context
        return {}


def _user_origin_fields(origin: Origin, parent: span.Trace | None) -> dict[str, Any]:
    """Return the origin fields of a user line; cached, because many lines share them."""
    global _cached_fields
    cached = _cached_fields
    if cached is None or cached[0] is not origin or cached[1] is not parent:
        _cached_fields = cached = (origin, parent, _origin_fields(origin, parent))
    return cached[2]


def _format_second(second: int) -> str:
    """Return a second of UTC as text; cached, because many lines share it."""
    global _cached_second
    cached = _cached_second
    if cached[0] != second:
        formatted = datetime.fromtimestamp(second, timezone.utc).strftime("%Y-%m-%dT%H:%M:%S")
        _cached_second = cached = (second, formatted)
    return cached[1]


def _line(wall_ns: int, mono_ns: int, number: int, level: str, event: str) -> dict[str, Any]:
    return {
        "ts": f"{_format_second(wall_ns // 10**9)}.{wall_ns // 1000 % 10**6:06d}Z",
        "mono_ns": mono_ns,
        "seq": number,
        "level": level,
        "event": event,
        "schema": SCHEMA,
        "pid": os.getpid(),
    }


def _origin_fields(origin: Origin, parent: span.Trace | None) -> dict[str, Any]:
    """Return the origin fields: job, rank and iteration, and the span in which the function runs."""
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
    """Return the ids of the user's own span, if their code uses OpenTelemetry."""
    trace = sys.modules.get("opentelemetry.trace")
    if trace is None:
        return {}
    try:
        context = trace.get_current_span().get_span_context()
        return (
            {"trace_id": format(context.trace_id, "032x"), "span_id": format(context.span_id, "016x")}
            if context.is_valid
            else {}
        )
    except Exception:  # a foreign library, perhaps half imported: the line has no span
        return {}


def _with_fields(line: dict[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """Add the event's own fields; a name that we already use gets an underscore."""
    return line | {f"{name}_" if name in OWN else str(name): value for name, value in fields.items()}


def _encoded(line: Mapping[str, Any]) -> bytes:
    try:
        return encoding.to_json(line, repr) + b"\n"
    except Exception:  # user values: odd keys, broken __repr__, endless nesting, huge numbers
        return encoding.to_json({name: _safe_value(value) for name, value in line.items()}) + b"\n"


def _safe_value(value: object) -> Any:
    if value is None or isinstance(value, bool):
        return value
    try:
        if isinstance(value, int):
            return value if abs(value) < 2**63 else hex(value)
        return ascii(value) if not isinstance(value, str) else str(value)
    except Exception:
        return f"<{type(value).__name__} that cannot be shown>"


def _human_line(line: Mapping[str, Any], fields: Mapping[str, Any], prefix: str) -> str:
    """Return a line for people, followed by the exception's lines."""
    values = dict(fields)
    error = values.pop("exception", None)
    values_text = " ".join(f"{name}={_safe_value(value)}" for name, value in values.items())
    line_text = (
        f"{line['ts'][11:23]} {line['level']:8} {prefix}{line['event']}{'  ' if values_text else ''}{values_text}\n"
    )
    return line_text if error is None else f"{line_text}{error}\n"


def _show(line: Mapping[str, Any], fields: Mapping[str, Any]) -> None:
    """Write a line for people to stderr."""
    prefix = f"[rank {line['initial_rank']}] " if "initial_rank" in line else ""
    try:
        sys.stderr.write(printable(_human_line(line, fields, prefix)))
    except (OSError, ValueError, AttributeError):
        pass  # stderr is closed, full or missing: there is nowhere left to write
