"""What runs on a rank when its call has completed?  A hook of the compatible API from its release 0.4 on."""

from __future__ import annotations

from abc import ABC, abstractmethod

from resilience.inprocess.state import State


class Completion(ABC):
    """Called once on every rank, active or not, after all ranks have completed and before the call returns.

    No other rank waits for it. In a plain environment the store does not wait either: rank 0's monitor, which hosts it,
    may leave 2 s after all ranks have completed, so `state.store` may be gone. A hook that runs longer than
    `hard_timeout` is ended with its process. An Exception is recorded, not raised: the call has completed."""

    @abstractmethod
    def __call__(self, state: State) -> State:
        """Report or clean up; return the state, which a Compose hands on."""
