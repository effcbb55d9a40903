"""How is memory freed that only a garbage collection frees?

Objects that refer to each other (a trainer and its model, modules of FSDP2) survive the end of the function that made
them until Python collects garbage. A restart that does not collect holds the old model beside the new one. A full
collection looks at every container object of the process, and importing torch alone makes 43 ms of them; so what
exists at the first entry is frozen once, after a collection, and later collections look at what came after it."""

from __future__ import annotations

import gc
import os
import time

import msgspec

PASSES = 4  # a pass may free an object of C++ that held the next circle of Python objects
_frozen_in = 0  # process id; a forked worker has objects of its own to freeze


class Collection(msgspec.Struct, frozen=True):
    """What a collection did. objects: unreachable ones that were found, some of which C++ may still hold."""

    objects: int
    passes: int
    duration_s: float


def freeze_once() -> None:
    """Exempt everything that is alive now from later collections; in one process only the first call does it."""
    global _frozen_in
    if _frozen_in != os.getpid():
        gc.collect()
        gc.freeze()
        _frozen_in = os.getpid()


def collect() -> Collection:
    """Free every object that nothing refers to from outside, also where the user has switched collections off.

    Runs finalizers of user code, which may block: call it where a limit is in force."""
    began = time.monotonic()
    total = passes = 0
    while passes < PASSES:
        found = gc.collect()
        total, passes = total + found, passes + 1
        if not found:
            break
    return Collection(total, passes, time.monotonic() - began)
