"""Which ranks does a person mean by a text such as "0-7,12"?"""

from __future__ import annotations

import itertools

from resilience.errors import ConfigurationError
from resilience.facts.identity import LARGEST_WORLD


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
