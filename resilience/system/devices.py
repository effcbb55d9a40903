"""Which CUDA device does a thread work on?

A thread starts with device 0 as its current one, whatever the main thread has chosen. Queries only a CUDA that this
process has already initialised: a query never initialises torch or CUDA. Imports no torch by itself."""

from __future__ import annotations

import sys
from typing import Any


def cuda() -> Any:
    """Return torch.cuda if this process has initialised CUDA, else None."""
    module = getattr(sys.modules.get("torch"), "cuda", None)
    return module if module is not None and module.is_initialized() else None


def current() -> int | None:
    """Return the calling thread's current device; None if this process has not initialised CUDA."""
    module = cuda()
    return None if module is None else int(module.current_device())


def use(device: int | None) -> None:
    """Make `device`, from `current`, the calling thread's current device."""
    if device is not None:
        cuda().set_device(device)
