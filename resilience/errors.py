"""Every exception this package raises.

    ResilienceError
    ├─ ConfigurationError (also ValueError) ── ConfigurationTypeError (also TypeError)
    ├─ ProtocolError          a peer or a bug of ours broke the rules
    ├─ DecodeError (also ValueError)   bytes are not what was expected
    ├─ MonitorError ── RankMonitorClientError
    ├─ LaunchError ── UnhealthyNodeError
    ├─ StoreError             the key-value store is gone or does not answer
    ├─ CorruptCheckpoint      a checkpoint of the demonstration does not hold what was written
    └─ RestartError           this rank does not take part in the restart any more
       ├─ HealthCheckError ── FaultCounterExceeded
       ├─ InternalError, TimeoutError, RankDiscarded
       └─ BarrierError ── BarrierTimeout, BarrierOverflow

    RestartAbort, RankShouldRestart      BaseException: control flow that user code must not swallow

A message says what happened with values and units, what was expected, and what to do; the facts it
names are attributes of the exception too.
"""

from __future__ import annotations

from typing import Any


class ResilienceError(Exception):
    """Base of every error of this package. Keyword facts become attributes."""

    def __init__(self, message: str = "", **facts: object) -> None:
        super().__init__(message)
        for name, value in facts.items():
            setattr(self, name, value)


class ConfigurationError(ResilienceError, ValueError):
    """A setting has a value that cannot work."""


class ConfigurationTypeError(ConfigurationError, TypeError):
    """A setting has a value of the wrong type."""


class ProtocolError(ResilienceError):
    """A peer, or a bug of ours, broke the rules of a protocol."""


class DecodeError(ResilienceError, ValueError):
    """Bytes of a file, a message or the store are not what was expected."""


class MonitorError(ResilienceError):
    """A rank monitor could not be started, reached or understood."""


class RankMonitorClientError(MonitorError):
    """The rank's side of a monitor was used wrongly or lost its monitor."""


class LaunchError(ResilienceError):
    """The launcher could not start or go on."""


class UnhealthyNodeError(LaunchError):
    """A node failed its health gate."""


class StoreError(ResilienceError):
    """The key-value store is gone or did not answer in time."""


class ServerGone(StoreError):
    """The server that was found ended before it said anything: it was an earlier call's, or made way for another."""


class CorruptCheckpoint(ResilienceError):
    """A checkpoint does not hold what was written."""


class RestartError(ResilienceError):
    """This rank cannot take part in the restart."""


class HealthCheckError(RestartError):
    """A health check said that this rank must not go on."""


class FaultCounterExceeded(HealthCheckError):
    """This rank failed more often than its FaultCounter allows."""


class InternalError(RestartError):
    """An invariant of the restart protocol does not hold."""


class TimeoutError(RestartError):
    """A step of the restart took longer than its limit."""


class RankDiscarded(RestartError):
    """The rank assignment left this rank out of the new world."""


class BarrierError(RestartError):
    """A barrier could not be completed."""


class BarrierTimeout(BarrierError):
    """Not every rank reached the barrier in time."""


class BarrierOverflow(BarrierError):
    """More ranks reached the barrier than it was made for."""


class RestartAbort(BaseException):
    """Raised by user code to end the job on this rank without another restart."""


class RankShouldRestart(BaseException):
    """Raised inside the wrapped function when the iteration has been interrupted. User code that raises it there asks
    all ranks to restart."""


class LeftInChild(BaseException):
    """Carries what a child that user code forked returned or raised through the call of its parent, and ends there."""

    def __init__(self, value: object, error: BaseException | None) -> None:
        super().__init__()
        self._value, self._error = value, error

    def result(self) -> Any:
        """Return or raise what user code did."""
        if self._error is not None:
            raise self._error
        return self._value
