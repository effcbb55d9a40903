"""Can this rank continue?

`health_check` runs on every rank before each start of the function, and again after a fault once `finalize`
has finished. It checks its own rank only: other ranks may still be in the function, or gone."""

from __future__ import annotations

from abc import ABC, abstractmethod
from datetime import timedelta
from typing import TYPE_CHECKING

from resilience.errors import FaultCounterExceeded, TimeoutError, error_in_words
from resilience.facts.in_words import count
from resilience.inprocess._runtime import options
from resilience.inprocess._runtime.failure import left_communication_call
from resilience.inprocess.later_releases import missing
from resilience.inprocess.state import State
from resilience.system.environment import local_rank
from resilience.system.health import cuda


class HealthCheck(ABC):
    """Receives None before each start. After a fault it receives this rank's own exception, or None if
    another rank failed. Raising before the start restarts all ranks; raising after a fault excludes this rank."""

    @abstractmethod
    def __call__(self, state: State, exc: Exception | None) -> tuple[State, Exception | None]:
        """Raise if this rank must not continue. Otherwise return both arguments: a Compose passes them on, the Wrapper
        ignores them."""


class CudaHealthCheck(HealthCheck):
    """Waits twice until the CUDA device has finished its work, each time at most `timeout`, so 60 s by default: the
    first wait may end without an error although earlier work broke the device.

    The device is that of LOCAL_RANK, or the current one. Does nothing if this process has not used CUDA.
    Raises: TimeoutError, or the device's own error; ConfigurationError."""

    def __init__(self, timeout: timedelta = timedelta(seconds=30)) -> None:
        self._limit = options.seconds("timeout", timeout)
        self.timeout = timeout

    def __call__(self, state: State, exc: Exception | None = None) -> tuple[State, Exception | None]:
        device = cuda.used_device(local_rank())
        if device is None:
            return state, exc
        for _ in range(2):
            if not cuda.finishes_within(self._limit, device):
                raise TimeoutError(
                    f"CUDA device {device} of rank {state.rank} did not finish its work within {self._limit:g} s "
                    "(timeout); work on a device cannot be cancelled, so this process has to be replaced",
                    device=device,
                    limit=self.timeout,
                )
        return state, exc


class FaultCounter(HealthCheck):
    """Excludes this rank once it has itself failed more than `max_rank_faults` times; None: never.

    `faults_count` is the number so far. Faults of other ranks do not count. Errors that left a communication call do
    not count either: another rank may have caused them, and such a verdict is too unsure to exclude a rank. They count
    while an abort of this rank runs that began more than hard_timeout ago, if the function has signalled no progress
    (`state.failed_beside_abort`): the abort will hardly end, and the backend may refuse all groups until it does.
    Raises: FaultCounterExceeded; ConfigurationError."""

    def __init__(self, max_rank_faults: int | None = None) -> None:
        self.max_rank_faults = None if max_rank_faults is None else options.whole("max_rank_faults", max_rank_faults, 0)
        self.faults_count = 0

    def __call__(self, state: State, exc: Exception | None = None) -> tuple[State, Exception | None]:
        if exc is None or (left_communication_call(exc) and not state.failed_beside_abort):
            return state, exc
        self.faults_count += 1
        if self.max_rank_faults is not None and self.faults_count > self.max_rank_faults:
            raise FaultCounterExceeded(
                f"rank {state.rank} (initially {state.initial_rank}) failed {count(self.faults_count, 'time')}, limit "
                f"{self.max_rank_faults} (max_rank_faults); its last failure: {error_in_words(exc)}",
                faults_count=self.faults_count,
                max_rank_faults=self.max_rank_faults,
            ) from exc
        return state, exc


__all__ = ["CudaHealthCheck", "FaultCounter", "FaultCounterExceeded", "HealthCheck"]


if not TYPE_CHECKING:  # a type checker reports names that are not here

    def __getattr__(name: str) -> object:
        raise missing(__name__, name)
