"""What happens if user code forks with `os.fork` inside a wrapped call?

The child is not a rank. When it leaves the function or a hook, it leaves the whole call with the value or exception of
user code, as if the function were not wrapped. It never uses its parent's store, page or channel."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TypeVar

from resilience.errors import LeftInChild

T = TypeVar("T")


def left_by(call: Callable[[], T]) -> T:
    """Return or raise what `call` does, or what user code did in a forked child that leaves it."""
    try:
        return call()
    except LeftInChild as left_in_child:
        child = left_in_child
    result: T = child.result()
    return result


def here_only(function: Callable[[], T]) -> Callable[[], T]:
    """Wrap `function` for this process: if a forked child leaves it, its value or exception becomes a LeftInChild."""
    pid = os.getpid()

    def call() -> T:
        try:
            value = function()
        except BaseException as error:
            if os.getpid() != pid:
                raise LeftInChild(None, error) from None
            raise
        if os.getpid() != pid:
            raise LeftInChild(value, None)
        return value

    return call
