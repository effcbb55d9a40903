"""A run folder as large as they come: 10,000 ranks, 50 restarts, every record of every rank.

`python -m tests.support.large_run FOLDER` writes it. A job of 84 ranks is told (`record_streams`): 50 that break, each
in an iteration of its own, and 34 that do not; the latter's files are then written for all other ranks, each under its
own rank, pid and node. So every file differs, nothing is linked, and what the ranks did has 84 variants."""

from __future__ import annotations

import argparse
import random
import re
from pathlib import Path

from resilience.facts.identity import Origin
from resilience.facts.records import to_line
from resilience.telemetry import rank_snapshot
from resilience.telemetry.timings import Timings
from tests.support import rank_timings
from tests.support.rank_timings import add_durations
from tests.support.record_streams import Fault, Kind, job

WORLD, RESTARTS, VARIANTS = 10_000, 50, 34
A_NODE = 8  # ranks
KINDS: tuple[Kind, ...] = ("exception", "hang", "kill", "exception", "stopped", "waited_for", "exit", "exception")
SECTIONS = {"data": 0.02, "forward": 0.05, "backward": 0.11, "reduce": 0.03, "checkpoint": 4.0}
LIMIT = 30.0
_WORLD_SIZE = re.compile(rb'world_size":(\d+)')
_POSITION = re.compile(rb'("initial_rank":@R@,"rank":)\d+')


def write(folder: Path, world: int = WORLD, restarts: int = RESTARTS) -> Path:
    """Write the run; answers its folder."""
    small = restarts + VARIANTS
    faults = [Fault(KINDS[n % len(KINDS)], n, n, 10 * (n + 1)) for n in range(restarts)]
    told = job(faults, world=small, seed=11, job_id=folder.name)
    (folder / "records").mkdir(parents=True)
    (folder / "timings").mkdir()
    texts = [b"".join(map(to_line, told.files[rank])) for rank in range(small)]
    more = world - small
    texts = [_WORLD_SIZE.sub(lambda found: b'world_size":%d' % (int(found[1]) + more), text) for text in texts]
    variants = [_variant(texts[rank], rank) for rank in range(restarts, small)]
    durations = _durations()
    for rank in range(world):
        text = texts[rank] if rank < restarts else variants[rank % VARIANTS].replace(b"@R@", b"%d" % rank)
        node = f"node{rank // A_NODE:04d}"
        text = text.replace(b'"node":"node"', b'"node":"%s"' % node.encode())
        (folder / "records" / f"{node}-{rank}.jsonl").write_bytes(text.replace(b"@P@", b"%d" % (1000 + rank)))
        rank_timings.write(folder, node, rank, durations[rank % len(durations)])
        allowed = tuple(rank_snapshot.Allowed(name, LIMIT, True) for name in SECTIONS)
        rank_snapshot.write(
            folder,
            rank_snapshot.RankSnapshot(
                Origin(folder.name, node, "monitor", 1, initial_rank=rank), "ended", limits=allowed
            ),
        )
    return folder


def _variant(text: bytes, rank: int) -> bytes:
    """The file of one rank with its numbers as places to be filled in."""
    for name in (b"initial_rank", b"rank"):
        text = re.sub(rb'"%s":%d\b' % (name, rank), b'"%s":@R@' % name, text)
    text = _POSITION.sub(rb"\g<1>@R@", text)
    return re.sub(rb'"(rank_)?pid":%d\b' % (100 + rank), rb'"\g<1>pid":@P@', text)


def _durations() -> list[Timings]:
    chance, made = random.Random(5), []
    for _ in range(20):
        timings = Timings()
        for name, typical in SECTIONS.items():
            add_durations(timings, ((name, typical * chance.lognormvariate(0.0, 0.3)) for _ in range(400)))
        made.append(timings)
    return made


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--world", type=int, default=WORLD)
    parser.add_argument("--restarts", type=int, default=RESTARTS)
    chosen = parser.parse_args()
    write(chosen.folder, chosen.world, chosen.restarts)
