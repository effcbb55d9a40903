"""Joins several hooks of one kind into one; the last one runs first."""

from __future__ import annotations

import functools
from abc import ABCMeta
from typing import Any


class Compose:
    """Compose(a, b)(x) is a(b(x)).

    Instances must share a kind (Initialize, Abort, Finalize, HealthCheck, RankAssignment, RankFilter);
    the result is of that kind too. A hook that takes and returns several values hands all of them on."""

    def __new__(cls, *instances: Any) -> Any:
        kinds = _common_bases(instances)
        joined = _joined_type(kinds)
        self: Any = object.__new__(joined)
        self.instances = instances
        return self

    def __init__(self, *instances: Any) -> None:
        self.instances = instances

    def __call__(self, *args: Any) -> Any:
        for instance in reversed(self.instances):
            result = instance(*args)
            args = result if isinstance(result, tuple) else (result,)
        return args if len(args) > 1 else args[0]

    def __reduce__(self) -> Any:
        return Compose, self.instances

    def __repr__(self) -> str:
        return f"Compose({', '.join(map(repr, self.instances))})"


def _common_bases(instances: tuple[Any, ...]) -> tuple[type, ...]:
    bases = [set(type(instance).__mro__) for instance in instances] or [set()]
    shared = set.intersection(*bases) - {object, Compose}
    kinds = [kind for kind in shared if isinstance(kind, ABCMeta) and kind.__module__ != "abc"]
    # The most specific kinds only: a base of another one is implied.
    return tuple(
        sorted(
            (kind for kind in kinds if not any(kind in other.__mro__[1:] for other in kinds)),
            key=lambda kind: kind.__name__,
        )
    )


@functools.cache
def _joined_type(kinds: tuple[type, ...]) -> type:
    made = type("Compose", (Compose, *kinds), {"__new__": object.__new__, "__reduce__": Compose.__reduce__})
    made.__abstractmethods__ = frozenset()  # type: ignore[attr-defined]
    return made
