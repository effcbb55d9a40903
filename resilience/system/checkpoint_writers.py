"""How are checkpoints ended that torch.distributed.checkpoint still writes in the background?

`async_save` writes in a thread of this process, or in a separate process that is kept for the next checkpoint. That
process holds a gloo group with those of the other ranks, which no longer fits once a rank is gone. So the process is
ended, and the next `async_save` starts a new one. A thread cannot be ended; this module waits for it. Imports no torch
by itself: if torch.distributed.checkpoint was never imported, there is nothing to end."""

from __future__ import annotations

import sys
import threading
import time
from typing import Any

_PROCESS_EXECUTOR = "torch.distributed.checkpoint._async_process_executor"
_THREAD = "AsyncCheckpointExecutor"  # prefix of the names that torch gives to the threads of async_save
TERMINATE_LIMIT = 1.0  # seconds between SIGTERM and SIGKILL for the background process


def end_process() -> None:
    """End the background process of async_save, if any. Its unfinished checkpoint stays without `.metadata`."""
    executor = sys.modules.get(_PROCESS_EXECUTOR)
    writer = getattr(executor, "_CHECKPOINT_PROCESS", None)
    if writer is None:
        return
    executor._CHECKPOINT_PROCESS = None  # type: ignore[union-attr]  # the next async_save starts another one
    process: Any = writer._save_process
    process.terminate()
    process.join(TERMINATE_LIMIT)
    if process.is_alive():
        process.kill()
        process.join(TERMINATE_LIMIT)


def await_threads(limit: float) -> int:
    """Wait at most `limit` seconds for the threads of async_save. Return how many still write."""
    deadline = time.monotonic() + limit
    writers = [thread for thread in threading.enumerate() if thread.name.startswith(_THREAD)]
    for thread in writers:
        thread.join(max(0.0, deadline - time.monotonic()))
    return sum(thread.is_alive() for thread in writers)
