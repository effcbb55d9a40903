"""Which of these keywords is not a setting?  Lets the constructor of a dataclass name it, and say what to write."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, TypeVar

from resilience.errors import ConfigurationTypeError

T = TypeVar("T")


def names_unknown(kind: type[T]) -> type[T]:
    """Return the dataclass; its constructor raises ConfigurationTypeError for a keyword that is no field. It must have
    a method `from_kwargs`, which ignores these."""
    construct: Callable[..., None] = kind.__init__
    names = [field.name for field in dataclasses.fields(kind)]  # type: ignore[arg-type]

    @functools.wraps(construct)
    def constructor(self: T, *values: Any, **settings: Any) -> None:
        unknown = sorted(set(settings) - set(names))
        if unknown:
            raise ConfigurationTypeError(
                f"there is no setting {', '.join(unknown)}; there are {', '.join(names)}. "
                f"{kind.__name__}.from_kwargs ignores other settings, with a warning",
                unknown=unknown,
            )
        construct(self, *values, **settings)

    kind.__init__ = constructor  # type: ignore[method-assign,assignment]
    return kind
