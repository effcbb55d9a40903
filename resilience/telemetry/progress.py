"""Which step is a program at, and in which section?  Whoever knows puts a function here; log lines ask it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any


def _nothing() -> Mapping[str, Any]:
    return {}


shown: Callable[[], Mapping[str, Any]] = _nothing
"""Return "step" and "section" of this moment, as far as they are known. `monitor.client` puts its own here."""
