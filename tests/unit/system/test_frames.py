"""Stacks are taken by any thread, while others take them too, fork, or build and destroy groups."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from resilience.system import flight_recorder

# Several threads take stacks, and the main thread forks meanwhile.
TAKE = """
import gc, os, sys, threading
from resilience.system.frames import current_frames

sys.setswitchinterval(1e-6)
is_over = threading.Event()

def take():
    while not is_over.is_set():
        current_frames()

threads = [threading.Thread(target=take, daemon=True) for _ in range(3)]
for thread in threads:
    thread.start()
for _ in range(200):
    pid = os.fork()
    if pid == 0:
        os._exit(0 if gc.isenabled() else 1)
    assert os.waitpid(pid, 0)[1] == 0, "a child was forked without garbage collection"
is_over.set()
for thread in threads:
    thread.join()
assert gc.isenabled(), "no garbage collection any more"
"""


def test_garbage_is_collected_after_threads_took_stacks_at_once() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", TAKE], capture_output=True, text=True, check=False, timeout=280
    )
    assert (done.returncode, done.stderr) == (0, "")


class Vanishing(dict[Any, Any]):
    """The ranks of a group that the main thread destroys just after somebody has looked whether it is there."""

    def __contains__(self, group: object) -> bool:
        is_there = super().__contains__(group)
        self.pop(group, None)
        return is_there


def test_group_that_is_destroyed_while_the_recorder_is_read_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    group, other = object(), object()
    world = SimpleNamespace(pg_names={group: "0", other: "1"}, pg_group_ranks=Vanishing({group: {3: 0, 2: 1}}))
    module = SimpleNamespace(_world=world)
    monkeypatch.setitem(sys.modules, "torch.distributed.distributed_c10d", module)  # type: ignore[arg-type]
    assert flight_recorder._ranks() == {"0": [2, 3]}
