"""A lock that no fork leaves held.

A child has the forking thread only. If another thread holds a lock at that moment, nobody releases it in the child. So
a fork waits for this lock, and releases it on both sides. The lock is reentrant: a signal handler may interrupt the
thread that holds it."""

from __future__ import annotations

import os
import threading


def fork_lock() -> threading.RLock:
    """Return a new lock. Hold it for microseconds only, because every fork of the process waits for it."""
    lock = threading.RLock()

    def release() -> None:
        try:
            lock.release()
        except RuntimeError:  # a signal handler raised while the fork waited for it
            pass

    def release_in_child() -> None:
        try:
            lock.release()
        except RuntimeError:  # also if another thread holds it, which the child does not have
            lock._at_fork_reinit()  # type: ignore[attr-defined]

    os.register_at_fork(before=lock.acquire, after_in_parent=release, after_in_child=release_in_child)
    return lock
