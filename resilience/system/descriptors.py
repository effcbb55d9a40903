"""How many descriptors may a process open, and is that enough?

A store's server needs one for each connection of its clients. Past the limit it accepts no more, without a word,
and its clients wait until their own limits pass."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
from collections.abc import Collection

from resilience.errors import StoreError
from resilience.system.open_sockets import is_listening
from resilience.system.processes import children

SPARE = 64  # descriptors for files, pipes and short connections


def raise_limit() -> int:
    """Raise this process's soft limit to its hard limit; return the soft limit before. Changes nothing where the system
    refuses: then the soft limit is what `make_room` counts with."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return soft


def close_others(kept: Collection[int] = ()) -> None:
    """Close every descriptor of this process except its standard streams and `kept`. For a forked process.

    Looks at open descriptors only: the limit may be 2^30 in a container, and without close_range(2) a loop up to it
    takes minutes."""
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) not in kept:
            with contextlib.suppress(OSError):  # the descriptor of the listing is closed already
                os.close(int(name))


def release_others(kept: Collection[int]) -> None:
    """Let every other descriptor, except the standard streams, refer to /dev/null. For a forked process that goes on
    with its parent's objects.

    The parent's files, locks and connections then end when the parent closes them. A closed number would be given to a
    file opened later, and an object that still has the number, such as a handler of the program's log, would write
    into that one."""
    numbers = {int(name) for name in os.listdir("/proc/self/fd")} - {0, 1, 2, *kept}
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for number in numbers - {null}:  # at most one was free: the listing's own
        os.dup2(null, number, inheritable=False)
    os.close(null)


def reserve() -> int:
    """Return how many of this process's last descriptors only the job may have, and telemetry may not."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 0 if soft == resource.RLIM_INFINITY else min(SPARE, soft // 4)


def are_scarce() -> bool:
    """Return True if only the reserve is left."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        return soft != resource.RLIM_INFINITY and soft - len(os.listdir("/proc/self/fd")) < reserve()
    except OSError:  # not even one is left, for the listing
        return True


def are_missing(error: BaseException | None) -> bool:
    """Return True if the error says that this process, or its host, has no free descriptor."""
    return isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE)


def check_room(count: int, purpose: str) -> None:
    """Check that this process can open `count` more descriptors. purpose: the subject of "needs … open files".

    Raises: OSError."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    left = soft - len(os.listdir("/proc/self/fd")) + 1  # the listing's own is closed by then
    if soft != resource.RLIM_INFINITY and left < count:
        raise OSError(
            errno.EMFILE,
            f"{purpose} needs {count} open files, and {left} of {soft} are left in process {os.getpid()}; raise the "
            "limit (`ulimit -n`, and `ulimit -Hn` if that is lower) before the job starts",
        )


def has_room(count: int, pid: int) -> bool:
    """Return True if a process can open `count` more descriptors and SPARE others under its soft limit.

    Raises: OSError if it is gone or of another user."""
    soft, _ = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    return soft == resource.RLIM_INFINITY or _needed(count, pid) <= soft


def make_room(count: int, purpose: str, pid: int | None = None) -> None:
    """Raise the soft limit of a process to its hard limit, and check that it can open `count` more descriptors.

    purpose: completes "the process has to …". pid: of a process of the same user; None: this process.
    Raises: StoreError; OSError if the other process is gone or of another user."""
    process = os.getpid() if pid is None else pid
    soft, hard = resource.prlimit(process, resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # the system refuses: then the soft limit is what counts
        resource.prlimit(process, resource.RLIMIT_NOFILE, (hard, hard))
    if not has_room(count, process):
        needed = _needed(count, process)
        which = "this process" if pid is None else f"process {pid}"
        raise StoreError(
            f"{which} has to {purpose} and needs {needed} open files for that; the limit is {hard} (hard; soft "
            f"{soft}). Raise both before the job starts: `ulimit -Hn {needed}` then `ulimit -n {needed}` in the shell, "
            "LimitNOFILE= in a systemd unit, --ulimit nofile= for a container",
            needed=needed,
            soft=soft,
            hard=hard,
        )


def make_room_in_agent(port: int, count: int, purpose: str) -> None:
    """Make room in the process that hosts the agent's store at `port`: the process that started this one, or a child
    of it.

    Each rank beside the agent does so before it connects: past its limit the host closes new connections, or accepts
    none and the ranks wait. purpose: as for `make_room`. Raises: StoreError if the hard limit is too low."""
    agent = os.getppid()
    for process in (agent, *children(agent)):
        with contextlib.suppress(OSError):  # it is gone, or belongs to another user
            if not has_room(count, process) and is_listening(process, port):
                make_room(count, purpose, process)


def _needed(count: int, pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd")) + SPARE + count
