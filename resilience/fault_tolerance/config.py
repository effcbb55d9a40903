"""`FaultToleranceConfig` under the module's name in the compatible API; it is defined in `monitor.config`."""

from resilience.monitor.config import FaultToleranceConfig

__all__ = ["FaultToleranceConfig"]
