"""Breaks one rank, or two, once.  Uses the standard library and nothing of the package.

The truth lies beside the job's folder (`truth_of`), not in it. The rank that it names breaks when it comes to the
step. A file that says so is written just before, so no fault strikes twice. A second rank breaks as soon as it is in a
handler of the first fault, or a known time after the first one: by a signal or an exit from a thread, wherever its main
thread is then; in any other way only if the restart has not begun yet."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SLOW_S = 0.8  # a slow step, within all limits
CHECKPOINT_S = 3.0  # a long checkpoint, within all limits
FIRST_LIMIT_S = 10.0  # for the first fault to strike
SIGNALS = {
    "sigkill": signal.SIGKILL,
    "sigterm": signal.SIGTERM,
    "sigstop": signal.SIGSTOP,
    "sigsegv": signal.SIGSEGV,
    "sigabrt": signal.SIGABRT,
    "sigint": signal.SIGINT,
    "sighup": signal.SIGHUP,
    "sigusr1": signal.SIGUSR1,
    "sigbus": signal.SIGBUS,
    "sigfpe": signal.SIGFPE,
}
MONITORS = (b"resilience.monitor", b"resilience-monitor", b"resilience.inprocess.monitor")
STOPPED_S = 3  # a monitor that stands still, within all limits
EXITS = {"exit": 7, "exit0": 0}
PLACES = {"checkpoint": "save", "loader_kill": "loader", "loader_hang": "loader"}
"""Where a fault strikes, if not at the beginning of a step."""


def truth_of(folder: Path) -> Path:
    """Return the file with the truth about the job in a folder. A verdict is read from the folder alone."""
    return folder.with_name(f"{folder.name}.truth.json")


def strike(folder: Path, rank: int, step: int, place: str = "step") -> None:
    """Break this rank, if it is its turn."""
    truth = json.loads(truth_of(folder).read_text())
    if step != truth["step"]:
        return
    if truth["fault"] == "everywhere" and place == "step":
        _once(folder / "injected")
        if _once(folder / f"injected-{rank}"):
            break_by("exception")
    elif rank == truth["rank"] and PLACES.get(truth["fault"], "step") == place:
        if _once(folder / "injected"):
            break_by(truth["fault"])
    elif rank == truth["second_rank"] and place == "step" and not truth["place"] and _once(folder / "armed"):
        _strike_second(folder, truth)


def handler_of(folder: Path) -> str:
    """Return the handler in which the second rank breaks, "" if it is none."""
    return str(json.loads(truth_of(folder).read_text())["place"])


def strike_in(folder: Path, rank: int, handler: str) -> None:
    """Break this rank in a handler of the first fault, if it is its turn."""
    truth = json.loads(truth_of(folder).read_text())
    is_turn = handler == truth["place"] and rank == truth["second_rank"] and (folder / "injected").exists()
    if is_turn and _once(folder / "injected-second"):
        break_by(truth["second"], waits=False)


def _strike_second(folder: Path, truth: dict[str, Any]) -> None:
    def strike() -> None:
        deadline = time.monotonic() + FIRST_LIMIT_S
        while not (folder / "injected").exists() and time.monotonic() < deadline:
            time.sleep(0.002)
        time.sleep(truth["delay_ms"] / 1000)
        if _once(folder / "injected-second"):
            break_by(truth["second"])

    if truth["second"] in SIGNALS or truth["second"] in EXITS:
        threading.Thread(target=strike, daemon=True).start()
    else:
        strike()


def _once(path: Path) -> bool:
    try:
        with path.open("x") as file:
            file.write(str(time.time_ns()))
    except FileExistsError:
        return False
    return True


def break_by(fault: str, waits: bool = True) -> None:
    """Break this process. waits: for a SIGTERM to end it."""
    match fault:
        case "exception":
            raise ValueError("by schedule")
        case "exit" | "exit0":
            sys.stdout.flush()
            os._exit(EXITS[fault])
        case "sigkill" | "sigterm" | "sigstop" | "sigsegv" | "sigabrt" | "sigbus" | "sigfpe":
            os.kill(os.getpid(), SIGNALS[fault])
            time.sleep(600 if fault == "sigterm" and waits else 0)
        case "sigint" | "sighup" | "sigusr1":
            os.kill(os.getpid(), SIGNALS[fault])
            time.sleep(600)
        case "system_exit":
            raise SystemExit(3)
        case "keyboard_interrupt":
            raise KeyboardInterrupt
        case "memory_error":
            bytes(sys.maxsize // 2)
        case "loader_kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "sleep" | "loader_hang":
            time.sleep(600)
        case "lock":
            lock = threading.Lock()
            lock.acquire()
            lock.acquire()
        case "py_loop":
            spin()
        case "gil":
            ctypes.PyDLL(None).sleep(600)
        case "barrier":
            import torch.distributed as dist

            dist.barrier()
        case "skipped" | "shape":
            _change_next("barrier" if fault == "skipped" else "all_reduce")
        case "swallowed":
            while True:
                with contextlib.suppress(BaseException):
                    time.sleep(600)
        case "slow":
            time.sleep(SLOW_S)
        case "checkpoint":
            time.sleep(CHECKPOINT_S)
        case "monitor":
            for pid in watchers(os.getpid()):
                os.kill(pid, signal.SIGKILL)
        case "monitor_stopped":
            for pid in watchers(os.getpid()):
                os.kill(pid, signal.SIGSTOP)
                resume = f"sleep {STOPPED_S}; kill -CONT {pid}"  # by another process: this one may end before
                subprocess.Popen(["sh", "-c", resume], start_new_session=True)
        case _:
            raise NotImplementedError(
                f"{fault!r} is no fault that this injector can bring about: add a case to break_by"
            )


def _change_next(name: str) -> None:
    """Have this rank leave out the next barrier, or bring a tensor of another shape to the next all_reduce."""
    import torch
    import torch.distributed as dist

    real = getattr(dist, name)

    def changed(*arguments: object) -> None:
        setattr(dist, name, real)
        if name == "all_reduce":
            real(torch.ones(1000, dtype=torch.double))

    setattr(dist, name, changed)


def spin() -> None:
    while True:
        pass


def watchers(watched: int) -> Iterator[int]:
    """Yield the monitors of a process: processes of that name that hold a pidfd of it."""
    for process in Path("/proc").iterdir():
        try:
            command = (process / "cmdline").read_bytes()
            if not any(name in command for name in MONITORS) or int(process.name) == watched:
                continue
            infos = [info.read_text() for info in (process / "fdinfo").iterdir()]
        except (OSError, ValueError):
            continue
        if any(f"Pid:\t{watched}\n" in info for info in infos):
            yield int(process.name)
