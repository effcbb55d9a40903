"""Where does a process hang?  The stacks of all its threads, taken from outside.

`arm` in the rank registers faulthandler on a real-time signal: its handler needs no GIL, so it answers
also for a rank that holds it in C. A stopped process answers nothing; py-spy, where it is installed and
allowed, reads its memory instead. Where neither works the result says why.

The dump goes to memory that the rank's monitor shares, and so survives the rank. Its first line names the
main thread, which faulthandler writes last and does not mark, and has the marks by which to see who holds the
interpreter's lock (`adapters.interpreter`). What a process that the rank forks writes
goes nowhere: what happens to a DataLoader's worker did not happen to the rank."""

from __future__ import annotations

import faulthandler
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from typing import Literal

import msgspec

from resilience.adapters import interpreter, processes
from resilience.core import encoding
from resilience.core.attribution import Frame, ThreadStack

DUMP_SIGNAL = signal.SIGRTMIN + 10
DUMP_LIMIT = 0.5  # seconds for faulthandler to answer; it needs milliseconds
PY_SPY_LIMIT = 2.0  # seconds for py-spy, which starts as a process of its own
_POLL = 0.0005
_QUIET = 0.005  # seconds without a further word after the main thread's stack: the dump is complete
_MOST = 1 << 20  # bytes in the file, beyond which it is begun anew
_FATAL = {
    "Segmentation fault": "SIGSEGV",
    "Floating-point exception": "SIGFPE",  # spelt by version of Python
    "Floating point exception": "SIGFPE",
    "Bus error": "SIGBUS",
    "Illegal instruction": "SIGILL",
    "Aborted": "SIGABRT",
}
_FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')
_HEADER = re.compile(r"(?m)^(?:Current thread|Thread) (0x[0-9a-f]+)(.*?) \(most recent call first\):$")
_MAIN = "main thread "
_FIRST_LINE = 1024  # bytes at most


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
        if start > _MOST:
            start = len(self._first_line()) + 1
            os.ftruncate(self.fd, start)
        if not process.send(DUMP_SIGNAL):
            return ()
        deadline = time.monotonic() + DUMP_LIMIT
        quiet_since, size = time.monotonic(), start
        while (now := time.monotonic()) < deadline:
            time.sleep(_POLL)
            grown = os.fstat(self.fd).st_size
            if grown > size:
                quiet_since, size = now, grown
            elif size > start and now - quiet_since >= _QUIET and self._is_complete(start):
                break
        return parse(self._text(start), self._main())

    def fatal_signal(self) -> str | None:
        """Return the signal of which the process left word while it crashed, None without one."""
        found = re.findall(r"(?m)^Fatal Python error: (.+)$", self._text())
        return _FATAL.get(found[-1]) if found else None

    def last_words(self) -> tuple[ThreadStack, ...]:
        """Return the stacks that the process left while it crashed, () if it did not."""
        text = self._text().rpartition("Fatal Python error: ")[2]
        return parse(text, self._main()) if self.fatal_signal() else ()

    def _is_complete(self, start: int) -> bool:
        text = self._text(start)
        # Of more than a hundred threads, faulthandler leaves out the oldest and says so.
        return text.endswith("\n...\n") or (text.endswith("\n") and self._main() in text)

    def holder(self, process: processes.Process) -> interpreter.Holder | None:
        """Return who holds the interpreter's lock of the process, None if that cannot be seen."""
        marks = self._first_line().removeprefix(_MAIN).partition(" ")[2]
        return interpreter.holder(process.pid, interpreter.from_text(marks))

    def _main(self) -> str:
        return self._first_line().removeprefix(_MAIN).partition(" ")[0]

    def _first_line(self) -> str:
        return encoding.text(os.pread(self.fd, _FIRST_LINE, 0)).partition("\n")[0]

    def _text(self, start: int = 0) -> str:
        return encoding.text(os.pread(self.fd, os.fstat(self.fd).st_size, start))


_armed: Dump | None = None  # faulthandler has one file a signal, so a process has one dump


def arm() -> Dump:
    """Make this process answer to DUMP_SIGNAL, and leave its stacks when it crashes, unless the user has
    faulthandler do that already. Main thread; once a process, again returns the same."""
    global _armed
    if _armed is not None:
        return _armed
    fd = os.memfd_create("resilience-stacks")
    marks = interpreter.to_text(interpreter.marks())
    os.write(fd, f"{_MAIN}0x{threading.main_thread().ident:016x} {marks}\n".encode())
    # Appended, so that each dump follows the one before, whoever else holds the descriptor.
    appending = os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_APPEND)
    faulthandler.register(DUMP_SIGNAL, file=appending, all_threads=True, chain=False)
    if not faulthandler.is_enabled():
        faulthandler.enable(file=appending, all_threads=True)
    os.register_at_fork(after_in_child=lambda: _disarm(appending))
    _armed = Dump(fd)
    return _armed


def _disarm(appending: int) -> None:
    """In a forked child: let what faulthandler writes go nowhere."""
    global _armed
    _armed = None
    try:
        null = os.open(os.devnull, os.O_WRONLY)
        # Not stderr: a monitor would keep its rank's output open beyond the rank's end.
        os.dup2(null, appending, inheritable=False)
        os.close(null)
    except OSError:  # no descriptor is left: the child is not ours to fail
        return


def capture(process: processes.Process, dump: Dump | None, thorough: bool) -> Stacks:
    """Return the stacks of a process. dump: None if it has not armed itself, and would die of the signal.

    thorough: start py-spy too, if faulthandler cannot answer; that may take PY_SPY_LIMIT, and is for a
    process that is about to be ended anyway."""
    state = process.state()
    if state is None or state.state in "ZX":
        return Stacks("none", reason="the process has ended")
    if state.state in "Tt":
        why = "the process is stopped and answers no signal"
    elif dump is None:
        why = "the process has not armed faulthandler"
    elif threads := dump.request(process):
        return Stacks("faulthandler", threads)
    else:
        why = f"faulthandler did not answer within {DUMP_LIMIT:g} s (process state {state.state})"
    return _py_spy(process.pid, why) if thorough else Stacks("none", reason=why)


def parse(text: str, main: str = "") -> tuple[ThreadStack, ...]:
    """Read faulthandler's dump, whose frames stand innermost first. main: the main thread as the dump
    calls it, "0x…"; it comes first."""
    first: list[ThreadStack] = []
    threads: list[ThreadStack] = []
    pieces = _HEADER.split(text)[1:]  # number, name (from Python 3.14 on), frames; and again
    for number, name, body in zip(pieces[::3], pieces[1::3], pieces[2::3], strict=True):
        body = body.partition("\n\n")[0]  # a blank line ends a thread
        frames = [Frame(m[1], int(m[2]), m[3]) for m in map(_FRAME.fullmatch, body.splitlines()) if m]
        kind = "MainThread" if number == main else "Thread"
        (first if number == main else threads).append(ThreadStack(f"{kind} {number}{name}", tuple(frames[::-1])))
    return (*first, *threads)


def _py_spy(pid: int, why: str) -> Stacks:
    # A program beside the interpreter is meant, also where the environment's folder is not on the path.
    program = shutil.which("py-spy", path=os.path.dirname(sys.executable)) or shutil.which("py-spy")
    if program is None:
        return Stacks("none", reason=f"{why}; py-spy is not installed")
    try:
        result = subprocess.run(
            [program, "dump", "--json", "--nonblocking", "--pid", str(pid)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=PY_SPY_LIMIT,
        )
        if result.returncode:
            words = encoding.text(result.stderr).strip().splitlines()
            return Stacks("none", reason=f"{why}; py-spy failed: {' '.join(words)[:200]}")
        threads = tuple(
            ThreadStack(
                f"{thread.get('thread_name') or 'Thread'} {thread.get('thread_id', '')}".strip(),
                tuple(Frame(frame["filename"], frame["line"], frame["name"]) for frame in reversed(thread["frames"])),
            )
            for thread in encoding.from_json(result.stdout)
        )
    except (OSError, subprocess.SubprocessError, ValueError, KeyError, TypeError) as error:
        return Stacks("none", reason=f"{why}; py-spy failed: {type(error).__name__}")
    return Stacks("py-spy", threads, why)
