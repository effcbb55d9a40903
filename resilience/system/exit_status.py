"""With which exit status does this program end?  Noted when it has ended, for code that runs as its interpreter ends.

Only a launcher that runs the program in a process of its own making knows the status before the process is gone. The
interpreter may need long until then: it joins threads and calls exit handlers."""

from __future__ import annotations

_noted: int | None = None


def note(status: int) -> int:
    """Note the status with which this program ends, the negative number of a signal that will end it; return it."""
    global _noted
    _noted = status
    return status


def noted() -> int | None:
    """Return the status with which this program ends, None if it runs or if the status is unknown."""
    return _noted
