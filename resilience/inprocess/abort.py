"""What frees this rank from collectives when its iteration is interrupted."""

from __future__ import annotations

from abc import ABC, abstractmethod
from datetime import timedelta

from resilience.adapters import collectives
from resilience.inprocess.state import State

ABORT_LIMIT = timedelta(seconds=2)
"""How long after the abort a main thread may stay inside torch.distributed before its process is
replaced: a cut that lands while a group is being built can leave a rank stuck for good."""


class Abort(ABC):
    """Called in a thread beside the main thread, which may be blocked. An exception is recorded, not
    raised. Runs again in every interrupted iteration."""

    @abstractmethod
    def __call__(self, state: State) -> State:
        """Free the main thread from what it may wait for."""


class AbortTorchDistributed(Abort):
    """Ends all of torch.distributed in this process: shuts the sockets of gloo groups, which nothing in
    torch does, aborts accelerator groups, and drops every group."""

    def __call__(self, state: State) -> State:
        collectives.cut_gloo_sockets()
        collectives.abort_accelerator_groups(ABORT_LIMIT.total_seconds())
        return state
