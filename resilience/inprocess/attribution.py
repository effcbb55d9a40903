"""Why an iteration ended: names kept from the compatible API; the values live in `core.attribution`."""

from resilience.core.attribution import Interruption, InterruptionRecord

__all__ = ["Interruption", "InterruptionRecord"]
