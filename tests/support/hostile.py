"""Text that tries to steer a terminal, and run folders in which every text is like that."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from resilience.errors import DecodeError
from resilience.facts.encoding import reader
from resilience.facts.identity import Job
from resilience.facts.printable import printable
from resilience.facts.records import from_line
from resilience.telemetry.rank_snapshot import RankSnapshot
from tests.fuzz import corpus

NAME = "Łódź 日本語 \x1b]0;pwned\x07\x1b[2J\x9b31m\u202elive\u2066"  # what the name of a file may hold too
HOSTILE = f"{NAME}\x00\rover\x1b[8m\ngone\x7f"
LEGITIMATE = "Łódź 日本語"

Check = Callable[[bytes], object]


def obeyed(shown: str) -> list[str]:
    """Return the lines of an output that a terminal would obey."""
    return [line for line in shown.split("\n") if printable(line) != line]


def run_folder(folder: Path, is_launched: bool) -> Path:
    """Write a run in which each text that may be anybody's is hostile."""
    corpus.run_folder(folder, is_launched)
    _poison(folder / "job.json", reader(Job))
    for path in (folder / "records").iterdir():
        _poison(path, from_line)
    for path in (folder / "timings").glob("*.signs"):
        _poison(path, reader(RankSnapshot))
    for path in (folder / "timings").glob("*.hist"):
        path.write_text(path.read_text().replace('"data"', json.dumps(f"data{HOSTILE}")))
    for path in (folder / "logs").iterdir():
        _poison(path, lambda line: None)
    for path in (folder / "output").rglob("*.*"):
        path.write_bytes(HOSTILE.encode() + b"\n" + path.read_bytes())
    return folder


def _poison(path: Path, check: Check) -> None:
    """Make each text in the lines of a file hostile, as far as the file's reader takes it."""
    whole = path.read_bytes()
    values = [json.loads(whole)] if path.suffix == ".json" else [json.loads(line) for line in whole.splitlines()]
    for value in values:
        _poison_within(value, value, check)
    path.write_bytes(b"".join(json.dumps(value).encode() + b"\n" for value in values))


def _poison_within(part: Any, whole: Any, check: Check) -> None:
    entries = part.items() if isinstance(part, dict) else enumerate(part) if isinstance(part, list) else ()
    for key, value in list(entries):
        if not isinstance(value, str) or key in ("ts", "level", "role"):
            _poison_within(value, whole, check)
            continue
        part[key] = value + HOSTILE
        try:
            check(json.dumps(whole).encode())
        except DecodeError:
            part[key] = value
