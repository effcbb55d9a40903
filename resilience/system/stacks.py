"""Where does a process hang?  The stacks of all its threads, taken without harm to a healthy process.

1. A thread of the process is asked. It reads the stacks under the GIL, so no thread can end meanwhile.
2. If it does not answer, faulthandler is asked by a real-time signal. Its handler needs no GIL and reads the list of
   threads without any lock. A thread that ends meanwhile crashes the process (up to 6 in 100 dumps,
   docs/decisions/a-rank-shows-its-own-stacks). So faulthandler is asked only if all threads of the process sleep, which
   means that the GIL is held, or if the process is about to be killed anyway.
3. A stopped process answers neither. py-spy, if it is installed and allowed, reads its memory from outside. That takes
   a second, and is for a process that is about to be killed.

If none of these works, the result says why. The dump goes to memory that the rank's monitor shares, so it survives the
rank. Its first line names the main thread, which faulthandler writes last and does not mark. The dumps of a process
that the rank forks are discarded: an event in a DataLoader's worker did not happen in the rank."""

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

from resilience.facts import encoding
from resilience.facts.interruptions import Frame, ThreadStack
from resilience.system import processes
from resilience.system.background import asked
from resilience.system.frames import current_frames, is_wrapper

DUMP_SIGNAL = signal.SIGRTMIN + 10
THREAD = "resilience-stacks"  # the answering thread in a launcher's worker; it holds no lock that a fork could inherit
ASK_LIMIT = 0.3  # seconds for a thread of the process to answer; it needs a millisecond
_LOOK = 0.004  # seconds between two checks for the answer
_ALL_ASLEEP = 6  # checks that find every thread asleep: then the asked thread waits for the GIL
_LEAST_CHECKS = 24  # before an answer is given up: on a busy host neither process gets many turns within ASK_LIMIT
DUMP_LIMIT = 0.5  # seconds for faulthandler to answer; it needs milliseconds
_LEAST_POLLS = 200  # before its answer is given up: the host may stand still for DUMP_LIMIT
PY_SPY_LIMIT = 2.0  # seconds to find py-spy and to get its answer; it starts as a process of its own
_POLL = 0.0005
_QUIET = 0.005  # seconds without further output after the main thread's stack: the dump is complete
_MOST = 1 << 20  # bytes in the file, beyond which it is truncated
_FATAL = {
    "Segmentation fault": "SIGSEGV",
    "Floating-point exception": "SIGFPE",  # spelt by version of Python
    "Floating point exception": "SIGFPE",
    "Bus error": "SIGBUS",
    "Illegal instruction": "SIGILL",
    "Aborted": "SIGABRT",
}
_FRAME = re.compile(r'  File "(.*)", line (\d{1,9}) in (.*)')
_HEADER = re.compile(r"(?m)^(?:Current thread|Thread) (0x[0-9a-f]+)(.*?) \(most recent call first\):$")
_MAIN = "main thread "
_END = "\nend of "  # and the question's number: the last line of an answer
_FIRST_LINE = 100  # bytes at most
_MOST_FRAMES = 100  # per thread, as in faulthandler

Ask = Callable[[int], bool]
"""Ask a thread of the process for its stacks, by a number; False if there is none to ask."""


class Stacks(msgspec.Struct, frozen=True):
    """The stacks of a process, innermost frame last. reason: why there are none, or why a safer method failed.
    is_gil_held: all threads slept, and the asked thread did not get the GIL."""

    method: Literal["own-thread", "faulthandler", "py-spy", "none"]
    threads: tuple[ThreadStack, ...] = ()
    reason: str = ""
    is_gil_held: bool = False


NONE = Stacks("none", reason="not taken")
ENDED = Stacks("none", reason="the process has ended")


class Dump:
    """The file a rank's faulthandler writes to, shared with its monitor."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def ask(self, pid: int, ask: Ask) -> Stacks:
        """Ask a thread of the process for its stacks. Return them, or the reason if none come within ASK_LIMIT and
        _LEAST_CHECKS."""
        start = self._begin()
        number = time.monotonic_ns()
        if not ask(number):
            return Stacks("none", reason="no thread of the process can be asked")
        deadline = time.monotonic() + ASK_LIMIT
        checks = asleep = 0
        while True:
            text = self._text(start)
            if text.endswith(_end(number)):
                # An answer to an earlier question may have come late; it stands before this one.
                own_answer = text.removesuffix(_end(number)).rpartition(_END)[2]
                return Stacks("own-thread", parse(own_answer, self._main()))
            if asleep >= _ALL_ASLEEP:
                return Stacks("none", reason="the asked thread waits for the GIL", is_gil_held=True)
            if checks >= _LEAST_CHECKS and time.monotonic() >= deadline:
                return Stacks("none", reason=f"the asked thread did not answer within {ASK_LIMIT:g} s")
            time.sleep(_LOOK)
            checks += 1
            asleep += processes.is_asleep(pid)

    def request(self, process: processes.Process) -> tuple[ThreadStack, ...]:
        """Ask faulthandler for a dump and return it; () if it does not come within DUMP_LIMIT and _LEAST_POLLS."""
        start = self._begin()
        if not process.send(DUMP_SIGNAL):
            return ()
        deadline = time.monotonic() + DUMP_LIMIT
        quiet_since, size, polls = time.monotonic(), start, 0
        while (now := time.monotonic()) < deadline or polls < _LEAST_POLLS:
            time.sleep(_POLL)
            polls += 1
            grown = os.fstat(self.fd).st_size
            if grown > size:
                quiet_since, size = now, grown
            elif size > start and now - quiet_since >= _QUIET and self._is_complete(start):
                break
        return parse(self._text(start), self._main())

    def fatal_signal(self) -> str | None:
        """Return the fatal signal that the process recorded while it crashed, None without one."""
        reports = re.findall(r"(?m)^Fatal Python error: (.+)$", self._text())
        return _FATAL.get(reports[-1]) if reports else None

    def last_words(self) -> tuple[ThreadStack, ...]:
        """Return the stacks that the process recorded while it crashed, () if it did not crash."""
        text = self._text().rpartition("Fatal Python error: ")[2]
        return parse(text, self._main()) if self.fatal_signal() else ()

    def _is_complete(self, start: int) -> bool:
        text = self._text(start)
        # With more than a hundred threads, faulthandler leaves out the oldest and says so.
        return text.endswith("\n...\n") or (text.endswith("\n") and self._main() in text)

    def _begin(self) -> int:
        """Return the start of the next dump; truncate the file if it is too long."""
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
    """The result of `arm`. appending: the descriptor that faulthandler writes to. holders: calls without `disarm`."""

    dump: Dump
    appending: int
    is_enabled_here: bool
    holders: int = 1


_armed: _Armed | None = None  # faulthandler has one file per signal, so a process has one dump


def arm() -> Dump:
    """Make this process answer to DUMP_SIGNAL, and record its stacks when it crashes, unless the user's faulthandler
    already does that. Main thread. A second call returns the same dump; each call needs its own `disarm`.
    Raises: OSError."""
    global _armed
    if _armed is not None:
        _armed.holders += 1
        return _armed.dump
    fd = os.memfd_create("resilience-stacks")
    try:
        os.write(fd, f"{_MAIN}0x{threading.main_thread().ident:016x}\n".encode())
        # Append, so that each dump follows the previous one, whatever process holds the descriptor.
        appending = os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_APPEND)
    except BaseException:
        os.close(fd)
        raise
    faulthandler.register(DUMP_SIGNAL, file=appending, all_threads=True, chain=False)
    is_enabled_here = not faulthandler.is_enabled()
    if is_enabled_here:
        faulthandler.enable(file=appending, all_threads=True)
    _armed = _Armed(Dump(fd), appending, is_enabled_here)
    return _armed.dump


def answer(number: int) -> None:
    """Write the stacks of all other threads of this process into its dump. Runs in the asked thread."""
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
    os.write(armed.appending, ("\n".join(lines) + _end(number)).encode())  # in one write


def _end(number: int) -> str:
    return f"{_END}{number}\n"


def _plain(text: str) -> str:
    """Return text as one line."""
    return " ".join(encoding.text(text).splitlines())


def disarm() -> None:
    """Undo one `arm`; the last one closes the dump. From then on DUMP_SIGNAL ends this process, so it must not be sent
    any more. Main thread."""
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
    """Discard faulthandler's output in a forked child."""
    global _armed
    if _armed is None:
        return
    appending, _armed = _armed.appending, None
    try:
        null = os.open(os.devnull, os.O_WRONLY)
        # Not stderr: a monitor would keep its rank's output open beyond the rank's end.
        os.dup2(null, appending, inheritable=False)
        os.close(null)
    except OSError:  # no descriptor is left; that must not fail the child
        return


os.register_at_fork(after_in_child=_silence)


def capture(process: processes.Process, dump: Dump | None, thorough: bool, ask: Ask) -> Stacks:
    """Return the stacks of a process. dump: None if the process has not armed itself; the signal would end it.

    thorough: the process is about to be ended anyway. So faulthandler may read data that other threads change, and
    py-spy may be started, which may take PY_SPY_LIMIT."""
    state = process.state()
    if _is_ending(process, state):
        return ENDED
    is_gil_held = False
    if state is not None and state.state in "Tt":
        reason = "the process is stopped and answers no signal"
    elif dump is None:
        reason = "the process has not armed faulthandler"
    else:
        own_stacks = dump.ask(process.pid, ask)
        if own_stacks.threads:
            return own_stacks
        state = process.state()
        if _is_ending(process, state):  # it was asleep for that reason
            return ENDED
        reason, is_gil_held = own_stacks.reason, own_stacks.is_gil_held
        if thorough or is_gil_held:
            if threads := dump.request(process):
                return Stacks("faulthandler", threads, reason, is_gil_held)
            shown = "unknown" if state is None else state.state
            reason += f"; faulthandler did not answer within {DUMP_LIMIT:g} s (process state {shown})"
    result = _py_spy(process.pid, reason) if thorough else Stacks("none", reason=reason)
    return msgspec.structs.replace(result, is_gil_held=is_gil_held)


def _is_ending(process: processes.Process, state: processes.ProcessState | None) -> bool:
    """Return True if the main thread of a process has begun to exit: it holds no GIL and answers nobody. state: None if
    it could not be read."""
    return process.has_ended() if state is None else state.state in "ZX" or state.wait_status is not None


def parse(text: str, main: str = "") -> tuple[ThreadStack, ...]:
    """Parse faulthandler's dump, which has the innermost frame first. main: the main thread's id in the dump, "0x…"; it
    comes first."""
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


def _py_spy(pid: int, reason: str) -> Stacks:
    """Ask py-spy, from another thread: a file server that does not answer holds up the search for the program and its
    start. Often that server is what the process hangs in."""
    try:
        return asked(lambda: _ask_py_spy(pid, reason), PY_SPY_LIMIT)
    except (TimeoutError, subprocess.TimeoutExpired):
        return Stacks("none", reason=f"{reason}; py-spy did not answer within {PY_SPY_LIMIT:g} s")


def _ask_py_spy(pid: int, reason: str) -> Stacks:
    """Raises: subprocess.TimeoutExpired."""
    # Prefer the program beside the interpreter, whose folder may not be on the path.
    program = shutil.which("py-spy", path=os.path.dirname(sys.executable)) or shutil.which("py-spy")
    if program is None:
        return Stacks("none", reason=f"{reason}; py-spy is not installed")
    try:
        result = subprocess.run(
            [program, "dump", "--json", "--nonblocking", "--pid", str(pid)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=PY_SPY_LIMIT,
        )
        if result.returncode:
            error_lines = encoding.text(result.stderr).strip().splitlines()
            return Stacks("none", reason=f"{reason}; py-spy failed: {' '.join(error_lines)[:200]}")
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
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return Stacks("none", reason=f"{reason}; py-spy failed: {type(error).__name__}")
    return Stacks("py-spy", tuple(sorted(threads, key=lambda stack: not stack.thread.startswith("MainThread"))), reason)
