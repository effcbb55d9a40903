"""A rank that is killed or stopped after a while, to try out the consequences.

For rehearsals of a whole job; it happens in every start of the workers. The rank and the time are drawn from the job's
name and the start, so that all ranks know them without communication."""

from __future__ import annotations

import dataclasses
import math
import os
import random
import signal
import threading
from collections.abc import Mapping
from typing import Any

from resilience.errors import ConfigurationError
from resilience.system.environment import Settings

_SIGNALS = {"rank_killed": signal.SIGKILL, "rank_hung": signal.SIGSTOP}
KINDS = (*_SIGNALS, "random")


@dataclasses.dataclass
class SimulatedFaultParams:
    """A fault to simulate.

    fault_type: rank_killed (SIGKILL), rank_hung (SIGSTOP), or random, one of the two. base_delay, rand_delay:
    seconds after the start of training; of rand_delay a random part. rank_to_fail: None for a random rank.
    Raises: ConfigurationError."""

    fault_type: str
    base_delay: float
    rand_delay: float = 0.0
    rank_to_fail: int | None = None

    def __post_init__(self) -> None:
        if self.fault_type not in KINDS:
            raise ConfigurationError(f"fault_type is {self.fault_type!r}, expected one of {', '.join(KINDS)}")
        for name in ("base_delay", "rand_delay"):
            delay = getattr(self, name)
            if isinstance(delay, bool) or not isinstance(delay, int | float) or not 0 <= delay < math.inf:
                raise ConfigurationError(f"{name} is {delay!r}, expected seconds, 0 or more")
        rank = self.rank_to_fail
        if rank is not None and (isinstance(rank, bool) or not isinstance(rank, int) or rank < 0):
            raise ConfigurationError(f"rank_to_fail is {rank!r}, expected a rank, 0 or more, or None")


def parsed(params: SimulatedFaultParams | Mapping[str, Any] | None) -> SimulatedFaultParams | None:
    """Return the parameters. Accepts a mapping, as from configuration files. Raises: ConfigurationError."""
    if params is None or isinstance(params, SimulatedFaultParams):
        return params
    try:
        return SimulatedFaultParams(**params)
    except TypeError as error:
        names = ", ".join(field.name for field in dataclasses.fields(SimulatedFaultParams))
        raise ConfigurationError(
            f"simulated_fault_params has the keys {', '.join(params)}, expected {names}"
        ) from error


def planned(params: SimulatedFaultParams, world_size: int, seed: str) -> tuple[int, float, signal.Signals]:
    """Return the rank that fails, the delay in seconds, and the signal; equal for equal seeds."""
    chance = random.Random(seed)
    rank = chance.randrange(world_size)
    delay = params.base_delay + chance.random() * params.rand_delay
    kind = chance.choice(sorted(_SIGNALS)) if params.fault_type == "random" else params.fault_type
    return rank if params.rank_to_fail is None else params.rank_to_fail, delay, _SIGNALS[kind]


def schedule(params: SimulatedFaultParams, rank: int, world_size: int) -> threading.Timer | None:
    """Schedule the fault on its rank. Return the timer there, None on the other ranks.

    Raises: ConfigurationError, on all ranks, for a rank that does not exist."""
    if params.rank_to_fail is not None and params.rank_to_fail >= world_size:
        raise ConfigurationError(f"rank_to_fail is {params.rank_to_fail}, expected a rank from 0 to {world_size - 1}")
    settings = Settings.from_environment()
    seed = f"{settings.job_id}/{settings.attempt_hint}/{settings.cycle}"
    chosen, delay, number = planned(params, world_size, seed)
    if rank != chosen:
        return None
    timer = threading.Timer(delay, os.kill, (os.getpid(), number))
    timer.daemon = True
    timer.start()
    return timer
