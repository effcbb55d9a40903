"""Does the CUDA device still finish its work?

Checks only a device that this process already uses: a check never initialises torch or CUDA. Imports no torch by
itself."""

from __future__ import annotations

from functools import partial

from resilience.system import devices
from resilience.system.call_with_timeout import returns_within


def used_device(local_rank: int | None) -> int | None:
    """Return the index of this rank's device, None if it has not initialised CUDA.

    local_rank: the device, if such a device is visible; else the calling thread's current device is used."""
    cuda = devices.cuda()
    if cuda is None:
        return None
    if local_rank is not None and local_rank < cuda.device_count():
        return local_rank
    return int(cuda.current_device())


def finishes_within(limit: float, device: int) -> bool:
    """Return True if all work given to the device finishes within `limit` seconds.

    A thread that waits for a device in vain is left behind, because pending work cannot be cancelled.
    Raises: the device's error, such as an illegal memory access in earlier work (RuntimeError)."""
    cuda = devices.cuda()
    assert cuda is not None, "used_device found none"
    return returns_within(limit, partial(cuda.synchronize, device), "resilience-cuda-check")
