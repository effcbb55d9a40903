"""Rank monitors under the names of the compatible API.

    client = RankMonitorClient()
    client.init_workload_monitoring()         in a worker of `resilience run`
    client.send_heartbeat()                   or start_section(name) … end_section(name)

Each name is documented in its own module. Modules are loaded on first use."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from resilience.errors import RankMonitorClientError
    from resilience.monitor.config import FaultToleranceConfig
    from resilience.monitor.rank_client import RankMonitorClient, WorkloadAction, WorkloadControlRequest
    from resilience.monitor.rank_server import RankMonitorServer

__all__ = [
    "FaultToleranceConfig",
    "RankMonitorClient",
    "RankMonitorClientError",
    "RankMonitorServer",
    "WorkloadAction",
    "WorkloadControlRequest",
]

_WHERE = {
    "FaultToleranceConfig": "resilience.monitor.config",
    "RankMonitorClient": "resilience.monitor.rank_client",
    "RankMonitorClientError": "resilience.errors",
    "RankMonitorServer": "resilience.monitor.rank_server",
    "WorkloadAction": "resilience.monitor.rank_client",
    "WorkloadControlRequest": "resilience.monitor.rank_client",
}


_STATE = "a monitor's state is not public; `resilience status` and the run folder's records show what ranks do"
_INSTEAD = {
    "RankMonitorState": _STATE,
    "RankMonitorStateMachine": _STATE,
    "InvalidStateTransitionException": _STATE + ". Wrong use of sections raises RankMonitorClientError",
}


_SUBMODULES = ("config", "data", "rank_monitor_client", "rank_monitor_server")


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        return importlib.import_module(f"{__name__}.{name}")
    if name not in _WHERE:
        instead = f": {_INSTEAD[name]}" if name in _INSTEAD else ""
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{instead}", name=name)
    value = getattr(importlib.import_module(_WHERE[name]), name)
    globals()[name] = value  # later look-ups bypass this function
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
