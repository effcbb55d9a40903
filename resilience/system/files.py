"""Files that are written while everything else may fail.

A line file is opened for appending and each line is one write, so lines of several writers never mix. A full disk, a
read-only folder or a lost mount never raises: the write returns False, and the caller counts it. After the failover of
a file server, the descriptor is of no more use, but the path works again: the file is opened anew. A whole file is
replaced atomically or left unchanged. Nothing waits for the disk itself: an fsync on a busy disk takes seconds, in
which a monitor would watch no rank."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from resilience.facts.encoding import text

ROTATED = ".1"  # suffix of a file that a newer one has replaced
TIMES = ".times"  # suffix of the file with the times at which a plain text file's bytes were read
REOPEN_EVERY = 5.0  # seconds between attempts to open a file that could not be opened, or whose descriptor was lost
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EAGAIN}  # the same descriptor may take the next write
MOST_LINKS = 40  # from one to the next; the kernel follows as many
TO_REPLACE = "it must be a file, not a device, a pipe or /dev/stdout; check free space and permissions"

Signature = tuple[int, int, int]
"""Of a file: inode, size, and time of change in nanoseconds."""


def matching(folder: Path, pattern: str) -> list[Path]:
    """Return the paths below a folder that match a pattern, as many as can be listed: others may delete what is being
    listed, and a file server may fail."""
    paths: list[Path] = []
    with contextlib.suppress(OSError):
        for path in folder.glob(pattern):
            paths.append(path)
    return paths


def close(fd: int | None) -> None:
    """Close a descriptor if there is one. A file server reports failed writes now; it is closed all the same."""
    if fd is not None:
        with contextlib.suppress(OSError):
            os.close(fd)


def is_lost(error: OSError) -> bool:
    """Return True if the descriptor of a write that failed like this must be closed: no later write may succeed. False
    if the disk is only full."""
    return error.errno not in _FULL


class LineFile:
    """An append-only file of lines. Creates its folders."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd: int | None = None
        self._retry_at = 0.0
        self._is_torn = False

    def write(self, line: bytes) -> bool:
        """Append a line (newline included) with one write. Return True if all of it was written."""
        fd = self._open()
        if fd is None:
            return False
        if self._is_torn:
            line = b"\n" + line  # so that an earlier torn line does not swallow this one
        try:
            written = os.write(fd, line)
        except OSError as error:
            if is_lost(error):
                self._close()
            return False
        self._is_torn = written < len(line)
        return not self._is_torn

    def close(self) -> None:
        """Close the descriptor; a later write reopens the file."""
        if self._fd is not None:
            self._retry_at = 0.0
        self._close()

    def _close(self) -> None:
        fd, self._fd = self._fd, None
        close(fd)

    def _open(self) -> int | None:
        if self._fd is None and time.monotonic() >= self._retry_at:
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self._is_torn = ends_torn(self.path)
                self._fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
            except (OSError, ValueError):  # ValueError: a zero byte in the path
                pass
            self._retry_at = time.monotonic() + REOPEN_EVERY
        return self._fd


def ends_torn(path: Path) -> bool:
    """Return True if a file ends in the middle of a line, which another process could not complete."""
    try:
        if not path.is_file() or not path.stat().st_size:
            return False
        with path.open("rb") as file:
            file.seek(-1, os.SEEK_END)
            return file.read(1) != b"\n"
    except OSError:
        return False


def replace(path: Path, content: bytes) -> bool:
    """Replace a whole file; a reader sees the old one or the new one. Return True if that worked.

    The target of a symbolic link is replaced, and the link stays. Nothing replaces a device, a pipe, or an open
    descriptor such as /dev/stdout."""
    return not why_not_replaced(path, content)


def why_not_replaced(path: Path, content: bytes) -> str:
    """Replace a whole file as `replace` does. Return the reason why it could not be replaced, empty if it was."""
    try:
        target = _target(path)
        if target.exists() and not target.is_file():
            return "it is not a file"
        with _written_beside(target, content) as temporary:
            temporary.replace(target)
    except FileExistsError:  # from the creation of the folder
        return os.strerror(errno.ENOTDIR)
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the path
        return getattr(error, "strerror", None) or str(error) or type(error).__name__
    return ""


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield where to write a file that replaces `path` once the block has succeeded; otherwise `path` is unchanged. A
    link, a device, a pipe, and a file in a folder where nothing can be created are written in place.

    Raises: OSError."""
    is_in_place = path.is_symlink() or (path.exists() and not path.is_file())
    if is_in_place or (path.exists() and not os.access(path.parent, os.W_OK | os.X_OK)):
        yield path
        return
    temporary = path.with_name(f".{os.urandom(6).hex()}.tmp")  # the name itself may be as long as a name may be
    try:
        yield temporary
        if path.exists():
            shutil.copymode(path, temporary)
        try:
            temporary.replace(path)
        except OSError as error:
            if error.errno != errno.EBUSY:  # the file is mounted by itself into a container
                raise
            shutil.copyfile(temporary, path)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def _target(path: Path) -> Path:
    """Return the file at the end of a chain of symbolic links. Raises: OSError for a link to an open descriptor.

    The writer of such a link means the open file, also one that has a name: it may hold other output already."""
    for _ in range(MOST_LINKS):
        if not path.is_symlink():
            return path
        folder = os.path.realpath(path.parent)
        if folder.startswith("/proc/"):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), str(path))
        path = Path(folder, path.readlink())
    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file's content, as hex digits. Raises: OSError."""
    import hashlib  # late: ranks import this module, and start faster without it

    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def create(path: Path, content: bytes, is_private: bool = False) -> bool:
    """Write a whole file that must not exist yet. Return False if it exists, or could not be written.

    If several processes try at once, on whatever hosts, one gets True. is_private: only its owner may read it."""
    try:
        with _written_beside(path, content, is_private) as temporary:
            try:
                os.link(temporary, path)
            except FileExistsError:
                return False
            except OSError:  # a file system without hard links: readers see the whole file only a moment later
                _write_new(path, content, is_private)
    except (OSError, ValueError):  # ValueError: a zero in the path
        return False
    return True


def signature(path: Path) -> Signature | None:
    """Return what tells two versions of a file apart, None without a file."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns


def why_unusable(folder: Path) -> str:
    """Create a folder. Return the reason why it cannot be written to, empty if it can."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:  # ValueError: a zero in the path
        return getattr(error, "strerror", None) or str(error)
    if os.access(folder, os.W_OK | os.X_OK, effective_ids=True):
        return ""
    is_read_only = os.statvfs(folder).f_flag & os.ST_RDONLY
    return os.strerror(errno.EROFS if is_read_only else errno.EACCES)


def times_of(path: Path) -> Path:
    """Return the file with the times at which a plain text file's bytes were read, for a rotated file too. Each of its
    lines is an offset and the time, in nanoseconds of UTC, at which the bytes from that offset on were read."""
    if path.name.endswith(ROTATED):
        return path.with_name(path.name.removesuffix(ROTATED) + TIMES + ROTATED)
    return path.with_name(path.name + TIMES)


def tail(path: Path, lines: int, most: int = 64 * 1024) -> tuple[str, ...]:
    """Return the last lines of a file that lie whole within its last `most` bytes; () if it is unreadable. For a line
    that is rewritten, such as a progress bar, return its first and last text.

    If the file was rotated a moment ago, also return the last lines of the previous one."""
    last_lines, is_whole = _tail(path, lines, most)
    if is_whole and len(last_lines) < lines:
        last_lines = _tail(Path(f"{path}{ROTATED}"), lines - len(last_lines), most)[0] + last_lines
    return last_lines


def _tail(path: Path, lines: int, most: int) -> tuple[tuple[str, ...], bool]:
    """Return the last lines, and True if they come from the whole file."""
    try:
        with path.open("rb") as file:
            start = max(0, file.seek(0, os.SEEK_END) - most)
            file.seek(start)
            written = file.read(most).removesuffix(b"\n").split(b"\n")
    except OSError:
        return (), False
    if start:
        written[0] = written[0].partition(b"\r")[2]  # the first text is cut
    last_lines = [shown for line in written for shown in _first_and_last(line)]
    return tuple(text(line) for line in last_lines[-lines:] if line), not start


def _first_and_last(line: bytes) -> list[bytes]:
    """Return the text before a line's first carriage return, and the text after its last one. A progress bar redraws
    its line for hours, without a newline."""
    first, *others = line.rstrip(b"\r").split(b"\r")
    return [first, *others[-1:]]


@contextlib.contextmanager
def _written_beside(path: Path, content: bytes, is_private: bool = False) -> Iterator[Path]:
    """Yield a new file with this content in the same folder, and remove it afterwards. Raises: OSError."""
    # Random, not by pid: other hosts may write to a shared file system.
    temporary = path.with_name(f".{path.name}.{os.urandom(6).hex()}")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        _write_new(temporary, content, is_private)
        yield temporary
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def _write_new(path: Path, content: bytes, is_private: bool) -> None:
    """Write a file that must not exist. Raises: OSError, ValueError."""
    mode = 0o600 if is_private else 0o666
    with open(path, "xb", opener=lambda name, flags: os.open(name, flags | os.O_CLOEXEC, mode)) as file:
        file.write(content)
