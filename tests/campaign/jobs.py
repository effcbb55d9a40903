"""The kinds of training that the campaign breaks: what one step, a checkpoint and the result are for each.

All give the same parameters for any number of ranks, bit for bit, so a job that goes on with fewer ranks can be
compared with an undisturbed one. There is nothing of the package in here."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from tests.campaign import injector

WIDTH, BATCH = 16, 8
LAYERS = 8  # of the pipeline: a stage for each of 8 ranks
Section = Callable[[str], AbstractContextManager[object]]
_kept: list[Module] = []
"""torch 2.13 deadlocks if DDP's reducer is freed, under the GIL, while gloo's thread lets go of the last collective."""


class Job(Protocol):
    """A training: load the last checkpoint, do a step, save one, and say what the parameters are."""

    def load(self) -> int: ...

    def advance(self, step: int) -> None: ...

    def save(self, step: int) -> None: ...

    def digest(self) -> str:
        """Return a hash of all parameters, on rank 0. Collective."""
        ...


class Replicated:
    """DDP; rank 0 saves."""

    def __init__(self, folder: Path, rank: int, section: Section) -> None:
        self.folder, self.rank, self.section = folder, rank, section
        torch.manual_seed(0)
        layers = torch.nn.Sequential(torch.nn.Linear(WIDTH, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1)).double()
        self.model = self._spread(layers)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)

    def _spread(self, layers: Module) -> Module:
        model = DistributedDataParallel(layers)
        _kept.append(model)
        return model

    def batch(self, step: int) -> Tensor:
        return batch(step)

    def advance(self, step: int) -> None:
        loss = self.model(self.batch(step)).square().mean()
        loss.backward()
        for parameter in self.model.parameters():  # the mean over any number of ranks is the same then, bit for bit
            assert parameter.grad is not None
            gradient = _local(parameter.grad)
            gradient.copy_(gradient.float())
        self.optimizer.step()
        self.optimizer.zero_grad()
        dist.all_reduce(loss.detach())

    def save(self, step: int) -> None:
        state = self._state()
        if dist.get_rank() == 0:
            path = self.folder / "checkpoint.new"
            torch.save({"step": step, "model": state}, path)
            path.rename(self.folder / "checkpoint")

    def load(self) -> int:
        path = self.folder / "checkpoint"
        if not path.exists():
            return 0
        state = torch.load(path)
        self._set_state(state["model"])
        return int(state["step"])

    def digest(self) -> str:
        return digest(self._state().values())

    def _state(self) -> dict[str, Tensor]:
        return self.model.state_dict()

    def _set_state(self, state: dict[str, Tensor]) -> None:
        self.model.load_state_dict(state)


class Sharded(Replicated):
    """FSDP2; the checkpoint is gathered on rank 0."""

    def _spread(self, layers: Module) -> Module:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in layers.children():
            if list(layer.parameters()):
                fully_shard(layer, mesh=mesh)
        fully_shard(layers, mesh=mesh)
        return layers

    def _state(self) -> dict[str, Tensor]:
        return {name: value.full_tensor() for name, value in self.model.state_dict().items()}

    def _set_state(self, state: dict[str, Tensor]) -> None:
        from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

        set_model_state_dict(self.model, state, options=StateDictOptions(full_state_dict=True))


class Batches(Dataset[Tensor]):
    """The batches of the steps that are left, made by another process."""

    def __init__(self, folder: Path, rank: int, begin: int) -> None:
        self.folder, self.rank, self.begin = folder, rank, begin

    def __len__(self) -> int:
        return 10_000

    def __getitem__(self, index: int) -> Tensor:
        injector.strike(self.folder, self.rank, self.begin + index, "loader")
        return batch(self.begin + index)


class Loading(Replicated):
    """DDP with a DataLoader that has a worker process."""

    def load(self) -> int:
        begin = super().load()
        data = Batches(self.folder, self.rank, begin)
        self._loaded: Iterator[Tensor] = iter(DataLoader(data, batch_size=None, num_workers=1, prefetch_factor=1))
        return begin

    def batch(self, step: int) -> Tensor:
        with self.section("data"):
            return next(self._loaded)


class Asynchronous(Replicated):
    """DDP; all ranks save a distributed checkpoint while they go on."""

    def __init__(self, folder: Path, rank: int, section: Section) -> None:
        super().__init__(folder, rank, section)
        self._group = dist.new_group()
        name = [f"{time.time_ns()}"]
        dist.broadcast_object_list(name, src=0)
        self._name = name[0]
        self._saving: Any = None

    def load(self) -> int:
        import torch.distributed.checkpoint as dcp

        complete = sorted(self.folder.glob("saved/*/.metadata"))
        choice = [str(complete[-1].parent) if complete else ""]
        dist.broadcast_object_list(choice, src=0)
        if not choice[0]:
            return 0
        state = self._whole(0)
        dcp.load(state, checkpoint_id=choice[0])
        self.model.load_state_dict(state["model"])
        return int(state["step"])

    def save(self, step: int) -> None:
        import torch.distributed.checkpoint as dcp

        self._finish()
        path = self.folder / "saved" / f"{step:04}-{self._name}"
        self._saving = dcp.async_save(self._whole(step), checkpoint_id=str(path), process_group=self._group)

    def digest(self) -> str:
        self._finish()
        return super().digest()

    def _whole(self, step: int) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "step": step}

    def _finish(self) -> None:
        if self._saving is not None:
            self._saving.result()


class Pipeline:
    """Each rank has some layers in a row; activations and gradients go from rank to rank."""

    def __init__(self, folder: Path, rank: int, section: Section) -> None:
        self.folder = folder
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.mine = range(LAYERS * self.rank // self.size, LAYERS * (self.rank + 1) // self.size)
        self.layers = torch.nn.ModuleList()
        for number in self.mine:
            torch.manual_seed(number)
            self.layers.append(torch.nn.Linear(WIDTH, WIDTH).double())
        self.optimizer = torch.optim.SGD(self.layers.parameters(), lr=0.01)

    def advance(self, step: int) -> None:
        is_first, is_last = self.rank == 0, self.rank == self.size - 1
        values = batch(step)
        if not is_first:
            dist.recv(values, self.rank - 1)
            values.requires_grad_()
        out = values
        for layer in self.layers:
            out = torch.tanh(layer(out))
        if is_last:
            out.square().mean().backward()
        else:
            dist.send(out.detach(), self.rank + 1)
            gradient = torch.empty_like(out)
            dist.recv(gradient, self.rank + 1)
            out.backward(gradient)
        if not is_first:
            assert values.grad is not None
            dist.send(values.grad, self.rank - 1)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def save(self, step: int) -> None:
        for number, layer in zip(self.mine, self.layers, strict=True):
            path = self.folder / f"layer-{step}-{number}"
            torch.save(layer.state_dict(), path.with_suffix(".new"))
            path.with_suffix(".new").rename(path)
        dist.barrier()
        if self.rank == 0:
            (self.folder / "complete.new").write_text(str(step))
            (self.folder / "complete.new").rename(self.folder / "complete")

    def load(self) -> int:
        begin = self._complete()
        dist.barrier()  # nobody writes before all have read
        if begin:
            for number, layer in zip(self.mine, self.layers, strict=True):
                layer.load_state_dict(torch.load(self.folder / f"layer-{begin}-{number}"))
        return begin

    def digest(self) -> str:
        step = self._complete()
        states = (torch.load(self.folder / f"layer-{step}-{number}") for number in range(LAYERS))
        return digest(value for state in states for value in state.values())

    def _complete(self) -> int:
        path = self.folder / "complete"
        return int(path.read_text()) if path.exists() else 0


KINDS: dict[str, type[Replicated] | type[Pipeline]] = {
    "ddp": Replicated,
    "fsdp2": Sharded,
    "loader": Loading,
    "async": Asynchronous,
    "pipeline": Pipeline,
}


def batch(step: int) -> Tensor:
    """Return the batch of a step: the same on every rank, so the result does not depend on how many there are."""
    return torch.randn(BATCH, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(step))


def digest(values: Iterable[Tensor]) -> str:
    """Return a hash of tensors, bit for bit."""
    return hashlib.sha256(b"".join(value.detach().numpy().tobytes() for value in values)).hexdigest()


def _local(value: Tensor) -> Tensor:
    return value.to_local() if hasattr(value, "to_local") else value
