"""How does a line of the timeline look as JSON?  One object per line, for every kind of line.

A record has the form of `telemetry.log.line_of`, a log line its own fields, a plain line its text as the message. Each
has its file and line number, and the quality of its time."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timezone
from typing import Any, Literal

import msgspec

from resilience.errors import DecodeError
from resilience.facts.identity import Role
from resilience.facts.records import from_line
from resilience.history.clocks import NodeClock
from resilience.run_folder.lines import Kind, Line, fields_of
from resilience.telemetry.log import line_of


class Entry(msgspec.Struct, omit_defaults=True):
    """A line of `resilience logs --json`, without the event's own fields. file, line: its origin.

    ts: UTC, corrected by the clock's offset. ts_is_estimate: a plain line without its own time.
    clock_offset_s: the correction. clock_uncertainty_s: possible error of the order between nodes."""

    ts: str
    level: Literal["debug", "info", "warning", "error", "critical"]
    event: str
    kind: Kind
    file: str
    line: int
    ts_is_estimate: bool = False
    clock_offset_s: float | None = None
    clock_uncertainty_s: float | None = None
    mono_ns: int | None = None
    seq: int | None = None
    schema: int | None = None
    pid: int | None = None
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


_OURS = ("kind", "file", "line", "ts_is_estimate", "clock_offset_s", "clock_uncertainty_s")


def entry_of(line: Line, clocks: Sequence[NodeClock] = ()) -> dict[str, Any]:
    """Return a line as plain values. An event field with the name of one of our fields gets an underscore."""
    plain = {f"{name}_" if name in _OURS else name: value for name, value in _plain(line).items()}
    entry: dict[str, Any] = {"ts": utc(line.at_ns), "level": line.level, "event": line.event}
    entry |= {"kind": line.kind, "file": line.file, "line": line.number}
    if line.is_placed:
        entry["ts_is_estimate"] = True
    for clock in clocks:
        if clock.node == line.node:
            entry["clock_offset_s"] = clock.offset_ns / 1e9
            if clock.uncertainty_ns is not None:
                entry["clock_uncertainty_s"] = clock.uncertainty_ns / 1e9
    return entry | {name: value for name, value in plain.items() if name not in entry}


def utc(at_ns: int) -> str:
    """Return a time in the format of log lines."""
    at = datetime.fromtimestamp(at_ns // 10**9, timezone.utc).strftime("%Y-%m-%dT%H:%M:%S")
    return f"{at}.{at_ns // 1000 % 10**6:06d}Z"


def _plain(line: Line) -> dict[str, Any]:
    if line.kind == "record":
        try:
            return line_of(from_line(line.raw))
        except DecodeError:  # a record of a newer release: only the known fields
            place = {"role": line.role, "iteration": line.iteration}
            plain = {**fields_of(line), **place, "node": line.node, "initial_rank": line.rank, "cycle": line.cycle}
    elif line.kind == "log":
        plain = fields_of(line)
    else:
        plain = {"node": line.node, "initial_rank": line.rank, "cycle": line.cycle}
    return {name: value for name, value in plain.items() if value is not None}
