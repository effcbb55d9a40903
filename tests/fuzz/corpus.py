"""What is damaged: messages, entries of stores and whole run folders, as the package itself writes them."""

from __future__ import annotations

import random
from pathlib import Path

import msgspec

from resilience.calibrate.tables import COLUMNS
from resilience.calibration.limits_file import Timeouts
from resilience.facts import events
from resilience.facts.configuration import Configuration
from resilience.facts.encoding import to_json, to_json_page, to_msgpack
from resilience.facts.identity import Job, Origin
from resilience.facts.limits import Limit, Limits
from resilience.facts.records import Record
from resilience.monitor import worker
from resilience.monitor.duration_recorder import DurationRecorder
from resilience.monitor.page import Closed
from resilience.system.attempts import Launch
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


def record_of(event: events.AnyEvent) -> Record:
    """Return a record of a rank's event."""
    return Record(1, AT, 10**9, ORIGIN, event)


def timeouts() -> Timeouts:
    """Return the content of a file of limits."""
    deadline = {"timeout_s": 5.0, "status": "ok", "reason": "fits", "p": 1e-9, "n": 300, "max_s": 2.0, "p99_s": 1.0}
    plain = {
        "schema": 2,
        "configuration": {"script": "train.py", "world_size": 2},
        "created": "now",
        "target_false_alarms": 0.1,
        "horizon_s": 2.6e6,
    }
    return msgspec.convert({**plain, "ranks": 2, "deadlines": {"data": deadline, "heartbeat": deadline}}, Timeouts)


def launches() -> list[bytes]:
    """Return entries of launches, as the launch's store holds them."""
    return [to_json(Launch("job", 2, "0123456789ab")), to_json(Launch("", 0, "0123", "attempt 2 has a run folder"))]


def notes() -> list[bytes]:
    """Return notes of monitors for their successors: one of a rank that has begun, and one of a rank that has not."""
    recorder = DurationRecorder(Path("/dev/null/nowhere"), ORIGIN)  # a folder that cannot be made
    recorder.process_started(1, is_cold=True)
    before = recorder.position
    closed = [Closed("data", 0.5, 10.0 + step) for step in range(20)]
    steps = [Closed("", 1.0, 10.0 + step, is_step=True, rise=1) for step in range(20)]
    recorder.take([*closed, *steps], (), announced=9.0, heartbeat_at=10.0, step=20)
    return [to_msgpack(worker._Note(tail, position)) for tail, position in ((0, before), (40, recorder.position))]


def log_lines() -> list[bytes]:
    """Return lines of our logger, and one of a program."""
    lines = [log.line_of(record) | {"loss": 0.5} for record in records()[:40]]
    return [*map(to_json, lines), b"step 10, loss 0.5"]


def elastic_events() -> list[bytes]:
    """Return events of torchelastic, as its handlers get them."""
    failed = {"run_id": "job", "global_rank": 1, "group_rank": 0, "state": "FAILED", "duration_ms": 1234}
    started = {"run_id": "job", "global_rank": None, "state": "RUNNING", "metadata": "{}", "raw_error": None}
    return [
        to_json(
            {"name": "torchelastic.worker.status.FAILED", "source": "WORKER", "timestamp": 0}
            | {"metadata": failed | {"raw_error": '{"message": "ValueError: no"}'}}
        ),
        to_json({"name": "agent", "source": "AGENT", "timestamp": 0, "metadata": started}),
    ]


def flight_dumps() -> list[bytes]:
    """Return what the flight recorder of torch 2.13 says of three collectives of gloo, and of two groups of NCCL."""
    tensors = {"input_dtypes": ["Float"], "input_sizes": [[4]], "output_dtypes": ["Float"], "output_sizes": [[4]]}
    times = {"time_discovered_completed_ns": 0, "time_discovered_started_ns": 0, "timeout_ms": 1800000}
    place = {"thread_id": "139828826692480", "thread_name": "python"}

    def entry(number: int, group: list[str], group_id: int, name: str, state: str) -> dict[str, object]:
        own = {
            "collective_seq_id": number,
            "is_p2p": name == "nccl:send",
            "op_id": number,
            "p2p_seq_id": 0,
            "pg_id": group_id,
            "process_group": group,
            "profiling_name": name,
            "record_id": number - 1,
            "retired": state == "completed",
            "state": state,
            "time_created_ns": AT + number * 10**6,
        }
        return dict(sorted((own | tensors | times | place).items()))

    def dump(entries: list[dict[str, object]]) -> bytes:
        ranks = {"": {"desc": "", "name": "", "ranks": "[0]"}}
        status = {"last_completed_collective": "3", "last_enqueued_collective": "3", "last_started_collective": "-1"}
        head = {"comm_lib_version": "", "entries": entries, "nccl_comm_state": {}, "pg_config": ranks}
        return to_json(head | {"pg_status": {"0": status}, "version": "2.10"})

    whole, part = ["0", "default_pg"], ["1", "undefined"]
    names = ("gloo:all_reduce", "gloo:broadcast", "gloo:barrier")
    of_gloo = [entry(number, whole, 0, name, "scheduled") for number, name in enumerate(names, 1)]
    of_nccl = [entry(number, whole, 0, "nccl:all_reduce", "completed") for number in range(1, 5)]
    of_nccl += [entry(1, part, 1, "nccl:all_gather", "started"), entry(2, part, 1, "nccl:send", "scheduled")]
    return [dump(of_gloo), dump(of_nccl)]


def table() -> bytes:
    """Return durations of another tool, as a table of two runs."""
    chance = random.Random(0)
    lines = [",".join((*COLUMNS, "end"))]
    for run in ("monday", "tuesday"):
        for number in range(60):
            lines += [f"{run},data,{rank},{number},{chance.lognormvariate(-3, 0.3):.6f},ok" for rank in range(2)]
        lines.append(f"{run},data,1,60,30.0,cut")
    return "\n".join([*lines, ""]).encode()


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
