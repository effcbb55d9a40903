"""Where does Prometheus find the nodes of a job?  Entries for its file_sd, and what they say at the end.

Entries of all jobs lie in one folder of the run directory, `.targets`, because file_sd accepts one `*`, in the last
part of a path. Each node that serves metrics has one. An entry outlives a killed agent: then nobody answers at its
address, and Prometheus knows that the job is gone. A job that ends well removes its entries. A job that fails leaves
one that says so, at an address where nobody answers. No process has to outlive the job for that, so it works where a
scheduler ends all processes of a job at once (docs/decisions/the-end-of-a-job-is-a-file.md).

A request names the job in its parameters, so a later job on the same port does not answer for this one."""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from pathlib import Path
from typing import Any

from resilience.adapters import files
from resilience.core import encoding
from resilience.errors import DecodeError
from resilience.telemetry.final_state import Outcome

FOLDER = ".targets"
PARAMETER = "job_id"
KEPT_FOR = 24 * 3600.0  # seconds after which an entry that nobody has renewed is removed
RENEWED_EVERY = 3600.0  # seconds
NOBODY = "127.0.0.1:0"  # an address where nobody can answer
_LONGEST = 100  # bytes of a job's and of a node's share in the name of a file
_BETWEEN = "@@"  # no run folder's name has it


class Targets:
    """The entry of one node. No method raises; an entry that cannot be written is missing."""

    def __init__(self, run_folder: Path, node: str) -> None:
        self._job_id, self._node = run_folder.name, node
        self._folder = run_folder.parent / FOLDER
        self._entry = b""
        self._renew_at = 0.0

    def announce(self, target: str) -> bool:
        """Let Prometheus find this node at an address; return False if the entry cannot be written.

        Old entries of jobs that nobody ended well are removed."""
        labels = {"job_id": self._job_id, "node": self._node, f"__param_{PARAMETER}": self._job_id}
        self._entry = encoding.to_json([{"targets": [target], "labels": labels}])
        with contextlib.suppress(OSError):
            self._folder.mkdir(exist_ok=True)
            self._folder.chmod(self._folder.parent.stat().st_mode & 0o1777)  # whoever may run jobs here may add entries
        self._forget(time.time())
        self._remove(self._path(""))
        return self._write()

    def renew(self) -> None:
        """Say that the entry is somebody's. Cheap, to be called often."""
        if self._entry and time.monotonic() >= self._renew_at:
            self._renew_at = time.monotonic() + RENEWED_EVERY
            try:
                os.utime(self._path(self._node))
            except OSError:
                self._write()

    def leave(self, outcome: Outcome | None) -> None:
        """Say how the job ended. None: nobody knows, as if this process had been killed."""
        if not self._entry or outcome is None:
            return
        self._entry = b""
        if outcome == "failed":
            labels = {"job_id": self._job_id, "outcome": outcome}
            files.replace(self._path(""), encoding.to_json([{"targets": [NOBODY], "labels": labels}]))
        self._remove(self._path(self._node))
        if outcome in ("completed", "stopped"):  # for all nodes, also for one that was lost long ago
            for path in _of_job(self._folder, self._job_id):
                self._remove(path)

    def _write(self) -> bool:
        self._renew_at = time.monotonic() + RENEWED_EVERY
        return files.replace(self._path(self._node), self._entry)

    def _path(self, node: str) -> Path:
        """The file of a node; of "" that of the job's end."""
        return self._folder / f"{_short(self._job_id)}{_BETWEEN}{_short(node)}.json"

    def _remove(self, path: Path) -> None:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)

    def _forget(self, now: float) -> None:
        for path in self._folder.glob(f"*{_BETWEEN}*.json"):
            with contextlib.suppress(OSError):
                if now - path.stat().st_mtime > KEPT_FOR:
                    path.unlink()


def announced(run_folder: Path) -> bytes:
    """Return the entries of all nodes of this job as one JSON list, for http_sd.

    They say that they came this way: when the node that answers ends, Prometheus keeps what it knows, and cannot tell
    a job that has completed from one that was killed."""
    found: list[Any] = []
    for path in sorted(_of_job(run_folder.parent / FOLDER, run_folder.name)):
        try:
            found += encoding.from_json(path.read_bytes(), list[dict[str, Any]])
        except (OSError, DecodeError):
            continue  # it goes, or is no entry of ours
    for entry in found:
        entry["labels"] = {**entry.get("labels", {}), "discovery": "http"}
    return encoding.to_json(found)


def _of_job(folder: Path, job_id: str) -> list[Path]:
    start = _short(job_id) + _BETWEEN
    try:
        return [path for path in folder.iterdir() if path.name.startswith(start) and path.suffix == ".json"]
    except OSError:
        return []


def _short(name: str) -> str:
    if len(encoding.text(name).encode()) <= _LONGEST:
        return encoding.text(name)
    mark = hashlib.sha256(name.encode(errors="backslashreplace")).hexdigest()[:16]
    return encoding.text(name)[: (_LONGEST - len(mark)) // 4] + mark  # a character has up to 4 bytes
