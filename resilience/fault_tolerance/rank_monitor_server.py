"""`RankMonitorServer` under the module's name in the compatible API; it is defined in `monitor.rank_server`."""

from resilience.monitor.rank_server import RankMonitorServer

__all__ = ["RankMonitorServer"]
