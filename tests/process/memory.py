"""Counts the memory that a test's objects take."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

MIB = 1 << 20


@contextmanager
def counted_memory() -> Iterator[Callable[[], int]]:
    """Yield a function that returns how many bytes are allocated that were not when this began."""
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        yield lambda: tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
