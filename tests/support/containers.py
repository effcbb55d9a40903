"""How much does an object keep?  Counts the items of all containers that can be reached from it."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable

import msgspec


def size(value: object, known: set[int]) -> int:
    """Return how many items all containers have that can be reached from a value."""
    if id(value) in known or isinstance(value, (str, bytes, type)):
        return 0
    known.add(id(value))
    parts: Iterable[object] = ()
    if isinstance(value, dict):
        parts = [*value.keys(), *value.values()]
    elif isinstance(value, (list, tuple, set, frozenset, deque, array)):
        parts = value
    elif isinstance(value, msgspec.Struct):
        parts = [getattr(value, name) for name in value.__struct_fields__]
    elif hasattr(value, "__dict__"):
        parts = vars(value).values()
    return sum(1 + size(part, known) for part in parts)
