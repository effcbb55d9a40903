"""Starts a program that ends with its parent: `python -I -S tied.py PARENT PROGRAM ARGUMENTS`.

The kernel sends the program SIGKILL when its parent dies, whatever happened to everybody else who could have ended it.
Only the process itself can ask for that, and a fork of an agent with threads must not run Python code, so the agent
starts this file, which asks and becomes the program. Standard library only. Environment, descriptors and session are
handed on as they came."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # include/uapi/linux/prctl.h; the kernel forgets it when a set-user-id program is executed


def tie_to(parent: int) -> None:
    """Have the kernel kill this process when its parent dies. Leaves at once if `parent` is not its parent any more."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(128 + signal.SIGKILL)


def main() -> None:
    parent, *command = sys.argv[1:]
    tie_to(int(parent))
    with open("/proc/self/environ", "rb") as file:  # os.environ has what this interpreter has set, too
        entries = [entry.partition(b"=") for entry in file.read().split(b"\0") if entry]
    for ignored in (signal.SIGPIPE, signal.SIGXFSZ):  # by this interpreter, and what is ignored stays so
        signal.signal(ignored, signal.SIG_DFL)
    try:
        os.execvpe(command[0], command, {name: value for name, _, value in entries})
    except OSError as error:
        sys.exit(f"{command[0]} cannot be started: {error}")


if __name__ == "__main__":
    main()
