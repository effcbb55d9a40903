"""How is the main thread freed when an iteration is interrupted?

The main thread may be blocked in a collective that will never end. The abort hook runs in a thread beside it and cuts
the connections that it waits for. The watcher (`inprocess._runtime.watcher`) then makes the main thread leave the
function. `system.collectives` cuts groups, `system.group_aborts` aborts those of accelerators."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable

from resilience.errors import ConfigurationError, ConfigurationTypeError, TimeoutError
from resilience.facts.in_words import count
from resilience.inprocess.later_releases import advises
from resilience.inprocess.state import State
from resilience.system import checkpoint_writers, collectives, group_aborts


def abort_wait(given: float | None, soft_timeout: float, hard_timeout: float) -> float:
    """Return how long an abort may wait for what it ends, in seconds. given: RESILIENCE_ABORT_WAIT, if it is set.

    Raises: ConfigurationError unless `given` is less than hard_timeout, the limit of the whole hook."""
    if given is not None and given >= hard_timeout:
        raise ConfigurationError(
            f"RESILIENCE_ABORT_WAIT is {given:g} s, expected less than hard_timeout ({hard_timeout:g} s), which is the "
            "limit of the whole hook; lower the variable, or raise hard_timeout and barrier_timeout",
            option="RESILIENCE_ABORT_WAIT",
            value=given,
            other=hard_timeout,
        )
    return hard_timeout - soft_timeout if given is None else given


class Abort(ABC):
    """Runs once in every interrupted iteration, in a thread beside the main thread, never inside
    `atomic()`. An Exception is recorded, not raised: the restart continues.

    The thread's current CUDA device is 0, whatever device the main thread uses."""

    @abstractmethod
    def __call__(self, state: State) -> State:
        """Free the main thread from whatever blocks it. Runs under hard_timeout. `state.abort_time_left()` returns how
        many seconds the hook may still wait."""


class AbortTorchDistributed(Abort):
    """Ends the work of torch.distributed in this process. Shuts down the connected sockets of its gloo groups,
    which torch itself cannot do, and aborts all accelerator groups at once. Other connections stay untouched.

    Takes milliseconds on gloo. Waits for the abort of every accelerator group, at most RESILIENCE_ABORT_WAIT, and
    reports each one as an event (`abort.group`). The groups themselves are dropped once the main thread has left the
    function. Does nothing if torch.distributed was not used."""

    @advises
    def __init__(self) -> None:
        super().__init__()

    def __call__(self, state: State) -> State:
        collectives.cut_gloo_sockets()
        group_aborts.abort_all(state.abort_time_left())
        return state


class AbortTransformerEngine(Abort):
    """Frees TransformerEngine's userbuffers, whose communicators no longer fit after a restart. The function has to
    call `initialize_ub` again. Does nothing if transformer_engine.pytorch was not imported.

    Its kernels have to be freed first. Use `Compose(AbortTransformerEngine(), AbortTorchDistributed())`; the last one
    runs first."""

    def __call__(self, state: State) -> State:
        base = sys.modules.get("transformer_engine.pytorch.module.base")
        if base is not None:
            base.destroy_ub()
        return state


class AbortCheckpointWriters(Abort):
    """Ends checkpoints that are still being written in the background, so that none of them writes into the next
    iteration.

    Ends the process of `torch.distributed.checkpoint.async_save`; its checkpoint stays without `.metadata`. A thread
    of async_save cannot be ended: the hook waits for it, at most RESILIENCE_ABORT_WAIT. Its collectives have to be
    cut first, so use `Compose(AbortCheckpointWriters(), AbortTorchDistributed())`; the last one runs first.
    Does nothing if torch.distributed.checkpoint was not imported.

    stop: called first; ends a checkpoint writer of your own, or waits for it.
    Raises: TimeoutError if a thread still writes (recorded, not raised further); ConfigurationError."""

    def __init__(self, stop: Callable[[], object] | None = None) -> None:
        if stop is not None and not callable(stop):
            raise ConfigurationTypeError(f"stop is {stop!r}, expected a function or None", option="stop", value=stop)
        self.stop = stop

    def __call__(self, state: State) -> State:
        if self.stop is not None:
            self.stop()
        checkpoint_writers.end_process()
        limit = state.abort_time_left()
        writing = checkpoint_writers.await_threads(limit)
        if writing:
            be = "is" if writing == 1 else "are"
            raise TimeoutError(
                f"{count(writing, 'checkpoint')} {be} still being written after {limit:g} s (RESILIENCE_ABORT_WAIT), "
                "so files of two iterations may mix. Raise RESILIENCE_ABORT_WAIT and hard_timeout, or write to "
                "a new folder in each iteration",
                limit=limit,
            )
        return state
