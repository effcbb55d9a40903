"""Where a wrapped function may be called."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from resilience.errors import ConfigurationError
from resilience.inprocess.entry import check_alone


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
