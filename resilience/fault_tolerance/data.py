"""Limits and requests of a client, under the module's name in the compatible API.

They are defined in `core.limits` and `monitor.rank_client`."""

from resilience.core.limits import HeartbeatTimeouts, SectionTimeouts
from resilience.monitor.rank_client import WorkloadAction, WorkloadControlRequest

FT_RANK_MONITOR_IPC_SOCKET_ENV_VAR = "FT_RANK_MONITOR_IPC_SOCKET"

__all__ = [
    "FT_RANK_MONITOR_IPC_SOCKET_ENV_VAR",
    "HeartbeatTimeouts",
    "SectionTimeouts",
    "WorkloadAction",
    "WorkloadControlRequest",
]
