"""Which of these keywords is not a setting?  Lets the constructor of a dataclass name it, and say what to write.

Settings that only the compatible API has are accepted where nothing needs to be done for them, and refused otherwise,
whether they come as a keyword, from a YAML file or as a flag of the launcher."""

from __future__ import annotations

import dataclasses
import difflib
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from resilience.errors import ConfigurationError, ConfigurationTypeError

T = TypeVar("T")

OFF = ("false", "0", "no")  # values that switch off a yes-or-no setting
HEALTH = "pass `--health-check` a command that checks it; each node runs it before each cycle"
ACCEPTED = {
    "restart_check_interval": "nothing polls at intervals: a monitor wakes when a limit is due",
    "skip_section_response": "a heartbeat or section is a write to shared memory; wrong use raises an error "
    "immediately",
}
"""Settings of the compatible API for which nothing needs to be done, with the reason."""

REFUSED = ("enable_nic_monitor", "pci_topo_file", "link_down_path_template")
"""Settings of its health checks. None, and a value that switches one off, is accepted."""


def without_settings_of_others(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings without those that only the compatible API has. Raises: ConfigurationError for one that asks
    for something that is not here."""
    for name in REFUSED:
        value = settings.get(name)
        if value is not None and str(value).lower() not in OFF:
            raise ConfigurationError(
                f"{name} is a setting of nvidia-resiliency-ext that is not supported: {HEALTH}",
                option=name,
                value=value,
            )
    return {name: value for name, value in settings.items() if name not in ACCEPTED and name not in REFUSED}


def hint_at(unknown: Iterable[str], names: Iterable[str]) -> str:
    """Return which settings may be meant instead of unknown ones; all settings if there is one like none of them."""
    names = list(names)
    similar = [difflib.get_close_matches(name, names, 1, 0.8) for name in unknown]
    if all(similar):
        return f"did you mean {', '.join(match for (match,) in similar)}?"
    return f"there are {', '.join(names)}"


def names_unknown(kind: type[T]) -> type[T]:
    """Return the dataclass; its constructor raises ConfigurationTypeError for a keyword that is no field, and sets each
    given field again, so that the dataclass can tell it from a default. It must have a method `from_kwargs`, which
    ignores unknown keywords."""
    construct: Callable[..., None] = kind.__init__
    names = [field.name for field in dataclasses.fields(kind)]  # type: ignore[arg-type]

    @functools.wraps(construct)
    def constructor(self: T, *values: Any, **settings: Any) -> None:
        settings = without_settings_of_others(settings)
        unknown = sorted(set(settings) - set(names))
        if unknown:
            raise ConfigurationTypeError(
                f"there is no setting {', '.join(unknown)}; {hint_at(unknown, names)}. "
                f"{kind.__name__}.from_kwargs ignores other settings, with a warning",
                unknown=unknown,
            )
        construct(self, *values, **settings)
        given = (*names[: len(values)], *settings)
        if len(given) < len(names):  # else a copy, as of `dataclasses.replace`, which passes defaults too
            for name in given:
                setattr(self, name, getattr(self, name))

    kind.__init__ = constructor  # type: ignore[method-assign,assignment]
    return kind
