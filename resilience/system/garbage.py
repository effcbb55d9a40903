"""How is memory freed that only a garbage collection frees?

Objects that refer to each other (a trainer and its model, modules of FSDP2) survive the end of the function that
created them until Python collects garbage. Without a collection, a restart holds the old model beside the new one. A
full collection visits every container object of the process, and importing torch alone creates 43 ms of them. So all
objects are frozen once, at the first entry, after a collection; later collections visit only newer objects."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

PASSES = 4  # a pass may free a C++ object that held the next cycle of Python objects
_frozen_in = 0  # process id; a forked worker has its own objects to freeze


class Collection(msgspec.Struct, frozen=True):
    """The result of a collection. objects: unreachable ones, some of which C++ may still hold."""

    objects: int
    passes: int
    duration_s: float


def freeze_once() -> None:
    """Exempt all objects alive now from later collections. Only a process's first call does it."""
    global _frozen_in
    if _frozen_in != os.getpid():
        gc.collect()
        gc.freeze()
        _frozen_in = os.getpid()


@contextmanager
def postponed() -> Iterator[None]:
    """Collect nothing in the body: an import creates so many objects that Python collects the whole heap of torch,
    which takes longer than the import."""
    was_enabled = gc.isenabled()
    try:
        gc.disable()
        yield
    finally:
        if was_enabled:
            gc.enable()


def collect() -> Collection:
    """Free every unreachable object, even if the user has switched collections off.

    Runs finalizers of user code, which may block: call it only where a limit applies."""
    began = time.monotonic()
    total = passes = 0
    while passes < PASSES:
        unreachable = gc.collect()
        total, passes = total + unreachable, passes + 1
        if not unreachable:
            break
    return Collection(total, passes, time.monotonic() - began)
