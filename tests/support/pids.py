"""Does a process still run, and which one is it?"""

from __future__ import annotations

from contextlib import suppress

import psutil


def has_ended(pid: int) -> bool:
    """Return True if there is no such process, or if it only waits for its parent to read its exit status."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def child_named(pid: int, text: str) -> psutil.Process:
    """Return the one child of a process, at any depth, with this text in its name or command line."""
    (child,) = children_named(pid, text)
    return child


def children_named(pid: int, text: str) -> list[psutil.Process]:
    """Return all of them that run. Other children may end meanwhile."""
    named = []
    for child in psutil.Process(pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if text in " ".join([child.name(), *child.cmdline()]) and child.status() != psutil.STATUS_ZOMBIE:
                named.append(child)
    return named
