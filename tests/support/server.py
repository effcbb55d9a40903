"""The test session's end of the fork server: ask for a rank, learn how it ended."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from resilience.launcher.worker.zygote import PRELOADED

ROOT = Path(__file__).resolve().parents[2]
END_LIMIT = 240.0  # seconds for it to end
START_LIMIT = 240.0  # seconds to import torch on a busy machine
# The first DistributedDataParallel, FSDP or fully_shard imports these, and the first backward pass: 800 modules, 1.2 s.
DDP_AND_FSDP = ("torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor", "torch.profiler")
LAUNCHER = ("resilience.launcher.main", "resilience.launcher.cycle_supervisor", *PRELOADED, "tests.process.launching")


class ForkServer:
    """The preloaded process, one a test session."""

    def __init__(self, preload: Sequence[str] = ()) -> None:
        """preload: modules that every rank will have imported already."""
        env = dict(os.environ, OPENBLAS_NUM_THREADS="1", OMP_NUM_THREADS="1", PYTHONPATH=str(ROOT))
        # gloo looks the host's own name up, which takes 5 s now and then where reverse DNS does not answer.
        env["GLOO_SOCKET_IFNAME"] = "lo"
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.forkserver", *preload],
            cwd=ROOT,
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._buffer = b""
        self._started: dict[str, int] = {}  # key -> pid
        self.ended: dict[int, int] = {}  # pid -> wait status
        self._read_until(lambda message: "ready" in message, START_LIMIT)

    @property
    def pid(self) -> int:
        return self._process.pid

    def start(self, key: str, folder: Path, target: str, kwargs: dict[str, Any], env: dict[str, str]) -> int:
        """Fork a rank that calls `target` ("module:function") in `folder`; answers its pid.

        kwargs: as JSON has them. The outcome lies in `<folder>/<key>.result`, the output in `.1` and `.2`."""
        request = {"key": key, "folder": str(folder), "target": target, "kwargs": kwargs, "env": env}
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        self._process.stdin.flush()
        assert self._read_until(lambda _: key in self._started, START_LIMIT), "the fork server does not answer"
        return self._started.pop(key)

    def wait(self, pid: int, limit: float) -> int | None:
        """Wait until a rank has ended; answers its wait status, None if it runs on."""
        self._read_until(lambda _: pid in self.ended, limit)
        return self.ended.get(pid)

    def close(self) -> None:
        """End the server; ranks that still run end with it. What it says last is read, or it could not write that."""
        try:
            self._process.communicate(timeout=END_LIMIT)
        finally:
            self._process.kill()
            self._process.wait()

    def _read_until(self, is_done: Callable[[dict[str, Any]], bool], limit: float) -> bool:
        deadline = time.monotonic() + limit
        message: dict[str, Any] = {}
        while not is_done(message):
            message = self._next(deadline - time.monotonic())
            if not message:
                return False
            if "ended" in message:
                self.ended[message["ended"]] = message["status"]
            if "started" in message:
                self._started[message["key"]] = message["started"]
                self.ended.pop(message["started"], None)  # pids come round again
        return True

    def _next(self, limit: float) -> dict[str, Any]:
        """Answer the next message, nothing if there is none in time."""
        assert self._process.stdout is not None
        fd = self._process.stdout.fileno()
        while b"\n" not in self._buffer:
            if not select.select([fd], [], [], max(0.0, limit))[0]:
                return {}
            data = os.read(fd, 65536)
            if not data:
                raise RuntimeError("the fork server has ended; its last words are on stderr")
            self._buffer += data
        line, self._buffer = self._buffer.split(b"\n", 1)
        return dict(json.loads(line))
