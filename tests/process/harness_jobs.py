"""What the ranks of test_harness run."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from typing import Any

from tests.support.signs import hold, show


def tell() -> dict[str, Any]:
    print("on stdout")
    return {
        "rank": int(os.environ["RANK"]),
        "world_size": int(os.environ["WORLD_SIZE"]),
        "extra": os.environ.get("EXTRA"),
        "is_own_group": os.getpgid(0) == os.getpid(),
        "threads": threading.active_count(),
        "native_threads": len(os.listdir("/proc/self/task")),
    }


def fail(with_code: int | None = None) -> None:
    if with_code is not None:
        raise SystemExit(with_code)
    raise ValueError("on purpose")


def wait_for_ever() -> None:
    show("waiting", int(os.environ["RANK"]))
    time.sleep(600)


def hold_twice() -> list[str]:
    rank = int(os.environ["RANK"])
    hold("first", rank)
    hold("second", rank)
    return ["first", "second"]


def leave_a_child() -> int:
    return subprocess.Popen(["sleep", "600"]).pid
