"""Why did an iteration end?  Names of the compatible API; the values are `facts.interruptions`'s."""

from resilience.facts.interruptions import Interruption, InterruptionRecord

__all__ = ["Interruption", "InterruptionRecord"]
