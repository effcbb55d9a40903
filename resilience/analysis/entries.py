"""How does a line of the timeline look to a machine?  One JSON object a line, whatever it was.

A record as `telemetry.log.line_of` shows it, a log line as it was written, a plain line with its text as
the message; each with where it stands, and with how its time is to be read."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timezone
from typing import Any, Literal

import msgspec

from resilience.analysis.clocks import Clock
from resilience.analysis.folding import Said
from resilience.analysis.lines import Kind, Line, fields_of
from resilience.core.identity import Role
from resilience.core.records import from_line
from resilience.errors import DecodeError
from resilience.telemetry.log import line_of


class Entry(msgspec.Struct, omit_defaults=True):
    """A line of `resilience logs --json`, beside the event's own fields. file and line: where it stands.

    ts: UTC, the clock's offset taken off. ts_is_estimate: a plain line without a time of its own.
    clock_offset_s: what was taken off. clock_uncertainty_s: how wrong the order between nodes may be."""

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


def entry_of(line: Line, clocks: Sequence[Clock] = ()) -> dict[str, Any]:
    """Return a line as plain values. A field of the event that has the name of one of ours gets an underscore."""
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


def said_entry(said: Said) -> dict[str, Any]:
    """Return a folded line as plain values."""
    return {
        "ts": utc(said.line.at_ns),
        "until": utc(said.until_ns),
        "level": said.line.level,
        "event": said.line.event if said.line.kind in ("record", "log") else said.text,
        "text": said.text,
        "ranks": said.ranks,
        "nodes": said.nodes,
        "count": said.count,
        "stands_out": said.stands_out,
    }


def utc(at_ns: int) -> str:
    """Return a time as log lines hold it."""
    at = datetime.fromtimestamp(at_ns // 10**9, timezone.utc).strftime("%Y-%m-%dT%H:%M:%S")
    return f"{at}.{at_ns // 1000 % 10**6:06d}Z"


def _plain(line: Line) -> dict[str, Any]:
    if line.kind == "record":
        try:
            return line_of(from_line(line.raw))
        except DecodeError:  # of a newer release: what it says, as far as known
            place = {"role": line.role, "iteration": line.iteration}
            plain = {**fields_of(line), **place, "node": line.node, "initial_rank": line.rank, "cycle": line.cycle}
    elif line.kind == "log":
        plain = fields_of(line)
    else:
        plain = {"node": line.node, "initial_rank": line.rank, "cycle": line.cycle}
    return {name: value for name, value in plain.items() if value is not None}
