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
    """A fault of one iteration: what strikes which initial rank at which step of its loop."""

    kind: Kind
    initial_rank: int
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

    Rank 0 is spared by kills: it hosts the peer's store, whose job would end with it."""
    chance = random.Random(seed)
    first = 1 if kind == "kill" else 0
    ranks = list(range(first, world_size))
    if kind == "kill":
        chance.shuffle(ranks)
    return [
        Fault(kind, ranks[i] if kind == "kill" else chance.choice(ranks), chance.randint(3, 20)) for i in range(count)
    ]


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
    return msgspec.structs.replace(
        outcome, noticed=_noticed(implementation, board, faults, folder / "runs"), limit=limit
    )


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
    is_victim = fault is not None and fault.initial_rank == initial_rank
    ballast = None
    if fault is not None and resident_bytes:
        if is_victim:
            ballast = touch(resident_bytes)
            board.stamp(initial_rank, iteration, Mark.READY)
        # Nobody builds the group before: its short timeout would end the iteration.
        while not board.read(fault.initial_rank, iteration, Mark.READY):
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
    killed_by_us: set[int] = set()
    stranded = 0
    for iteration, fault in enumerate(faults):
        struck = board.read(fault.initial_rank, iteration, Mark.FAULT)
        if fault.kind == "kill" and struck:
            killed_by_us.add(fault.initial_rank)
        survivors = [rank for rank in job.pids if rank not in killed_by_us]
        back = [board.read(rank, iteration + 1, Mark.ENTERED) for rank in survivors]
        first = [board.read(rank, iteration + 1, Mark.REDUCED) for rank in survivors]
        if not all(back):
            stranded += 1
            break
        if struck is None:  # something else ended this iteration, e.g. gloo's timeout: nothing to time
            continue
        entered.append((max(filter(None, back)) - struck) / 1e9)
        if all(first):
            reduced.append((max(filter(None, first)) - struck) / 1e9)
    killed = [rank for rank, status in job.statuses.items() if status < 0 and rank not in killed_by_us]
    bad = {rank: status for rank, status in job.statuses.items() if status and rank not in killed_by_us}
    problem = "" if ended else f"not ended after {limit:g} s"
    if bad and ended:
        problem = f"ranks ended with {bad}"
    return Outcome(entered, reduced, stranded, len(killed), problem=problem)


def _noticed(implementation: Implementation, board: Board, faults: list[Fault], run_folder: Path) -> list[float]:
    times = []
    for iteration, fault in enumerate(faults):
        struck = board.read(fault.initial_rank, iteration, Mark.FAULT)
        recorded = implementation.death_recorded_at(run_folder, fault.initial_rank)
        if fault.kind == "kill" and struck and recorded:
            times.append((recorded - struck) / 1e9)
    return times
