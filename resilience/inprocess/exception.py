"""What may a wrapped call raise?  Names of the compatible API; the classes are those of `errors`."""

from resilience.errors import (
    HealthCheckError,
    InternalError,
    RestartAbort,
    RestartError,
    TimeoutError,
)

__all__ = ["HealthCheckError", "InternalError", "RestartAbort", "RestartError", "TimeoutError"]
