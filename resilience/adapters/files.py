"""Files that are written while everything else may go wrong.

A line file is opened for appending and each line is one write, so lines of several writers never mix. A
full disk, a read-only folder or a lost mount never raises: the write answers False, and the caller
counts. A whole file is replaced atomically or left as it was. Nothing waits for the disk itself: on a
busy one an fsync takes seconds, in which a monitor would watch nobody."""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Iterator
from pathlib import Path

from resilience.core.encoding import text

ROTATED = ".1"  # behind the name of a file that another one has followed
TIMES = ".times"  # behind the name of a file of plain text: when which of its bytes were read
REOPEN_EVERY = 5.0  # seconds between attempts to open a file that could not be opened


class LineFile:
    """An append-only file of lines. Creates its folders."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd: int | None = None
        self._retry_at = 0.0
        self._is_torn = False

    def write(self, line: bytes) -> bool:
        """Append a line (newline included) with one write; answers whether all of it was written."""
        fd = self._open()
        if fd is None:
            return False
        if self._is_torn:
            line = b"\n" + line  # the torn line before must not swallow this one
        try:
            written = os.write(fd, line)
        except OSError:
            return False
        self._is_torn = written < len(line)
        return not self._is_torn

    def close(self) -> None:
        """Give the descriptor back; a later write opens the file again."""
        fd, self._fd = self._fd, None
        if fd is not None:
            with contextlib.suppress(OSError):  # a lost mount tells of its writes now
                os.close(fd)

    def _open(self) -> int | None:
        if self._fd is None and time.monotonic() >= self._retry_at:
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self._fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
            except (OSError, ValueError):  # ValueError: a zero in the path
                self._retry_at = time.monotonic() + REOPEN_EVERY
        return self._fd


def replace(path: Path, content: bytes) -> bool:
    """Write a whole file so that a reader sees the old one or the new one; answers whether it worked."""
    try:
        with _written_beside(path, content) as temporary:
            temporary.replace(path)
    except (OSError, ValueError):  # ValueError: a zero in the path
        return False
    return True


def create(path: Path, content: bytes, is_private: bool = False) -> bool:
    """Write a whole file that must not exist yet; answers False if it does, or could not be written.

    Of several that try at once, on whatever hosts, one gets True. is_private: only its owner may read it."""
    try:
        with _written_beside(path, content, is_private) as temporary:
            try:
                os.link(temporary, path)
            except FileExistsError:
                return False
            except OSError:  # a file system without hard links: whole for whoever comes a moment later
                _write_new(path, content, is_private)
    except (OSError, ValueError):  # ValueError: a zero in the path
        return False
    return True


def why_unusable(folder: Path) -> str:
    """Make a folder; return why nothing can be written in it, empty if something can."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:  # ValueError: a zero in the path
        return getattr(error, "strerror", None) or str(error)
    if os.access(folder, os.W_OK | os.X_OK, effective_ids=True):
        return ""
    is_read_only = os.statvfs(folder).f_flag & os.ST_RDONLY
    return os.strerror(errno.EROFS if is_read_only else errno.EACCES)


def times_of(path: Path) -> Path:
    """Return the file that says when the bytes of a file of plain text were read, also of a rotated one. Each of its
    lines is an offset and the time, in nanoseconds of UTC, at which the bytes from there on came."""
    if path.name.endswith(ROTATED):
        return path.with_name(path.name.removesuffix(ROTATED) + TIMES + ROTATED)
    return path.with_name(path.name + TIMES)


def tail(path: Path, lines: int, most: int = 64 * 1024) -> tuple[str, ...]:
    """Return the last lines of a file, as far as its last `most` bytes hold them whole; () if unreadable.

    Of a file that was rotated a moment ago, also the last lines of the one before."""
    found, is_whole = _tail(path, lines, most)
    if is_whole and len(found) < lines:
        found = _tail(Path(f"{path}{ROTATED}"), lines - len(found), most)[0] + found
    return found


def _tail(path: Path, lines: int, most: int) -> tuple[tuple[str, ...], bool]:
    """Return the last lines, and whether this is the whole file."""
    try:
        with path.open("rb") as file:
            start = max(0, file.seek(0, os.SEEK_END) - most)
            file.seek(start)
            found = file.read(most).removesuffix(b"\n").split(b"\n")
    except OSError:
        return (), False
    if start:
        found = found[1:]  # cut off at its front
    return tuple(text(line) for line in found[-lines:] if line), not start


@contextlib.contextmanager
def _written_beside(path: Path, content: bytes, is_private: bool = False) -> Iterator[Path]:
    """Give a new file with this content in the same folder, which is gone afterwards. Raises: OSError."""
    # Not by pid: on a shared file system other hosts write beside us.
    temporary = path.with_name(f".{path.name}.{os.urandom(6).hex()}")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        _write_new(temporary, content, is_private)
        yield temporary
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def _write_new(path: Path, content: bytes, is_private: bool) -> None:
    """Raises: OSError, ValueError."""
    mode = 0o600 if is_private else 0o666
    with open(path, "xb", opener=lambda name, flags: os.open(name, flags | os.O_CLOEXEC, mode)) as file:
        file.write(content)
