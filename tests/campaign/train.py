"""The job of the campaign: a model that is trained for some steps, with a checkpoint after each.

    python -m tests.campaign.train FOLDER STEPS wrapper|launcher|both|plain|peer-wrapper|peer-launcher KIND

`plain` has nothing of the package in it: it runs under any launcher. `peer-…` is for nvidia-resiliency-ext. Each step
of each rank is noted in a file."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests.campaign import injector
from tests.campaign.cases import GROUP_TIMEOUT, LIMIT, USER_PORT
from tests.campaign.jobs import KINDS, Job, Section


def train(
    folder: Path,
    steps: int,
    kind: str,
    note: Callable[[int], object],
    section: Section,
    group: dict[str, Any] | None = None,
) -> None:
    """Train from the last checkpoint to the end, and leave what the parameters are then.

    group: what the default process group is made of, besides the environment."""
    initial_rank = int(os.environ.get("INITIAL_RANK", os.environ["RANK"]))
    timeout = timedelta(seconds=float(os.environ.get(GROUP_TIMEOUT, "300")))
    dist.init_process_group("gloo", timeout=timeout, **(group or {}))
    job: Job = KINDS[kind](folder, initial_rank, section)
    injector.strike_in(folder, initial_rank, "load")
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
    _strike_in_process(folder, int(os.environ["RANK"]))
    if mode == "plain":
        train(folder, steps, kind, lambda step: None, _no_section)
        return
    if mode in PEERS:
        PEERS[mode](folder, steps, kind)
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

    hooks = _hooks(folder) if injector.handler_of(folder) else {}

    @Wrapper(soft_timeout=timedelta(seconds=limit), hard_timeout=timedelta(seconds=2 * limit), **hooks)
    def wrapped(call: CallWrapper | None = None) -> None:
        train(folder, steps, kind, note, resilience.section)

    wrapped()


def _strike_in_process(folder: Path, rank: int) -> None:
    """Break this rank when its next process starts, or while it is told to stop, if its truth says so."""
    injector.strike_in(folder, rank, "start")
    if injector.handler_of(folder) != "stop":
        return

    def stop(number: int, frame: object) -> None:
        injector.strike_in(folder, rank, "stop")
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    signal.signal(signal.SIGTERM, stop)


def _hooks(folder: Path) -> dict[str, Any]:
    """Return hooks of the Wrapper in which this rank may break."""
    from resilience import inprocess

    rank = int(os.environ["INITIAL_RANK"])

    class Abort(inprocess.abort.Abort):
        def __call__(self, state: Any) -> Any:
            injector.strike_in(folder, rank, "abort")
            return state

    class Initialize(inprocess.initialize.Initialize):
        def __call__(self, state: Any) -> Any:
            injector.strike_in(folder, rank, "initialize")
            return state

    class Finalize(inprocess.finalize.Finalize):
        def __call__(self, state: Any, exc: Exception | None = None) -> Any:
            injector.strike_in(folder, rank, "finalize")
            return state, exc

    class HealthCheck(inprocess.health_check.HealthCheck):
        def __call__(self, state: Any, exc: Exception | None = None) -> Any:
            injector.strike_in(folder, rank, "health_check")
            return state, exc

    abort = inprocess.Compose(Abort(), inprocess.abort.AbortTorchDistributed())
    return {"abort": abort, "initialize": Initialize(), "finalize": Finalize(), "health_check": HealthCheck()}


def _peer_wrapper(folder: Path, steps: int, kind: str) -> None:
    """As in its examples: the groups have a store of their own, with a prefix for each iteration."""
    inprocess: Any = importlib.import_module("nvidia_resiliency_ext.inprocess")
    limit = float(os.environ[LIMIT])
    address, port = os.environ["MASTER_ADDR"], int(os.environ[USER_PORT])
    is_master = os.environ["RANK"] == "0"
    base = dist.TCPStore(
        address, port, int(os.environ["WORLD_SIZE"]), is_master, multi_tenant=True, wait_for_workers=True
    )

    def wrapped(call: Any = None) -> None:
        size, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
        store = dist.PrefixStore(str(call.iteration), base)
        group = {"store": store, "rank": rank, "world_size": size}
        train(folder, steps, kind, lambda step: call.ping(), _no_section, group)

    wrapped.__annotations__["call"] = inprocess.CallWrapper
    inprocess.Wrapper(soft_timeout=timedelta(seconds=limit), hard_timeout=timedelta(seconds=2 * limit))(wrapped)()


def _peer_launcher(folder: Path, steps: int, kind: str) -> None:
    client = importlib.import_module("nvidia_resiliency_ext.fault_tolerance").RankMonitorClient()
    client.init_workload_monitoring()
    train(folder, steps, kind, lambda step: client.send_heartbeat(), _no_section)
    client.shutdown_workload_monitoring()


def _no_section(name: str) -> AbstractContextManager[object]:
    return contextlib.nullcontext()


PEERS = {"peer-wrapper": _peer_wrapper, "peer-launcher": _peer_launcher}


if __name__ == "__main__":
    main()
