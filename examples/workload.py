"""The model and data of the example scripts, kept apart so that each script shows only its start and its restart.

A next-word model on the sources of Python's standard library, and the options that all scripts share.
Nothing here concerns restarts except the checkpoint, which any long job needs, and the fault of `--fault`."""

from __future__ import annotations

import argparse
import os
import re
import signal
import sys
import sysconfig
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

CONTEXT, BATCH, WORDS = 8, 64, 4096


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--checkpoints", type=Path, default=Path("checkpoints"), help="folder, shared by all ranks")
    parser.add_argument("--fault", help="KIND@STEP:RANK, KIND one of exception, kill, hang; happens once")
    return parser.parse_args()


class Words:
    """Every word of the standard library's sources as a number; takes a moment, like most data sets."""

    def __init__(self) -> None:
        files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        words = re.findall(r"\w+|[^\w\s]", "".join(file.read_text(errors="ignore") for file in files))
        numbers = {word: number for number, (word, _) in enumerate(Counter(words).most_common(WORDS - 1))}
        self.numbers = torch.tensor([numbers.get(word, WORDS - 1) for word in words])

    def batch(self, step: int, rank: int) -> tuple[Tensor, Tensor]:
        """Return the same batch for the same step and rank, on every call."""
        generator = torch.Generator().manual_seed(step * 1000 + rank)
        starts = torch.randint(len(self.numbers) - CONTEXT - 1, (BATCH, 1), generator=generator)
        words = self.numbers[starts + torch.arange(CONTEXT + 1)]
        return words[:, :-1], words[:, -1]


def build_model() -> nn.Module:
    torch.manual_seed(0)
    width = 64
    return nn.Sequential(
        nn.Embedding(WORDS, width),
        nn.Flatten(),
        nn.Linear(CONTEXT * width, 256),
        nn.GELU(),
        nn.Linear(256, WORDS),
    )


def save(folder: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Write the state before `step`; a reader finds the old or the new file, never a partial one."""
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = folder / "unfinished"
    with unfinished.open("wb") as file:
        torch.save({"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(folder / "newest")


def load(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Load the newest state into both; return the next step, 0 without a checkpoint."""
    if not (folder / "newest").exists():
        return 0
    state: dict[str, Any] = torch.load(folder / "newest", weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return int(state["step"])


def say(line: str) -> None:
    """Print a line in one piece, since all ranks write to the same place."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def maybe_fail(arguments: argparse.Namespace, step: int, rank: int) -> None:
    """Carry out the fault of `--fault`, the first time that its step and rank are reached."""
    if arguments.fault is None:
        return
    kind, _, place = arguments.fault.partition("@")
    if place != f"{step}:{rank}":
        return
    try:
        (arguments.checkpoints / "fault-happened").touch(exist_ok=False)
    except FileExistsError:
        return
    say(f"fault: {kind} at step {step} on rank {rank}")
    if kind == "exception":
        raise ValueError(f"planned fault at step {step}")
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    threading.Event().wait()
