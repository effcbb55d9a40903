"""torchft: every rank is a replica group of one process, and this adapter starts those again that end.

    python -m tests.campaign.replicas FOLDER STEPS --nproc-per-node=N --join-timeout-ms=MS

The lighthouse runs in here, with the settings of torchft's README. A replica that joins late gets the parameters from
another one, so there are no checkpoints. When a replica has done all steps, the others get some more seconds."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.campaign import injector
from tests.campaign.jobs import WIDTH, batch, digest

MOST_STARTS = 4  # as many as the launchers of the campaign have
LAST_S = 5.0


def main() -> int:
    parser = argparse.ArgumentParser("python -m tests.campaign.replicas")
    parser.add_argument("folder", type=Path)
    parser.add_argument("steps", type=int)
    parser.add_argument("--nproc-per-node", type=int, default=0)
    parser.add_argument("--join-timeout-ms", type=int, default=10_000)
    options = parser.parse_args()
    if "REPLICA_GROUP_ID" in os.environ:
        _replica(options.folder, options.steps, int(os.environ["REPLICA_GROUP_ID"]))
        return 0
    coordination: Any = importlib.import_module("torchft.coordination")
    lighthouse = coordination.LighthouseServer(
        bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=options.join_timeout_ms, quorum_tick_ms=100
    )
    variables = {**os.environ, "TORCHFT_LIGHTHOUSE": lighthouse.address()}
    is_complete = _supervise(options.nproc_per_node, variables)
    lighthouse.shutdown()
    return int(not is_complete)


def _supervise(count: int, variables: dict[str, str]) -> bool:
    """Run the replicas to the end, and start each that fails again. Return True if one has done all steps."""

    def start(rank: int) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "tests.campaign.replicas", *sys.argv[1:]]
        return subprocess.Popen(command, env={**variables, "REPLICA_GROUP_ID": str(rank)})

    running, starts = {rank: start(rank) for rank in range(count)}, dict.fromkeys(range(count), 1)
    until, is_complete = float("inf"), False
    while running and time.monotonic() < until:
        time.sleep(0.1)
        for rank, process in list(running.items()):
            status = process.poll()
            if status is None:
                continue
            del running[rank]
            if status == 0:
                is_complete, until = True, min(until, time.monotonic() + LAST_S)
            elif not is_complete and starts[rank] < MOST_STARTS:
                starts[rank] += 1
                running[rank] = start(rank)
    for process in running.values():
        process.kill()
        process.wait()
    return is_complete


def _replica(folder: Path, steps: int, rank: int) -> None:
    """As in torchft's example of DDP."""
    torchft: Any = importlib.import_module("torchft")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    torch.manual_seed(0)
    layers = torch.nn.Sequential(torch.nn.Linear(WIDTH, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1)).double()
    inner = torch.optim.SGD(layers.parameters(), lr=0.01)

    def load(state: dict[str, Any]) -> None:
        layers.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=timedelta(seconds=int(os.environ.get("TORCHFT_TIMEOUT_SEC", "60")))),
        load_state_dict=load,
        state_dict=lambda: {"model": layers.state_dict(), "optimizer": inner.state_dict()},
        min_replica_size=1,
        replica_id=f"replica_{rank}",
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
    )
    model = torchft.DistributedDataParallel(manager, layers)
    optimizer = torchft.Optimizer(manager, inner)
    entry = f"{os.getpid()}"
    while (step := manager.current_step()) < steps:
        with (folder / "steps.jsonl").open("a") as file:
            file.write(json.dumps([time.time_ns(), rank, step, entry]) + "\n")
        injector.strike(folder, rank, step)
        optimizer.zero_grad()
        model(batch(step)).square().mean().backward()
        for parameter in layers.parameters():  # as in the other jobs
            assert parameter.grad is not None
            parameter.grad.copy_(parameter.grad.float())
        injector.strike(folder, rank, step, "save")
        optimizer.step()
    path = folder / f"result-{rank}"
    path.write_text(digest(layers.state_dict().values()))
    path.rename(folder / "result")
    manager.shutdown(wait=False)


if __name__ == "__main__":
    sys.exit(main())
