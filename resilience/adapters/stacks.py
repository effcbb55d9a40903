"""Where does a process hang?  The stacks of all its threads, taken from outside.

`arm` in the rank registers faulthandler on a real-time signal: its handler needs no GIL, so it answers
also for a rank that holds it in C. A stopped process answers nothing; py-spy, where it is installed and
allowed, reads its memory instead. Where neither works the result says why."""

from __future__ import annotations

import faulthandler
import json
import os
import re
import shutil
import signal
import subprocess
import time
from typing import Literal

import msgspec

from resilience.adapters import processes
from resilience.core.attribution import Frame, ThreadStack

DUMP_SIGNAL = signal.SIGRTMIN + 10
DUMP_LIMIT = 0.5  # seconds for faulthandler to answer; it needs milliseconds
PY_SPY_LIMIT = 2.0  # seconds for py-spy, which starts as a process of its own
_POLL = 0.0005
_FATAL = {
    "Segmentation fault": "SIGSEGV",
    "Floating-point exception": "SIGFPE",  # spelt by version of Python
    "Floating point exception": "SIGFPE",
    "Bus error": "SIGBUS",
    "Illegal instruction": "SIGILL",
    "Aborted": "SIGABRT",
}
_FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')


class Stacks(msgspec.Struct, frozen=True):
    """The stacks of a process, innermost frame last, or the reason why there are none."""

    method: Literal["faulthandler", "py-spy", "none"]
    threads: tuple[ThreadStack, ...] = ()
    reason: str = ""


NONE = Stacks("none", reason="not taken")


class Dump:
    """The file a rank's faulthandler writes to, shared with its monitor."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def request(self, process: processes.Process) -> tuple[ThreadStack, ...]:
        """Ask for a dump and return it; () if it does not come within DUMP_LIMIT."""
        start = os.fstat(self.fd).st_size
        if not process.send(DUMP_SIGNAL):
            return ()
        deadline = time.monotonic() + DUMP_LIMIT
        size = start
        while time.monotonic() < deadline:
            time.sleep(_POLL)
            now = os.fstat(self.fd).st_size
            if now == size and now > start:
                break  # it has stopped growing
            size = now
        return parse(os.pread(self.fd, 1 << 20, start).decode(errors="replace"))

    def fatal_signal(self) -> str | None:
        """Return the signal of which the process left word while it crashed, None without one."""
        found = re.findall(r"(?m)^Fatal Python error: (.+)$", self._text())
        return _FATAL.get(found[-1]) if found else None

    def last_words(self) -> tuple[ThreadStack, ...]:
        """Return the stacks that the process left while it crashed, () if it did not."""
        return parse(self._text().rpartition("Fatal Python error: ")[2]) if self.fatal_signal() else ()

    def _text(self) -> str:
        return os.pread(self.fd, 1 << 20, 0).decode(errors="replace")


def arm() -> Dump:
    """Make this process answer to DUMP_SIGNAL, and leave its stacks when it crashes, unless the user has
    faulthandler do that already. Main thread, once a process."""
    fd = os.memfd_create("resilience-stacks", 0)
    # Appended, so that each dump follows the one before, whoever else holds the descriptor.
    appending = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_APPEND)
    os.close(fd)
    faulthandler.register(DUMP_SIGNAL, file=appending, all_threads=True, chain=False)
    if not faulthandler.is_enabled():
        faulthandler.enable(file=appending, all_threads=True)
    return Dump(appending)


def capture(process: processes.Process, dump: Dump, thorough: bool) -> Stacks:
    """Return the stacks of a process. thorough: start py-spy too, if faulthandler cannot answer; that may
    take PY_SPY_LIMIT, and is for a process that is about to be ended anyway."""
    state = processes.state(process.pid)
    if state is None or state.state in "ZX":
        return Stacks("none", reason="the process has ended")
    if state.state in "Tt":
        why = "the process is stopped and answers no signal"
    elif threads := dump.request(process):
        return Stacks("faulthandler", threads)
    else:
        why = f"faulthandler did not answer within {DUMP_LIMIT:g} s"
    return _py_spy(process.pid, why) if thorough else Stacks("none", reason=why)


def parse(text: str) -> tuple[ThreadStack, ...]:
    """Read faulthandler's dump. Its frames stand innermost first."""
    threads: list[ThreadStack] = []
    for block in re.split(r"(?m)^(?=(?:Current thread|Thread) )", text):
        header, _, body = block.partition("\n")
        if not header.startswith(("Current thread", "Thread")):
            continue
        frames = [Frame(m[1], int(m[2]), m[3]) for m in map(_FRAME.match, body.splitlines()) if m]
        name = re.sub(r" ?\(most recent call first\):?", "", header)
        threads.append(ThreadStack(name, tuple(reversed(frames))))
    return tuple(threads)


def _py_spy(pid: int, why: str) -> Stacks:
    program = shutil.which("py-spy")
    if program is None:
        return Stacks("none", reason=f"{why}; py-spy is not installed")
    try:
        result = subprocess.run(
            [program, "dump", "--json", "--nonblocking", "--pid", str(pid)],
            capture_output=True,
            timeout=PY_SPY_LIMIT,
            check=True,
        )
        threads = tuple(
            ThreadStack(
                f"{thread.get('thread_name') or 'Thread'} {thread.get('thread_id', '')}".strip(),
                tuple(Frame(frame["filename"], frame["line"], frame["name"]) for frame in reversed(thread["frames"])),
            )
            for thread in json.loads(result.stdout)
        )
    except (OSError, subprocess.SubprocessError, ValueError, KeyError, TypeError) as error:
        return Stacks("none", reason=f"{why}; py-spy failed: {type(error).__name__}")
    return Stacks("py-spy", threads, why)
