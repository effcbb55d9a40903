"""A logger for user code that knows rank, iteration and step.

Inside a wrapped function each line goes, as one JSON object, to the rank's own log file; elsewhere to
stderr. structlog is imported at the first use, so that a rank that never logs never pays for it."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, MutableMapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import msgspec

from resilience.adapters.files import LineFile

SCHEMA = 1
_file: LineFile | None = None
_context: Callable[[], dict[str, Any]] | None = None


def configure(path: Path | None, context: Callable[[], dict[str, Any]] | None) -> None:
    """Let loggers write to `path`, each line with what `context` answers; None: to stderr again."""
    global _file, _context
    _file = None if path is None else LineFile(path)
    _context = context


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


def _write(_: Any, level: str, event: MutableMapping[str, Any]) -> Any:
    import structlog

    now = datetime.fromtimestamp(time.time(), timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    context = _context() if _context is not None else {}
    line = {"ts": now, "mono_ns": time.monotonic_ns(), "level": level, **context, **event, "schema": SCHEMA}
    text = msgspec.json.encode(line, enc_hook=repr) + b"\n"
    if _file is None or not _file.write(text):
        sys.stderr.write(text.decode())
    raise structlog.DropEvent
