"""What does a command do if its output cannot be written?  It says so in one line, and ends with a status of its own.

A reader that closes the pipe, as `head` does, is no error: the command ends like other programs whose reader is gone,
and prints nothing."""

from __future__ import annotations

import os
import signal
import sys

from resilience.system import render

UNWRITTEN = 1  # exit status: the output could not be written
CLOSED_PIPE = 128 + signal.SIGPIPE  # exit status: the reader of stdout ended before the command did


def status_after(command: str, error: OSError) -> int:
    """Return the exit status of a command after an error of its stdout; print a line, unless the reader has closed the
    pipe. command: as behind `resilience`."""
    discard()
    return CLOSED_PIPE if isinstance(error, BrokenPipeError) else complain(command, error.strerror or str(error))


def complain(command: str, reason: str) -> int:
    """Print that stdout cannot be written, and why. Return the exit status."""
    render.complain(f"resilience {command}: cannot write to stdout: {reason}; redirect it to a file or a terminal")
    return UNWRITTEN


def discard() -> None:
    """Drop what stdout still holds. Without this, the interpreter reports an error at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
