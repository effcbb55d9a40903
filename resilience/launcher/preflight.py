"""Is this node fit for the next cycle?  Checks that run before each cycle, and one that repeats while workers run.

All checks run at the same time. `PeriodicCheck` repeats the one that costs a running job nothing.

A check reports what is wrong, within a time limit of its own. A check that raises, does not answer or gets no thread
also counts as a failure, so a hung file system or driver cannot hold up the job. A check that cannot be stopped stays
behind in a daemon thread; the node leaves anyway. Our checks cover the disk of the run folder, the job's store, NVIDIA
devices if there are any, and the user's command; any object with the methods of `PreflightCheck` is a check.
`cycle_supervisor` makes the node leave and reports one `NodeUnhealthy` per failure."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from time import monotonic, sleep
from typing import Protocol

import msgspec

from resilience.core.elapsed import Elapsed
from resilience.errors import error_in_words
from resilience.facts import encoding
from resilience.facts.masking import masked_text
from resilience.launcher.arguments import Options
from resilience.system import descriptors
from resilience.system.health import nvml

DESCRIPTORS_PAUSE = 0.1  # seconds until a check that found no descriptor is tried again
THREADS_LIMIT = 3.0  # seconds for a thread to come free (`ulimit -u`): processes of the last cycle's workers still end
LOOK = 0.02  # seconds between polls of a request to stop
LONGEST_GAP = 0.2  # seconds that a gap between two such polls counts; in a longer one, this process was stopped
LOOKS = 10  # least number of looks within a check's limit while workers run; a longer gap counts as one of them
DISK_LIMIT, STORE_LIMIT, DEVICE_LIMIT = 10.0, 30.0, 30.0  # seconds
DISK_WARNING_LIMIT = 1.0  # seconds; a mere warning may not delay a cycle longer
LAST = 500  # characters of a command's output in the report
# The kernel kills the shell when the agent's waiting thread ends, for whatever reason.
_SHELL = (
    "import sys\n"
    "sys.path[:] = filter(None, sys.path)\n"  # the current folder may have files with names of Python's own modules
    "import ctypes, os\n"
    "ctypes.CDLL(None).prctl(1, 9)\n"
    "os.getppid() == int(sys.argv[1]) and os.execv('/bin/sh', ['sh', '-c', sys.argv[2]])\n"
)


class PreflightFailure(msgspec.Struct, frozen=True):
    """Why a node is not fit. is_warning: the node may take part anyway."""

    check: str
    detail: str
    is_warning: bool = False


class PreflightCheck(Protocol):
    """Checks one thing. name: for records and people. limit: seconds. is_warning: a failure excludes no node."""

    @property
    def name(self) -> str: ...

    @property
    def is_warning(self) -> bool: ...

    @property
    def limit(self) -> float: ...

    def look(self) -> str:
        """Return what is wrong, empty if nothing is. Runs in a thread of its own; raising counts as a failure."""

    def give_up(self) -> None:
        """Stop what can be stopped: the answer is no longer needed. Runs in the main thread and must not wait."""


class Preflight:
    """The checks of one node. Main thread only."""

    def __init__(self, checks: Sequence[PreflightCheck]) -> None:
        self._checks = tuple(checks)

    def refusals(self, is_interrupted: Callable[[], bool] = lambda: False) -> list[PreflightFailure]:
        """Return why this node is not fit, empty if it is. Takes as long as the slowest check, or its limit.

        is_interrupted: True ends the wait; a check that has not answered by then counts as passed."""
        waited = Elapsed(monotonic(), LONGEST_GAP)
        check_runs = [_CheckRun(check) for check in self._checks]
        outcomes = [check_run.await_answer(waited, is_interrupted) for check_run in check_runs]
        return [outcome for outcome in outcomes if outcome is not None]


class PeriodicCheck:
    """One check, repeated while workers run. Main thread only; never waits."""

    def __init__(self, check: PreflightCheck, interval: float) -> None:
        """interval: seconds between the starts of two runs."""
        self._check, self._interval = check, interval
        self._run: _CheckRun | None = None
        self._began = -math.inf
        self._waited = Elapsed(0.0)

    def refusal(self, now: float) -> PreflightFailure | None:
        """Return the failure that the current run has found, or that it is late; start the next run when it is due.

        now: seconds on a monotonic clock. A run is late after its limit, or later if looks are more than a tenth of
        the limit apart. A run that nothing can stop is left behind and not repeated. A run that gets no thread says
        nothing about the node: the next one starts after the interval."""
        if self._run is None:
            if now - self._began >= self._interval:
                self._began, self._waited = now, Elapsed(now, self._check.limit / LOOKS)
                check_run = _CheckRun(self._check)
                self._run = check_run if check_run.has_thread else None
            return None
        waited = self._waited.look(now)
        outcome = self._run.answer()
        if outcome is None:
            if waited < self._check.limit:
                return None
            self._check.give_up()
            self._began = math.inf
            outcome = late_failure(self._check)
        self._run = None
        return outcome if outcome.detail else None


def late_failure(check: PreflightCheck) -> PreflightFailure:
    """Return the failure of a check that does not answer in time."""
    return PreflightFailure(check.name, f"no answer within {check.limit:g} s", check.is_warning)


class _CheckRun:
    """One run of a check, in a thread. has_thread: False while this host could not start one."""

    def __init__(self, check: PreflightCheck) -> None:
        self.check = check
        self._answer = ""
        self._has_answered = threading.Event()
        self.has_thread = False
        self._began = 0.0  # seconds, since all runs began, until it got its thread
        self._start()

    def _start(self) -> None:
        try:
            threading.Thread(target=self._work, name=f"resilience-preflight-{self.check.name}", daemon=True).start()
            self.has_thread = True
        except RuntimeError as error:
            self._answer = error_in_words(error)

    def await_answer(self, waited: Elapsed, is_interrupted: Callable[[], bool]) -> PreflightFailure | None:
        """Return the failure that this run finds, or that it is late or gets no thread; None if nothing is wrong, or
        after an interrupt.

        waited: since all runs began."""
        while not self._has_answered.wait(LOOK):
            so_far = waited.look(monotonic())
            is_late = so_far - self._began >= self.check.limit
            if is_interrupted():
                self.check.give_up()
                return late_failure(self.check) if is_late else None
            if not self.has_thread:
                self._began = so_far
                self._start()  # before the limit counts: waiting for the checks before may have taken longer
                if not self.has_thread and so_far >= min(self.check.limit / 2, THREADS_LIMIT):
                    self._has_answered.set()  # the refusal is the answer
            elif is_late:
                self.check.give_up()
                return late_failure(self.check)
        return self.answer() if self._answer else None

    def answer(self) -> PreflightFailure | None:
        """Return the answer, with an empty detail if nothing is wrong; None if there is no answer yet."""
        has_answered = self._has_answered.is_set()
        return PreflightFailure(self.check.name, self._answer, self.check.is_warning) if has_answered else None

    def _work(self) -> None:
        give_up_at = monotonic() + self.check.limit / 2
        while True:
            try:
                self._answer = self.check.look()
                break
            except Exception as error:  # edge of a plugin: if a check fails to run, the node is not known to be fit
                if not descriptors.are_missing(error) or monotonic() >= give_up_at:
                    self._answer = error_in_words(error)
                    break
            sleep(DESCRIPTORS_PAUSE)  # the agent lacks descriptors for a moment, which says nothing about the node
        self._has_answered.set()


class _Simple:
    """A check that nothing can stop."""

    is_warning = False

    def give_up(self) -> None:
        pass


class Disk(_Simple):
    """Checks that the folder's file system is writable, has this much space (MiB) and accepts a new file."""

    name = "disk"

    def __init__(self, folder: Path, least_mb: int, is_warning: bool = False) -> None:
        self._folder, self._least, self.is_warning = folder, least_mb, is_warning
        self.limit = DISK_WARNING_LIMIT if is_warning else DISK_LIMIT

    def look(self) -> str:
        disk = os.statvfs(self._folder)
        free = disk.f_bavail * disk.f_frsize >> 20
        if disk.f_flag & os.ST_RDONLY:
            return f"{self._folder} is on a read-only file system"
        if free < self._least:
            return f"{self._folder} has {free} MiB free, expected {self._least} (--min-free-disk-mb)"
        if disk.f_files and not disk.f_favail:
            return f"{self._folder} is on a file system that accepts no more files"
        return ""


class Store(_Simple):
    """Checks that the job's store answers. ask: sends it one request, from a thread that is not the main one."""

    name = "store"

    def __init__(self, ask: Callable[[], object], limit: float = STORE_LIMIT) -> None:
        self._ask, self.limit = ask, limit

    def look(self) -> str:
        self._ask()
        return ""


class Devices(_Simple):
    """Checks that NVIDIA devices answer their driver. A node without devices is fit."""

    name = "gpu"

    def __init__(self, limit: float = DEVICE_LIMIT) -> None:
        self.limit = limit

    def look(self) -> str:
        library = nvml.find()
        return "" if library is None else "; ".join(nvml.faults(library))


class CommandCheck:
    """Checks that the user's shell command exits with 0. A late command is killed with its process group; otherwise,
    processes that the command leaves running are not touched."""

    name = "command"
    is_warning = False

    def __init__(self, command: str, limit: float = 60.0) -> None:
        self._text, self.limit = command, limit
        self._process: subprocess.Popen[bytes] | None = None
        self._is_given_up = False

    def look(self) -> str:
        self._is_given_up = False
        # A file: processes that the command leaves running would hold a pipe open. In memory: a disk may be full.
        with open(os.memfd_create("resilience-health-check"), "w+b") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-S", "-c", _SHELL, str(os.getpid()), self._text],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            if self._is_given_up:  # meanwhile, by `give_up`
                self._kill()
            code = self._process.wait()
            if code == 0:
                return ""
            output.seek(max(0, output.seek(0, os.SEEK_END) - LAST))
            output_tail = " ".join(encoding.text(output.read()).split())
        ending = f"exited with {code}" if code > 0 else f"was killed by signal {-code}"
        return f"{masked_text(self._text)!r} {ending} (--health-check)" + (f": {output_tail}" if output_tail else "")

    def give_up(self) -> None:
        self._is_given_up = True
        self._kill()

    def _kill(self) -> None:
        process = self._process
        if process is not None and process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)


def checks(folder: Path, ask_store: Callable[[], object], options: Options) -> list[PreflightCheck]:
    """Return the checks that a node runs before each cycle. folder: of the run; ask_store: as in `Store`."""
    node_checks: list[PreflightCheck] = [Store(ask_store), Devices()]
    if options.min_free_disk_mb:
        node_checks.insert(0, Disk(folder, options.min_free_disk_mb, is_warning=not options.exclude_on_full_disk))
    if options.health_check:
        node_checks.append(CommandCheck(options.health_check, options.health_check_timeout))
    return node_checks
