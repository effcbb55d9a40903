"""Which modules does the zygote import in advance, and which of them can it have without doing harm?

A module that the zygote has imported costs a restart nothing. After the import the process must still be fit to be
forked, and a program must find everything as if it had imported the module itself. A module that starts a thread or
a process, opens a file, a socket or a device, or handles a signal breaks that: it is refused, with the reason."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from resilience.core.encoding import text
from resilience.launcher import worker_main

# The first DistributedDataParallel, FSDP or fully_shard imports these, and the first backward pass: 800 modules.
DDP_AND_FSDP = ("torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor", "torch.profiler")


class Loaded(msgspec.Struct, frozen=True):
    """The outcome of preloading. refused: these modules cannot be preloaded, and none of the others was kept.
    found: the file of each top-level module that was not imported before."""

    modules: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()
    why: str = ""
    found: dict[str, str] = {}
    duration_s: float = 0.0


def load(modules: Sequence[str]) -> Loaded:
    """Import modules in this order. If one of them is refused, this process is of no use any more."""
    began = time.monotonic()
    sys.path[:] = worker_main.PATHS  # as in workers, but for the script's folder
    known = set(sys.modules)
    before, environment = _state(), dict(os.environ)
    for name in modules:
        try:
            importlib.import_module(name)
        except BaseException as error:  # whatever a module raises
            return Loaded(refused=(name,), why=text(f"{type(error).__name__}: {error}")[:300])
        why = cannot_fork() or _difference(before, _state())
        if why:
            return Loaded(refused=(name,), why=why)
    if dict(os.environ) != environment:
        os.environ.clear()
        os.environ.update(environment)
    gc.collect()
    gc.freeze()  # a collection in a worker must not copy what is shared
    found = {
        name: str(getattr(sys.modules[name], "__file__", None) or "")
        for name in set(sys.modules) - known
        if "." not in name
    }
    return Loaded(tuple(modules), found=found, duration_s=time.monotonic() - began)


def cannot_fork() -> str:
    """Return why this process must not be forked, empty if it may be."""
    threads = [text((task / "comm").read_bytes()).strip() for task in Path("/proc/self/task").iterdir()]
    if len(threads) > 1:
        return f"{len(threads)} threads run in the agent ({', '.join(sorted(threads))}), and a fork has only one"
    for fd in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            if os.readlink(fd).startswith("/dev/nvidia"):
                return "the agent uses CUDA, which does not survive a fork"
    return ""


def _state() -> dict[str, object]:
    """Return what importing a module must not change, by its name in a sentence."""
    return {
        "open descriptors": _descriptors(),
        "handlers of signals": [signal.getsignal(number) for number in sorted(signal.valid_signals())],
        "child processes": Path(f"/proc/self/task/{os.getpid()}/children").read_bytes(),
        "sys.path": list(sys.path),
        "sys.excepthook": sys.excepthook,
        "the present folder": os.stat(os.curdir).st_ino,
    }


def _descriptors() -> dict[str, str]:
    descriptors = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # that of the list itself
            descriptors[name] = os.readlink(f"/proc/self/fd/{name}")
    return descriptors


def _difference(before: dict[str, object], after: dict[str, object]) -> str:
    changed = [name for name, value in before.items() if after[name] != value]
    return f"its import changes {' and '.join(changed)}" if changed else ""
