"""What frees this rank when its iteration is interrupted?

The main thread may be blocked in a collective that will never end; the abort hook, called beside it, cuts
what it waits for. That the main thread then leaves the function is the watcher's work
(`inprocess.watcher`); how groups are cut is `adapters.collectives`'."""

from __future__ import annotations

from abc import ABC, abstractmethod
from datetime import timedelta

from resilience.adapters import collectives
from resilience.inprocess.state import State

ABORT_LIMIT = timedelta(seconds=2)
"""How long after the abort a main thread may stay inside torch.distributed before its process is
replaced: a cut that lands while a group is being built can leave a rank stuck for good."""


class Abort(ABC):
    """Called once in every interrupted iteration, in a thread beside the main thread, never inside
    `atomic()`. An Exception is recorded, not raised: the restart goes on."""

    @abstractmethod
    def __call__(self, state: State) -> State:
        """Free the main thread from what it may wait for. Runs under hard_timeout."""


class AbortTorchDistributed(Abort):
    """Ends what torch.distributed does in this process: shuts the connected sockets of its gloo groups,
    which nothing in torch does, and aborts accelerator groups. No other connection is touched. Takes
    milliseconds on gloo, at most ABORT_LIMIT on accelerators.

    The groups themselves are dropped once the main thread has left the function. Does nothing where
    torch.distributed was not used."""

    def __call__(self, state: State) -> State:
        collectives.cut_gloo_sockets()
        collectives.abort_accelerator_groups(ABORT_LIMIT.total_seconds())
        return state
