"""What happens to a child that user code forks with `os.fork` inside a wrapped call?

The child is no rank. If it leaves the function or a hook, it leaves the whole call with what user code returned or
raised, as if the function were not wrapped: it uses neither store nor page nor channel of its parent."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TypeVar

from resilience.errors import LeftInChild

T = TypeVar("T")


def left_by(call: Callable[[], T]) -> T:
    """Return or raise what `call` does, or what user code did in a child that leaves it."""
    try:
        return call()
    except LeftInChild as left:
        child = left
    result: T = child.result()
    return result


def here_only(function: Callable[[], T]) -> Callable[[], T]:
    """Return `function` for this process: what a forked child returns or raises there becomes a LeftInChild."""
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
