"""Where does Prometheus find the nodes of a job?  In entries for its file_sd, which also show how the job ended.

Entries of all jobs are in one folder of the run directory, `.targets`, because file_sd accepts one `*`, in the last
part of a path. Each node that serves metrics has one entry. An entry outlives a killed agent: then its address does not
answer, and Prometheus knows that the job is gone. A job that ends well removes its entries. A job that fails leaves an
entry that says so, at an address that never answers. No process has to outlive the job for that, so it works if a
scheduler kills all processes of a job at once (docs/decisions/the-end-of-a-job-is-a-file.md).

Each node writes and removes its own entry. What concerns other entries is done by the first node of the job alone
(group rank 0, or rank 0 without the launcher; there is one after the loss of any node): it removes those of lost nodes
once the job has ended well, and old ones of other jobs. Otherwise the number of operations in this one folder would
grow with the square of the number of nodes.

A request names the job in its parameters, so a later job on the same port does not answer for this one."""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from pathlib import Path

import msgspec

from resilience.errors import DecodeError
from resilience.facts import encoding
from resilience.system import files
from resilience.telemetry.final_state import Outcome

FOLDER = ".targets"
PARAMETER = "job_id"
KEPT_FOR = 24 * 3600.0  # seconds after which an entry that was not renewed is removed
RENEWED_EVERY = 3600.0  # seconds
DEAD_ADDRESS = "127.0.0.1:0"  # an address that cannot answer
_LONGEST = 100  # bytes for the job and for the node in a file name, each
_SEPARATOR = "@@"  # separator that no run folder's name contains


class _Announcement(msgspec.Struct, frozen=True):
    """One entry of a file_sd file."""

    targets: list[str]
    labels: dict[str, str]


_entries = encoding.reader(list[_Announcement])


class Targets:
    """The entry of one node. No method raises; an entry that cannot be written is missing."""

    def __init__(self, run_folder: Path, node: str) -> None:
        self._job_id, self._node = run_folder.name, node
        self._folder = run_folder.parent / FOLDER
        self._entry = b""
        self._renew_at = 0.0
        self._has_forgotten = False

    def announce(self, target: str) -> bool:
        """Let Prometheus find this node at an address; return False if the entry cannot be written."""
        labels = {"job_id": self._job_id, "node": self._node, f"__param_{PARAMETER}": self._job_id}
        self._entry = encoding.to_json([_Announcement([target], labels)])
        with contextlib.suppress(OSError):
            self._folder.mkdir(exist_ok=True)
            self._folder.chmod(
                self._folder.parent.stat().st_mode & 0o1777
            )  # users who may run jobs here may add entries
        self._remove(self._path(""))
        return self._write()

    def renew(self, is_first: bool = False) -> None:
        """Keep the entry from expiring, and write it again if another node has removed it. Cheap; call it often.

        A node that is slow to end removes all entries of the job, perhaps after this one has begun its next call.
        is_first: this is the first node of the job. It removes old entries of jobs that did not end cleanly, once."""
        if not self._entry:
            return
        if is_first and not self._has_forgotten:
            self._has_forgotten = True
            self._forget(time.time())
        is_due = time.monotonic() >= self._renew_at
        try:
            if is_due:
                os.utime(self._path(self._node))
                self._renew_at = time.monotonic() + RENEWED_EVERY
            else:
                os.stat(self._path(self._node))
        except OSError:
            self._write()

    def leave(self, outcome: Outcome | None, is_first: bool = False) -> None:
        """Record how the job ended. None: unknown, as if this process had been killed. completed and stopped are about
        the whole job, the others about this node. is_first: this is the first node of the job."""
        if not self._entry or outcome is None:
            return
        self._entry = b""
        if outcome == "failed":
            labels = {"job_id": self._job_id, "outcome": outcome}
            files.replace(self._path(""), encoding.to_json([_Announcement([DEAD_ADDRESS], labels)]))
        self._remove(self._path(self._node))
        if outcome == "completed":
            self._remove(self._path(""))  # if it has only stopped, a node may have failed before
        if is_first and outcome in ("completed", "stopped"):  # of nodes that were lost, perhaps long ago
            for path in _of_job(self._folder, self._job_id):
                if path != self._path(""):
                    self._remove(path)

    def _write(self) -> bool:
        self._renew_at = time.monotonic() + RENEWED_EVERY
        return files.replace(self._path(self._node), self._entry)

    def _path(self, node: str) -> Path:
        """Return the file of a node; for "", the file of the job's end."""
        return self._folder / f"{_short(self._job_id)}{_SEPARATOR}{_short(node)}.json"

    def _remove(self, path: Path) -> None:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)

    def _forget(self, now: float) -> None:
        for path in self._folder.glob(f"*{_SEPARATOR}*.json"):
            with contextlib.suppress(OSError):
                if now - path.stat().st_mtime > KEPT_FOR:
                    path.unlink()


def announced(run_folder: Path) -> bytes:
    """Return the entries of all nodes of this job as one JSON list, for http_sd.

    Entries are labelled with discovery=http: when the answering node ends, Prometheus keeps what it knows, and cannot
    tell a completed job from a killed one."""
    entries: list[_Announcement] = []
    for path in sorted(_of_job(run_folder.parent / FOLDER, run_folder.name)):
        try:
            entries += _entries(path.read_bytes())
        except (OSError, DecodeError):
            continue  # it is being removed, or is not our entry
    return encoding.to_json([_Announcement(entry.targets, entry.labels | {"discovery": "http"}) for entry in entries])


def _of_job(folder: Path, job_id: str) -> list[Path]:
    start = _short(job_id) + _SEPARATOR
    try:
        return [path for path in folder.iterdir() if path.name.startswith(start) and path.suffix == ".json"]
    except OSError:
        return []


def _short(name: str) -> str:
    if len(encoding.text(name).encode()) <= _LONGEST:
        return encoding.text(name)
    mark = hashlib.sha256(name.encode(errors="backslashreplace")).hexdigest()[:16]
    return encoding.text(name)[: (_LONGEST - len(mark)) // 4] + mark  # a character has up to 4 bytes
