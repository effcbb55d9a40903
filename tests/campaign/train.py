"""The job of the campaign: a model that is trained for some steps, with a checkpoint after each.

    python -m tests.campaign.train FOLDER STEPS wrapper|launcher|both|plain KIND

`plain` has nothing of the package in it: it runs under any launcher. Each step of each rank is noted in a file."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from tests.campaign import injector
from tests.campaign.cases import GROUP_TIMEOUT, LIMIT
from tests.campaign.jobs import KINDS, Job, Section


def train(folder: Path, steps: int, kind: str, note: Callable[[int], object], section: Section) -> None:
    """Train from the last checkpoint to the end, and leave what the parameters are then."""
    initial_rank = int(os.environ.get("INITIAL_RANK", os.environ["RANK"]))
    dist.init_process_group("gloo", timeout=timedelta(seconds=float(os.environ.get(GROUP_TIMEOUT, "300"))))
    job: Job = KINDS[kind](folder, initial_rank, section)
    begin = job.load()
    entry = f"{os.getpid()}-{time.monotonic_ns()}"
    for step in range(begin, steps):
        note(step)
        _note(folder, initial_rank, step, entry)
        injector.strike(folder, initial_rank, step)
        job.advance(step)
        with section("checkpoint"):
            injector.strike(folder, initial_rank, step, "save")
            job.save(step + 1)
        dist.barrier()
    result = job.digest()
    if dist.get_rank() == 0:
        (folder / "result").write_text(result)
    dist.barrier()
    with contextlib.suppress(Exception):
        dist.destroy_process_group()


def _note(folder: Path, rank: int, step: int, entry: str) -> None:
    """Note that a rank begins a step. entry: which call of `train` it is."""
    with (folder / "steps.jsonl").open("a") as file:
        file.write(json.dumps([time.time_ns(), rank, step, entry]) + "\n")


def main() -> None:
    folder, steps, mode, kind = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
    os.environ["INITIAL_RANK"] = os.environ["RANK"]
    if mode == "plain":
        train(folder, steps, kind, lambda step: None, _no_section)
        return
    import resilience

    def note(step: int) -> None:
        resilience.step(step)
        resilience.heartbeat()

    if mode == "launcher":
        train(folder, steps, kind, note, resilience.section)
        return
    from resilience.inprocess import CallWrapper, Wrapper

    limit = float(os.environ[LIMIT])

    @Wrapper(soft_timeout=timedelta(seconds=limit), hard_timeout=timedelta(seconds=2 * limit))
    def wrapped(call: CallWrapper | None = None) -> None:
        train(folder, steps, kind, note, resilience.section)

    wrapped()


def _no_section(name: str) -> AbstractContextManager[object]:
    return contextlib.nullcontext()


if __name__ == "__main__":
    main()
