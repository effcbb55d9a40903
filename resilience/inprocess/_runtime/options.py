"""Is this argument valid?  Checks that the hooks and the stores share.

Each check returns the value in the form that its caller uses, or raises. The message has the argument's name, its
value and unit, what was expected and what to write. `inprocess.wrap` checks the Wrapper's own options, and how
they relate to each other."""

from __future__ import annotations

from datetime import timedelta

from resilience.errors import ConfigurationError, ConfigurationTypeError


def seconds(name: str, value: object, may_be_0: bool = False) -> float:
    """Return a timedelta above 0, or from 0, in seconds. Raises: ConfigurationTypeError, ConfigurationError."""
    if not isinstance(value, timedelta):
        example = value if isinstance(value, int | float) else 60
        raise ConfigurationTypeError(
            f"{name} is {value!r} ({type(value).__name__}), expected a datetime.timedelta; "
            f"write e.g. {name}=timedelta(seconds={example})",
            option=name,
            value=value,
        )
    if value < timedelta(0) or (value == timedelta(0) and not may_be_0):
        expected = "0 s or more" if may_be_0 else "more than 0 s"
        raise ConfigurationError(
            f"{name} is {value.total_seconds():g} s, expected {expected}", option=name, value=value
        )
    return value.total_seconds()


def whole(name: str, value: object, least: int) -> int:
    """Return an int of at least `least`. Raises: ConfigurationTypeError, ConfigurationError."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise ConfigurationTypeError(
            f"{name} is {value!r} ({type(value).__name__}), expected a whole number from {least}",
            option=name,
            value=value,
        )
    if value < least:
        raise ConfigurationError(f"{name} is {value}, expected a whole number from {least}", option=name, value=value)
    return value
