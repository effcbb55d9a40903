"""Where a wrapped function may be called, and with which arguments."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import pytest

from resilience.errors import ConfigurationError
from resilience.inprocess._runtime.entry import check_alone, inject, name_of


def run(name: str, body: Callable[[], object] = lambda: None, pid: int | None = None) -> object:
    """As `CallWrapper.run` does."""
    pid = os.getpid() if pid is None else pid
    check_alone(name)
    return body()


def test_call_inside_a_wrapped_function_is_refused_and_both_are_named() -> None:
    with pytest.raises(ConfigurationError, match="inner was called inside outer"):
        run("outer", lambda: run("inner"))


def test_call_after_a_call_that_failed_is_allowed() -> None:
    with pytest.raises(ZeroDivisionError):
        run("first", lambda: 1 / 0)
    run("second")


def test_call_in_a_child_of_a_raw_fork_is_allowed() -> None:
    run("outer, in the parent", lambda: run("inner, in the child"), pid=os.getppid())


# -- arguments ----------------------------------------------------------------------------------------


class Call:
    """In place of a CallWrapper."""


CALL = Call()


def train(steps: int, scale: int = 2, call: Call | None = None) -> tuple[Any, ...]:
    return steps, scale, call


class Trainer:
    def __call__(self, steps: int, call: Call | None = None) -> tuple[Any, ...]:
        return steps, call

    def fit(self, steps: int, *, call: Call | None = None) -> tuple[Any, ...]:
        return steps, call


def strictly(steps: int, scale: int = 2, call: Call | None = None, /) -> tuple[Any, ...]:
    return steps, scale, call


class Model:
    def __init__(self, steps: int, call: Call | None = None) -> None:
        self.made_of = steps, call


@functools.wraps(train)
def decorated() -> tuple[Any, ...]:
    return train(7)


def returned(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    positional, named = inject(function, Call, CALL, args, kwargs)
    return function(*positional, **named)


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (train, "train"),
        (functools.partial(train, 1), "train"),
        (functools.partial(functools.partial(train), 1), "train"),
        (Trainer(), "Trainer"),
        (Trainer().fit, "Trainer.fit"),
        (functools.partial(Trainer(), 1), "Trainer"),
        (Model, "Model"),
    ],
)
def test_callable_of_each_kind_has_a_name(function: Callable[..., Any], name: str) -> None:
    assert name_of(function) == f"{__name__}.{name}"


def test_callable_of_each_kind_gets_the_call() -> None:
    assert returned(train, 1) == (1, 2, CALL)
    assert returned(functools.partial(train, 1, scale=3)) == (1, 3, CALL)
    assert returned(functools.partial(train, call=None), 1) == (1, 2, CALL)
    assert returned(strictly, 1) == (1, 2, CALL)
    assert returned(Trainer(), 1) == (1, CALL)
    assert returned(functools.partial(Trainer(), 1)) == (1, CALL)
    assert returned(Trainer().fit, 1) == (1, CALL)
    assert returned(Model, 1).made_of == (1, CALL)
    assert returned(lambda: 5) == 5
    assert returned(len, [1]) == 1
    assert returned(print) is None  # it has no signature
    mine = Call()
    assert returned(train, 1, call=mine) == (1, 2, mine)


@pytest.mark.parametrize(
    ("annotation", "is_injected"),
    [
        ("Call", True),
        ("Call | None", True),
        ("None | Call", True),
        ("inprocess.Call | None", True),
        ("Optional[Call]", True),
        ("typing.Union[None, 'Call']", True),
        ("Annotated[Call | None, 'set by the wrapper']", True),
        ("list[Call]", False),
        ("Callable[[Call], int] | None", False),
        ("MyCall | None", False),
        ("Annotated[int, Call]", False),
        ("not an annotation", False),
    ],
)
def test_annotation_that_cannot_be_resolved_is_compared_by_its_names(annotation: str, is_injected: bool) -> None:
    """As one whose names are imported for type checkers only."""

    def function(call: Any = None) -> Any:
        return call

    function.__annotations__ = {"call": annotation, "return": "unknown to the interpreter"}
    assert returned(function) is (CALL if is_injected else None)


def test_container_of_calls_is_not_a_call() -> None:
    def function(calls: list[Call] | None = None) -> Any:
        return calls

    function.__annotations__ = {"calls": list[Call]}
    assert returned(function) is None


@pytest.mark.parametrize(
    ("function", "args", "reason"),
    [
        (train, (), r"test_entry\.train: missing a required argument: 'steps'"),
        (train, (1, 2, None, 4), r"test_entry\.train: too many positional arguments"),
        (functools.partial(train, 1), (2, None, 3), r"test_entry\.train: too many positional arguments"),
        (Trainer(), (), r"test_entry\.Trainer: missing a required argument: 'steps'"),
        (lambda: 5, (1,), r"too many positional arguments"),
    ],
)
def test_arguments_that_the_function_does_not_take_reach_the_caller(
    function: Callable[..., Any], args: tuple[Any, ...], reason: str
) -> None:
    with pytest.raises(TypeError, match=reason):
        inject(function, Call, CALL, args, {})


def test_decorator_may_pass_other_arguments_than_it_takes() -> None:
    assert inject(decorated, dict, {}, (), {}) == ((), {})
