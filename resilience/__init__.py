"""Keeps distributed PyTorch training alive and explains every interruption.

    with resilience.section("data"): ...      mark a named part of a step, with its own limit
    resilience.heartbeat()                    signal that the rank is alive
    resilience.step(n)                        signal progress of the training loop
    resilience.stop_requested()               True if the job was asked to stop: write a checkpoint and exit
    resilience.get_logger()                   a structured logger that adds rank, iteration and step
    resilience.traceparent()                  the span of this iteration, for the program's own tracer

Inside a wrapped function or under the launcher, these calls reach the rank's monitor. Elsewhere they do
nothing, at almost no cost. The restart wrapper is `resilience.inprocess.Wrapper`."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from resilience.monitor.client import heartbeat, section, step, stop_requested
    from resilience.telemetry.log import get_logger
    from resilience.telemetry.workload import traceparent

__version__ = "0.1.0"
__all__ = ["__version__", "get_logger", "heartbeat", "section", "step", "stop_requested", "traceparent"]

_WHERE = {
    "heartbeat": "resilience.monitor.client",
    "section": "resilience.monitor.client",
    "step": "resilience.monitor.client",
    "stop_requested": "resilience.monitor.client",
    "get_logger": "resilience.telemetry.log",
    "traceparent": "resilience.telemetry.workload",
}


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_WHERE[name]), name)
    globals()[name] = value  # later look-ups bypass this function
    return value
