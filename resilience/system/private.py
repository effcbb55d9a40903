"""A folder that only this user can enter, under a name that nobody can guess.

Another user of the host can neither read it, nor connect to a socket in it, nor hold a lock on it, nor take its name
before it exists."""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from pathlib import Path

PREFIX = "resilience-"
MEMORY = "/dev/shm"


def make(longest: int | None = None) -> str:
    """Return the path of a new folder. longest: most bytes for the path; a longer one is replaced by one in /tmp.

    Raises: OSError."""
    folder = _new()
    if longest is not None and len(os.fsencode(folder)) > longest:
        os.rmdir(folder)
        folder = tempfile.mkdtemp(prefix=PREFIX, dir="/tmp")
    return folder


def make_in_memory() -> str:
    """Return the path of a new folder on no disk, which could hang. Without shared memory, it is as from `make`.

    Raises: OSError."""
    try:
        return tempfile.mkdtemp(prefix=PREFIX, dir=MEMORY)
    except OSError:
        return make()


def _new() -> str:
    """Create it among temporary files, or in shared memory if that place is full or read-only."""
    try:
        return tempfile.mkdtemp(prefix=PREFIX)
    except OSError:
        return tempfile.mkdtemp(prefix=PREFIX, dir=MEMORY)


def enter(folder: str) -> int:
    """Return a descriptor of the folder. Raises: OSError, also if other users can enter it."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    status = os.fstat(fd)
    if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
        os.close(fd)
        raise PermissionError(
            f"{folder} can be entered by other users, expected a folder of mode 700 that this user owns"
        )
    return fd


def remove(folder: str) -> None:
    """Remove the folder if it is empty and has a name like ours. Does nothing if it is gone."""
    if Path(folder).name.startswith(PREFIX):
        with contextlib.suppress(OSError):
            os.rmdir(folder)
