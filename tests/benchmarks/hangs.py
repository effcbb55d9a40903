"""How long after the limit does a hang have consequences?

Both ranks of a job ping; then one shows no further progress. With the GIL free it goes on executing
bytecode, so only the armed ping can tell; its last ping is the exact moment the limit counts from.
With the GIL held (a C call that never releases it) nothing in the process can act: the others must be
freed at the soft limit, and the rank itself must be gone after the hard limit and the grace.

With the GIL held, the automatic watchdog's last sign of life counts, which lies up to one
`progress_watchdog_interval` before the last ping; the interval is set to 10 ms there, so a figure
may be up to 10 ms too low."""

from __future__ import annotations

import ctypes
import time
from datetime import timedelta
from pathlib import Path
from typing import Literal

import msgspec

from tests.benchmarks.implementations import Implementation
from tests.benchmarks.processes import Board, Job, Mark

SOFT, HARD, GRACE = 2.5, 5.0, 1.0  # seconds; the wrappers' intervals stay 1 s
WORLD_SIZE = 2
VICTIM = 1

HangKind = Literal["free", "held"]


class Hang(msgspec.Struct, frozen=True):
    """Seconds from a limit to its consequence; None where the consequence did not come."""

    abort_after_soft: float | None  # first abort hook on any rank, after the soft limit
    gone_after_hard: float | None = None  # the hung process has ended, after the hard limit
    back_after_soft: float | None = None  # the last surviving rank re-entered
    problem: str = ""


def measure(implementation: Implementation, kind: HangKind, folder: Path, limit: float = 40.0) -> Hang:
    """Run one job with one hang and return its delays."""
    board = Board(WORLD_SIZE)

    def body(rank: int) -> None:
        implementation.start()
        implementation.wrap(
            lambda call: _work(board, rank, call, kind),
            abort=implementation.marking_abort(lambda iteration: board.stamp(rank, iteration, Mark.ABORT)),
            soft_timeout=timedelta(seconds=SOFT),
            hard_timeout=timedelta(seconds=HARD),
            termination_grace_time=timedelta(seconds=GRACE),
            progress_watchdog_interval=timedelta(seconds=0.01 if kind == "held" else 1),
        )()

    job = Job(WORLD_SIZE, body, folder, {"RESILIENCE_RUN_DIR": str(folder / "runs")})
    try:
        gone_at: float | None = None
        if kind == "held" and job.wait(limit, [VICTIM]):
            gone_at = time.monotonic()
        ended = job.wait(limit)
    finally:
        job.end()
    return _evaluate(board, kind, gone_at, "" if ended else f"not ended after {limit:g} s")


def _work(board: Board, rank: int, call: object, kind: HangKind) -> None:
    iteration: int = call.iteration  # type: ignore[attr-defined]
    ping = call.ping  # type: ignore[attr-defined]
    board.stamp(rank, iteration, Mark.ENTERED)
    deadline = time.monotonic() + 1.5
    while time.monotonic() < deadline:  # every interval has passed at least once
        ping()
        time.sleep(0.01)
    if iteration > 0:
        return
    if rank == VICTIM:
        ping()
        board.stamp(rank, iteration, Mark.FAULT)
        if kind == "held":
            _hold_the_interpreter()
        while True:
            time.sleep(0.01)
    while True:
        ping()
        time.sleep(0.01)


def _hold_the_interpreter() -> None:
    """Block in C for good without releasing the GIL. A second lock of a plain mutex: `sleep` would
    return early on the first signal, which is how stacks are asked for."""
    mutex = ctypes.create_string_buffer(64)  # all zeros is PTHREAD_MUTEX_INITIALIZER
    library = ctypes.PyDLL(None)
    library.pthread_mutex_lock(mutex)
    library.pthread_mutex_lock(mutex)


def _evaluate(board: Board, kind: HangKind, gone_at: float | None, problem: str) -> Hang:
    struck = board.read(VICTIM, 0, Mark.FAULT)
    if struck is None:
        return Hang(None, problem=problem or "the rank did not get as far as the hang")
    hung_at = struck / 1e9
    aborts = [stamp for rank in range(WORLD_SIZE) if (stamp := board.read(rank, 0, Mark.ABORT))]
    survivors = [rank for rank in range(WORLD_SIZE) if kind == "free" or rank != VICTIM]
    back = [board.read(rank, 1, Mark.ENTERED) for rank in survivors]
    return Hang(
        abort_after_soft=min(aborts) / 1e9 - hung_at - SOFT if aborts else None,
        gone_after_hard=gone_at - hung_at - HARD if gone_at is not None else None,
        back_after_soft=max(s for s in back if s) / 1e9 - hung_at - SOFT if all(back) else None,
        problem=problem,
    )
