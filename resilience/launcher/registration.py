"""How does torchrun find our rendezvous?  By an entry point of the group `torchrun.handlers`.

torch loads it whenever its rendezvous package is imported, while that import is still under way: so this
module imports nothing."""

from __future__ import annotations

from typing import Any


def creator() -> Any:
    """Return what makes a handler for `--rdzv-backend=resilience`."""
    return _create


def _create(parameters: Any) -> Any:
    from resilience.launcher.rendezvous import Handler

    return Handler(parameters)
