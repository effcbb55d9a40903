"""Where does a process hang?  The stacks of all its threads, taken so that no healthy process is harmed.

1. A thread of the process is asked. It reads the stacks under the GIL, so no thread can end meanwhile.
2. Where it does not answer, faulthandler is asked by a real-time signal. Its handler needs no GIL and reads the
   list of threads without any lock: a thread that ends meanwhile crashes the process (up to 6 in 100 dumps,
   docs/decisions/a-rank-shows-its-own-stacks). So it is asked only if all threads of the process sleep, which means
   that the GIL is held, or if the process is about to be killed anyway.
3. A stopped process answers neither. py-spy, where it is installed and allowed, reads its memory from outside;
   that takes a second, and is for a process that is about to be killed.

Where none of these works the result says why. The dump goes to memory that the rank's monitor shares, and so
survives the rank. Its first line names the main thread, which faulthandler writes last and does not mark. What a
process that the rank forks writes goes nowhere: what happens to a DataLoader's worker did not happen to the
rank."""

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
from collections.abc import Callable
from types import FrameType
from typing import Literal

import msgspec

from resilience.adapters import processes
from resilience.adapters.frames import current_frames, is_wrapper
from resilience.core import encoding
from resilience.core.attribution import Frame, ThreadStack

DUMP_SIGNAL = signal.SIGRTMIN + 10
THREAD = "resilience-stacks"  # that answers for a worker of the launcher; it holds no lock that a fork could inherit
ASK_LIMIT = 0.3  # seconds for a thread of the process to answer; it needs a millisecond
_LOOK = 0.004  # seconds between two looks at what is asked
_ALL_ASLEEP = 6  # looks that find every thread asleep: the thread that was asked waits for the GIL
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
_FIRST_LINE = 100  # bytes at most
_MOST_FRAMES = 100  # of a thread, as faulthandler has it

Ask = Callable[[int], bool]
"""Ask a thread of the process for its stacks, by a number; False if there is none to ask."""


class Stacks(msgspec.Struct, frozen=True):
    """The stacks of a process, innermost frame last. reason: why there are none, or why not by a safer method.
    is_gil_held: all threads slept, and the one that was asked did not get the GIL."""

    method: Literal["own-thread", "faulthandler", "py-spy", "none"]
    threads: tuple[ThreadStack, ...] = ()
    reason: str = ""
    is_gil_held: bool = False


NONE = Stacks("none", reason="not taken")


class Dump:
    """The file a rank's faulthandler writes to, shared with its monitor."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def ask(self, pid: int, ask: Ask) -> Stacks:
        """Ask a thread of the process and return what it says; why not if it does not within ASK_LIMIT."""
        start = self._begin()
        number = time.monotonic_ns()
        if not ask(number):
            return Stacks("none", reason="no thread of the process can be asked")
        deadline = time.monotonic() + ASK_LIMIT
        asleep = 0
        while True:
            text = self._text(start)
            if text.endswith(_end(number)):
                return Stacks("own-thread", parse(text, self._main()))
            if asleep >= _ALL_ASLEEP:
                return Stacks("none", reason="the thread that was asked waits for the GIL", is_gil_held=True)
            if time.monotonic() >= deadline:
                return Stacks("none", reason=f"the thread that was asked did not answer within {ASK_LIMIT:g} s")
            time.sleep(_LOOK)
            asleep += processes.is_asleep(pid)

    def request(self, process: processes.Process) -> tuple[ThreadStack, ...]:
        """Ask faulthandler for a dump and return it; () if it does not come within DUMP_LIMIT."""
        start = self._begin()
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

    def _begin(self) -> int:
        """Return where the next dump begins, in a file that is not too long."""
        start = os.fstat(self.fd).st_size
        if start > _MOST:
            start = len(self._first_line()) + 1
            os.ftruncate(self.fd, start)
        return start

    def _main(self) -> str:
        return self._first_line().removeprefix(_MAIN)

    def _first_line(self) -> str:
        return encoding.text(os.pread(self.fd, _FIRST_LINE, 0)).partition("\n")[0]

    def _text(self, start: int = 0) -> str:
        return encoding.text(os.pread(self.fd, os.fstat(self.fd).st_size, start))


class _Armed(msgspec.Struct):
    """What `arm` did. appending: the descriptor that faulthandler writes to. holders: who has not disarmed yet."""

    dump: Dump
    appending: int
    is_enabled_here: bool
    holders: int = 1


_armed: _Armed | None = None  # faulthandler has one file a signal, so a process has one dump


def arm() -> Dump:
    """Make this process answer to DUMP_SIGNAL, and leave its stacks when it crashes, unless the user has
    faulthandler do that already. Main thread. Called again it returns the same; each call wants its `disarm`."""
    global _armed
    if _armed is not None:
        _armed.holders += 1
        return _armed.dump
    fd = os.memfd_create("resilience-stacks")
    os.write(fd, f"{_MAIN}0x{threading.main_thread().ident:016x}\n".encode())
    # Appended, so that each dump follows the one before, whoever else holds the descriptor.
    appending = os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_APPEND)
    faulthandler.register(DUMP_SIGNAL, file=appending, all_threads=True, chain=False)
    is_enabled_here = not faulthandler.is_enabled()
    if is_enabled_here:
        faulthandler.enable(file=appending, all_threads=True)
    _armed = _Armed(Dump(fd), appending, is_enabled_here)
    return _armed.dump


def answer(number: int) -> None:
    """Write the stacks of all other threads of this process into its dump. For the thread that was asked."""
    armed = _armed
    if armed is None:
        return
    lines: list[str] = []
    for thread, innermost in current_frames().items():
        if thread == threading.get_ident():
            continue
        lines.append(f"Thread 0x{thread:016x} (most recent call first):")
        frame: FrameType | None = innermost
        count = 0
        while frame is not None and count < _MOST_FRAMES:
            code = frame.f_code
            lines.append(f'  File "{_plain(code.co_filename)}", line {frame.f_lineno or 0} in {_plain(code.co_name)}')
            frame, count = frame.f_back, count + 1
        lines.append("")
    os.write(armed.appending, ("\n".join(lines) + _end(number)).encode())  # in one piece


def _end(number: int) -> str:
    return f"\nend of {number}\n"


def _plain(text: str) -> str:
    """Return text on one line, whatever it holds."""
    return " ".join(encoding.text(text).splitlines())


def disarm() -> None:
    """Take one `arm` back; the last one closes the dump. From then on DUMP_SIGNAL ends this process, so nobody may
    send it any more. Main thread."""
    global _armed
    if _armed is not None:
        _armed.holders -= 1
        if _armed.holders == 0:
            faulthandler.unregister(DUMP_SIGNAL)
            if _armed.is_enabled_here:
                faulthandler.disable()
            os.close(_armed.appending)
            os.close(_armed.dump.fd)
            _armed = None


def _silence() -> None:
    """In a forked child: let what faulthandler writes go nowhere."""
    global _armed
    if _armed is None:
        return
    appending, _armed = _armed.appending, None
    try:
        null = os.open(os.devnull, os.O_WRONLY)
        # Not stderr: a monitor would keep its rank's output open beyond the rank's end.
        os.dup2(null, appending, inheritable=False)
        os.close(null)
    except OSError:  # no descriptor is left: the child is not ours to fail
        return


os.register_at_fork(after_in_child=_silence)


def capture(process: processes.Process, dump: Dump | None, thorough: bool, ask: Ask) -> Stacks:
    """Return the stacks of a process. dump: None if it has not armed itself, and would die of the signal.

    thorough: the process is about to be ended anyway, so faulthandler may read what others change, and then
    py-spy be started, which may take PY_SPY_LIMIT."""
    state = process.state()
    if state is None or state.state in "ZX":
        return Stacks("none", reason="the process has ended")
    is_gil_held = False
    if state.state in "Tt":
        why = "the process is stopped and answers no signal"
    elif dump is None:
        why = "the process has not armed faulthandler"
    else:
        own = dump.ask(process.pid, ask)
        if own.threads:
            return own
        why, is_gil_held = own.reason, own.is_gil_held
        if thorough or is_gil_held:
            if threads := dump.request(process):
                return Stacks("faulthandler", threads, why, is_gil_held)
            why += f"; faulthandler did not answer within {DUMP_LIMIT:g} s (process state {state.state})"
    result = _py_spy(process.pid, why) if thorough else Stacks("none", reason=why)
    return msgspec.structs.replace(result, is_gil_held=is_gil_held)


def parse(text: str, main: str = "") -> tuple[ThreadStack, ...]:
    """Read faulthandler's dump, whose frames stand innermost first. main: the main thread as the dump
    calls it, "0x…"; it comes first."""
    first: list[ThreadStack] = []
    threads: list[ThreadStack] = []
    pieces = _HEADER.split(text)[1:]  # number, name (from Python 3.14 on), frames; and again
    for number, name, body in zip(pieces[::3], pieces[1::3], pieces[2::3], strict=True):
        body = body.partition("\n\n")[0]  # a blank line ends a thread
        lines = map(_FRAME.fullmatch, body.splitlines())
        frames = [Frame(m[1], int(m[2]), m[3]) for m in lines if m and not is_wrapper(m[1])]
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
                tuple(
                    Frame(frame["filename"], frame["line"], frame["name"])
                    for frame in reversed(thread["frames"])
                    if not is_wrapper(frame["filename"])
                ),
            )
            for thread in encoding.from_json(result.stdout)
        )
    except (OSError, subprocess.SubprocessError, ValueError, KeyError, TypeError) as error:
        return Stacks("none", reason=f"{why}; py-spy failed: {type(error).__name__}")
    return Stacks("py-spy", tuple(sorted(threads, key=lambda stack: not stack.thread.startswith("MainThread"))), why)
