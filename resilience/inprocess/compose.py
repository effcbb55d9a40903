"""How do several hooks make one?  `Compose(a, b)` is a hook that runs b, then a.

Hooks of one kind hand on what they were given: a state, a state and an exception, or a state and the
terminated ranks. So joining them is plain composition, whatever the kind. The joined hook is an instance
of the kind its parts share, because that is what `Wrapper` checks."""

from __future__ import annotations

import functools
from abc import ABC, ABCMeta
from typing import TYPE_CHECKING, Any, TypeVar

from resilience.errors import ConfigurationError, ConfigurationTypeError

T = TypeVar("T")


class Composition:
    """Compose(a, b, c)(x) is a(b(c(x))): the last one runs first.

    instances: callables, at least one; the result is an instance of every abstract class that all of them
    are instances of. A hook that returns None hands on what it was given; a tuple is handed on as
    several arguments. Raises: ConfigurationError, ConfigurationTypeError."""

    instances: tuple[Any, ...]

    def __new__(cls, *instances: Any) -> Any:
        if not instances:
            raise ConfigurationError("Compose() has nothing to join; pass at least one hook, or None to the Wrapper")
        for instance in instances:
            if not callable(instance) or isinstance(instance, type):
                raise ConfigurationTypeError(
                    f"Compose got {instance!r}, expected an instance of a hook; "
                    + ("construct it, with ()" if isinstance(instance, type) else "it cannot be called"),
                    value=instance,
                )
        composed: Any = object.__new__(_composed(_shared_kinds(instances)))
        composed.instances = instances
        return composed

    def __init__(self, *instances: Any) -> None:
        """Done by __new__; keeps the constructor of a shared kind from being called."""

    def __call__(self, *args: Any) -> Any:
        result: Any = args if len(args) != 1 else args[0]
        for instance in reversed(self.instances):
            returned = instance(*args)
            if returned is not None:
                result = returned
                args = returned if isinstance(returned, tuple) else (returned,)
        return result if args else None

    def __reduce__(self) -> Any:
        return Composition, self.instances  # an executed monitor gets its hooks pickled

    def __repr__(self) -> str:
        return f"Compose({', '.join(map(repr, self.instances))})"


def _shared_kinds(instances: tuple[Any, ...]) -> tuple[type, ...]:
    """The most specific abstract classes that all instances share; a class implied by another is left out."""
    shared = set.intersection(*(set(type(instance).__mro__) for instance in instances))
    kinds = [
        kind for kind in shared if isinstance(kind, ABCMeta) and kind is not ABC and not issubclass(kind, Composition)
    ]
    specific = (kind for kind in kinds if not any(kind in other.__mro__[1:] for other in kinds))
    return tuple(sorted(specific, key=lambda kind: f"{kind.__module__}.{kind.__qualname__}"))


@functools.cache
def _composed(kinds: tuple[type, ...]) -> type:
    # `__call__` of Composition comes first in the order of bases, so nothing abstract is left to implement.
    return type("Compose", (Composition, *kinds), {"__module__": __name__, "__new__": object.__new__})


if TYPE_CHECKING:
    # What a type checker has to know: joined Initialize hooks are an Initialize.
    def Compose(*instances: T) -> T: ...  # noqa: N802
else:
    Compose = Composition
