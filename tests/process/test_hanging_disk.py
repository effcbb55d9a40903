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
from tests.process.launching import Launched, launcher
from tests.process.test_faults import fault
from tests.process.test_output import PER_MB, WRITE, run
from tests.support import disks, stuck
from tests.support.account import Account
from tests.support.disks import Freezing
from tests.support.ranks import Job
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
    while "resilience run: completed" not in job.job.output():
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
    said = job.output()
    assert said.count("Read-only file system; the records of ") == 1
    (place,) = [line.rpartition(" ")[2] for line in said.splitlines() if "the records of" in line]
    job.account = Account(Path(place))
    job.wait()  # until their monitors, too, have written all
    assert len(job.of(events.RestartEnded)) == 2
