"""What workers write: no write fails or waits because of our files, our terminal or our agent, and nothing is lost
without a word."""

from __future__ import annotations

import contextlib
import ctypes
import os
import pty
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from resilience.facts import events
from resilience.facts.interruptions import Interruption
from resilience.launcher import agent
from resilience.launcher.output.byte_counts import ByteCounts
from resilience.launcher.output.drain import Drain
from resilience.launcher.output.drained_stream import Stream
from resilience.launcher.output.output_files import Keeper
from resilience.launcher.output.streams import Finished, FinishStreams, OpenStream, StreamLost, decode_for_agent, encode
from resilience.monitor import evidence
from resilience.system import background, files
from resilience.system.channel import connect, listen, pair
from tests.process.launching import Launched, launcher
from tests.support import disks
from tests.support.account import Account
from tests.support.pids import child_named, has_ended
from tests.support.ranks import Job
from tests.support.server import ROOT
from tests.support.signs import await_true

Launch = Callable[..., Launched]
MB = 1 << 20
PTRACE_ATTACH, PTRACE_DETACH = 16, 17
LINE = "x" * 79 + "\n"
# Writes this many MiB of lines that all differ, and says so afterwards.
WRITE = """
def write(mb, to=sys.stdout):
    for block in range(mb * 16):
        to.write("".join(f"{block:06} {line:04} " + "x" * 51 + "\\n" for line in range(1024)))
"""
PER_MB = 16 * 1024 * 64


@pytest.fixture
def launch(start: Callable[..., Job], tmp_path: Path) -> Launch:
    return launcher(start, tmp_path)


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    with disks.mounted(tmp_path / "small", "size=4m") as folder:
        yield folder


def kept(job: Launched, rank: int = 0, cycle: int = 0, stream: str = "out") -> bytes:
    return (job.job.run / "output" / str(cycle) / f"{rank}.{stream}").read_bytes()


def is_kept(job: Launched, text: bytes) -> bool:
    """Whether this is in rank 0's file, which may not be there yet."""
    with contextlib.suppress(FileNotFoundError):
        return kept(job) == text
    return False


def of(folder: Path, kind: type[events.Event]) -> list[Any]:
    """Return the events of a kind in the records of a run folder."""
    return [each.event for each in Account(folder).records() if isinstance(each.event, kind)]


def drain_of(job: Launched) -> psutil.Process:
    """The process that reads the output of a job's workers."""
    (agent,) = job.job.pids
    return child_named(agent, "resilience.launcher.output.drain")


# -- the disk -----------------------------------------------------------------------------------------


def test_worker_that_writes_more_than_the_disk_holds_goes_on_and_the_loss_is_counted(
    launch: Launch, small: Path
) -> None:
    job = launch(WRITE + "write(8)\nsay('written')", "--run-dir", str(small), "--min-free-disk-mb", "1", nproc=1)
    assert job.wait() == [0], job.job.output()
    assert (job.folder / "written.0.0").exists()
    assert len(job.output()) == 8 * PER_MB  # the terminal has all of it
    said = job.output(stream=2)
    assert said.count("cannot be kept") == said.count("could not be kept") == 1
    total = re.search(r"([\d,]+) bytes of workers' output could not be kept \(No space left on device\)", said)
    assert total is not None, said
    in_file = (small / "job" / "output" / "0" / "0.out").stat().st_size
    assert in_file + int(total[1].replace(",", "")) == 8 * PER_MB


def test_file_says_what_is_missing_once_there_is_room_again(launch: Launch, small: Path) -> None:
    (small / "filler").write_bytes(b"." * (7 * MB // 2))  # and when it is gone there is room for all that is written
    job = launch(WRITE + "write(1)\nawait_file('go')\nprint('again')", "--run-dir", str(small), nproc=1)
    await_true(lambda: "workers' output cannot be kept in " in job.job.written())
    (small / "filler").unlink()
    (job.folder / "go").touch()
    assert job.wait() == [0], job.job.output()
    note = re.compile(rb"\n?\[resilience run: ([\d,]+) bytes are missing here: No space left on device\]\n")
    whole = (small / "job" / "output" / "0" / "0.out").read_bytes()
    assert whole.endswith(b"\nagain\n")
    missing = sum(int(count.replace(b",", b"")) for count in note.findall(whole))
    assert missing and missing + len(note.sub(b"", whole)) == pytest.approx(PER_MB + len("again\n"), abs=8)
    assert of(small / "job", events.OutputLost)[-1].count == missing


def test_loss_is_reported_again_when_there_is_room_for_a_record_of_it(small: Path) -> None:
    told: queue.SimpleQueue[StreamLost] = queue.SimpleQueue()
    keeper = Keeper(told.put)
    stream = Stream(OpenStream(1, "rank 0's stdout", os.fsencode(small / "0.out"), 0, 0), -1, ByteCounts.create())
    keeper.open(stream)
    disks.fill(small)
    keeper.take(stream, b"." * 1000, is_stalled=False)
    first = told.get(timeout=60.0)  # put on record on the same disk, so perhaps in vain
    (small / "filler").unlink()
    keeper.take(stream, b"again", is_stalled=False)
    assert told.get(timeout=60.0) == first
    assert (first.place, first.count) == ("file", 1000)
    keeper.take(stream, b"and again", is_stalled=False)
    is_over = threading.Event()
    keeper.close(stream)
    keeper.call(is_over.set)
    assert is_over.wait(60.0)
    assert told.empty()


@pytest.mark.parametrize("deleted", [("0.out",), ("0.out.times",), ("0.out", "0.out.times")])
def test_file_that_was_deleted_before_its_rotation_costs_no_later_output(
    tmp_path: Path, deleted: tuple[str, ...]
) -> None:
    told: queue.SimpleQueue[StreamLost] = queue.SimpleQueue()
    keeper = Keeper(told.put)
    stream = Stream(OpenStream(1, "rank 0's stdout", os.fsencode(tmp_path / "0.out"), 100, 0), -1, ByteCounts.create())
    keeper.open(stream)

    def take(data: bytes) -> None:
        is_over = threading.Event()
        keeper.take(stream, data, is_stalled=False)
        keeper.call(is_over.set)
        assert is_over.wait(60.0)

    take(b"." * 100 + b"\n")
    assert files.times_of(tmp_path / "0.out").name == "0.out.times"
    for name in deleted:
        (tmp_path / name).unlink()
    take(b"second\n")
    take(b"third\n")
    keeper.close(stream)
    assert (tmp_path / "0.out").read_bytes() == b"second\nthird\n"
    assert told.empty()


def test_disk_that_does_not_answer_blocks_no_write(launch: Launch) -> None:
    job = launch(
        WRITE
        + """
folder = pathlib.Path(os.environ["RESILIENCE_RUN_DIR"], "job", "output", "1")
if cycle == 0:
    folder.mkdir(parents=True)
    os.mkfifo(folder / "0.out")  # whoever opens it waits for ever
    sys.exit(1)
write(40)
""",
        nproc=1,
    )
    assert job.wait() == [0], job.job.output()
    assert "the disk does not answer" in job.output(stream=2)


def test_file_is_rotated_at_its_size_and_the_account_says_what_was_removed(launch: Launch) -> None:
    job = launch(WRITE + "write(5)", "--output-file-mb", "1", nproc=1)
    assert job.wait() == [0]
    newest, older = (job.job.run / "output" / "0" / name for name in ("0.out", "0.out.1"))
    assert older.stat().st_size <= 2 * MB and newest.stat().st_size <= 2 * MB
    removed = [record.event.count for record in job.of(events.OutputLost) if record.event.place == "rotated"][-1]
    whole = job.output().encode()
    assert older.read_bytes() + newest.read_bytes() == whole[removed:]
    assert removed


# -- the agent ----------------------------------------------------------------------------------------


def test_stopped_agent_blocks_no_write(launch: Launch) -> None:
    job = launch(WRITE + "say('up')\nawait_file('go')\nwrite(5)\nwrite(5, sys.stderr)\nsay('written')", nproc=1)
    job.await_worker("up.0.0")
    job.job.signal(0, signal.SIGSTOP)
    (job.folder / "go").touch()
    job.await_worker("written.0.0")
    job.job.signal(0, signal.SIGCONT)
    assert job.wait() == [0]
    assert len(kept(job)) == len(job.output()) == 5 * PER_MB


def test_killed_agent_loses_nothing_that_was_written(launch: Launch) -> None:
    job = launch(WRITE + "say('up')\nawait_file('go')\nwrite(5)\nprint('the end')\nsay('written')\nawait_file('never')")
    job.await_worker("up.0.0")
    job.await_worker("up.0.1")
    drain = drain_of(job)
    (door,) = {each.laddr for each in drain.net_connections("unix") if each.laddr}
    job.job.signal(0, signal.SIGSTOP)
    (job.folder / "go").touch()
    job.await_worker("written.0.0")
    job.await_worker("written.0.1")
    job.job.signal(0, signal.SIGKILL)
    job.wait_agent(0)
    psutil.wait_procs([drain], timeout=60)
    assert not drain.is_running() and not Path(door).parent.exists()
    for rank in range(2):
        assert kept(job, rank).endswith(b"the end\n") and len(kept(job, rank)) == 5 * PER_MB + 8
    assert len(job.output()) == 2 * (5 * PER_MB + 8)
    job.job.ran_to_its_end = True


def test_killed_drain_process_is_replaced_and_no_write_fails(launch: Launch) -> None:
    job = launch(WRITE + "print('before')\nsay('up')\nawait_file('go')\nwrite(5)\nsay('written')", nproc=1)
    job.await_worker("up.0.0")
    await_true(lambda: is_kept(job, b"before\n"))
    drain_of(job).kill()
    (job.folder / "go").touch()
    assert job.wait() == [0], job.job.output()
    assert len(kept(job)) == 5 * PER_MB + len("before\n")
    assert [record.event.why for record in job.of(events.DrainLost)] == ["SIGKILL"]


def test_drain_process_that_is_killed_while_workers_are_stopped_is_replaced(launch: Launch) -> None:
    script = """
def save(*_):
    say('asked')
    await_file('go')
    write(1)
    say('saved')
    os._exit(0)
signal.signal(signal.SIGTERM, save)
say('up')
time.sleep(300)
"""
    job = launch("import signal\n" + WRITE + script, nproc=1)
    job.await_worker("up.0.0")
    job.job.signal(0, signal.SIGTERM)
    job.await_worker("asked.0.0")
    drain_of(job).kill()
    (job.folder / "go").touch()
    assert job.wait() == [143], job.job.output()
    assert (job.folder / "saved.0.0").exists()
    assert len(kept(job)) == PER_MB


class LateWriter(Drain):
    """Its files are written right after it was asked for the first time whether they are."""

    times = 0

    def _is_passed_on(self, until: float) -> bool:
        self.times += 1
        return self.times > 1


def test_drain_process_says_that_all_is_passed_on_before_it_ends(tmp_path: Path) -> None:
    ours, theirs = pair()
    with listen(tmp_path / "drain") as listener:
        process = LateWriter(theirs, listener, ByteCounts.create())
        ours.send(encode(FinishStreams()))
        process.run()
        said = ours.receive(0.0)
    assert said is not None
    assert decode_for_agent(said) == Finished()
    ours.close()
    theirs.close()


def test_output_that_a_killed_drain_process_had_not_shown_is_counted(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    script = WRITE + "write(5)\n(here / 'written').touch()\nwhile not (here / 'go').exists(): time.sleep(0.01)"
    with run(tmp_path, script, writing) as child:
        os.close(writing)
        files_of = tmp_path / "runs" / "job" / "output" / "0" / "0.out"
        await_true(lambda: (tmp_path / "written").exists() and files_of.stat().st_size == 5 * PER_MB)
        drain = child_named(child.pid, "resilience.launcher.output.drain")
        (door,) = {each.laddr for each in drain.net_connections("unix") if each.laddr}
        asking = connect(door, 60.0)
        assert asking.send(b"keep")
        assert asking.receive(60.0) is not None  # it has also noted that all of it is kept
        asking.close()
        drain.kill()
        await_true(lambda: of(tmp_path / "runs" / "job", events.DrainLost) != [])
        (tmp_path / "go").touch()
        assert child.wait(150) == 0
    os.set_blocking(reading, False)
    arrived = len(os.read(reading, 1 << 20))
    os.close(reading)
    said = (tmp_path / "stderr").read_text()
    found = re.search(r"([\d,]+) bytes of workers' output are not shown here \(.* was lost: SIGKILL\); see (\S+)", said)
    assert found is not None, said
    assert int(found[1].replace(",", "")) + arrived == 5 * PER_MB
    assert Path(found[2]).stat().st_size == 5 * PER_MB


def test_stopped_drain_process_is_continued_and_loses_nothing(launch: Launch) -> None:
    job = launch(WRITE + "print('before')\nsay('up')\nawait_file('go')\nwrite(5)\nsay('written')", nproc=1)
    job.await_worker("up.0.0")
    await_true(lambda: is_kept(job, b"before\n"))
    drain_of(job).suspend()
    (job.folder / "go").touch()
    assert job.wait() == [0], job.job.output()  # a pipe holds 64 KiB
    assert len(kept(job)) == len(job.output()) == 5 * PER_MB + len("before\n")
    assert job.of(events.DrainStopped) and not job.of(events.DrainLost)


def test_drain_process_that_does_not_read_is_replaced(launch: Launch) -> None:
    job = launch(WRITE + "print('before')\nsay('up')\nawait_file('go')\nwrite(5)\nsay('written')", nproc=1)
    job.await_worker("up.0.0")
    await_true(lambda: is_kept(job, b"before\n"))
    drain = drain_of(job)
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.ptrace(PTRACE_ATTACH, drain.pid, None, None) == 0  # its parent does not see that it is stopped
    (job.folder / "go").touch()
    assert job.wait() == [0], job.job.output()
    assert len(kept(job)) == 5 * PER_MB + len("before\n")
    assert [record.event.why for record in job.of(events.DrainLost)] == ["it did not answer for 10 s"]


def test_last_lines_of_a_killed_worker_are_on_record(launch: Launch) -> None:
    job = launch("if cycle == 0: print('the last words'); os.kill(os.getpid(), 9)", nproc=1, SLOW_ANSWERS="yes")
    assert job.wait() == [0]
    (found,) = job.job.of(events.RankInterrupted)
    assert found.event.record.log_tail[-1:] == ("the last words",)


def test_last_lines_of_a_worker_whose_file_was_just_rotated_are_on_record(launch: Launch) -> None:
    job = launch(
        WRITE + "if cycle == 0: write(1)\nif cycle == 0: print('after'); os.kill(os.getpid(), 9)",
        "--output-file-mb",
        "1",
        nproc=1,
        SLOW_ANSWERS="yes",
    )
    assert job.wait() == [0]
    assert (job.job.run / "output" / "0" / "0.out").read_bytes() == b"after\n"
    (found,) = job.job.of(events.RankInterrupted)
    tail = found.event.record.log_tail
    assert tail[-1] == "after" and tail[-2].startswith("000015 1023")


def test_exception_is_on_record_though_the_drain_process_is_slow_to_keep_what_the_worker_wrote(launch: Launch) -> None:
    script = "say('up')\nawait_file('go')\nif cycle == 0: raise ValueError('slowly')"
    job = launch(script, nproc=1, SLOW_ANSWERS="yes")
    job.await_worker("up.0.0")
    pid = job.worker_pid(0)
    drain = drain_of(job)
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.ptrace(PTRACE_ATTACH, drain.pid, None, None) == 0  # its parent does not see that it is stopped
    os.waitpid(drain.pid, 0x40000000)  # __WALL: it has stopped
    (job.folder / "go").touch()
    await_true(lambda: has_ended(pid))
    time.sleep(0.2)  # as a rule its monitor has asked for the last lines
    assert libc.ptrace(PTRACE_DETACH, drain.pid, None, None) == 0
    assert job.wait() == [0], job.job.output()
    (found,) = job.job.of(events.RankInterrupted)
    assert found.event.record.interruption is Interruption.EXCEPTION
    assert found.event.record.exception.type == "ValueError"
    # Outside this test, the monitor waits for a disk that is slow but answers, and the agent waits for the monitor.
    assert agent.SETTLE > 2 * evidence.READ_LIMIT > 2 * background.STALL


# -- the terminal -------------------------------------------------------------------------------------

CLI = ("-m", "resilience.cli")
# A job that is stopped gives its output more time: on a busy machine a process may stand still for seconds.
UNHURRIED = """
import sys
from resilience.cli import main
from resilience.launcher import launch

launch.PREEMPTED_LIMIT = 15.0
sys.exit(main())
"""


@contextlib.contextmanager
def run(
    folder: Path, script: str, stdout: int, *options: str, stderr: int | None = None, program: Sequence[str] = CLI
) -> Iterator[subprocess.Popen]:
    """Start `resilience run` with this stdout."""
    path = folder / "script.py"
    path.write_text("import os, sys, pathlib, time\nhere = pathlib.Path(__file__).parent\n" + script)
    env = {**os.environ, "PYTHONPATH": str(ROOT), "RESILIENCE_RUN_DIR": str(folder / "runs"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *program, "run", "--nproc-per-node", "1", *options, str(path)]
    with (folder / "stderr").open("wb") as errors:
        child = subprocess.Popen(
            command,
            env={**env, "RESILIENCE_JOB_ID": "job"},
            cwd=folder,
            stdout=stdout,
            stderr=errors if stderr is None else stderr,
            start_new_session=True,
        )
    try:
        yield child
    finally:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()


def read_all(fd: int) -> bytes:
    pieces = []
    while piece := os.read(fd, 1 << 20):
        pieces.append(piece)
    return b"".join(pieces)


NOTE = re.compile(rb"\[resilience run: ([\d,]+) bytes of rank 0's stdout are not shown here, [^;]*; see (\S+)\]\n")


def test_slow_reader_blocks_no_worker_and_gets_notes_of_the_missing_bytes(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    with run(tmp_path, WRITE + "write(60)\n(here / 'written').touch()", writing) as child:
        os.close(writing)
        await_true((tmp_path / "written").exists)  # nobody has read a byte
        got = read_all(reading)
        assert child.wait(150) == 0
    file = tmp_path / "runs" / "job" / "output" / "0" / "0.out"
    assert file.stat().st_size == 60 * PER_MB
    notes = NOTE.findall(got)
    assert {path for _, path in notes} == {str(file).encode()}
    missing = sum(int(count.replace(b",", b"")) for count, _ in notes)
    assert missing and len(NOTE.sub(b"", got)) + missing == 60 * PER_MB


def test_reader_that_reads_nothing_holds_up_no_job_and_stderr_says_what_is_missing(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    with run(tmp_path, WRITE + "write(20)", writing) as child:
        os.close(writing)
        assert child.wait(150) == 0
    os.set_blocking(reading, False)
    arrived = len(os.read(reading, 1 << 20))
    os.close(reading)
    said = (tmp_path / "stderr").read_text()
    found = re.search(r"([\d,]+) bytes of workers' output are not shown here \(.*\); see (\S+)", said)
    assert found is not None, said
    assert int(found[1].replace(",", "")) + arrived == 20 * PER_MB
    assert Path(found[2]).stat().st_size == 20 * PER_MB


@pytest.mark.slow
def test_missing_bytes_of_an_unread_stdout_are_reported_after_sigterm(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    script = WRITE + "write(2)\nsys.stdout.flush()\n(here / 'written').touch()\ntime.sleep(300)"
    with run(tmp_path, script, writing, program=("-c", UNHURRIED)) as child:
        os.close(writing)
        await_true((tmp_path / "written").exists)
        child.send_signal(signal.SIGTERM)  # a test run in the background ignores SIGINT, and so would its jobs
        assert child.wait(150) == 143
    os.set_blocking(reading, False)
    arrived = len(os.read(reading, 1 << 20))
    os.close(reading)
    said = (tmp_path / "stderr").read_text()
    found = re.search(r"([\d,]+) bytes of workers' output are not shown here \(.*\); see (\S+)", said)
    assert found is not None, said
    assert int(found[1].replace(",", "")) + arrived == 2 * PER_MB
    assert Path(found[2]).stat().st_size == 2 * PER_MB


LOOK = """
print(*(os.isatty(fd) for fd in range(3)), file=open(here / 'seen', 'w'), flush=True)
print('€ \\x1b[1m\\r', end='')
"""


@pytest.mark.parametrize(
    ("stderr_too", "options"),
    [
        pytest.param(True, (), id="both-warm"),
        pytest.param(False, ("--cold",), id="stdout-cold", marks=pytest.mark.slow),
        pytest.param(True, ("--cold",), id="both-cold", marks=pytest.mark.slow),
        pytest.param(False, (), id="stdout-warm", marks=pytest.mark.slow),
    ],
)
def test_workers_see_a_terminal_exactly_where_torchruns_do(
    tmp_path: Path, options: tuple[str, ...], stderr_too: bool
) -> None:
    seen = []
    for launcher_of in ("resilience", "torchrun"):
        folder = tmp_path / launcher_of
        folder.mkdir()
        screen, terminal = pty.openpty()
        stderr = terminal if stderr_too else None
        with running(launcher_of, folder, terminal, options, stderr) as child:
            os.close(terminal)
            shown = b""
            with contextlib.suppress(OSError):  # EIO: its other end is closed
                while piece := os.read(screen, 4096):
                    shown += piece
            assert child.wait(150) == 0, shown
        os.close(screen)
        assert "€ \x1b[1m\r".encode() in shown
        seen.append((folder / "seen").read_text())
    assert seen[0] == seen[1]
    assert "True" in seen[0]


@contextlib.contextmanager
def running(
    launcher_of: str, folder: Path, stdout: int, options: tuple[str, ...], stderr: int | None
) -> Iterator[subprocess.Popen]:
    if launcher_of == "resilience":
        with run(folder, LOOK, stdout, *options, stderr=stderr) as child:
            yield child
        return
    path = folder / "script.py"
    path.write_text("import os, sys, pathlib, time\nhere = pathlib.Path(__file__).parent\n" + LOOK)
    with (folder / "stderr").open("wb") as errors:
        child = subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1", str(path)],
            stdout=stdout,
            stderr=errors if stderr is None else stderr,
            start_new_session=True,
        )
    try:
        yield child
    finally:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()


def test_stdout_and_stderr_stay_apart(launch: Launch) -> None:
    script = "sys.stdout.write(f'out {rank}\\n')\nsys.stderr.write(f'err {rank}\\n')"  # each line in one piece
    job = launch(script)
    assert job.wait() == [0]
    assert (kept(job, 1), kept(job, 1, stream="err")) == (b"out 1\n", b"err 1\n")
    assert sorted(job.output().splitlines()) == ["out 0", "out 1"]
    assert {"err 0", "err 1"} <= set(job.output(stream=2).splitlines())
