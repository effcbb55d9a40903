"""Why did an iteration end?  Names of the compatible API; the values are `core.attribution`'s."""

from resilience.core.attribution import Interruption, InterruptionRecord

__all__ = ["Interruption", "InterruptionRecord"]
