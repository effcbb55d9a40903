"""Options of a Wrapper that cannot work are refused with what to write."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from resilience.errors import ConfigurationError, ConfigurationTypeError
from resilience.inprocess import Wrapper
from resilience.inprocess._runtime.monitor_process import check_logfile


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"store_kwargs": "abc"}, ConfigurationTypeError, r"store_kwargs is 'abc' \(str\), expected a dict"),
        ({"store_kwargs": 5}, ConfigurationTypeError, r"store_kwargs is 5 \(int\), expected a dict"),
        (
            {"monitor_process_logfile": 5},
            ConfigurationTypeError,
            r"monitor_process_logfile is 5 \(int\), expected a path",
        ),
        ({"monitor_process_logfile": Path("/a")}, ConfigurationTypeError, "expected a path as a str"),
        ({"monitor_process_logfile": "a_{rank}"}, ConfigurationError, "expected an absolute path"),
        (
            {"monitor_process_logfile": "/a_{x}"},
            ConfigurationError,
            r"in which only '{rank}' is replaced \(KeyError: 'x'\)",
        ),
        ({"monitor_process_logfile": "/a_{}"}, ConfigurationError, "in which only '{rank}' is replaced"),
        ({"monitor_process_logfile": "/a_{rank:x"}, ConfigurationError, "in which only '{rank}' is replaced"),
    ],
)
def test_option_that_cannot_work_is_refused(options: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        Wrapper(**options)


def test_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    check_logfile("")
    check_logfile(str(tmp_path / "monitor.log"))
    assert (tmp_path / "monitor.log").exists()
    missing = tmp_path / "missing" / "monitor.log"
    with pytest.raises(ConfigurationError, match=f"{missing} cannot be written: No such file or directory; create its"):
        check_logfile(str(missing))


class Later:
    async def __call__(self) -> int:
        return 1


async def coroutine() -> int:
    return 1


def generator() -> Iterator[int]:
    yield 1


async def asynchronous_generator() -> AsyncIterator[int]:
    yield 1


@pytest.mark.parametrize(
    "function", [coroutine, functools.partial(coroutine), generator, asynchronous_generator, Later()]
)
def test_function_whose_body_would_run_after_the_call_is_refused(function: Callable[[], Any]) -> None:
    with pytest.raises(ConfigurationTypeError, match="its body would run after the call, without protection"):
        Wrapper()(function)
    assert Wrapper(enabled=False)(function) is function
