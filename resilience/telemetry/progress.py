"""Which step and section is a program in?  The code that knows installs a function here; log lines call it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any


def _nothing() -> Mapping[str, Any]:
    return {}


shown: Callable[[], Mapping[str, Any]] = _nothing
"""Return the current "step" and "section", as far as known. `monitor.client` installs its own function."""
