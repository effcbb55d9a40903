"""What the ranks of a soak run: DDP behind FSDP2, sub-groups, data loaders and asynchronous checkpoints.

Each step is the same for all ranks, so at the end all have the same parameters. The function goes on until the plan
of the round is at an end, and then for a few steps more. It looks at its own process once in each iteration, when
everything is built and nothing changes any more."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import torch
import torch._dynamo.utils  # else DDP imports it, in whichever step a fault then strikes
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import resilience
from resilience.inprocess import CallWrapper, Wrapper
from resilience.inprocess.finalize import Finalize
from resilience.inprocess.health_check import HealthCheck
from resilience.inprocess.initialize import Initialize
from resilience.inprocess.state import State
from tests.soak.plan import from_json
from tests.soak.striking import Striker
from tests.support import memory, threads

OPTIONS = {  # seconds
    "soft_timeout": 10.0,
    "hard_timeout": 25.0,
    "termination_grace_time": 1.0,
    "heartbeat_timeout": 30.0,
}
STEPS_AFTER = 10
CHECKPOINT_EVERY = 10
BATCHES = 12  # of one pass through the data
STEP_PAUSE = 0.02  # seconds: a step that is all communication would leave no time outside it
CALM = 0.3  # seconds without a change of threads and descriptors
CALM_LIMIT = 5.0


class Hook(Initialize, Finalize, HealthCheck):
    """A hook in which the plan may strike."""

    def __init__(self, name: str, striker: Striker) -> None:
        self._name = name
        self._striker = striker

    def __call__(self, state: State, *exc: Any) -> Any:
        self._striker.in_hook(self._name)
        return (state, *exc) if exc else state


def train(faults: list[dict[str, Any]], workers: int) -> dict[str, Any]:
    """Train until all faults have struck. Returns the parameters' sum, and what each iteration's look showed."""
    torch.manual_seed(0)
    rank, folder = int(os.environ["RANK"]), Path.cwd()
    striker = Striker(from_json(faults), rank, folder)
    looks: list[dict[str, Any]] = []
    hooks: dict[str, Any] = {name: Hook(name, striker) for name in ("initialize", "finalize", "health_check")}

    @Wrapper(**hooks, **{name: timedelta(seconds=value) for name, value in OPTIONS.items()})
    def function(call: CallWrapper | None = None) -> float:
        assert call is not None
        striker.entered()
        try:
            with resilience.section("build"):
                dist.init_process_group("gloo", timeout=timedelta(minutes=30))
                training = Training(folder, call.iteration, rank, workers)
            looks.append(training.look(call.iteration))
            return training.run(striker)
        finally:
            striker.left()

    striker.function = function.__wrapped__.__code__  # type: ignore[attr-defined]
    return {"sum": function(), "looks": looks}


class Training:
    """The groups, models and data of one iteration.

    is_warm: this process has saved a checkpoint, so it has done everything once that it will do again."""

    is_warm = False

    def __init__(self, folder: Path, iteration: int, rank: int, workers: int) -> None:
        self._folder = folder / "checkpoints"
        self._name = f"{iteration:04}"
        size = dist.get_world_size()
        members = [torch.zeros(1, dtype=torch.int64) for _ in range(size)]
        dist.all_gather(members, torch.tensor([rank]))
        self.members = {int(member) for member in members}
        self._halves = [dist.new_group(list(range(first, size, 2))) for first in range(min(2, size))]
        self._half = self._halves[dist.get_rank() % len(self._halves)]
        self._checkpoint_group = dist.new_group()
        mesh = init_device_mesh("cpu", (size,))
        torch.manual_seed(0)
        self.sharded = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 16))
        for layer in (self.sharded[0], self.sharded[2], self.sharded):
            fully_shard(layer, mesh=mesh)
        self.head = DistributedDataParallel(torch.nn.Linear(16, 1))
        self.sharded_optimizer = torch.optim.SGD(self.sharded.parameters(), lr=1e-3, momentum=0.9)
        self.head_optimizer = torch.optim.SGD(self.head.parameters(), lr=1e-3)
        self._data = DataLoader(TensorDataset(torch.ones(4 * BATCHES, 64)), batch_size=4, num_workers=workers)
        self._saving: Any = None
        self.step = 0
        self._load()

    def run(self, striker: Striker) -> float:
        """Train until the plan is at an end, and some steps more. Returns the parameters' sum."""
        left = STEPS_AFTER
        while left > 0:
            for (batch,) in self._data:
                self._train(batch)
                if dist.get_rank() == 0:
                    striker.skip_if_gone(self.members)
                done = torch.tensor([striker.position() == len(striker.faults)], dtype=torch.int32)
                dist.all_reduce(done, dist.ReduceOp.MIN)
                left -= int(done)
                if left <= 0:
                    break
        if self._saving is not None:
            self._saving.result()
        total = sum(parameter.full_tensor().sum() for parameter in self.sharded.parameters())
        total += sum(parameter.sum() for parameter in self.head.parameters())
        dist.destroy_process_group()
        return float(total)

    def _train(self, batch: torch.Tensor) -> None:
        resilience.step(self.step)
        self.head(self.sharded(batch)).square().mean().backward()
        for optimizer in (self.sharded_optimizer, self.head_optimizer):
            optimizer.step()
            optimizer.zero_grad()
        for group in (self._half, None):
            dist.all_reduce(torch.ones(64), group=group)
        self.step += 1
        if self.step % CHECKPOINT_EVERY == 0:
            with resilience.section("checkpoint"):
                self._save()
        time.sleep(STEP_PAUSE)

    # -- checkpoints ------------------------------------------------------------------------------

    def _state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.sharded, self.sharded_optimizer)
        return {"model": model, "optimizer": optimizer, "head": self.head.module.state_dict(), "step": self.step}

    def _save(self) -> None:
        if self._saving is not None:
            self._saving.result()
        path = self._folder / f"{self._name}-{self.step:06}"
        self._saving = dcp.async_save(self._state(), checkpoint_id=str(path), process_group=self._checkpoint_group)
        Training.is_warm = True

    def _load(self) -> None:
        """Load the last checkpoint that is complete, the same one on all ranks."""
        complete = sorted(self._folder.glob("*/.metadata"))
        choice = [str(complete[-1].parent) if complete else ""]
        dist.broadcast_object_list(choice, src=0)
        if not choice[0]:
            return
        state = self._state()
        dcp.load(state, checkpoint_id=choice[0])
        set_state_dict(
            self.sharded,
            self.sharded_optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        self.head.module.load_state_dict(state["head"])
        self.step = state["step"]

    # -- leaks ------------------------------------------------------------------------------------

    def look(self, iteration: int) -> dict[str, Any]:
        """Return what this process holds, once it has held the same for a moment."""
        process = psutil.Process()
        began = calm_since = time.monotonic()
        held = (process.num_fds(), threads.count())
        while time.monotonic() - calm_since < CALM and time.monotonic() - began < CALM_LIMIT:
            time.sleep(0.02)
            now = (process.num_fds(), threads.count())
            if now != held:
                held, calm_since = now, time.monotonic()
        return {
            "iteration": iteration,
            "world": dist.get_world_size(),
            "is_warm": Training.is_warm,
            "descriptors": held[0],
            "threads": held[1],
            "processes": len(process.children(recursive=True)),
            "anonymous_kib": memory.anonymous_kib(),
        }
