"""How do several hooks become one?  `Compose(a, b)` is a hook that runs b, then a.

Hooks of one kind return what they receive: a state, a state and an exception, or a state and the terminated
ranks. So joining them is plain composition, whatever the kind. The joined hook is an instance of the kind
that its parts share, because `Wrapper` checks the kind."""

from __future__ import annotations

import functools
import warnings
from abc import ABC
from typing import TYPE_CHECKING, Any, TypeVar

from resilience.errors import ConfigurationError, ConfigurationTypeError

T = TypeVar("T")
_BASETYPE = 1 << 10  # Py_TPFLAGS_BASETYPE: the class may have subclasses


class Composition:
    """Compose(a, b, c)(x) is a(b(c(x))): the last one runs first.

    instances: callables, at least one. The result is an instance of the nearest class that all of them share,
    abstract or not, and of every other such class. A returned tuple becomes several arguments of the next hook.
    If a hook receives arguments and returns None, a UserWarning is issued and the next hook gets the same ones.
    Raises: ConfigurationError, ConfigurationTypeError."""

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
        """Do nothing: __new__ did it. Keeps Python from calling the constructor of a shared kind."""

    def __call__(self, *args: Any) -> Any:
        result: Any = args if len(args) != 1 else args[0]
        for instance in reversed(self.instances):
            returned = instance(*args)
            if returned is not None:
                result = returned
                args = returned if isinstance(returned, tuple) else (returned,)
            elif args and args != (None,):
                warnings.warn(
                    f"{instance!r} returned None inside a Compose, expected its arguments, changed or not; the next "
                    "hook gets the same arguments. Return them",
                    UserWarning,
                    stacklevel=2,
                )
        return result if args else None

    def __reduce__(self) -> Any:
        return Composition, self.instances  # a monitor started by exec receives its hooks pickled

    def __repr__(self) -> str:
        return f"Compose({', '.join(map(repr, self.instances))})"


def _shared_kinds(instances: tuple[Any, ...]) -> tuple[type, ...]:
    """Return the most specific classes that all instances share, without classes that another one implies."""
    shared = set.intersection(*(set(type(instance).__mro__) for instance in instances))
    kinds = [kind for kind in shared if kind not in (ABC, object) and _may_be_base(kind)]
    specific = (kind for kind in kinds if not any(kind in other.__mro__[1:] for other in kinds))
    return tuple(sorted(specific, key=lambda kind: f"{kind.__module__}.{kind.__qualname__}"))


def _may_be_base(kind: type) -> bool:
    """Return False for Composition itself, and for classes that Python does not let anyone subclass, as functions'."""
    return not issubclass(kind, Composition) and bool(kind.__flags__ & _BASETYPE)


@functools.cache
def _composed(kinds: tuple[type, ...]) -> type:
    # `__call__` of Composition comes first in the order of bases, so nothing abstract is left to implement.
    return type("Compose", (Composition, *kinds), {"__module__": __name__, "__new__": object.__new__})


if TYPE_CHECKING:
    # For type checkers: joined Initialize hooks are an Initialize.
    def Compose(*instances: T) -> T: ...  # noqa: N802
else:
    Compose = Composition
