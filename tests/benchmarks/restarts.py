"""How long from a fault until all ranks are back in the function?

Every job runs the same function: build the default gloo group, then all_reduce a small tensor until the
iteration's fault strikes one rank at a random step; the others then sit in an all_reduce that cannot
end. The last iteration has no fault and returns. The time counted is from the stamp right before the
fault to the last surviving rank's stamp on the function's first line."""

from __future__ import annotations

import itertools
import os
import random
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import msgspec

from tests.benchmarks.implementations import Implementation
from tests.benchmarks.processes import Board, Job, Mark

FINAL_STEPS = 5
Kind = Literal["exception", "kill"]


class Fault(msgspec.Struct, frozen=True):
    """A fault of one iteration: what strikes which rank (modulo the world size) at which step."""

    kind: Kind
    rank: int
    step: int


class Outcome(msgspec.Struct, frozen=True):
    """What one job gave: seconds for each restart that came to its end, and what went wrong."""

    entered: list[float]  # fault -> all survivors on the function's first line
    reduced: list[float]  # fault -> all survivors through their first all_reduce
    stranded: int = 0  # restarts that did not come to their end within the limit
    killed: int = 0  # ranks that ended by a signal although no fault of ours killed them
    noticed: list[float] = []  # SIGKILL -> the monitor's record of it
    limit: float = 0.0  # seconds the job was given
    problem: str = ""


def plan(kind: Kind, world_size: int, count: int, seed: int) -> list[Fault]:
    """Return the faults of one job's iterations, the same for every implementation.

    The first kill spares rank 0: it hosts the peer's store, whose job would end with it."""
    chance = random.Random(seed)
    first = 1 if kind == "kill" else 0
    return [Fault(kind, chance.randrange(first, world_size), chance.randint(3, 20)) for _ in range(count)]


def measure(
    implementation: Implementation,
    world_size: int,
    faults: list[Fault],
    folder: Path,
    *,
    group_timeout: timedelta | None = None,
    resident_bytes: int = 0,
    limit: float = 60.0,
) -> Outcome:
    """Run one job and return its restart times.

    group_timeout: of the gloo group; None leaves torch's 30 minutes.
    resident_bytes: touched by each rank that will be killed, before its first step.
    limit: seconds for the whole job."""
    board = Board(world_size)

    def body(rank: int) -> None:
        implementation.start()
        implementation.wrap(
            lambda call: _work(implementation, board, rank, call.iteration, faults, group_timeout, resident_bytes)
        )()

    job = Job(world_size, body, folder, {"RESILIENCE_RUN_DIR": str(folder / "runs")})
    try:
        ended = job.wait(limit)
    finally:
        job.end()
    outcome = _evaluate(board, job, faults, ended, limit)
    noticed = _noticed(implementation, board, faults, folder / "runs")
    return msgspec.structs.replace(outcome, noticed=noticed)


def _work(
    implementation: Implementation,
    board: Board,
    initial_rank: int,
    iteration: int,
    faults: list[Fault],
    group_timeout: timedelta | None,
    resident_bytes: int,
) -> None:
    import torch
    import torch.distributed as dist

    board.stamp(initial_rank, iteration, Mark.ENTERED)
    fault = faults[iteration] if iteration < len(faults) else None
    world_size = int(os.environ["WORLD_SIZE"])
    is_victim = fault is not None and int(os.environ["RANK"]) == fault.rank % world_size
    ballast = None
    if fault is not None and resident_bytes:
        if is_victim:
            ballast = touch(resident_bytes)
            board.stamp(initial_rank, iteration, Mark.READY)
        # Nobody builds the group before: its short timeout would end the iteration.
        while not board.stamped(iteration, Mark.READY):
            time.sleep(0.005)
    implementation.build_group(iteration, group_timeout)
    tensor = torch.ones(16)
    for step in itertools.count() if fault is not None else range(FINAL_STEPS):
        if fault is not None and is_victim and step == fault.step:
            strike(fault.kind, lambda: board.stamp(initial_rank, iteration, Mark.FAULT))
        dist.all_reduce(tensor)
        tensor.fill_(1.0)
        if step == 0:
            board.stamp(initial_rank, iteration, Mark.REDUCED)
    dist.destroy_process_group()
    del ballast


def strike(kind: Kind, stamp: Callable[[], None]) -> None:
    """Stamp, then raise or die."""
    stamp()
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)
    raise RuntimeError("injected fault")


def touch(size: int) -> Any:
    """Return `size` bytes of memory that are resident."""
    import torch

    return torch.ones(size // 8, dtype=torch.int64)


def _evaluate(board: Board, job: Job, faults: list[Fault], ended: bool, limit: float) -> Outcome:
    entered: list[float] = []
    reduced: list[float] = []
    struck_down: set[int] = set()
    stranded = 0
    alive = set(job.pids)
    for iteration, fault in enumerate(faults):
        struck = board.stamped(iteration, Mark.FAULT)
        if fault.kind == "kill":
            struck_down |= struck.keys()
        entries = board.stamped(iteration + 1, Mark.ENTERED)
        # A rank that the library itself has killed cannot come back; it is counted apart.
        killed = {rank for rank in alive - entries.keys() if job.statuses.get(rank, 0) < 0}
        alive -= killed | struck_down
        if not alive or not alive <= entries.keys():
            stranded += 1
            break
        if not struck:  # something else ended this iteration, e.g. gloo's timeout: nothing to time
            continue
        struck_at = min(struck.values())
        entered.append((max(entries[rank] for rank in alive) - struck_at) / 1e9)
        reductions = board.stamped(iteration + 1, Mark.REDUCED)
        if alive <= reductions.keys():
            reduced.append((max(reductions[rank] for rank in alive) - struck_at) / 1e9)
    bad = {rank: status for rank, status in job.statuses.items() if status and rank not in struck_down}
    problem = "" if ended else f"not ended after {limit:g} s"
    if bad and ended:
        problem = "ranks ended with " + ", ".join(map(str, sorted(set(bad.values()))))
    return Outcome(entered, reduced, stranded, sum(status < 0 for status in bad.values()), limit=limit, problem=problem)


def _noticed(implementation: Implementation, board: Board, faults: list[Fault], run_folder: Path) -> list[float]:
    times = []
    for iteration, fault in enumerate(faults):
        for initial_rank, struck_at in board.stamped(iteration, Mark.FAULT).items():
            recorded = implementation.death_recorded_at(run_folder, initial_rank)
            if fault.kind == "kill" and recorded:
                times.append((recorded - struck_at) / 1e9)
    return times
