"""How long does a restart's garbage collection take, by the number of live container objects?

    python -m tests.benchmarks.garbage [--millions 0,1,10]

Measures in one process: first a full collection after the import of torch, then, once everything is frozen as at the
first call of a wrapped function, the collection of a restart. Prints medians of 7, also of
CPU time, which a busy machine changes less. Ten million lists need 1 GiB."""

from __future__ import annotations

import argparse
import gc
import os
import sys
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import NamedTuple

import torch

from resilience.system import garbage
from tests.benchmarks import table

REPEATS = 7


class Duration(NamedTuple):
    wall: float
    cpu: float


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
    machine = table.this_machine()
    print(f"{machine.cpu}, {machine.cores} cores, torch {torch.__version__}, Python {sys.version.split()[0]}")
    print(f"load {machine.load:.1f} at the start; medians of {REPEATS} (smallest - largest)")
    _show("not frozen, after the import of torch", _times(lambda: gc.collect()))
    garbage.freeze_once()
    for millions in map(float, options.millions.split(",")):
        _show(f"frozen, then {millions:g} million lists", collection_times(int(millions * 1e6)))
    print(f"load {os.getloadavg()[0]:.1f} at the end")
    return 0


def collection_times(containers: int) -> list[Duration]:
    """Return wall and CPU seconds of each collection while this many lists are alive."""
    alive: list[list[None]] = [[] for _ in range(containers)]
    seconds = _times(garbage.collect)
    assert len(alive) == containers
    return seconds


def _times(collect: Callable[[], object]) -> list[Duration]:
    collect()  # frees what earlier code has left
    durations = []
    for _ in range(REPEATS):
        began, began_cpu = time.perf_counter(), time.process_time()
        collect()
        durations.append(Duration(time.perf_counter() - began, time.process_time() - began_cpu))
    return durations


def _show(what: str, durations: Sequence[Duration]) -> None:
    wall, cpu = (_summary(values) for values in zip(*durations, strict=True))
    print(f"  {what:40} {wall}, CPU {cpu}", flush=True)


def _summary(seconds: Sequence[float]) -> str:
    middle, low, high = (table.show(value, "s") for value in (median(seconds), min(seconds), max(seconds)))
    return f"{middle} ({low} - {high})"


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.garbage", description=__doc__)
    parser.add_argument("--millions", default="0,1,10", help="millions of live lists to measure with (%(default)s)")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
