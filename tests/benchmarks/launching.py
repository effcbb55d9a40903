"""How long until a crashed worker's job computes again, and how long do workers outlive their launcher?  The same
script under several launchers, taking turns.

From just before a worker kills itself until the last of the new workers has done its first all_reduce, or its first
optimizer step of a DistributedDataParallel model. torchrun is run with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, without
which torch 2.13 mostly fails to restart gloo."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Literal

import psutil

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

DEAF = r"""
import os, signal, sys, time
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
with open(sys.argv[1], "ab", buffering=0) as told:
    told.write(f"{os.getpid()}\n".encode())
while True:
    time.sleep(60)
"""
ORPHANED = 10.0  # seconds after which a worker counts as left behind


def measure(launcher: Launcher, workers: int, crashes: int, folder: Path, work: Work = "all_reduce") -> list[float]:
    """Return the seconds of each restart of one job. Raises: RuntimeError if it did not complete."""
    folder.mkdir(parents=True)
    script, told = folder / "train.py", folder / "told"
    body, trains = (ALL_REDUCE, 0) if work == "all_reduce" else (DDP_STEP, 8)
    script.write_text(SCRIPT.replace("WORK", body).replace("TRAINS", str(trains)))
    options = [f"--nproc-per-node={workers}", f"--max-restarts={crashes + 1}", str(script), str(crashes), str(told)]
    process = _start(launcher, options, folder)
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


def _start(launcher: Launcher, options: list[str], folder: Path) -> subprocess.Popen[bytes]:
    """Start a launcher in a process group of its own; its output goes to a file in the folder."""
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
        return subprocess.Popen(
            [sys.executable, *command, *options], env=environment, stdout=output, stderr=output, start_new_session=True
        )


def seconds_orphaned(launcher: Launcher, workers: int, folder: Path) -> float:
    """Return the seconds from the SIGKILL of all processes of a launcher, at once, to the end of the last of its
    workers, which ignore signals; `math.inf` if one of them lives after ORPHANED. Raises: RuntimeError if the job did
    not start."""
    folder.mkdir(parents=True)
    script, told = folder / "deaf.py", folder / "told"
    script.write_text(DEAF)
    told.touch()
    process = _start(launcher, [f"--nproc-per-node={workers}", str(script), str(told)], folder)
    started = [psutil.Process(process.pid)]
    try:
        deadline = time.monotonic() + LIMIT
        while len(pids := told.read_text().split()) < workers:
            if time.monotonic() > deadline or process.poll() is not None:
                raise RuntimeError(f"{launcher} did not start its workers")
            time.sleep(0.05)
        started += started[0].children(recursive=True)
        deaf = [each for each in started if str(each.pid) in pids]
        ours = [each for each in started if each not in deaf]
        for each in ours:
            each.send_signal(signal.SIGSTOP)  # so that none acts on the death of another one
        began = time.monotonic()
        for each in ours:
            each.kill()
        alive = psutil.wait_procs(deaf, timeout=ORPHANED)[1]
        return math.inf if alive else time.monotonic() - began
    finally:
        for each in started:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        process.wait()
