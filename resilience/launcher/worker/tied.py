"""Starts a program that ends with its parent: `python -I -S tied.py PARENT FILES PIPE PROGRAM ARGUMENTS`.

The kernel sends the program SIGKILL when its parent dies, even if every other process that could end it is gone. Only
the process itself can request that, and a fork of an agent with threads must not run Python code. So the agent starts
this file, which makes the request and then executes the program. Standard library only. FILES is the
program's soft limit of open files: the agent has raised its own. PIPE is a descriptor: it gets the error's number as
one byte if the kernel refuses the program, else it is closed. Everything else is inherited unchanged."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import sys

PR_SET_PDEATHSIG = 1  # include/uapi/linux/prctl.h; the kernel forgets it when a set-user-id program is executed


def tie_to(parent: int) -> None:
    """Let the kernel kill this process when its parent dies. Exit at once if `parent` is no longer its parent."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(128 + signal.SIGKILL)


def main() -> None:
    parent, files, pipe, *command = sys.argv[1:]
    os.set_inheritable(int(pipe), False)
    tie_to(int(parent))
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (int(files), hard))
    with open("/proc/self/environ", "rb") as file:  # os.environ also has what this interpreter set
        entries = [entry.partition(b"=") for entry in file.read().split(b"\0") if entry]
    for ignored in (signal.SIGPIPE, signal.SIGXFSZ):  # ignored by this interpreter, and exec would keep that
        signal.signal(ignored, signal.SIG_DFL)
    try:
        os.execvpe(command[0], command, {name: value for name, _, value in entries})
    except OSError as error:
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)
        with contextlib.suppress(OSError):  # the agent does not wait any more
            os.write(int(pipe), bytes([error.errno or 0]))
        sys.exit(f"{command[0]} cannot be started: {error}")


if __name__ == "__main__":
    main()
