"""What does the library cost while nothing goes wrong?

Sign-of-life calls in the rank, calls of a wrapped function, the monitor's memory and idle CPU, the import, a barrier of
many store clients. Each is measured through the public API of either library."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from tests.benchmarks.implementations import Implementation
from tests.benchmarks.processes import (
    Board,
    Job,
    Mark,
    cpu_seconds,
    descendants,
    free_port,
    is_running,
    private_bytes,
)

BATCHES, CALLS = 40, 500  # calls are timed in batches, a pause after each, as a training loop would make them
PAUSE = 0.02  # seconds


# -- signs of life -----------------------------------------------------------------------------


class CallCost(msgspec.Struct, frozen=True):
    """Seconds for one call of each kind; None where the library has none."""

    ping: float
    ping_cpu: float  # CPU seconds of the rank and its monitor behind one ping
    heartbeat: float
    section: float  # one pair: enter and leave


def call_costs(implementation: Implementation, folder: Path) -> CallCost:
    """Measure in one rank, W = 1. Raises: RuntimeError if the rank failed."""
    job = Job(1, lambda rank: _time_calls(implementation, folder), folder, _environment(folder))
    try:
        job.wait(60)
    finally:
        job.end()
    if job.statuses.get(0) != 0:
        raise RuntimeError(f"{implementation.name}: timing calls failed:\n{job.output(0)[-2000:]}")
    return msgspec.json.decode((folder / "costs.json").read_bytes(), type=CallCost)


def _time_calls(implementation: Implementation, folder: Path) -> None:
    answers: list[tuple[float, float]] = []
    signs: list[tuple[float, float]] = []

    def body(call: Any) -> None:
        if not answers:
            answers.append((_per_call(call.ping), _cpu_per_call(call.ping)))
            if implementation.signs_inside_wrapper:
                signs.append(_time_signs(implementation))

    implementation.wrap(body)()
    if not signs:
        signs.append(_time_signs(implementation))
    (ping, cpu), (heartbeat, section) = answers[0], signs[0]
    cost = CallCost(ping=ping, ping_cpu=cpu, heartbeat=heartbeat, section=section)
    (folder / "costs.json").write_bytes(msgspec.json.encode(cost))


def _time_signs(implementation: Implementation) -> tuple[float, float]:
    with implementation.signs_of_life() as (heartbeat, section_pair):
        return _per_call(heartbeat), _per_call(section_pair)


def _per_call(call: Callable[[], object]) -> float:
    """Return the median over the batches of the seconds for one call, loop included."""
    batches = []
    for _ in range(BATCHES):
        started = time.perf_counter_ns()
        for _ in range(CALLS):
            call()
        batches.append((time.perf_counter_ns() - started) / CALLS / 1e9)
        time.sleep(PAUSE)
    return median(batches)


def _cpu_per_call(call: Callable[[], object]) -> float:
    """Return the CPU seconds that this process and those below it (or daemons beside it) spend on a call,
    over what they spend without."""

    def spend(work: Callable[[], object]) -> float:
        before = _cpu_of_all()
        for _ in range(BATCHES):
            work()
            time.sleep(PAUSE)
        time.sleep(0.2)
        return _cpu_of_all() - before

    def batch() -> None:
        for _ in range(CALLS):
            call()

    return (spend(batch) - spend(lambda: None)) / (BATCHES * CALLS)


def _cpu_of_all() -> float:
    """CPU seconds of this process and of everything else below the benchmark's own process."""
    own = resource.getrusage(resource.RUSAGE_SELF)
    others = [pid for pid in descendants(os.getppid()) if pid != os.getpid()]
    return own.ru_utime + own.ru_stime + sum(map(_cpu_or_zero, others))


def _cpu_or_zero(pid: int) -> float:
    try:
        return cpu_seconds(pid)
    except (FileNotFoundError, ProcessLookupError):
        return 0.0


# -- entering the function ---------------------------------------------------------------------


class EntryCost(msgspec.Struct, frozen=True):
    """Seconds from the call of a wrapped function to the function's first line."""

    wall: float
    cpu: float  # of the rank itself


def entry_costs(implementation: Implementation, calls: int, folder: Path) -> list[EntryCost]:
    """Measure several calls of a wrapped function, one after another in the same process.

    In one rank, W = 1. No process group is built. Raises: RuntimeError if the rank failed."""
    job = Job(1, lambda rank: _time_entries(implementation, calls, folder), folder, _environment(folder))
    try:
        job.wait(60)
    finally:
        job.end()
    if job.statuses.get(0) != 0:
        raise RuntimeError(f"{implementation.name}: calls of a function failed:\n{job.output(0)[-2000:]}")
    return msgspec.json.decode((folder / "entries.json").read_bytes(), type=list[EntryCost])


def _time_entries(implementation: Implementation, calls: int, folder: Path) -> None:
    entered: list[tuple[float, float]] = []
    costs: list[EntryCost] = []
    function = implementation.wrap(lambda call: entered.append((time.perf_counter(), time.process_time())))
    for _ in range(calls):
        began, began_cpu = time.perf_counter(), time.process_time()
        function()
        wall, cpu = entered[-1]
        costs.append(EntryCost(wall - began, cpu - began_cpu))
    (folder / "entries.json").write_bytes(msgspec.json.encode(costs))


# -- the monitor -------------------------------------------------------------------------------


class MonitorCost(msgspec.Struct, frozen=True):
    """The dearest monitor of an idle job."""

    private_bytes: int
    cpu_share: float  # of one core
    processes: int  # how many processes beside the ranks the job had


def monitor_cost(implementation: Implementation, folder: Path, seconds: float = 10.0) -> MonitorCost:
    """Watch the monitors of a job of two ranks that sleep in the function, for `seconds`.

    A monitor that hosts a store is counted with it. Raises: RuntimeError if there is no monitor."""
    world_size = 2
    board = Board(world_size)

    def body(rank: int) -> None:
        def idle(call: Any) -> None:
            board.stamp(rank, call.iteration, Mark.ENTERED)
            time.sleep(seconds + 5)

        implementation.start()
        implementation.wrap(idle)()

    job = Job(world_size, body, folder, _environment(folder))
    try:
        deadline = time.monotonic() + 30
        while not all(board.read(rank, 0, Mark.ENTERED) for rank in range(world_size)):
            if time.monotonic() > deadline or job.wait(0.05):
                raise RuntimeError(f"{implementation.name}: no rank entered:\n{job.output(0)[-2000:]}")
        time.sleep(2)
        ranks = set(job.pids.values())
        monitors = [pid for pid in descendants(os.getpid()) if pid not in ranks and is_running(pid)]
        if not monitors:
            raise RuntimeError(f"{implementation.name}: no monitor process was found")
        before = {pid: cpu_seconds(pid) for pid in monitors}
        started = time.monotonic()
        job.wait(seconds)
        passed = time.monotonic() - started
        shares = [(cpu_seconds(pid) - before[pid]) / passed for pid in monitors]
        memory = [private_bytes(pid) for pid in monitors]
    finally:
        job.end(0)
    return MonitorCost(max(memory), max(shares), len(monitors))


# -- the import --------------------------------------------------------------------------------

IMPORT = """
import gc, sys, time, torch, torch.distributed
collecting = 0.0
def collection(phase, info):
    global collecting
    collecting += time.process_time() if phase == "stop" else -time.process_time()
gc.callbacks.append(collection)
def private():
    lines = open("/proc/self/smaps_rollup").read().splitlines()
    return sum(int(l.split()[1]) for l in lines if l.startswith(("Private_Clean:", "Private_Dirty:")))
before, started = private(), time.process_time()
exec(f"from {sys.argv[1]} import CallWrapper, Wrapper")
print(time.process_time() - started - collecting, (private() - before) * 1024)
"""


def import_cost(module: str, compiled: Path) -> tuple[float, int]:
    """Return CPU seconds and private bytes of what users write, `from module import CallWrapper, Wrapper`, after
    torch, in a fresh process. Garbage collections do not count: one of all that torch has made takes 50 to 80 ms, and
    whether it falls into the import depends on how many objects were made before.

    compiled: a folder for bytecode, which a first call fills: users have theirs beside the package."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run(
        [sys.executable, "-c", IMPORT, module],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
        env={**environment, "PYTHONPYCACHEPREFIX": str(compiled)},
    )
    seconds, size = done.stdout.split()
    return float(seconds), int(size)


# -- the store barrier -------------------------------------------------------------------------


def barrier_times(implementation: Implementation, clients: int, rounds: int, folder: Path) -> list[float]:
    """Return, for each round, the seconds from the moment at which all clients start until the last is out.

    Each client is a process with its own connection; one of them hosts the store.
    Raises: RuntimeError if a round was not completed."""
    board = Board(clients, rounds + 1)
    port = free_port()
    gap = max(1.0, clients / 256)  # seconds between rounds; also the head start of the first

    def body(rank: int) -> None:
        store = implementation.store(rank, clients, port)
        board.stamp(rank, rounds, Mark.ENTERED)
        while not (first := board.read(0, rounds, Mark.FAULT)):
            time.sleep(0.1)
        for round_number in range(rounds):
            start = first / 1e9 + round_number * gap
            time.sleep(max(0.0, start - time.monotonic()))
            implementation.barrier(store, f"round{round_number}", rank, clients)
            board.stamp(rank, round_number, Mark.REDUCED)
        # Nobody leaves while others may still be in the last round; the store's host leaves last.
        time.sleep(1.0 if rank else 2.0)

    job = Job(clients, body, folder, _environment(folder))
    try:
        deadline = time.monotonic() + 240
        while not all(board.read(rank, rounds, Mark.ENTERED) for rank in range(clients)):
            if time.monotonic() > deadline:
                raise RuntimeError(f"{implementation.name}: not all clients connected within 240 s")
            time.sleep(0.1)
        board.stamp(0, rounds, Mark.FAULT, time.monotonic_ns() + int(gap * 1e9))
        ended = job.wait(30 + rounds * gap)
    finally:
        job.end(0)
    first = board.read(0, rounds, Mark.FAULT)
    times = []
    for round_number in range(rounds):
        out = [board.read(rank, round_number, Mark.REDUCED) for rank in range(clients)]
        if first is None or not all(out):
            raise RuntimeError(
                f"{implementation.name}: round {round_number} was not completed ({ended=}):\n{job.output(0)[-2000:]}"
            )
        times.append(max(stamp for stamp in out if stamp) / 1e9 - first / 1e9 - round_number * gap)
    return times


def _environment(folder: Path) -> dict[str, str]:
    return {"RESILIENCE_RUN_DIR": str(folder / "runs")}
