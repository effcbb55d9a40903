"""May a wrapped function be called here, and with which arguments?

A call runs in the main thread, in no other wrapped function, and with no process group alive: groups do not survive
a restart. The call itself is `inprocess.call`'s."""

from __future__ import annotations

import inspect
import os
import threading
import typing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from resilience.adapters import collectives
from resilience.errors import ConfigurationError

_running: list[str] = []  # the wrapped function that is running: at most one in a process
os.register_at_fork(after_in_child=_running.clear)


@contextmanager
def alone(name: str) -> Iterator[None]:
    """Raises: ConfigurationError inside another wrapped function."""
    if _running:
        raise ConfigurationError(
            f"{name} was called inside {_running[-1]}, which is wrapped too; one interruption cannot restart both. "
            "Wrap only the outermost function"
        )
    _running.append(name)
    try:
        yield
    finally:
        _running.clear()


def check_caller(function: Callable[..., Any]) -> None:
    """Raises: ConfigurationError unless called from the main thread with no process group alive."""
    if threading.current_thread() is not threading.main_thread():
        raise ConfigurationError(
            f"{function.__qualname__} was called from thread {threading.current_thread().name!r}; a wrapped "
            "function runs in the main thread only, because only that can be interrupted everywhere. Call it "
            "from the main thread"
        )
    if collectives.groups_alive():
        raise ConfigurationError(
            f"{function.__qualname__} was called while a process group is initialised; groups do not survive "
            "a restart, so create them inside the wrapped function, or call destroy_process_group() before"
        )


def inject(
    function: Callable[..., Any], kind: type, call: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Fill every argument annotated with `kind` or an optional `kind` that the caller left out with `call`."""
    signature = inspect.signature(function)
    try:
        hints = typing.get_type_hints(function)
    except Exception:  # annotations are the user's and may name anything
        hints = {name: p.annotation for name, p in signature.parameters.items()}
    wanted = [name for name in signature.parameters if _names(kind, hints.get(name))]
    if not wanted:
        return args, kwargs
    bound = signature.bind_partial(*args, **kwargs)
    for name in wanted:
        if bound.arguments.get(name) is None:
            bound.arguments[name] = call
    return bound.args, bound.kwargs


def _names(kind: type, hint: object) -> bool:
    """Return whether an annotation is `kind` or an optional `kind`; it may be text that could not be resolved."""
    if isinstance(hint, str):
        return hint.replace(" ", "").removeprefix("Optional[").removesuffix("]").split("|")[0].endswith(kind.__name__)
    return hint is kind or kind in typing.get_args(hint)
