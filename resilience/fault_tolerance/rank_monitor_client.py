"""`RankMonitorClient` under the module's name in the compatible API; it is defined in `monitor.rank_client`."""

from resilience.errors import RankMonitorClientError
from resilience.monitor.rank_client import RankMonitorClient

__all__ = ["RankMonitorClient", "RankMonitorClientError"]
