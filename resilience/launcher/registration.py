"""How does torchrun find our rendezvous?  By an entry point of the group `torchrun.handlers`.

torch loads this module while the import of its rendezvous package is still running, so this module imports nothing."""

from __future__ import annotations

from typing import Any


def creator() -> Any:
    """Return the function that creates a handler for `--rdzv-backend=resilience`."""
    return _create


def _create(parameters: Any) -> Any:
    from resilience.launcher.rendezvous.handler import Handler

    return Handler(parameters)
