"""Store operations on a store that answers in an unusual way."""

from __future__ import annotations

import gc
from typing import Any

from resilience.adapters.store import execute
from resilience.core.restart import Read


class StoreBesideATracer:
    """While it answers, another thread takes a list of all objects, as a memory tracer does."""

    def __init__(self) -> None:
        self.traced: list[Any] = []

    def check(self, keys: list[str]) -> bool:
        self.traced.append(gc.get_objects())
        return True

    def get(self, key: str) -> bytes:
        return key.encode()


def test_values_are_read_while_a_memory_tracer_holds_every_object() -> None:
    assert execute(Read(("a", "b")), StoreBesideATracer()) == ("a", "b")  # type: ignore[arg-type]
