"""The training function of the demonstration: a small data-parallel character transformer with checkpoints.

It may be restarted at any time: all state that survives a restart comes from the newest valid checkpoint. For a given
world size the result is bit for bit the same, whichever processes take part and however often they are interrupted:
the data of a step depend only on seed, step and active rank, each rank computes with one thread, and gloo sums in a
fixed order. Tests check this. Parameters, gradients and optimiser state are flat tensors: one collective per step, one
contiguous checkpoint. `demo.ranks` starts the ranks and injects faults, `demo.runs` checks the result."""

from __future__ import annotations

import ctypes
import hashlib
import math
import os
import sysconfig
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Protocol

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

import resilience
from resilience.errors import CorruptCheckpoint
from resilience.facts import encoding
from resilience.inprocess import CallWrapper

VOCABULARY = 128  # ASCII
CONTEXT = 64  # characters per sample
SAMPLES = 6  # per rank and step
WIDTH, HEADS, LAYERS = 96, 4, 3
LEARNING_RATE, WARMUP = 3e-3, 20
BETAS, EPSILON = (0.9, 0.98), 1e-8
CLIP = 1.0

# Long, plain modules that every supported Python has.
SOURCES = (
    "argparse.py", "ast.py", "configparser.py", "datetime.py", "difflib.py", "doctest.py", "inspect.py", "locale.py",
    "mailbox.py", "optparse.py", "pathlib.py", "pdb.py", "pickle.py", "random.py", "shutil.py", "ssl.py",
    "statistics.py", "subprocess.py", "tarfile.py", "textwrap.py", "threading.py", "turtle.py", "typing.py",
    "zipfile.py",
)  # fmt: skip


class Task(msgspec.Struct, frozen=True):
    """A training task. folder: checkpoint folder; every: steps between two checkpoints."""

    steps: int
    seed: int
    folder: str
    every: int = 10


class Trained(msgspec.Struct, frozen=True):
    """The result of one rank. digest: SHA-256 of parameters and optimiser state."""

    steps: int
    loss: float
    first_loss: float
    digest: str
    parameters: int


class Observer(Protocol):
    """Observes the training and may inject faults."""

    def begins(self, step: int, rank: int) -> None:
        """`rank` is about to load the data of `step`. May raise, hang or end the process."""

    def finished(self, step: int, rank: int, loss: float) -> None:
        """`rank` has completed `step`. loss: mean over all ranks, in nats per character."""


def load_text() -> Tensor:
    """Return the sources of the standard library as one tensor of ASCII codes, shape (n,), uint8.

    Raises: FileNotFoundError if this Python comes without its sources."""
    library = Path(sysconfig.get_path("stdlib"))
    texts = [(library / name).read_bytes() for name in SOURCES if (library / name).is_file()]
    text = bytes(byte for byte in b"".join(texts) if byte < VOCABULARY)
    if len(text) < 100 * CONTEXT:
        raise FileNotFoundError(f"{library} contains no standard library sources to train on")
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def train(task: Task, text: Tensor, observer: Observer, call_wrapper: CallWrapper | None = None) -> Trained:
    """Train from the newest checkpoint to the last step; return the result."""
    dist.init_process_group("gloo")  # with gloo's default timeout of 30 minutes
    rank, world = dist.get_rank(), dist.get_world_size()
    model, parameters, gradients = flat_model(task.seed)
    state = torch.stack([parameters, torch.zeros_like(parameters), torch.zeros_like(parameters)])
    _point(model, state[0])
    checkpoints = Checkpoints(Path(task.folder))
    step, loss, first_loss = checkpoints.load_into(state)
    _agree_on(step)
    while step < task.steps:
        resilience.step(step)
        with resilience.section("data"):
            observer.begins(step, rank)
            sample = _sample(text, task.seed, step, rank)
        with resilience.section("step"):
            gradients.zero_()
            local_loss = _loss(model, sample)
            local_loss.backward()  # type: ignore[no-untyped-call]
            loss = _average(gradients, local_loss, world)
            _update(state, gradients, step)
        first_loss = loss if step == 0 else first_loss
        observer.finished(step, rank, loss)
        step += 1
        if step % task.every == 0 or step == task.steps:
            with resilience.section("checkpoint"), _unbroken(call_wrapper):
                if rank == 0:
                    checkpoints.save(state, step, loss, first_loss)
    dist.barrier()  # no rank leaves before the last checkpoint is on disk
    dist.destroy_process_group()
    return Trained(step, loss, first_loss, hashlib.sha256(_bytes_of(state)).hexdigest(), parameters.numel())


def _unbroken(call_wrapper: CallWrapper | None) -> AbstractContextManager[None]:
    """Defer interruptions during a checkpoint. An interrupted checkpoint is harmless, but its work is lost."""
    return nullcontext() if call_wrapper is None else call_wrapper.atomic()


def _agree_on(step: int) -> None:
    """Check that all ranks loaded the same step. Raises: CorruptCheckpoint."""
    bounds = torch.tensor([step, -step])
    dist.all_reduce(bounds, dist.ReduceOp.MAX)
    if bounds[0] != -bounds[1]:
        raise CorruptCheckpoint(f"ranks loaded steps {-int(bounds[1])} to {int(bounds[0])}; they must be equal")


def _sample(corpus: Tensor, seed: int, step: int, rank: int) -> Tensor:
    """Return the characters that `rank` learns from in `step`, shape (SAMPLES, CONTEXT + 1)."""
    digest = hashlib.blake2b(f"{seed}/{step}/{rank}".encode(), digest_size=7).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "big"))
    starts = torch.randint(len(corpus) - CONTEXT - 1, (SAMPLES, 1), generator=generator)
    return corpus[starts + torch.arange(CONTEXT + 1)].long()


def _loss(model: nn.Module, sample: Tensor) -> Tensor:
    logits: Tensor = model(sample[:, :-1])
    return functional.cross_entropy(logits.flatten(0, 1), sample[:, 1:].flatten())


def _average(gradients: Tensor, loss: Tensor, world: int) -> float:
    """Average the gradients over all ranks in place and return the mean loss, with one collective."""
    combined = torch.cat([gradients, loss.detach().reshape(1)])
    dist.all_reduce(combined)
    combined /= world
    gradients.copy_(combined[:-1])
    return float(combined[-1])


def _update(state: Tensor, gradients: Tensor, step: int) -> None:
    """Do one step of Adam on flat tensors, with warm-up and a clipped gradient."""
    parameters, first, second = state
    norm = float(gradients.norm())
    if norm > CLIP:
        gradients.mul_(CLIP / norm)
    first.lerp_(gradients, 1 - BETAS[0])
    second.lerp_(gradients * gradients, 1 - BETAS[1])
    rate = LEARNING_RATE * min(1.0, (step + 1) / WARMUP)
    corrected = rate * math.sqrt(1 - BETAS[1] ** (step + 1)) / (1 - BETAS[0] ** (step + 1))
    with torch.no_grad():
        parameters.addcdiv_(first, second.sqrt().add_(EPSILON), value=-corrected)


# -- the model ----------------------------------------------------------------------------------


class Block(nn.Module):
    """Causal self-attention and a feed-forward layer, both residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.project = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.widen, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.attention(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(heads[0], heads[1], heads[2], is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).flatten(2))
        out: Tensor = x + self.narrow(functional.gelu(self.widen(self.norm2(x))))
        return out


class Transformer(nn.Module):
    """Predicts the next character from up to CONTEXT characters before it."""

    def __init__(self) -> None:
        super().__init__()
        self.characters, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, text: Tensor) -> Tensor:
        x = self.characters(text) + self.positions.weight[: text.shape[1]]
        logits: Tensor = self.head(self.norm(self.blocks(x)))
        return logits


def flat_model(seed: int) -> tuple[Transformer, Tensor, Tensor]:
    """Return a new model, its parameters as one flat tensor, and its gradients as another."""
    torch.set_num_threads(1)  # a fixed order of sums on any number of cores
    torch.manual_seed(seed)
    model = Transformer()
    parameters = nn.utils.parameters_to_vector(model.parameters()).detach()
    gradients = torch.zeros_like(parameters)
    for parameter, part in zip(model.parameters(), _split(model, gradients), strict=True):
        parameter.grad = part
    return model, parameters, gradients


def _point(model: nn.Module, parameters: Tensor) -> None:
    """Make the model's parameters views of `parameters`."""
    for parameter, part in zip(model.parameters(), _split(model, parameters), strict=True):
        parameter.data = part


def _split(model: nn.Module, flat: Tensor) -> list[Tensor]:
    parameters = list(model.parameters())
    flat_parts = torch.split(flat, [parameter.numel() for parameter in parameters])
    return [flat_part.view_as(parameter) for flat_part, parameter in zip(flat_parts, parameters, strict=True)]


# -- the checkpoint -----------------------------------------------------------------------------


class Checkpoints:
    """The two newest checkpoints in a folder. Each is one file: a line of JSON with step, losses, length and SHA-256,
    then the state. Files are written atomically. An invalid file is skipped in favour of the previous one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def save(self, state: Tensor, step: int, loss: float, first_loss: float) -> None:
        """Write the state after `step` steps. One writer at a time."""
        payload = _bytes_of(state)
        header = {
            "step": step,
            "loss": loss,
            "first_loss": first_loss,
            "length": len(payload),
            "sha256": hashlib.sha256(payload).hexdigest(),
        }
        for leftover in self.folder.glob("*.tmp"):  # left by a killed writer
            leftover.unlink()
        target = self.folder / f"step-{step:08d}.ckpt"
        unfinished = target.with_suffix(".tmp")
        with unfinished.open("wb") as file:
            file.write(encoding.to_json(header) + b"\n" + payload)
            file.flush()
            os.fsync(file.fileno())
        unfinished.rename(target)
        _sync(self.folder)
        for outdated in self._newest_first()[2:]:
            outdated.unlink()

    def load_into(self, state: Tensor) -> tuple[int, float, float]:
        """Fill `state` from the newest valid checkpoint; return its step and losses.

        Return (0, nan, nan) and leave `state` unchanged if there is none."""
        for path in self._newest_first():
            try:
                return _read_into(state, path)
            except CorruptCheckpoint as error:
                resilience.get_logger().warning("invalid checkpoint skipped", path=str(path), reason=str(error))
        return 0, math.nan, math.nan

    def _newest_first(self) -> list[Path]:
        return sorted(self.folder.glob("step-*.ckpt"), reverse=True)


def _read_into(state: Tensor, path: Path) -> tuple[int, float, float]:
    try:
        line, _, payload = path.read_bytes().partition(b"\n")
        header = encoding.from_json(line)
        step, length, digest = int(header["step"]), int(header["length"]), str(header["sha256"])
        losses = float(header["loss"]), float(header["first_loss"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CorruptCheckpoint(f"{path.name} has no readable header: {error}") from error
    if len(payload) != length or length != state.numel() * state.element_size():
        raise CorruptCheckpoint(f"{path.name} contains {len(payload)} bytes, its header says {length}")
    if hashlib.sha256(payload).hexdigest() != digest:
        raise CorruptCheckpoint(f"{path.name} does not match its SHA-256")
    state.view(-1).copy_(torch.frombuffer(bytearray(payload), dtype=state.dtype))
    return step, *losses


def _bytes_of(state: Tensor) -> bytes:
    return ctypes.string_at(state.data_ptr(), state.numel() * state.element_size())


def _sync(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
