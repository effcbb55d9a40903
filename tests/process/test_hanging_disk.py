"""A disk that does not answer: whoever writes to it waits for ever. It costs the account, never the job.

The kernel keeps a process until the last of its threads has come back from the disk, so each test lets the disk answer
once the job has done all of its work, and expects the exit status then."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from resilience.facts import events
from resilience.facts.records import Record
from resilience.telemetry import exporters
from resilience.telemetry.exporters import ExportThread, MetricsOptions
from resilience.telemetry.targets import FOLDER
from tests.process.launching import Launched, launcher
from tests.process.test_agent_exports import started_run, write
from tests.process.test_export import scrape
from tests.process.test_faults import fault
from tests.process.test_output import PER_MB, WRITE, run
from tests.support import disks, stuck
from tests.support.account import Account
from tests.support.disks import Freezing
from tests.support.launch_streams import launched
from tests.support.ranks import Job, free_port
from tests.support.signs import await_true

pytestmark = pytest.mark.timeout(900)  # together they may take longer than 300 s on a busy machine

Launch = Callable[..., Launched]


@pytest.fixture
def launch(start: Callable[..., Job], tmp_path: Path) -> Launch:
    return launcher(start, tmp_path)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Freezing]:
    with disks.freezing(tmp_path / "disk") as disk:
        yield disk


def await_completion(job: Launched) -> None:
    """Wait until the launcher says that the job is complete."""
    until = time.monotonic() + 150
    while "resilience run: completed" not in job.job.written():
        assert time.monotonic() < until, job.job.output()
        time.sleep(0.05)


def test_job_restarts_and_completes_while_the_disk_of_its_records_does_not_answer(
    launch: Launch, disk: Freezing
) -> None:
    script = """
import resilience
resilience.step(cycle)
if cycle == 0:
    say("up")
    await_file("go")
    if rank: os.kill(os.getpid(), signal.SIGKILL)
    await_file("never")
print("the end")
"""
    job = launch(script, "--run-dir", str(disk.folder / "runs"))
    job.await_worker("up.0.0")
    job.await_worker("up.0.1")
    disk.freeze()
    (job.folder / "go").touch()
    await_completion(job)
    assert job.output().count("the end") == 2
    disk.thaw()
    assert job.wait() == [0], job.job.output()


def test_hung_rank_is_ended_while_the_disk_does_not_answer(launch: Launch, disk: Freezing) -> None:
    script = """
import resilience
resilience.step(1)
say("up")
if cycle == 0:
    await_file("go")
    if rank: time.sleep(1000)
"""
    limits = ("--ft-step-timeout", "3", "--ft-num-warmup-iterations", "0")
    job = launch(script, "--run-dir", str(disk.folder / "runs"), *limits)
    job.await_worker("up.0.1")
    disk.freeze()
    (job.folder / "go").touch()
    await_completion(job)
    disk.thaw()
    assert job.wait() == [0], job.job.output()


def test_records_that_waited_are_written_when_the_disk_answers_again(launch: Launch, disk: Freezing) -> None:
    script = "say('up')\nif cycle == 0:\n    await_file('go')\n    sys.exit(1)\nawait_file('end')"
    job = launch(script, "--run-dir", str(disk.folder / "runs"), nproc=1)
    job.await_worker("up.0.0")
    disk.freeze()
    (job.folder / "go").touch()
    job.await_worker("up.1.0")
    disk.thaw()
    (job.folder / "end").touch()
    assert job.wait() == [0], job.job.output()
    told = Account(disk.folder / "runs" / "job").records()
    assert [record.event.verdict for record in told if isinstance(record.event, events.RestartDecided)] == ["restart"]


def test_hung_disk_and_stalled_reader_block_no_write_and_each_loss_is_reported_once(
    disk: Freezing, tmp_path: Path
) -> None:
    script = """
(here / "up").touch()
while not (here / "go").exists():
    time.sleep(0.005)
write(40)
(here / "written").touch()
"""
    reading, writing = os.pipe()  # nobody reads it before the job is complete
    errors = tmp_path / "stderr"
    with run(tmp_path, WRITE + script, writing, "--run-dir", str(disk.folder / "runs")) as child:
        os.close(writing)
        await_true((tmp_path / "up").exists)
        disk.freeze()
        try:
            (tmp_path / "go").touch()
            await_true((tmp_path / "written").exists)
            await_true(lambda: "resilience run: completed" in errors.read_text())
        finally:
            disk.thaw()
        assert child.wait(150) == 0
    os.set_blocking(reading, False)
    arrived = len(os.read(reading, 1 << 20))
    os.close(reading)
    said = errors.read_text()
    unkept = re.findall(r"([\d,]+) bytes of workers' output could not be kept \(the disk does not answer\)", said)
    unshown = re.findall(r"([\d,]+) bytes of workers' output are not shown here", said)
    assert [int(count.replace(",", "")) for count in unkept] == [40 * PER_MB], said
    assert [int(count.replace(",", "")) for count in unshown] == [40 * PER_MB - arrived], said
    assert said.count("workers' output cannot be kept in ") == 1


def test_wrapper_restarts_in_place_while_the_disk_of_its_records_does_not_answer(
    start: Callable[..., Job], disk: Freezing
) -> None:
    job = start(
        2,
        "tests.process.jobs:train_on_a_frozen_disk",
        env={"RESILIENCE_RUN_DIR": str(disk.folder / "runs"), "FREEZE": str(disk.folder)},
    )
    job.await_sign("done", rank=0)
    job.await_sign("done", rank=1)
    disk.thaw()
    assert [rank.code for rank in job.wait_ranks(150.0)] == [0, 0], job.output()


@pytest.mark.slow  # the file is written every 15 s
def test_metrics_of_a_job_go_on_while_the_disk_of_its_run_folder_does_not_answer(
    launch: Launch, disk: Freezing, tmp_path: Path
) -> None:
    """Else JobGone would report a healthy job as killed."""
    port, file = free_port(), tmp_path / "textfile" / "resilience-job-node0.prom"
    file.parent.mkdir()
    metrics = ("--metrics-port", str(port), "--metrics-textfile", str(file.parent))
    job = launch("say('up')\nawait_file('go', 300)", "--run-dir", str(disk.folder / "runs"), *metrics, nproc=1)
    job.await_worker("up.0.0")
    is_up = 'resilience_run_folder_up{job_id="job",node="node0"} '
    await_true(lambda: file.exists() and f"{is_up}1.0" in file.read_text())
    disk.freeze()
    try:
        await_true(lambda: f"{is_up}0.0" in file.read_text())
        assert "resilience_run_folder_up 0.0" in scrape(port).splitlines()
    finally:
        disk.thaw()
    (tmp_path / "go").touch()
    assert job.wait() == [0], job.job.output()
    assert "resilience_ended_timestamp_seconds" in file.read_text()


def test_end_of_a_job_is_shown_while_the_disk_of_its_run_folder_does_not_answer(
    launch: Launch, disk: Freezing, tmp_path: Path
) -> None:
    """Else JobGone would report a completed job as killed."""
    file, entry = tmp_path / "textfile" / "resilience-job-node0.prom", disk.folder / "runs" / FOLDER / "job@@node0.json"
    file.parent.mkdir()
    metrics = ("--metrics-port", str(free_port()), "--metrics-textfile", str(file.parent))
    job = launch("say('up')\nawait_file('go', 300)", "--run-dir", str(disk.folder / "runs"), *metrics, nproc=1)
    job.await_worker("up.0.0")
    await_true(lambda: file.exists() and entry.exists())
    disk.freeze()
    try:
        (tmp_path / "go").touch()
        await_true(lambda: 'node="node0",outcome="completed"' in file.read_text())
    finally:
        disk.thaw()
    assert job.wait() == [0], job.job.output()
    assert not entry.exists()


def test_disk_of_the_file_for_node_exporter_holds_up_no_other_metrics(
    disk: Freezing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exporters, "SNAPSHOT_EVERY", 0.1)
    folder, emitted, port = tmp_path / "run", list[events.Event](), free_port()
    started_run(folder)
    asked = MetricsOptions(port, textfile=str(disk.folder))
    exports = ExportThread.start(folder, "node0", emitted.append, asked, is_agents=True)
    assert exports is not None
    await_true((disk.folder / "resilience-run-node0.prom").exists)
    disk.freeze()
    try:
        await_true(lambda: any(isinstance(event, events.ExportFailed) for event in emitted))
        agent = launched(is_running=True).files["node0", None][-1].origin
        write(folder, "node0-agent.jsonl", [Record(99, 10**18, 10**18, agent, events.StopRequested("SIGTERM", 30.0))])
        await_true(lambda: 'resilience_events_total{event="stop.requested"} 1.0' in scrape(port).splitlines())
    finally:
        disk.thaw()
    exports.close(60.0)
    why = f"{disk.folder}/resilience-run-node0.prom cannot be written: the disk does not answer"
    assert [event for event in emitted if isinstance(event, events.ExportFailed)] == [
        events.ExportFailed("prometheus", why)
    ]


# -- from the start -----------------------------------------------------------------------------------


def test_folder_that_never_answers_moves_the_account_elsewhere(launch: Launch, tmp_path: Path) -> None:
    why = stuck.missing()
    if why:
        pytest.skip(why)
    with stuck.silent(tmp_path / "silent") as file:
        job = launch("print('ran')", "--run-dir", str(file.parent / "runs"), nproc=1)
        await_completion(job)
    assert job.wait() == [0], job.job.output()
    assert "the disk does not answer; records go to " in job.output(stream=2)


def test_wrapper_without_the_launcher_keeps_its_account_elsewhere_too(
    start: Callable[..., Job], tmp_path: Path
) -> None:
    with disks.mounted(tmp_path / "read-only", "ro") as folder:
        job = start(
            2, "tests.process.jobs:train", faults=[fault("exception")], env={"RESILIENCE_RUN_DIR": str(folder / "runs")}
        )
        assert [rank.code for rank in job.wait_ranks(150.0)] == [0, 0], job.output()
    said = job.written()
    assert said.count("Read-only file system; the records of ") == 1
    (place,) = [line.rpartition(" ")[2] for line in said.splitlines() if "the records of" in line]
    job.account = Account(Path(place))
    job.wait()  # until their monitors, too, have written all
    assert len(job.of(events.RestartEnded)) == 2
