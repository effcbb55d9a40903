"""The argument parser of all subcommands, and argument types that several of them share.

A rejected argument is escaped before it is printed, like any other text."""

from __future__ import annotations

import argparse
import itertools
from typing import NoReturn

from resilience.errors import ConfigurationError
from resilience.facts.identity import LARGEST_WORLD
from resilience.facts.printable import usage_error


class Parser(argparse.ArgumentParser):
    """An argparse parser whose error messages contain no terminal control sequences."""

    def error(self, message: str) -> NoReturn:
        """Print the usage and the message, and exit with status 2."""
        super().error(usage_error(message))


def refuse_together(option: str, advice: str = "; leave one of them out", **others: object) -> None:
    """Raise ConfigurationError if one of the other options, by name, is given together with `option`."""
    given = [f"--{name}" for name, value in others.items() if value is not None and value is not False]
    if given:
        raise ConfigurationError(f"{option} cannot be combined with {', '.join(given)}{advice}")


def ranks_of(text: str) -> frozenset[int]:
    """Return the ranks that a text such as "0-7,12" lists. Raises: ConfigurationError."""
    return frozenset(itertools.chain.from_iterable(ranges_of(text)))


def ranges_of(text: str) -> tuple[range, ...]:
    """Return the ranges of ranks in a text such as "0-7,12". Raises: ConfigurationError."""
    return tuple(_range(text, part) for part in text.split(","))


def _range(text: str, part: str) -> range:
    first, dash, last = part.strip().partition("-")
    if not first.isdecimal() or (dash and not last.isdecimal()):
        raise ConfigurationError(f"--rank {text}: {part!r} is neither a rank nor a range; write ranks as 0-7,12")
    low, high = _rank(text, first), _rank(text, last or first)
    if high < low:
        raise ConfigurationError(f"--rank {text}: {part!r} ends before it begins; write ranks as 0-7,12")
    return range(low, high + 1)


def _rank(text: str, digits: str) -> int:
    digits = digits.lstrip("0") or "0"
    # The length comes first: Python refuses to convert thousands of digits.
    if len(digits) > len(str(LARGEST_WORLD)) or int(digits) > LARGEST_WORLD:
        raise ConfigurationError(f"--rank {text}: ranks are at most {LARGEST_WORLD}")
    return int(digits)
