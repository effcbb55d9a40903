"""What runs on a rank that leaves its call with an exception?  A hook of the compatible API from its release 0.4 on."""

from __future__ import annotations

from abc import ABC, abstractmethod

from resilience.inprocess.state import State


class Terminate(ABC):
    """Called once on a rank that leaves the call with an exception: after the store has recorded that, and before the
    exception reaches the caller. If the hook raises an exception, the caller gets that one instead. A hook that runs
    longer than `hard_timeout` is ended with its process."""

    @abstractmethod
    def __call__(self, state: State) -> State:
        """Report or clean up; return the state, which a Compose hands on."""
