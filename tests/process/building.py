"""What the ranks of the group-building test run: sub-groups built and used in a loop, broken at any moment."""

from __future__ import annotations

import itertools
import os
import signal
from datetime import timedelta
from types import FrameType

import torch
import torch.distributed as dist

from resilience.inprocess import CallWrapper
from tests.process.jobs import wrapper_of

REPEAT = 0.05  # seconds: a raise that lands in a destructor is lost, so the timer raises again


class InjectedFault(Exception):
    """Raised by the timer, wherever the main thread then is."""


_armed: list[bool] = []


def build_and_break(plan: list[tuple[int, float]], options: dict[str, float]) -> int:
    """Build groups until all faults of `plan` have struck; answers the number of iterations.

    plan: for each iteration, which of the ranks then present raises (modulo their number), and how many seconds
    after its entry."""
    signal.signal(signal.SIGALRM, _raise)

    @wrapper_of(options, {}, [])
    def function(call: CallWrapper | None = None) -> int:
        assert call is not None
        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        victim, delay = plan[call.iteration] if call.iteration < len(plan) else (-1, 0.0)
        try:
            if victim >= 0 and rank == victim % world:
                _armed.append(True)
                signal.setitimer(signal.ITIMER_REAL, delay, REPEAT)
            dist.init_process_group("gloo", timeout=timedelta(minutes=30))
            for _ in itertools.count() if victim >= 0 else range(3):
                group = dist.new_group(list(range(world)))
                dist.all_reduce(torch.ones(16), group=group)
            dist.destroy_process_group()
            return call.iteration
        except InjectedFault:
            _armed.clear()
            raise
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)

    return function()


def _raise(number: int, frame: FrameType | None) -> None:
    if _armed:
        raise InjectedFault
