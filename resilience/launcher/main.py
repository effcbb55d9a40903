"""The command line of the launcher: `resilience run`, `python -m resilience.launcher`."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
from collections.abc import Iterator, Sequence

from resilience.core.cycle import FAILED, WRONG_USE
from resilience.errors import ConfigurationError, ResilienceError
from resilience.system.environment import one_blas_thread

NO_FOLDER = (
    "the working directory does not exist any more (it was removed, perhaps made again); change to one that exists "
    'and start again: cd "$PWD"'
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run this node's part of the job; return the exit status.

    An error of this package is one line on the terminal, not a traceback."""
    # If SIGCHLD was ignored when this process started, the kernel would drop the exit statuses of all workers.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _open_closed_streams()
    if _has_no_folder():
        from resilience.launcher.console import say

        say(NO_FOLDER)
        return WRONG_USE
    with one_blas_thread(), _ended_by_ctrl_c():
        from resilience.launcher.arguments import parse
        from resilience.launcher.console import say
        from resilience.launcher.failed_workers import leave_error_file
        from resilience.launcher.launch import launch

    try:
        return launch(parse(arguments))
    except ResilienceError as error:
        say(str(error))
        leave_error_file(str(error))
        return WRONG_USE if isinstance(error, ConfigurationError) else FAILED


def _has_no_folder() -> bool:
    """Return True if the working directory was removed. There, torch ends this process as it is imported: "Intel oneMKL
    FATAL ERROR: Cannot load libtorch_cpu.so"."""
    try:
        os.getcwd()
    except FileNotFoundError:
        return True
    return False


@contextlib.contextmanager
def _ended_by_ctrl_c() -> Iterator[None]:
    """Let Ctrl-C end this process at once while modules are imported. As an exception it would be lost in a module that
    handles whatever one of its own imports raises, as torch does for numpy."""
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _open_closed_streams() -> None:
    """Let a stdin, stdout or stderr that was closed (`>&-`) lead to /dev/null. Otherwise the next file would take its
    place."""
    for fd, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(fd)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # takes the lowest free number, which is `fd`
        if getattr(sys, name) is None:
            setattr(sys, name, io.TextIOWrapper(io.FileIO(fd, "w" if fd else "r", closefd=False)))
