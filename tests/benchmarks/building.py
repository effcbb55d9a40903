"""How often does a fault that lands inside group building strand a rank?

Four ranks build sub-groups and all_reduce on them in a loop; 0-50 ms after an iteration's entry a timer
raises in one of them, wherever it then is. Gloo can leave a rank in a wait that nothing ends; then the
ladder must replace the process. Counted, for each fault: did every living rank come back to the function,
and was a rank killed on the way? A job of ours goes on with one rank fewer, and every job ends with its
last planned fault or its first stranded restart."""

from __future__ import annotations

import itertools
import os
import random
import signal
from pathlib import Path
from types import FrameType

import msgspec

from tests.benchmarks.implementations import Implementation
from tests.benchmarks.processes import Board, Job, Mark

WORLD_SIZE = 4
LATEST = 0.05  # seconds after entry
REPEAT = 0.05  # seconds: a raise that lands in a destructor is lost, so the timer raises again


class Tally(msgspec.Struct, frozen=True):
    """What became of the faults of some jobs."""

    faults: int = 0
    replaced: int = 0  # restarts in which a rank was killed by the ladder; the others went on
    stranded: int = 0  # restarts that did not bring every living rank back within the limit
    slowest: float = 0.0  # seconds, of the restarts that came to their end

    def __add__(self, other: Tally) -> Tally:
        return Tally(
            self.faults + other.faults,
            self.replaced + other.replaced,
            self.stranded + other.stranded,
            max(self.slowest, other.slowest),
        )

    @property
    def share(self) -> float:
        """Share of the faults after which a process had to be replaced or the job was stuck."""
        return (self.replaced + self.stranded) / self.faults if self.faults else 0.0


class InjectedFault(Exception):
    """Raised by the timer, wherever the main thread then is."""


def measure(implementation: Implementation, faults: int, seed: int, folder: Path, limit: float = 20.0) -> Tally:
    """Run one job of at most `faults` faults.

    limit: seconds one restart may take before the job counts as stranded."""
    chance = random.Random(seed)
    plan = [(chance.randrange(WORLD_SIZE), chance.uniform(0.0005, LATEST)) for _ in range(faults)]
    board = Board(WORLD_SIZE)

    def body(rank: int) -> None:
        signal.signal(signal.SIGALRM, _raise)
        implementation.start()
        implementation.wrap(lambda call: _work(implementation, board, rank, call.iteration, plan))()

    job = Job(WORLD_SIZE, body, folder, {"RESILIENCE_RUN_DIR": str(folder / "runs")})
    try:
        reached = -1
        while not job.wait(limit):
            now = _furthest(board, faults)
            if now == reached:
                break
            reached = now
    finally:
        job.end()
    return _evaluate(board, job, faults)


def _work(
    implementation: Implementation,
    board: Board,
    initial_rank: int,
    iteration: int,
    plan: list[tuple[int, float]],
) -> None:
    import torch
    import torch.distributed as dist

    board.stamp(initial_rank, iteration, Mark.ENTERED)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    victim, delay = plan[iteration] if iteration < len(plan) else (-1, 0.0)
    try:
        if iteration < len(plan) and rank == victim % world_size:
            _armed.append(True)
            signal.setitimer(signal.ITIMER_REAL, delay, REPEAT)
        implementation.build_group(iteration, None)
        world = list(range(world_size))
        tensor = torch.ones(16)
        for _ in itertools.count() if victim >= 0 else range(3):
            group = dist.new_group(world)
            dist.all_reduce(tensor, group=group)
        dist.destroy_process_group()
    except InjectedFault:
        _armed.clear()
        board.stamp(initial_rank, iteration, Mark.FAULT)
        raise
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


_armed: list[bool] = []


def _raise(number: int, frame: FrameType | None) -> None:
    if _armed:
        raise InjectedFault


def _furthest(board: Board, faults: int) -> int:
    """Return the last iteration that any rank entered."""
    return max(
        (i for i in range(faults + 1) for rank in range(WORLD_SIZE) if board.read(rank, i, Mark.ENTERED)),
        default=-1,
    )


def _evaluate(board: Board, job: Job, faults: int) -> Tally:
    tally = Tally()
    alive = set(range(WORLD_SIZE))
    for iteration in range(faults):
        struck = [s for rank in alive if (s := board.read(rank, iteration, Mark.FAULT))]
        came = {rank for rank in alive if board.read(rank, iteration + 1, Mark.ENTERED)}
        if not struck and not came:
            break
        dead = {rank for rank in alive - came if job.statuses.get(rank, 0) < 0}
        is_stuck = came | dead != alive or not came
        back = max((board.read(rank, iteration + 1, Mark.ENTERED) or 0 for rank in came), default=0)
        tally += Tally(
            faults=1,
            replaced=int(bool(dead) and not is_stuck),
            stranded=int(is_stuck),
            slowest=(back - struck[0]) / 1e9 if struck and not is_stuck else 0.0,
        )
        if is_stuck:
            break
        alive = came
    return tally
