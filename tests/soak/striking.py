"""Strikes a rank with the faults that the plan has for it, and writes each down before it does.

One thread in each rank follows the plan. A fault's turn has come when the one before it has struck; that is known to
all ranks by a file for each. Signals and the kill of a monitor come from this thread, so they strike wherever
the main thread is. An exception, an exit and a hang come from a signal handler in the main thread, and only while it
is inside the wrapped function."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType

from tests.soak.plan import Fault

LOOK_EVERY = 0.01  # seconds
STANDARD_LIBRARY = os.path.join(os.path.dirname(threading.__file__), "")
AGAIN = 0.05  # seconds: an exception that is raised in a destructor is lost, so it is raised again
FROM_OUTSIDE = {"kill": signal.SIGKILL, "term": signal.SIGTERM, "segv": signal.SIGSEGV, "stop": signal.SIGSTOP}


class InjectedFault(Exception):
    """By the plan."""


class InjectedExit(BaseException):
    """By the plan; ends its rank."""


class Striker:
    """Follows the plan for one rank, in the folder that all ranks of the round share."""

    def __init__(self, faults: tuple[Fault, ...], rank: int, folder: Path) -> None:
        self.faults = faults
        self.function: CodeType | None = None  # of the wrapped function
        self._rank = rank
        self._folder = folder
        self._entered_at: float | None = None  # monotonic seconds; None outside the function
        self._raising: Fault | None = None
        self._lock = threading.Lock()
        self._next = 0
        self._since = time.monotonic()  # when the turn of the next fault came
        self._is_following = False

    # -- for the function -------------------------------------------------------------------------

    def entered(self) -> None:
        """The function begins: faults may strike. The thread starts now, when the monitor has been forked."""
        if not self._is_following:
            self._is_following = True
            signal.signal(signal.SIGUSR2, self._handle)
            threading.Thread(target=self._follow, name="striker", daemon=True).start()
        self.position()
        self._entered_at = time.monotonic()

    def left(self) -> None:
        """The function ends: nothing is raised from now on."""
        self._entered_at = None
        self._raising = None

    def position(self) -> int:
        """Return how many faults have struck."""
        with self._lock:
            while self._next < len(self.faults) and self._has_struck(self.faults[self._next]):
                self._next += 1
                self._since = time.monotonic()
            return self._next

    def skip_if_gone(self, members: set[int]) -> None:
        """Pass over a fault whose victim does not take part any more. Called by one rank."""
        position = self.position()
        if position < len(self.faults) and self.faults[position].victim not in members:
            self._write_down(self.faults[position], "skipped")

    def in_hook(self, name: str) -> None:
        """A hook was called: strike in it if the plan says so."""
        position = self.position()
        for fault in self.faults[max(0, position - 1) : position]:
            second = fault.second
            if second is None or (second.victim, second.where) != (self._rank, name):
                continue
            if not self._has_struck(second, fault):
                self._write_down(second, "struck", fault)
                self._act(second)

    # -- the thread -------------------------------------------------------------------------------

    def _follow(self) -> None:
        while True:
            time.sleep(LOOK_EVERY)
            position = self.position()
            if position:
                self._follow_up(self.faults[position - 1])
            if position == len(self.faults):
                continue
            fault, entered_at = self.faults[position], self._entered_at
            if fault.victim != self._rank or entered_at is None:
                continue
            if position and entered_at < self._since and self._causes_restart(self.faults[position - 1]):
                continue  # and that is still to come
            if time.monotonic() >= max(entered_at, self._since) + fault.delay_s:
                self._strike(fault)

    def _follow_up(self, fault: Fault) -> None:
        """Strike during the restart from a fault."""
        second = fault.second
        if second is None or (second.victim, second.where) != (self._rank, "restart"):
            return
        if time.monotonic() < self._since + second.delay_s or self._has_struck(second, fault):
            return
        if second.kind in FROM_OUTSIDE:
            self._write_down(second, "struck", fault)
            os.kill(os.getpid(), FROM_OUTSIDE[second.kind])
        elif self._entered_at is not None:
            self._raise_in_main_thread(second, fault)

    def _strike(self, fault: Fault) -> None:
        if fault.kind in FROM_OUTSIDE:
            self._write_down(fault, "struck")
            os.kill(os.getpid(), FROM_OUTSIDE[fault.kind])
        elif fault.kind == "monitor":
            self._write_down(fault, "struck")
            os.kill(self._monitor_pid(), signal.SIGKILL)
        else:
            self._raise_in_main_thread(fault)

    def _raise_in_main_thread(self, fault: Fault, first: Fault | None = None) -> None:
        self._raising = fault
        self._first = first
        while self._raising is fault and self._entered_at is not None:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR2)
            time.sleep(AGAIN)

    def _monitor_pid(self) -> int:
        """The process id of this rank's monitor, from the account."""
        for path in self._folder.glob(f"runs/*/records/*-{self._rank}.jsonl"):
            for line in path.read_text().splitlines():
                if '"monitor.started"' in line:
                    return int(json.loads(line)["origin"]["pid"])
        raise AssertionError(f"the account does not name the monitor of rank {self._rank}")

    # -- the main thread --------------------------------------------------------------------------

    def _handle(self, number: int, frame: FrameType | None) -> None:
        fault = self._raising
        if fault is None or not self._is_users(frame):
            return
        if not self._has_struck(fault, self._first):
            self._write_down(fault, "struck", self._first)
        self._act(fault)

    def _is_users(self, frame: FrameType | None) -> bool:
        """Return whether the main thread is inside the function, where an exception can come from: neither in the
        standard library (nor in this module), nor below an import or multiprocessing. A standard library that is left
        at any line keeps locks (logging's), pipes and threads; an import that is cut short is broken for good."""
        stack = list(_frames(frame))
        files = [each.f_code.co_filename for each in stack]
        if files[0] == __file__ or (files[0].startswith(STANDARD_LIBRARY) and "-packages" not in files[0]):
            return False
        if any(part in file for part in ("importlib", "/multiprocessing/") for file in files):
            return False
        return any(each.f_code is self.function for each in stack)

    def _act(self, fault: Fault) -> None:
        match fault.kind:
            case "exception":
                raise InjectedFault
            case "base_exception":
                raise InjectedExit
            case "exit_0" | "exit_1":
                os._exit(int(fault.kind[-1]))
            case "hang":
                self._raising = None
                time.sleep(3600)
            case "hang_with_gil":
                sum(range(10**12))
            case "segv":
                ctypes.string_at(0)
            case _:
                os.kill(os.getpid(), FROM_OUTSIDE[fault.kind])

    # -- what has struck --------------------------------------------------------------------------

    def _mark(self, fault: Fault, first: Fault | None) -> Path:
        return self._folder / f"struck-{fault.number}{'' if first is None else '-second'}"

    def _has_struck(self, fault: Fault, first: Fault | None = None) -> bool:
        return self._mark(fault, first).exists()

    def _causes_restart(self, fault: Fault) -> bool:
        """Return whether a fault that had its turn makes all ranks enter the function again."""
        return fault.kind != "monitor" and self._mark(fault, None).read_text() == "struck"

    def _write_down(self, fault: Fault, how: str, first: Fault | None = None) -> None:
        line = {"rank": fault.victim, "kind": fault.kind, "where": fault.where, "how": how}
        line |= {"is_ending": fault.is_ending, "number": fault.number, "mono_ns": time.monotonic_ns()}
        with open(self._folder / "strikes.jsonl", "ab", buffering=0) as file:
            file.write(json.dumps(line).encode() + b"\n")
        self._mark(fault, first).write_text(how)


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back
