"""Exceptions of the restart: names kept from the compatible API; they live in `resilience.errors`."""

from resilience.errors import (
    HealthCheckError,
    InternalError,
    RestartAbort,
    RestartError,
    TimeoutError,
)

__all__ = ["HealthCheckError", "InternalError", "RestartAbort", "RestartError", "TimeoutError"]
