"""May a wrapped function be called here, and with which arguments?

A call runs in the main thread, not inside another wrapped function, and with no process group alive: groups do not
survive a restart. The call itself is `inprocess._runtime.call`'s."""

from __future__ import annotations

import ast
import functools
import inspect
import os
import sys
import threading
import types
import typing
from collections.abc import Callable
from typing import Any

from resilience.errors import ConfigurationError
from resilience.system import collectives


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


def name_of(function: Callable[..., Any]) -> str:
    """Return module and name of a callable: for a partial those of its function, for an object those of its class."""
    function = _without_partial(function)
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}.{named.__qualname__}"


def check_caller(name: str) -> None:
    """Raise unless called from the main thread with no process group alive. Raises: ConfigurationError."""
    if threading.current_thread() is not threading.main_thread():
        raise ConfigurationError(
            f"{name} was called from thread {threading.current_thread().name!r}; call it from the "
            "main thread, because only the main thread can be interrupted everywhere"
        )
    if collectives.groups_alive():
        raise ConfigurationError(
            f"{name} was called while a process group is initialised; groups do not survive "
            "a restart, so create them inside the wrapped function, or call destroy_process_group() before"
        )


def inject(
    function: Callable[..., Any], kind: type, call: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Set every argument annotated with `kind` or an optional `kind` to `call`, unless the caller passed it.

    Raises: TypeError if the function does not take these arguments. Every iteration would fail alike."""
    try:
        signature = inspect.signature(function)
    except ValueError:  # of a function written in C; it takes no `kind`
        return args, kwargs
    try:
        hints = typing.get_type_hints(_annotated(function))
    except Exception:  # annotations are the user's and may contain anything
        hints = {name: parameter.annotation for name, parameter in signature.parameters.items()}
    wanted = [name for name in signature.parameters if _is_annotation_of(kind, hints.get(name))]
    try:
        if wanted:
            bound = signature.bind_partial(*args, **kwargs)
            if any(signature.parameters[name].kind is inspect.Parameter.POSITIONAL_ONLY for name in wanted):
                bound.apply_defaults()  # what comes before must be there too
            for name in wanted:
                if bound.arguments.get(name) is None:
                    bound.arguments[name] = call
            args, kwargs = bound.args, bound.kwargs
        # A decorator may pass other arguments on, so its own signature counts.
        inspect.signature(function, follow_wrapped=False).bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(f"{name_of(function)}: {error}") from None
    return args, kwargs


def _without_partial(function: Callable[..., Any]) -> Callable[..., Any]:
    while isinstance(function, functools.partial):
        function = function.func
    return function


def _annotated(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function with the annotations of a callable's arguments."""
    function = _without_partial(function)
    if inspect.isroutine(function):
        return function
    kind = type(function)
    method: Callable[..., Any] = function.__init__ if isinstance(function, type) else kind.__call__  # type: ignore[misc]
    return method


def _is_annotation_of(kind: type, hint: object) -> bool:
    """Return True if an annotation is `kind` or an optional `kind`. It may be text that could not be resolved."""
    if isinstance(hint, str):
        try:
            return kind.__name__ in _names_of(ast.parse(hint, mode="eval").body)
        except (SyntaxError, ValueError):
            return False
    return hint is kind or (
        typing.get_origin(hint) in (typing.Union, types.UnionType) and kind in typing.get_args(hint)
    )


def _names_of(node: ast.expr) -> set[str]:
    """Return the names of the types that an annotation allows, each without its module."""
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return {name}
        case ast.Constant(value=str(text)):
            return _names_of(ast.parse(text, mode="eval").body)
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return _names_of(left) | _names_of(right)
        case ast.Subscript(value=ast.Name(id=name) | ast.Attribute(attr=name), slice=inner):
            parts = inner.elts if isinstance(inner, ast.Tuple) else [inner]
            if name == "Annotated":
                return _names_of(parts[0])
            return set().union(*map(_names_of, parts)) if name in ("Optional", "Union") else set()
        case _:
            return set()
