"""May a wrapped function be called here, and with which arguments?

A call runs in the main thread, not inside another wrapped function, and with no process group alive: groups do not
survive a restart. The call itself is `inprocess.call`'s."""

from __future__ import annotations

import inspect
import os
import sys
import threading
import typing
from collections.abc import Callable
from typing import Any

from resilience.adapters import collectives
from resilience.errors import ConfigurationError


def check_alone(name: str) -> None:
    """Raise if the caller runs inside another call of itself, that is, inside another wrapped function.

    Reads the stack, because an exception in the wrong place could leave a variable behind. The caller must have the
    locals `name` and `pid`. Raises: ConfigurationError."""
    caller = sys._getframe(1)
    frame = caller.f_back
    while frame is not None:
        if frame.f_code is caller.f_code and frame.f_locals.get("pid") == os.getpid():
            raise ConfigurationError(
                f"{name} was called inside {frame.f_locals['name']}, which is wrapped too; one interruption cannot "
                "restart both. Wrap only the outermost function"
            )
        frame = frame.f_back


def check_caller(function: Callable[..., Any]) -> None:
    """Raise unless called from the main thread with no process group alive. Raises: ConfigurationError."""
    if threading.current_thread() is not threading.main_thread():
        raise ConfigurationError(
            f"{function.__qualname__} was called from thread {threading.current_thread().name!r}; call it from the "
            "main thread, because only the main thread can be interrupted everywhere"
        )
    if collectives.groups_alive():
        raise ConfigurationError(
            f"{function.__qualname__} was called while a process group is initialised; groups do not survive "
            "a restart, so create them inside the wrapped function, or call destroy_process_group() before"
        )


def inject(
    function: Callable[..., Any], kind: type, call: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Set every argument annotated with `kind` or an optional `kind` to `call`, unless the caller passed it."""
    signature = inspect.signature(function)
    try:
        hints = typing.get_type_hints(function)
    except Exception:  # annotations are the user's and may contain anything
        hints = {name: parameter.annotation for name, parameter in signature.parameters.items()}
    wanted = [name for name in signature.parameters if _is_annotation_of(kind, hints.get(name))]
    if not wanted:
        return args, kwargs
    bound = signature.bind_partial(*args, **kwargs)
    for name in wanted:
        if bound.arguments.get(name) is None:
            bound.arguments[name] = call
    return bound.args, bound.kwargs


def _is_annotation_of(kind: type, hint: object) -> bool:
    """Return True if an annotation is `kind` or an optional `kind`. It may be text that could not be resolved."""
    if isinstance(hint, str):
        return hint.replace(" ", "").removeprefix("Optional[").removesuffix("]").split("|")[0].endswith(kind.__name__)
    return hint is kind or kind in typing.get_args(hint)
