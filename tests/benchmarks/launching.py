"""How long until a crashed worker's job computes again?  The same script under three launchers, taking turns.

From just before a worker kills itself until the last of the new workers has done its first all_reduce, or its first
optimizer step of a DistributedDataParallel model. torchrun is run with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, without
which torch 2.13 mostly fails to restart gloo."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Literal

Launcher = Literal["resilience run", "resilience run --cold", "torchrun", "ft_launcher"]
LAUNCHERS: tuple[Launcher, ...] = ("resilience run", "resilience run --cold", "torchrun", "ft_launcher")
Work = Literal["all_reduce", "ddp step"]
LIMIT = 180.0  # seconds for a job
ALL_REDUCE = """
value = torch.ones(1)
def work():
    dist.all_reduce(value)
"""
DDP_STEP = """
layers = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1))
model = torch.nn.parallel.DistributedDataParallel(layers)
optimizer = torch.optim.AdamW(model.parameters())
def work():
    optimizer.zero_grad()
    model(torch.randn(32, 256)).square().mean().backward()
    optimizer.step()
"""
SCRIPT = """
import json, os, signal, sys, time
import torch, torch.distributed as dist
crashes, told = int(sys.argv[1]), open(sys.argv[2], "ab", buffering=0)
restart, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"])
dist.init_process_group("gloo")
WORK
work()
told.write(json.dumps(["worked", restart, rank, time.monotonic()]).encode() + b"\\n")
if restart == 0:
    time.sleep(TRAINS)
for _ in range(3):
    work()
if restart < crashes:
    if rank == 1:
        told.write(json.dumps(["crash", restart, rank, time.monotonic()]).encode() + b"\\n")
        os.kill(os.getpid(), signal.SIGKILL)
    work()
dist.destroy_process_group()
"""


def measure(launcher: Launcher, workers: int, crashes: int, folder: Path, work: Work = "all_reduce") -> list[float]:
    """Return the seconds of each restart of one job. Raises: RuntimeError if it did not complete."""
    folder.mkdir(parents=True)
    script, told = folder / "train.py", folder / "told"
    body, trains = (ALL_REDUCE, 0) if work == "all_reduce" else (DDP_STEP, 8)
    script.write_text(SCRIPT.replace("WORK", body).replace("TRAINS", str(trains)))
    common = [f"--nproc-per-node={workers}", f"--max-restarts={crashes + 1}", str(script), str(crashes), str(told)]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        "RESILIENCE_RUN_DIR": str(folder / "runs"),
    }
    command = {
        "resilience run": ["-m", "resilience.launcher", "--same-failure-limit=0"],
        "resilience run --cold": [
            "-m",
            "resilience.launcher",
            "--same-failure-limit=0",
            "--cold",
        ],
        "torchrun": ["-m", "torch.distributed.run", "--standalone"],
        "ft_launcher": ["-m", "nvidia_resiliency_ext.fault_tolerance.launcher", "--standalone"],
    }[launcher]
    with (folder / "output").open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, *command, *common], env=environment, stdout=output, stderr=output, start_new_session=True
        )
        try:
            status = process.wait(LIMIT)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            process.wait()
            raise RuntimeError(f"{launcher} had not finished after {LIMIT:g} s") from None
    if status:
        tail = (folder / "output").read_text(errors="replace")[-500:]
        raise RuntimeError(f"{launcher} ended with {status}: {tail}")
    events = [json.loads(line) for line in told.read_text().splitlines()]
    seconds = []
    for restart in range(crashes):
        (crashed,) = [at for what, number, _, at in events if what == "crash" and number == restart]
        worked = [at for what, number, _, at in events if what == "worked" and number == restart + 1]
        if len(worked) != workers:
            raise RuntimeError(f"{launcher}: {len(worked)} of {workers} workers came back after crash {restart}")
        seconds.append(max(worked) - crashed)
    return seconds
