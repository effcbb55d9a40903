"""What the ranks of the tests of asynchronous checkpoints run: a fault while a checkpoint is being written."""

from __future__ import annotations

import os
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemWriter, async_save
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from resilience.inprocess import CallWrapper, Compose, Wrapper
from resilience.inprocess.abort import AbortCheckpointWriters, AbortTorchDistributed

LIMIT = 500.0  # seconds; the process that writes imports torch anew, which takes minutes on a busy machine
TIMEOUTS = {"soft_timeout": timedelta(minutes=10), "hard_timeout": timedelta(minutes=15)}


class SlowWriter(FileSystemWriter):  # type: ignore[misc]
    """Writes for `seconds`; the file `writing-<rank>` says that it has begun."""

    def __init__(self, path: str, seconds: float) -> None:
        super().__init__(path)
        self._seconds = seconds

    def write_data(self, plan: Any, planner: Any) -> Any:
        Path(f"writing-{os.environ['RANK']}").touch()
        time.sleep(self._seconds)
        return super().write_data(plan, planner)


def fail_while_a_checkpoint_is_written(kind: str, seconds: float) -> dict[str, Any]:
    """Rank 1 fails while both ranks write a checkpoint that takes `seconds`; then both write another one.

    Returns which checkpoints are complete, and which threads still wrote when the second iteration began."""
    initial_rank = os.environ["RANK"]
    writing: list[str] = []

    @Wrapper(
        abort=Compose(AbortCheckpointWriters(), AbortTorchDistributed()),
        barrier_timeout=timedelta(minutes=20),
        **TIMEOUTS,
    )
    def function(call: CallWrapper | None = None) -> bool:
        assert call is not None
        dist.init_process_group("gloo")
        state = {"weights": torch.full((4,), float(call.iteration))}
        path = str(Path(f"checkpoint-{call.iteration}").absolute())
        if call.iteration == 0:
            async_save(
                state, storage_writer=SlowWriter(path, seconds), async_checkpointer_type=AsyncCheckpointerType[kind]
            )
            while not all(Path(f"writing-{rank}").exists() for rank in range(2)):
                time.sleep(0.01)
            if initial_rank == "1":
                raise ValueError("broken, by schedule")
            dist.barrier()
            dist.barrier()
        writing.extend(thread.name for thread in threading.enumerate() if thread.name.startswith("AsyncCheckpoint"))
        saved = async_save(state, checkpoint_id=path, async_checkpointer_type=AsyncCheckpointerType[kind])
        saved.result(LIMIT)
        dist.barrier()
        dist.destroy_process_group()
        return True

    assert function()
    return {
        "complete": [Path(f"checkpoint-{number}", ".metadata").exists() for number in range(2)],
        "writing": writing,
    }
