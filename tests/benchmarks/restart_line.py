"""How long until the line of a restart names the rank that began it, by the number of recorded ranks?

    python -m tests.benchmarks.restart_line [--ranks 8,512,10000]

Writes the record files of a job whose middle rank hangs, or is killed, while all others wait for it. Then it asks for
the line that rank 0 prints. Prints the time from the end of the restart, and the CPU time."""

from __future__ import annotations

import argparse
import os
import queue
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from resilience.facts import events
from resilience.facts.identity import Origin
from resilience.facts.records import to_line
from resilience.inprocess._runtime.telling import of_restart
from tests.benchmarks import table
from tests.support.record_streams import Fault, Kind, job

FAULTS: tuple[Kind, ...] = ("kill", "waited_for")
SEED_RANKS = 8  # of the job that is multiplied


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m tests.benchmarks.restart_line")
    parser.add_argument("--ranks", default="8,512,10000", help="sizes of the job (default 8,512,10000)")
    options = parser.parse_args(arguments)
    machine = table.this_machine()
    print(
        f"{machine.cpu}, {machine.cores} cores, Python {sys.version.split()[0]}, load {machine.load:.1f} at the start"
    )
    is_right = True
    for size in map(int, options.ranks.split(",")):
        for kind in FAULTS:
            with tempfile.TemporaryDirectory() as folder:
                origin = write(Path(folder), kind, size)
                cpu = time.process_time()
                took, line = told(Path(folder), origin)
                cpu = time.process_time() - cpu
            is_right &= f"rank {size // 2} failed first" in line
            print(f"{size} ranks, {kind}: {took:.1f} s, CPU {cpu:.2f} s: {line}")
    return int(not is_right)


def told(folder: Path, origin: Origin) -> tuple[float, str]:
    """Return the line of the restart before `origin`, and after how many seconds it was there."""
    began, lines = time.monotonic(), queue.SimpleQueue[str]()
    of_restart(folder, origin, lines.put, lambda event: None)
    line = lines.get(timeout=60)
    return time.monotonic() - began, line


def write(folder: Path, kind: Kind, size: int) -> Origin:
    """Write the files of a job of `size` ranks, and return the origin of rank 0 after the restart. Rank 0 and the one
    that breaks are those of a small job; all others are copies of its last rank."""
    (folder / "records").mkdir()
    small = job([Fault(kind, 1, 0)], world=SEED_RANKS)
    texts = {rank: b"".join(map(to_line, records)) for rank, records in small.files.items()}
    culprit, of_size = size // 2, f'"world_size":{size}'.encode()
    sources = {0: 0, culprit: 1}
    for rank in range(size):
        source = sources.get(rank, SEED_RANKS - 1)
        text = texts[source].replace(f'"world_size":{SEED_RANKS}'.encode(), of_size)
        for name in ("initial_rank", "rank"):
            text = text.replace(f'"{name}":{source}'.encode(), f'"{name}":{rank}'.encode())
        text = text.replace(b'"by":1,', f'"by":{culprit},'.encode())
        path = folder / "records" / f"node-{rank}.jsonl"
        path.write_bytes(text)
        if rank == culprit:
            os.utime(path, (1000, 1000))  # the others have changed since
    started = [record for record in small.files[0] if isinstance(record.event, events.IterationStarted)]
    return msgspec.structs.replace(started[-1].origin, world_size=size)


if __name__ == "__main__":
    sys.exit(main())
