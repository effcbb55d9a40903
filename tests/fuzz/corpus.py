"""What is damaged: messages, entries of stores and whole run folders, as the package itself writes them."""

from __future__ import annotations

import random
from pathlib import Path

from resilience.facts import events
from resilience.facts.configuration import Configuration
from resilience.facts.encoding import to_json, to_json_page
from resilience.facts.identity import Job, Origin
from resilience.facts.limits import Limit, Limits
from resilience.facts.records import Record
from resilience.telemetry import log, rank_snapshot
from resilience.telemetry.durations import Header, Recorder
from resilience.telemetry.recording import JOB_FILE
from tests.support import launch_streams, record_streams

ORIGIN = Origin("job", "node", "rank", 7, initial_rank=1, rank=1, world_size=3, iteration=0)
CONFIGURATION = Configuration("train.py", world_size=2, arguments=("--lr=1",), torch="2.13.0")
LIMITS = Limits(step=Limit(None, 5.0), sections={"data": Limit(1.0)}, warmup={"data": Limit()}, warmup_occurrences=3)
KINDS = (
    "exception", "everywhere", "left", "exit", "kill", "oom", "hang", "waited_for", "stopped", "native", "busy",
    "finalize",
    "communication", "skipped",
)  # fmt: skip
LAUNCHED = ("raise", "hang", "kill", "request", "membership")
AT = record_streams.STARTED_NS


def records() -> list[Record]:
    """Return records of every kind that a job writes."""
    faults = [record_streams.Fault(kind, n % 3, n, 10 * (n + 1)) for n, kind in enumerate(KINDS)]  # type: ignore[arg-type]
    told = record_streams.job(faults, world=3, spares=1)
    known = [record for file in told.files.values() for record in file]
    known += launch_streams.launched([launch_streams.Fault(kind) for kind in LAUNCHED], nodes=2).records  # type: ignore[arg-type]
    return known


def run_folder(folder: Path, is_launched: bool) -> Path:
    """Write a small run folder with every kind of file in it."""
    if is_launched:
        launch_streams.launched([launch_streams.Fault("raise", 1)], nodes=2, ranks=1).write(folder)
        nodes = ["node0", "node1"]
    else:
        faults = [record_streams.Fault("exception", 1, 0), record_streams.Fault("hang", 0, 1, 20)]
        record_streams.job(faults, world=2).write(folder)
        nodes = ["node", "node"]
    job = Job("job", 0, AT, "train.main", ("train.py", "--lr=1"), 2, "host", "0.1", "2.13.0", "3.11.7", CONFIGURATION)
    (folder / JOB_FILE).write_bytes(to_json_page(job))
    for name in ("timings", "logs", "output/0"):
        (folder / name).mkdir(parents=True)
    for rank, node in enumerate(nodes):
        _timings(folder, node, rank)
        _logs(folder, node, rank)
    return folder


def _timings(folder: Path, node: str, rank: int) -> None:
    chance = random.Random(rank)
    recorder = Recorder(folder, Header("job", node, rank, 2, CONFIGURATION), AT / 1e9)
    recorder.started("cold", AT / 1e9)
    for number in range(80):
        seconds = chance.lognormvariate(-3, 0.3)
        for name in ("data", "heartbeat"):
            recorder.add(name, seconds, AT / 1e9 + number * 20)
    recorder.add("data", 3.0, AT / 1e9, "cut", is_failed=True)
    recorder.add("data", 30.0, AT / 1e9, "hang")
    recorder.close(AT / 1e9 + 6000)
    shown = rank_snapshot.RankSnapshot(
        Origin("job", node, "monitor", 9, initial_rank=rank, rank=rank, world_size=2), "function", 100.0, AT / 1e9,
        12, 99.0, 99.5, (rank_snapshot.SnapshotSection("data", 98.0, 30.0),), 0, rank_snapshot.allowed(LIMITS),
    )  # fmt: skip
    rank_snapshot.write(folder, shown)


def _logs(folder: Path, node: str, rank: int) -> None:
    lines = []
    for number in range(6):
        record = Record(number, AT + number * 10**9, number * 10**9, ORIGIN, events.HookFailed("finalize", "no"))
        line = log.line_of(record) | {
            "loss": 0.5,
            "step": number,
            "initial_rank": rank,
            "node": node,
            "event": "trained",
        }
        lines.append(to_json(line) + b"\n")
    (folder / "logs" / f"{node}-{rank}.jsonl").write_bytes(b"".join(lines))
    text = (
        b"2023-11-14 22:13:20,123 INFO loading\n[W1114 22:13:21.000000000 socket.cpp:204] Warning\nno time here\n"
        b'Traceback (most recent call last):\n  File "train.py", line 1, in <module>\nValueError: caf\xe9\n\r 50%|##\r'
    )
    (folder / "output" / "0" / f"{rank}.out").write_bytes(text)
    (folder / "output" / "0" / f"{rank}.err").write_bytes(text[::-1])
