"""Restart a function in the same processes when any rank fails, hangs or dies.

Names and behaviour are those of the compatible API; `Wrapper` is where to start."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from resilience.inprocess.call import CallWrapper
    from resilience.inprocess.compose import Compose
    from resilience.inprocess.wrap import Wrapper

__all__ = ["CallWrapper", "Compose", "Wrapper"]

_WHERE = {"CallWrapper": "call", "Compose": "compose", "Wrapper": "wrap"}
_MODULES = (
    "abort",
    "attribution",
    "exception",
    "finalize",
    "health_check",
    "initialize",
    "monitor_thread",
    "rank_assignment",
    "rank_filter",
    "state",
    "store",
    "tools",
)


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_WHERE[name]}"), name)
    globals()[name] = value
    return value
