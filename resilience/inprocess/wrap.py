"""`Wrapper`: the options that a user configures.  Checks them once; each call is a `call.CallWrapper`.

    @Wrapper(initialize=RetryController(max_iterations=10), soft_timeout=timedelta(seconds=60))
    def train(config, call_wrapper: CallWrapper | None = None): ...

The wrapped function starts again, in the same processes, whenever any rank fails, hangs or dies. Names,
parameters and the order of hooks follow the compatible API. Where that API sleeps or polls for an interval,
the interval is here an upper bound on the delay before an event is noticed."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, cast

from resilience.errors import ConfigurationError, ConfigurationTypeError, error_in_words
from resilience.inprocess._runtime import options
from resilience.inprocess.abort import Abort, AbortTorchDistributed
from resilience.inprocess.completion import Completion
from resilience.inprocess.finalize import Finalize
from resilience.inprocess.health_check import HealthCheck
from resilience.inprocess.initialize import Initialize
from resilience.inprocess.later_releases import advises, check_signature, missing
from resilience.inprocess.rank_assignment import RankAssignment, ShiftRanks
from resilience.inprocess.rank_filter import RankFilter
from resilience.inprocess.store import TCPStore
from resilience.inprocess.terminate import Terminate

if TYPE_CHECKING:
    from resilience.inprocess._runtime.call import CallWrapper as CallWrapper

P = ParamSpec("P")
R = TypeVar("R")

_DURATIONS = (
    "monitor_thread_interval",
    "monitor_process_interval",
    "heartbeat_interval",
    "progress_watchdog_interval",
    "soft_timeout",
    "hard_timeout",
    "heartbeat_timeout",
    "barrier_timeout",
    "completion_timeout",
    "last_call_wait",
    "termination_grace_time",
)
# (shorter, longer, what goes wrong otherwise)
_ORDER = (
    ("monitor_thread_interval", "soft_timeout", "a hang would be over before the thread checks for it"),
    ("progress_watchdog_interval", "soft_timeout", "a healthy rank would be declared hung"),
    ("soft_timeout", "hard_timeout", "a rank would be killed before it can restart"),
    ("hard_timeout", "barrier_timeout", "the other ranks would give up before a hung rank is killed"),
    ("monitor_process_interval", "heartbeat_timeout", "a healthy node would be declared lost"),
    ("heartbeat_timeout", "barrier_timeout", "the other ranks would give up before a lost node is noticed"),
)
_HOOKS: dict[str, type] = {
    "initialize": Initialize,
    "abort": Abort,
    "finalize": Finalize,
    "health_check": HealthCheck,
    "rank_assignment": RankAssignment,
    "rank_filter": RankFilter,
    "completion": Completion,
    "terminate": Terminate,
}


class Wrapper:
    """Restarts a function inside its processes when any rank fails, hangs or dies.

    store_factory, store_kwargs: connect to the store that all ranks share (a StoreMixin).
        Called in every rank and in its monitor. With the default TCPStore, rank 0's monitor hosts it.
    initialize, abort, finalize, health_check, rank_assignment, rank_filter: hooks, see their modules;
        None leaves one out. Compose joins several. A hook may change the State that it receives.
    monitor_process_interval: longest delay until the rank's monitor notices an event that it has to poll for.
        Most events wake it at once.
    monitor_thread_interval: accepted for compatibility, without effect: every event wakes the rank's thread.
        Must be shorter than `soft_timeout`.
    progress_watchdog_interval: how often the main thread has to prove that it runs bytecode.
    soft_timeout: silence after which all ranks restart. hard_timeout: silence after which the rank is
        terminated, and killed `termination_grace_time` later; also the limit of each hook. Under `resilience run` with
        the policy any-failed (its default) the rank is killed at once.
    heartbeat_timeout: silence of a whole node after which its ranks count as lost.
    barrier_timeout: how long ranks wait for each other in a restart, and for their monitors at the start.
    completion_timeout: how long a rank that has returned waits for the others to return; then all restart, even if the
        others still work.
    last_call_wait: longest wait for the records of other ranks after a fault.
    monitor_process_logfile: absolute path for the monitor's own messages. "{rank}" becomes the initial rank; a format
        is possible, such as "{rank:04d}".
    enabled: False returns the function itself.
    completion, terminate: hooks of release 0.4 of the compatible API, called when this rank's call is over.
    heartbeat_interval: accepted for code written for later releases, without effect.
    Raises: ConfigurationError (a ValueError), ConfigurationTypeError (also a TypeError)."""

    @advises
    def __init__(
        self,
        *,
        store_factory: Callable[..., Any] = TCPStore,
        store_kwargs: dict[str, Any] | None = None,
        initialize: Initialize | None = None,
        abort: Abort | None = AbortTorchDistributed(),  # noqa: B008  stateless
        finalize: Finalize | None = None,
        health_check: HealthCheck | None = None,
        rank_assignment: RankAssignment | None = ShiftRanks(),  # noqa: B008  stateless
        rank_filter: RankFilter | None = None,
        monitor_thread_interval: timedelta = timedelta(seconds=1),
        monitor_process_interval: timedelta = timedelta(seconds=1),
        progress_watchdog_interval: timedelta = timedelta(seconds=1),
        soft_timeout: timedelta = timedelta(seconds=60),
        hard_timeout: timedelta = timedelta(seconds=90),
        heartbeat_timeout: timedelta = timedelta(seconds=30),
        barrier_timeout: timedelta = timedelta(seconds=120),
        completion_timeout: timedelta = timedelta(seconds=120),
        last_call_wait: timedelta = timedelta(seconds=1),
        termination_grace_time: timedelta = timedelta(seconds=5),
        monitor_process_logfile: str | None = None,
        enabled: bool = True,
        completion: Completion | None = None,
        terminate: Terminate | None = None,
        heartbeat_interval: timedelta = timedelta(seconds=1),
    ) -> None:
        if store_kwargs is not None and not isinstance(store_kwargs, Mapping):
            raise ConfigurationTypeError(
                f"store_kwargs is {store_kwargs!r} ({type(store_kwargs).__name__}), expected a dict of the arguments "
                "of store_factory, such as {'port': 29600}",
                option="store_kwargs",
                value=store_kwargs,
            )
        self.store_factory = store_factory
        self.store_kwargs = dict(store_kwargs or {})
        self.initialize = initialize
        self.abort = abort
        self.finalize = finalize
        self.health_check = health_check
        self.rank_assignment = rank_assignment
        self.rank_filter = rank_filter
        self.monitor_thread_interval = monitor_thread_interval
        self.monitor_process_interval = monitor_process_interval
        self.progress_watchdog_interval = progress_watchdog_interval
        self.soft_timeout = soft_timeout
        self.hard_timeout = hard_timeout
        self.heartbeat_timeout = heartbeat_timeout
        self.barrier_timeout = barrier_timeout
        self.completion_timeout = completion_timeout
        self.last_call_wait = last_call_wait
        self.termination_grace_time = termination_grace_time
        self.monitor_process_logfile = monitor_process_logfile
        self.enabled = enabled
        self.completion = completion
        self.terminate = terminate
        self.heartbeat_interval = heartbeat_interval
        _check_types(self)
        _check_durations(self)
        _check_distributed()

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        """Return `function` wrapped. Calling it returns the function's value once all active ranks
        completed, None on inactive ranks; it may be called again in the same process."""
        if not self.enabled:
            return function
        _check_function(function)

        @functools.wraps(function)
        def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
            from resilience.inprocess._runtime.call import CallWrapper

            return cast(R, CallWrapper(self).run(function, args, kwargs))

        return wrapped


def _check_function(function: Callable[..., Any]) -> None:
    """Raise if the function's body would run after the call, without protection. Raises: ConfigurationTypeError."""
    for is_deferred, kind in (
        (inspect.iscoroutinefunction, "a coroutine function"),
        (inspect.isgeneratorfunction, "a generator function"),
        (inspect.isasyncgenfunction, "an asynchronous generator function"),
    ):
        if is_deferred(function) or is_deferred(getattr(function, "__call__", None)):  # noqa: B004
            raise ConfigurationTypeError(
                f"the wrapped {getattr(function, '__qualname__', function)} is {kind}: its body would run after the "
                "call, without protection; wrap a function that runs it, with asyncio.run or in a loop",
                option="function",
                value=function,
            )


def _check_types(wrapper: Wrapper) -> None:
    for name, kind in _HOOKS.items():
        hook = getattr(wrapper, name)
        if hook is not None and not isinstance(hook, kind):
            raise ConfigurationTypeError(
                f"{name} is {hook!r}, expected an instance of {kind.__module__}.{kind.__name__} or None; "
                f"subclass {kind.__name__}, or join several with Compose",
                option=name,
                value=hook,
            )
        if hook is not None:
            check_signature(name, hook)
    if not callable(wrapper.store_factory):
        raise ConfigurationTypeError(
            f"store_factory is {wrapper.store_factory!r}, expected a callable that returns a StoreMixin",
            option="store_factory",
            value=wrapper.store_factory,
        )
    if not isinstance(wrapper.enabled, bool):
        raise ConfigurationTypeError(
            f"enabled is {wrapper.enabled!r}, expected True or False", option="enabled", value=wrapper.enabled
        )
    _check_logfile(wrapper.monitor_process_logfile)


def _check_logfile(logfile: Any) -> None:
    if logfile is None:
        return
    option = "monitor_process_logfile"
    if not isinstance(logfile, str):
        raise ConfigurationTypeError(
            f"{option} is {logfile!r} ({type(logfile).__name__}), expected a path as a str, such as "
            "'/runs/monitor_{rank}.log', or None",
            option=option,
            value=logfile,
        )
    try:
        path = logfile.format(rank=0)
    except (KeyError, IndexError, ValueError, AttributeError) as error:
        raise ConfigurationError(
            f"{option} is {logfile!r}, in which only '{{rank}}' is replaced ({error_in_words(error)}); write "
            "'{{' and '}}' for braces that are part of the name",
            option=option,
            value=logfile,
        ) from None
    if not Path(path).is_absolute():
        raise ConfigurationError(
            f"{option} is {logfile!r}, expected an absolute path: the monitor does not share "
            "the working directory; '{rank}' in it is replaced by the initial rank",
            option=option,
            value=logfile,
        )


def _check_durations(wrapper: Wrapper) -> None:
    for name in _DURATIONS:
        options.seconds(name, getattr(wrapper, name), may_be_0=name in ("last_call_wait", "termination_grace_time"))
    for shorter, longer, otherwise in _ORDER:
        shorter_value: timedelta = getattr(wrapper, shorter)
        longer_value: timedelta = getattr(wrapper, longer)
        if not shorter_value < longer_value:
            raise ConfigurationError(
                f"{shorter} ({shorter_value.total_seconds():g} s) must be shorter than "
                f"{longer} ({longer_value.total_seconds():g} s), or {otherwise}; lower {shorter} or raise {longer}",
                option=shorter,
                value=shorter_value,
                other=longer_value,
            )


def _check_distributed() -> None:
    import torch.distributed

    if not torch.distributed.is_available():
        raise ConfigurationError(
            "torch.distributed is not available in this build of torch, and the wrapper needs it; install a "
            "build with distributed support, or pass enabled=False"
        )


if not TYPE_CHECKING:  # a type checker reports names that are not here

    def __getattr__(name: str) -> object:
        """Return CallWrapper, which the compatible API has in this module."""
        if name != "CallWrapper":
            raise missing(__name__, name)
        from resilience.inprocess._runtime.call import CallWrapper

        return CallWrapper
