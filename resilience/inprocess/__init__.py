"""Restart a function in the same processes when any rank fails, hangs or dies.

Start with `Wrapper`. Names and behaviour follow the compatible API."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from resilience.inprocess._runtime.call import CallWrapper
    from resilience.inprocess.compose import Compose
    from resilience.inprocess.state import State
    from resilience.inprocess.wrap import Wrapper

__all__ = ["CallWrapper", "Compose", "State", "Wrapper"]

_MODULE_OF = {"CallWrapper": "_runtime.call", "Compose": "compose", "State": "state", "Wrapper": "wrap"}
_MODULES = (
    "abort",
    "attribution",
    "completion",
    "compose",
    "exception",
    "finalize",
    "health_check",
    "initialize",
    "monitor_thread",
    "nested_restarter",
    "rank_assignment",
    "rank_filter",
    "state",
    "store",
    "terminate",
    "tools",
    "wrap",
)


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    if name not in _MODULE_OF:
        from resilience.inprocess.later_releases import missing

        raise missing(__name__, name)
    value = getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value
