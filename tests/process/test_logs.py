"""`resilience logs` on a real job, by the published schemas and in lnav; and on runs that are large."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from resilience.facts.identity import Job
from resilience.telemetry.recording import write_job
from tests.process.leftovers import left_after
from tests.support.lines import AT, log_line, write
from tests.support.server import ROOT

pytestmark = pytest.mark.timeout(900)  # together they may take longer than 300 s on a busy machine

MOST_RSS = 300 << 20
# Measures itself: the peak of this process alone, and the descriptors that were open at once.
MEASURED = """
import os, resource, sys
from resilience.cli import main
if "--few" in sys.argv:
    sys.argv.remove("--few")
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
status = main(sys.argv[1:])
sys.stdout.flush()
# Not ru_maxrss, which remembers the process that this one was started from.
peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(int(peak.split()[1]) * 1024, file=sys.stderr)
sys.exit(status)
"""


def measured(folder: Path, *arguments: str) -> tuple[int, int, float]:
    """Run `resilience logs`; returns lines told, peak of resident memory in bytes, and seconds."""
    command = [sys.executable, "-c", MEASURED, "logs", str(folder), "--few", *arguments]
    began = time.monotonic()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT) as child:
        assert child.stdout is not None and child.stderr is not None
        lines = 0
        while piece := child.stdout.read(1 << 20):
            lines += piece.count(b"\n")
        notes = child.stderr.read().decode()
    assert child.wait() == 0, notes
    took = time.monotonic() - began
    rss = int(notes.split()[-1])
    print(f"{' '.join(arguments)}: {lines} lines, {rss / 2**20:.0f} MiB, {took:.0f} s")
    return lines, rss, took


def fill(folder: Path, files: int, size: int) -> int:
    """Write log files of `size` bytes each; returns how many lines there are."""
    total = 0
    assert write_job(Job("large"), folder)
    for rank in range(files):
        count = size // len(log_line("step done", AT, rank, step=1, loss=2.5))
        lines = [log_line("step done", AT + i * 10**7 + rank, rank, step=i, loss=2.5) for i in range(count)]
        write(folder, f"logs/n{rank // 8}-{rank}.jsonl", *lines)
        total += count
    return total


@pytest.mark.slow
@pytest.mark.parametrize(("files", "size"), [(1000, 2 << 20), (10_000, 20 << 10)])
@pytest.mark.parametrize("arguments", [["--json"], []], ids=["each", "folded"])
def test_memory_stays_within_300_mb(tmp_path: Path, files: int, size: int, arguments: list[str]) -> None:
    total = fill(tmp_path, files, size)
    lines, rss, _ = measured(tmp_path, *arguments)
    assert rss < MOST_RSS
    assert lines == total if arguments else lines < total


def test_more_files_than_descriptors_are_merged(tmp_path: Path) -> None:
    total = fill(tmp_path, 200, 2000)
    lines, _, _ = measured(tmp_path, "--json")
    assert lines == total
    assert len(os.listdir(tmp_path / "logs")) == 200


# -- a real job --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of a job under the launcher, in which rank 1 failed once."""
    root = tmp_path_factory.mktemp("real")
    script = ROOT / "tests/process/scripts/logging_train.py"
    own = {"RESILIENCE_RUN_DIR": str(root), "RESILIENCE_JOB_ID": "job", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "resilience.cli", "run", "--nproc-per-node", "2", str(script)]
    ran = subprocess.run(command, env={**os.environ, **own}, capture_output=True, text=True, timeout=240, check=False)
    assert ran.returncode == 0, ran.stderr
    assert not left_after(root)  # the last records of a Wrapper's monitor come after the job's end
    return root / "job"


def told(folder: Path, *arguments: str) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "resilience.cli", "logs", str(folder), "--json", *arguments]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=True)
    return [json.loads(line) for line in ran.stdout.splitlines()]


def test_timeline_of_a_real_job_has_every_line_of_every_file(real: Path) -> None:
    paths = [*real.glob("records/*.jsonl"), *real.glob("logs/*.jsonl"), *real.glob("output/*/*.*")]
    expected = {
        (str(path.relative_to(real)), number)
        for path in paths
        for number, line in enumerate(path.read_bytes().split(b"\n"), 1)
        if line and path.suffix not in (".json", ".times")
    }
    entries = told(real)
    assert {(entry["file"], entry["line"]) for entry in entries} == expected
    assert {entry["kind"] for entry in entries} == {"record", "log", "text"}
    plain = [entry for entry in entries if entry["event"] == "plain line of a worker"]
    assert sorted(entry["initial_rank"] for entry in plain) == [0, 0, 1, 1]
    (failing,) = [entry for entry in entries if entry["event"] == "about to fail"]
    (raised,) = [e for e in entries if e["event"] == "rank.interrupted" and e["record"]["message"].endswith("planned")]
    assert failing["initial_rank"] == raised["initial_rank"] == 1
    assert failing["ts"] <= raised["ts"]


def test_lines_of_a_real_job_are_what_the_published_schemas_say(real: Path) -> None:
    jsonschema = pytest.importorskip("jsonschema")

    def validator(name: str) -> Any:
        schema = json.loads((ROOT / "docs" / "schema" / f"{name}.schema.json").read_text())
        jsonschema.Draft202012Validator.check_schema(schema)
        return jsonschema.Draft202012Validator(schema)

    def lines(pattern: str) -> Iterator[Any]:
        for path in real.glob(pattern):
            yield from map(json.loads, path.read_text().splitlines())

    checked = 0
    for name, found in (
        ("record", lines("records/*.jsonl")),
        ("log-line", lines("logs/*.jsonl")),
        ("timeline", iter(told(real))),
    ):
        check = validator(name)
        for line in found:
            check.validate(line)
            checked += 1
    assert checked > 100
    assert not validator("record").is_valid({"event": {"event": "no.such"}})


def test_sql_over_a_real_job(real: Path) -> None:
    pytest.importorskip("duckdb", reason="the extra `analysis` is not installed")
    (row,) = told(real, "--sql", "SELECT count(*) AS n, count(DISTINCT initial_rank) AS ranks FROM records")
    assert row["n"] == sum(len(path.read_text().splitlines()) for path in real.glob("records/*.jsonl"))
    assert row["ranks"] == 2
    (row,) = told(real, "--sql", "SELECT sum(count) AS n FROM timings WHERE section = 'reduce' AND rank = 1")
    assert row["n"] == 4 + 5


def test_lnav_shows_a_real_job_by_our_format(real: Path, tmp_path: Path) -> None:
    lnav = shutil.which("lnav")
    if lnav is None:
        pytest.skip("lnav is not installed: dashboards/lnav/resilience.json was not opened in it")
    (tmp_path / "formats" / "resilience").mkdir(parents=True)
    shutil.copy(ROOT / "dashboards" / "lnav" / "resilience.json", tmp_path / "formats" / "resilience")
    files = [str(path) for path in (*real.glob("records/*.jsonl"), *real.glob("logs/*.jsonl"))]
    query = ";SELECT log_format, log_level, log_body FROM all_logs WHERE log_level IN ('warning', 'error')"
    command = [lnav, "-n", "-I", str(tmp_path), "-c", query, "-c", ":write-csv-to -", *files]
    env = {**os.environ, "HOME": str(tmp_path), "TERM": "dumb"}
    ran = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240, check=True)
    assert ran.stderr == ""
    rows = ran.stdout.splitlines()
    assert "resilience_log,warning,about to fail" in rows
    assert "resilience_record,error,rank.interrupted" in rows


def test_trace_of_a_real_job_tells_whom_it_waited_for_and_loads(real: Path, tmp_path: Path) -> None:
    def trace(*arguments: str) -> str:
        command = [sys.executable, "-m", "resilience.cli", "trace", str(real), *arguments]
        env = {**os.environ, "COLUMNS": "80"}
        return subprocess.run(
            command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=240, check=True
        ).stdout

    lines = trace().splitlines()
    assert max(map(len, lines)) <= 80
    restart = json.loads(trace("--json"))
    assert sum(step["seconds"] for step in restart["path"]) == pytest.approx(restart["seconds"])
    assert {"abort", "regroup", "resume"} <= {row["name"] for row in restart["rows"]}
    shown = json.loads(trace("--format", "perfetto"))["traceEvents"]
    assert [event["args"]["name"] for event in shown if event["name"] == "process_name"] != []
    assert {"launcher.cycle", "inprocess.iteration", "restart", "interruption"} <= {event["name"] for event in shown}
    assert not [event["name"] for event in shown if "end not recorded" in event["name"]]
    arrows = {kind: [event for event in shown if event["ph"] == kind] for kind in "sf"}
    assert len({event["tid"] for event in arrows["s"]}) == 1  # from the one that failed …
    assert len({event["tid"] for event in arrows["f"]}) == len(arrows["f"]) == 2  # … to the restart of each rank
