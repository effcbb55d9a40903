"""Is this rank fit to go on?"""

from __future__ import annotations

import sys
import threading
from abc import ABC, abstractmethod
from datetime import timedelta

from resilience.errors import FaultCounterExceeded, TimeoutError
from resilience.inprocess.state import State


class HealthCheck(ABC):
    """Called before each start with None, and after a fault with this rank's own exception or None.

    Raising before the function restarts all; raising after a fault excludes this rank."""

    @abstractmethod
    def __call__(self, state: State, exc: Exception | None) -> tuple[State, Exception | None]:
        """Raise if this rank must not go on."""


class CudaHealthCheck(HealthCheck):
    """Synchronises the CUDA device within `timeout`, twice. Does nothing where CUDA was not initialised.

    Raises: TimeoutError if the device does not answer, or the device's own error."""

    def __init__(self, timeout: timedelta = timedelta(seconds=30)) -> None:
        self.timeout = timeout

    def __call__(self, state: State, exc: Exception | None) -> tuple[State, Exception | None]:
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
            device = torch.cuda.current_device()
            for _ in range(2):  # the first may only report an error of the work before
                self._synchronise(torch, device)
        return state, exc

    def _synchronise(self, torch: object, device: int) -> None:
        raised: list[BaseException] = []

        def work() -> None:
            try:
                torch.cuda.synchronize(device)  # type: ignore[attr-defined]
            except BaseException as error:  # handed over to the caller's thread
                raised.append(error)

        thread = threading.Thread(target=work, name="resilience-cuda-check", daemon=True)
        thread.start()
        thread.join(self.timeout.total_seconds())
        if thread.is_alive():
            raise TimeoutError(
                f"CUDA device {device} did not finish its work within {self.timeout.total_seconds():g} s; it hangs, "
                "and its process has to be replaced",
                limit=self.timeout,
            )
        if raised:
            raise raised[0]


class FaultCounter(HealthCheck):
    """Excludes this rank once it has itself failed more than `max_rank_faults` times (None: never)."""

    def __init__(self, max_rank_faults: int | None = None) -> None:
        self.max_rank_faults = max_rank_faults
        self.faults = 0

    def __call__(self, state: State, exc: Exception | None) -> tuple[State, Exception | None]:
        if exc is not None:
            self.faults += 1
        if self.max_rank_faults is not None and self.faults > self.max_rank_faults:
            raise FaultCounterExceeded(
                f"rank {state.initial_rank} failed {self.faults} times, allowed are {self.max_rank_faults}",
                faults=self.faults,
                max_rank_faults=self.max_rank_faults,
            )
        return state, exc


__all__ = ["CudaHealthCheck", "FaultCounter", "FaultCounterExceeded", "HealthCheck"]
