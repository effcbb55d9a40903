"""Every exception this package raises.

    ResilienceError
    ├─ ConfigurationError (also ValueError) ── ConfigurationTypeError (also TypeError), NodeRefused
    ├─ ProtocolError          a peer, or a bug in this package, violated a protocol
    ├─ DecodeError (also ValueError)   bytes do not have the expected format
    ├─ MonitorError ── RankMonitorClientError
    ├─ LaunchError            the launcher could not start or continue
    ├─ StoreError             the key-value store is gone or does not answer
    ├─ CorruptCheckpoint      a checkpoint of the demonstration does not contain what was written
    └─ RestartError           this rank no longer takes part in the restart
       ├─ HealthCheckError ── FaultCounterExceeded
       ├─ InternalError, TimeoutError, RankDiscarded
       └─ BarrierError ── BarrierTimeout, BarrierOverflow

    InjectedException                    RuntimeError: the fault that inject_fault puts into user code
    RestartAbort, RankShouldRestart      BaseException: control flow that user code must not swallow

A message says what happened (with values and units), what was expected, and what to do. The facts in the
message are also attributes of the exception.
"""

from __future__ import annotations

from typing import Any

MOST_TEXT = 2000  # characters of an exception's text; a record must fit one message of the channel


def message_of(error: object) -> str:
    """Return str(error), shortened. The `__str__` of a program's exception may raise anything, or exit."""
    try:
        return str(error)[:MOST_TEXT]
    except (Exception, SystemExit) as broken:
        return f"<no message: __str__ raised {type(broken).__name__}>"


def error_in_words(error: BaseException, most: int = 500) -> str:
    """Return type and text of an exception, at most so many characters, whatever its `__str__` raises."""
    return f"{type(error).__name__}: {message_of(error)}"[:most]


class ResilienceError(Exception):
    """Base class of every error in this package. Keyword arguments become attributes."""

    def __init__(self, message: str = "", **facts: object) -> None:
        super().__init__(message)
        for name, value in facts.items():
            setattr(self, name, value)


class ConfigurationError(ResilienceError, ValueError):
    """A setting has a value that cannot work."""


class ConfigurationTypeError(ConfigurationError, TypeError):
    """A setting has a value of the wrong type."""


class NodeRefused(ConfigurationError):
    """The configuration of this node does not fit the job, which continues without it."""


class ProtocolError(ResilienceError):
    """A peer, or a bug in this package, violated a protocol."""


class DecodeError(ResilienceError, ValueError):
    """Bytes of a file, a message or the store do not have the expected format."""


class MonitorError(ResilienceError):
    """A rank monitor could not be started, reached or understood."""


class RankMonitorClientError(MonitorError):
    """The monitor client of a rank was used wrongly or lost its monitor."""


class LaunchError(ResilienceError):
    """The launcher could not start or continue."""


class StoreError(ResilienceError):
    """The key-value store is gone or did not answer in time."""


class ServerGone(StoreError):
    """The server ended before it answered: it belonged to an earlier call, or another server replaced it."""


class CorruptCheckpoint(ResilienceError):
    """A checkpoint does not contain what was written."""


class RestartError(ResilienceError):
    """This rank cannot take part in the restart."""


class HealthCheckError(RestartError):
    """A health check decided that this rank must not continue."""


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
    """More ranks reached the barrier than it was created for."""


class RestartAbort(BaseException):
    """User code raises this to end the job on this rank without another restart."""


class RankShouldRestart(BaseException):
    """Raised inside the wrapped function when the iteration is interrupted. If user code raises it there, all ranks
    restart."""


class LeftInChild(BaseException):
    """Carries what a forked child of user code returned or raised through its parent's call, and ends there."""

    def __init__(self, value: object, error: BaseException | None) -> None:
        super().__init__()
        self._value, self._error = value, error

    def result(self) -> Any:
        """Return what user code returned, or raise what it raised."""
        if self._error is not None:
            raise self._error
        return self._value


class InjectedException(RuntimeError):
    """The fault that ASYNC_EXC and SIGNAL_EXC of `inprocess.tools.inject_fault` put into the wrapped function."""
