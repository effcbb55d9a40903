"""Is this node fit for the next cycle, and still while workers run?  Checks that run before each cycle.

They run all at the same time; a patrol repeats the one that costs a job nothing while workers run.

A check answers what is wrong, within a limit of its own; one that raises or does not answer is a refusal
as well, so that a hung file system or driver cannot hold the job. What cannot be ended is left behind in
a daemon thread: a node that is refused leaves anyway. Ours are the disk of the run folder, the job's store,
NVIDIA devices where there are any, and the user's command; any object with the methods of `Check` is one.
That the node leaves, and says why, is `node`'s: one `NodeUnhealthy` for each refusal."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from resilience.adapters.health import nvml
from resilience.core import encoding
from resilience.core.masking import masked_text

LOOK = 0.02  # seconds between looks whether somebody wants the agent to stop
DISK_LIMIT, STORE_LIMIT, DEVICE_LIMIT, COMMAND_LIMIT = 10.0, 30.0, 30.0, 60.0  # seconds
DISK_WARNING_LIMIT = 1.0  # seconds; a cycle does not wait longer for a mere warning
LAST = 500  # characters of a command's output that are told
# Ends with the agent's thread that waits for it, whatever ends that.
_SHELL = (
    "import ctypes, os, sys\n"
    "ctypes.CDLL(None).prctl(1, 9)\n"
    "os.getppid() == int(sys.argv[1]) and os.execv('/bin/sh', ['sh', '-c', sys.argv[2]])\n"
)


class Refusal(msgspec.Struct, frozen=True):
    """Why a node is not fit. is_warning: it may take part all the same."""

    check: str
    detail: str
    is_warning: bool = False


class Check(Protocol):
    """Looks at one thing. name: for records and people. limit: seconds. is_warning: what it finds excludes no node."""

    @property
    def name(self) -> str: ...

    @property
    def is_warning(self) -> bool: ...

    @property
    def limit(self) -> float: ...

    def look(self) -> str:
        """Return what is wrong, empty if nothing is. In a thread of its own; raising is a refusal."""

    def give_up(self) -> None:
        """Nobody waits for the answer any more: end what can be ended. In the main thread, must not wait."""


class Gate:
    """The checks of one node. Main thread only."""

    def __init__(self, checks: Sequence[Check]) -> None:
        self._checks = tuple(checks)

    def refusals(self, is_interrupted: Callable[[], bool] = lambda: False) -> list[Refusal]:
        """Return why this node is not fit, empty if it is. Takes as long as the slowest check, or its limit.

        is_interrupted: True ends the wait; checks that have not answered by then refuse nothing."""
        began = time.monotonic()
        looks = [_Look(check) for check in self._checks]
        refused = [look.await_answer(began + look.check.limit, is_interrupted) for look in looks]
        return [refusal for refusal in refused if refusal is not None]


class Patrol:
    """One check, repeated while workers run. Main thread only; never waits."""

    def __init__(self, check: Check, interval: float) -> None:
        """interval: seconds between the begins of two looks."""
        self._check, self._interval = check, interval
        self._look: _Look | None = None
        self._began = -math.inf

    def refusal(self, now: float) -> Refusal | None:
        """Return what the look that is under way has found, if it has, or is late; begin the next when it is time.

        now: seconds on a monotonic clock. A look that nothing can end is left behind, and not repeated."""
        if self._look is None:
            if now - self._began >= self._interval:
                self._look, self._began = _Look(self._check), now
            return None
        found = self._look.answer()
        if found is None:
            if now - self._began < self._check.limit:
                return None
            self._check.give_up()
            self._began = math.inf
            found = late(self._check)
        self._look = None
        return found if found.detail else None


def late(check: Check) -> Refusal:
    """The refusal of a check that does not answer."""
    return Refusal(check.name, f"no answer within {check.limit:g} s", check.is_warning)


class _Look:
    """A check at work."""

    def __init__(self, check: Check) -> None:
        self.check = check
        self._answer = ""
        self._has_answered = threading.Event()
        threading.Thread(target=self._work, name=f"resilience-gate-{check.name}", daemon=True).start()

    def await_answer(self, deadline: float, is_interrupted: Callable[[], bool]) -> Refusal | None:
        while not self._has_answered.wait(max(0.0, min(LOOK, deadline - time.monotonic()))):
            is_late = time.monotonic() >= deadline
            if is_late or is_interrupted():
                self.check.give_up()
                return late(self.check) if is_late else None
        return self.answer() if self._answer else None

    def answer(self) -> Refusal | None:
        """Return what was answered, with an empty detail if nothing is wrong; None if nothing yet."""
        is_there = self._has_answered.is_set()
        return Refusal(self.check.name, self._answer, self.check.is_warning) if is_there else None

    def _work(self) -> None:
        try:
            self._answer = self.check.look()
        except Exception as error:  # a plugin's edge: whatever is wrong with a check, the node is not known to be fit
            self._answer = f"{type(error).__name__}: {error}"
        self._has_answered.set()


class _Simple:
    """A check that nothing can end."""

    is_warning = False

    def give_up(self) -> None:
        pass


class Disk(_Simple):
    """The folder's file system can be written to, and has this much space (MiB) and a file left."""

    name = "disk"

    def __init__(self, folder: Path, least_mb: int, is_warning: bool = False) -> None:
        self._folder, self._least, self.is_warning = folder, least_mb, is_warning
        self.limit = DISK_WARNING_LIMIT if is_warning else DISK_LIMIT

    def look(self) -> str:
        seen = os.statvfs(self._folder)
        free = seen.f_bavail * seen.f_frsize >> 20
        if seen.f_flag & os.ST_RDONLY:
            return f"{self._folder} is on a file system that can only be read"
        if free < self._least:
            return f"{self._folder} has {free} MiB free, expected {self._least} (--min-free-disk-mb)"
        if seen.f_files and not seen.f_favail:
            return f"{self._folder} is on a file system that can take no more files"
        return ""


class Store(_Simple):
    """The job's store answers. ask: one question to it, from a thread that is not the main one."""

    name = "store"

    def __init__(self, ask: Callable[[], object], limit: float = STORE_LIMIT) -> None:
        self._ask, self.limit = ask, limit

    def look(self) -> str:
        self._ask()
        return ""


class Devices(_Simple):
    """NVIDIA devices answer their driver. A node without any is fit."""

    name = "gpu"

    def __init__(self, limit: float = DEVICE_LIMIT) -> None:
        self.limit = limit

    def look(self) -> str:
        library = nvml.find()
        return "" if library is None else "; ".join(nvml.faults(library))


class Command:
    """The user's shell command exits with 0. Its process group is killed when it is late; what it starts and
    leaves running otherwise is its own matter."""

    name = "command"
    is_warning = False

    def __init__(self, text: str, limit: float = COMMAND_LIMIT) -> None:
        self._text, self.limit = text, limit
        self._process: subprocess.Popen[bytes] | None = None
        self._is_given_up = False

    def look(self) -> str:
        self._is_given_up = False
        # A file, for a pipe would be held open by whatever the command leaves running. In memory: a disk may be full.
        with open(os.memfd_create("resilience-health-check"), "w+b") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-S", "-c", _SHELL, str(os.getpid()), self._text],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            if self._is_given_up:  # in between
                self._kill()
            code = self._process.wait()
            if code == 0:
                return ""
            output.seek(max(0, output.seek(0, os.SEEK_END) - LAST))
            said = " ".join(encoding.text(output.read()).split())
        how = f"exited with {code}" if code > 0 else f"was ended by signal {-code}"
        return f"{masked_text(self._text)!r} {how} (--health-check)" + (f": {said}" if said else "")

    def give_up(self) -> None:
        self._is_given_up = True
        self._kill()

    def _kill(self) -> None:
        process = self._process
        if process is not None and process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)


def checks(
    folder: Path,
    least_mb: int,
    ask_store: Callable[[], object],
    command: str | None,
    excludes_on_full_disk: bool = False,
) -> list[Check]:
    """Return the checks of a node. folder: of the run; least_mb: MiB, 0 for no check of the disk."""
    made: list[Check] = [Store(ask_store), Devices()]
    if least_mb:
        made.insert(0, Disk(folder, least_mb, is_warning=not excludes_on_full_disk))
    if command:
        made.append(Command(command))
    return made
