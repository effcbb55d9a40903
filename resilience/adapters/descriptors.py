"""How many descriptors may this process open, and is that enough?

A store's server needs one for each connection of its clients. Past the limit it accepts no more, without a word,
and its clients wait until their own limits pass."""

from __future__ import annotations

import os
import resource

from resilience.errors import StoreError

SPARE = 64  # descriptors for files, pipes and short connections


def raise_limit() -> None:
    """Raise this process's soft limit to its hard limit. Changes nothing where the system refuses."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == hard:
        return
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError):
        return  # what `make_room` then counts with is the soft limit


def are_scarce() -> bool:
    """Return True if so few descriptors are left that only the job may have them, and telemetry may not."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return soft != resource.RLIM_INFINITY and soft - len(os.listdir("/proc/self/fd")) < min(SPARE, soft // 4)


def make_room(count: int, purpose: str) -> None:
    """Raise the limit, and check that `count` more descriptors can be opened.

    purpose: completes "this process has to …". Raises: StoreError."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    raise_limit()
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    needed = len(os.listdir("/proc/self/fd")) + SPARE + count
    if allowed != resource.RLIM_INFINITY and needed > allowed:
        raise StoreError(
            f"this process has to {purpose} and needs {needed} open files for that; the limit is {hard} (hard; soft "
            f"{soft}). Raise both before the job starts: `ulimit -Hn {needed}` then `ulimit -n {needed}` in the shell, "
            "LimitNOFILE= in a systemd unit, --ulimit nofile= for a container",
            needed=needed,
            soft=soft,
            hard=hard,
        )
