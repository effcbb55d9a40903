"""`get_logger()` in a program without a Wrapper, and the times of what workers write, under `resilience run`."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from dashboards.generator import collecting
from resilience.facts import events
from resilience.run_folder.merge import MergedLines
from resilience.system.files import times_of
from resilience.telemetry.log import LogLine
from tests.process.launching import launcher
from tests.support.ranks import Job

Start = Callable[..., Job]
LOGS = """
import resilience
log = resilience.get_logger(shard=rank)
log.info("before any sign")
resilience.step(7)
with resilience.section("data"):
    log.warning("slow", seconds=2.5)
try:
    1 / 0
except ZeroDivisionError:
    log.exception("went wrong")
"""
LATE = """
print("early", flush=True)
say("written")
await_file("go")
raise ValueError("late")
"""


def test_logger_of_a_launched_program_writes_lines_with_their_place(start: Start, tmp_path: Path) -> None:
    job = launcher(start, tmp_path)(LOGS)
    assert job.wait() == [0]
    for rank in (0, 1):
        (path,) = (tmp_path / "runs" / "job" / "logs").glob(f"*-{rank}.jsonl")
        lines = [msgspec.json.decode(line) for line in path.read_bytes().splitlines()]
        known = [msgspec.convert(line, LogLine) for line in lines]
        assert [line.event for line in known] == ["before any sign", "slow", "went wrong"]
        assert {(line.job_id, line.rank, line.initial_rank, line.world_size) for line in known} == {
            ("job", rank, rank, 2)
        }
        assert len({line.trace_id for line in known} - {None}) == 1
        assert [(line.step, line.section) for line in known] == [(None, None), (7, "data"), (7, None)]
        assert [line["shard"] for line in lines] == [rank] * 3
        assert "ZeroDivisionError" in lines[2]["exception"]
    assert "before any sign" not in job.output(0, 2)
    for name in ("promtail.yaml", "vector.toml", "config.alloy"):  # as shipped, they find all files of such a run
        (pattern,) = re.findall(r"/shared/resilience-runs/([^\s\"}\]]*)", collecting.texts()[f"logs/{name}"])
        found = (tmp_path / "runs").glob(pattern)
        assert {path.name.rpartition("-")[2] for path in found} == {"0.jsonl", "1.jsonl"}, name
    told = [line for line in MergedLines(job.account.folder) if line.kind == "log"]
    assert {(line.rank, line.event) for line in told} >= {(0, "slow"), (1, "slow")}


def test_plain_text_of_a_worker_has_the_time_at_which_it_was_written(start: Start, tmp_path: Path) -> None:
    job = launcher(start, tmp_path)(LATE, "--max-restarts", "0", nproc=1)
    job.await_worker("written.0.0")
    times = times_of(job.account.folder / "output" / "0" / "0.out")
    deadline = time.monotonic() + 60.0
    while not (times.is_file() and times.read_bytes()):
        assert time.monotonic() < deadline, "the first line was not read"
        time.sleep(0.01)
    late_from = time.time_ns()
    (tmp_path / "go").touch()
    assert job.wait() == [1]
    lines = {line.event.strip(): line for line in MergedLines(job.account.folder) if line.kind == "text"}
    assert lines["early"].at_ns < late_from
    for text in ("Traceback (most recent call last):", "ValueError: late"):
        assert lines[text].at_ns >= late_from
    assert not any(line.is_placed for line in lines.values())
    (started,) = job.of(events.CycleStarted)  # a warm worker may write before its start is on record
    assert started.wall_ns <= lines["early"].at_ns
