"""One verdict has the same words at the terminal, in the record, the span, the log, the metric and the report."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from resilience.attribution.first_failure import failure_in_words
from resilience.facts import events
from resilience.facts.records import Record, from_line
from resilience.report.condensed import report
from resilience.run_folder.load import Reader
from tests.process import patient_launcher
from tests.process.leftovers import left_after
from tests.process.test_export import receiving
from tests.process.test_terminal import SCRIPT, TORCHRUN, WRAPPED, Open, let_end, terminal  # noqa: F401
from tests.support.collector import of_wire
from tests.support.ranks import free_port

pytestmark = pytest.mark.timeout(900)  # waits of minutes for a slow machine
OURS = [sys.executable, "-m", patient_launcher.__name__, "--run-dir", "runs"]
KILLED = SCRIPT + "\nif cycle == 0 and rank == 1: os.kill(os.getpid(), signal.SIGKILL)"
FAILS = SCRIPT + "\nif rank: raise ValueError('bad batch')\ntime.sleep(60)"

GOES_ON = """
    import pathlib, time
    deadline = time.monotonic() + 200
    while time.monotonic() < deadline:  # an event is on a span only if it comes before the span's end
        records = pathlib.Path(os.environ["RESILIENCE_RUN_DIR"]).glob("*/records/*.jsonl")
        if any("incident.judged" in path.read_text() for path in records):
            break
        time.sleep(0.1)
"""
PATIENTLY = """
from resilience.inprocess._runtime import supervision
from resilience.telemetry import restart_lines
supervision.EXPORT_LIMIT = restart_lines.LIMIT = 60.0  # the monitor is forked
"""
IN_PLACE = PATIENTLY + WRAPPED.replace(
    "    dist.destroy_process_group()\n", GOES_ON + "    dist.destroy_process_group()\n"
)


@pytest.mark.parametrize(
    ("command", "script", "status", "sentence"),
    [
        ([*OURS, "--nproc-per-node", "2"], KILLED, 0, "rank 1 failed first (SIGKILL)"),
        pytest.param(
            [*OURS, "--nproc-per-node", "2", "--max-restarts", "0"],
            FAILS,
            1,
            "rank 1 failed first (ValueError: bad batch)",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            [*TORCHRUN, "--nproc-per-node", "2"],
            IN_PLACE,
            0,
            "rank 1 failed first (ValueError: bad batch)",
            marks=pytest.mark.slow,
        ),
    ],
    ids=["restart by the launcher", "end of the job", "restart in place"],
)
def test_verdict_has_the_same_words_everywhere(
    terminal: Open,  # noqa: F811
    tmp_path: Path,
    command: list[str],
    script: str,
    status: int,
    sentence: str,
) -> None:
    with receiving() as receiver:
        exporting = {
            "RESILIENCE_RUN_DIR": str(tmp_path / "runs"),
            "RESILIENCE_METRICS_PORT": str(free_port()),
            "OTEL_EXPORTER_OTLP_ENDPOINT": receiver.endpoint,
            "OTEL_BSP_SCHEDULE_DELAY": "20",
        }
        job = terminal(command, script, **exporting)
        if status == 0:
            let_end(tmp_path, "restart 1", job)
        assert job.wait() == status, job.text
        assert not left_after(tmp_path / "runs")  # a Wrapper's monitor exports the last span as it ends
        noted = [event for span in of_wire(receiver.requests) for event in span["events"]]
    (run,) = {path.parent for path in tmp_path.glob("runs/*/records")}
    (judged,) = [record.event for record in records_of(run) if isinstance(record.event, events.IncidentJudged)]
    assert (judged.sentence, judged.rank) == (sentence, 1)
    assert sentence in " ".join(job.text.split())
    assert [about["resilience.sentence"] for name, _, about in noted if name == "incident.judged"] == [sentence]
    assert sentence in logs(run)
    assert labels(run) == {sentence}
    (incident,) = report(Reader(run)).incidents
    assert failure_in_words(incident) == sentence


def records_of(run: Path) -> list[Record]:
    lines = (line for path in sorted(run.glob("records/*.jsonl")) for line in path.read_bytes().splitlines())
    return [from_line(line) for line in lines]


def logs(run: Path) -> str:
    command = [sys.executable, "-m", "resilience.cli", "logs", str(run), "--event", "incident.judged", "--json"]
    return subprocess.run(command, capture_output=True, timeout=240, text=True, check=True).stdout


def labels(run: Path) -> set[str]:
    """Return the sentences of the metric that alerts take their annotation from."""
    text = "".join(path.read_text() for path in run.glob("metrics/*.prom"))
    return set(re.findall(r'^resilience_verdict_timestamp_seconds\{sentence="(.*)"\}', text, re.M))
