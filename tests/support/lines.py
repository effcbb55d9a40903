"""Files of a run as ranks, monitors, agents and workers leave them, line by line."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec

from resilience.facts.events import Event
from resilience.facts.identity import Origin
from resilience.facts.records import Record, to_line
from resilience.run_folder.entries import utc

AT = 1_700_000_000_000_000_000
SECOND = 10**9


def log_line(event: str, at_ns: int, rank: int = 0, **fields: Any) -> bytes:
    """One line as `resilience.get_logger()` writes it."""
    head = {"ts": utc(at_ns), "mono_ns": at_ns, "seq": 0, "level": "info", "event": event, "schema": 1, "pid": 7}
    place = {"node": "node", "rank": rank, "initial_rank": rank, "role": "rank"}
    return msgspec.json.encode(head | place | fields) + b"\n"


def record_line(event: Event, at_ns: int, node: str = "node", rank: int | None = None, **place: Any) -> bytes:
    """One line of a record file."""
    role = place.pop("role", "agent" if rank is None else "rank")
    origin = Origin("job", node, role, 7, initial_rank=rank, rank=rank, **place)
    return to_line(Record(0, at_ns, at_ns, origin, event))  # type: ignore[arg-type]


def write(folder: Path, name: str, *lines: bytes, changed_ns: int = AT + 3600 * SECOND) -> Path:
    """Write a file of a run that was changed last at `changed_ns`."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(lines))
    os.utime(path, ns=(changed_ns, changed_ns))
    return path
