"""A rank that is killed while its data loader has more results than anybody reads."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from datetime import timedelta

from torch.utils.data import DataLoader, Dataset

import resilience
from resilience.inprocess import CallWrapper, Wrapper
from tests.support import signs


class Large(Dataset[bytes]):
    """Samples that fill the pipe between a worker and its rank: one is larger than the pipe."""

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> bytes:
        return bytes(200_000)


def killed_beside_a_full_queue(method: str) -> tuple[int, int]:
    """method: how workers are started. Rank 1 is killed in iteration 0. Return (iteration, world size)."""

    @Wrapper(soft_timeout=timedelta(seconds=60), hard_timeout=timedelta(seconds=90))
    def function(call: CallWrapper | None = None) -> tuple[int, int]:
        assert call is not None
        if call.iteration == 0 and os.environ["RANK"] == "1":
            _load_and_die(method)
        while call.iteration == 0:
            time.sleep(0.005)
        return call.iteration, int(os.environ["WORLD_SIZE"])

    return function()


def _load_and_die(method: str) -> None:
    loader = DataLoader(Large(), batch_size=None, num_workers=2, prefetch_factor=4, multiprocessing_context=method)
    samples: Iterator[bytes] = iter(loader)
    for _ in range(loader.num_workers):  # one of each: it has its name by then
        next(samples)
    workers = [worker.pid for worker in samples._workers]  # type: ignore[attr-defined]
    signs.Path("workers.new").write_text(" ".join(map(str, workers)))
    os.replace("workers.new", "workers")
    step = 0
    while not signs.Path("go").exists():  # until the monitor has looked at the rank
        resilience.step(step := step + 1)
        time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGKILL)


def killed_while_its_worker_starts() -> tuple[int, int]:
    """Rank 1 is killed in iteration 0, by its worker that has just been forked. Return (iteration, world size)."""

    @Wrapper(soft_timeout=timedelta(seconds=60), hard_timeout=timedelta(seconds=90))
    def function(call: CallWrapper | None = None) -> tuple[int, int]:
        assert call is not None
        if call.iteration == 0 and os.environ["RANK"] == "1":
            loader = DataLoader(Large(), num_workers=1, multiprocessing_context="fork", worker_init_fn=_kill_rank)
            samples = iter(loader)
            assert samples is not None  # kept: else its worker is asked to end
            time.sleep(3600.0)  # until it is killed
        while call.iteration == 0:
            time.sleep(0.005)
        return call.iteration, int(os.environ["WORLD_SIZE"])

    return function()


def _kill_rank(worker: int) -> None:
    """End the rank before its worker has looked for the first time who its parent is."""
    signs.Path("workers").write_text(str(os.getpid()))
    rank = os.getppid()
    os.kill(rank, signal.SIGKILL)
    while os.getppid() == rank:
        time.sleep(0.001)
