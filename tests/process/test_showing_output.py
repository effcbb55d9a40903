"""The thread that shows workers' output at the launcher's stdout or stderr, whose reader may be gone."""

from __future__ import annotations

import fcntl
import os
import select
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.tail_log import TailLog

from resilience.launcher.output import teed_output, terminal_copy
from resilience.launcher.output.byte_counts import ByteCounts
from resilience.launcher.output.drained_stream import Stream
from resilience.launcher.output.streams import OpenStream, StreamLost
from resilience.launcher.output.teed_output import TeedOutput
from resilience.launcher.output.terminal_copy import Shower
from resilience.system import terminal
from tests.process.memory import MIB, counted_memory


def test_loss_at_the_terminal_has_the_error_of_the_write() -> None:
    told: list[StreamLost] = []
    reading, writing = os.pipe()
    os.close(reading)
    shower = Shower(writing, told.append)
    shower.take(
        Stream(OpenStream(1, "rank 0's stdout", b"/0.out", 0, 1), -1, ByteCounts.create()), b"nobody reads this\n"
    )
    deadline = time.monotonic() + 60.0
    while not shower.is_stuck(0.0, 60.0):  # the first attempt to write has not failed yet
        assert time.monotonic() < deadline
        time.sleep(0.01)
    shower.settle()
    assert [(each.place, each.count, each.why) for each in told] == [("terminal", 18, "Broken pipe")]


def full_pipe() -> tuple[int, int]:
    """Return both ends of a pipe that accepts nothing more."""
    reading, writing = os.pipe()
    fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 4096)
    os.write(writing, b"." * 4096)
    return reading, writing


def test_output_after_the_end_of_the_job_is_shown_once_the_reader_reads_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A child of a worker may still write then."""
    monkeypatch.setattr(terminal_copy, "ROOM", 4096)
    reading, writing = full_pipe()
    shower = Shower(writing, lambda lost: None)
    stream = Stream(OpenStream(1, "rank 0's stdout", b"/0.out", 0, 1), -1, ByteCounts.create())
    for _ in range(2):
        shower.take(stream, b"x" * 4095 + b"\n")
    shower.settle()
    shower.take(stream, b"later\n")
    received = b""
    while not received.endswith(b"later\n") and b"not shown here" not in received:
        received += os.read(reading, 4096)
    assert received.endswith(b"later\n")
    os.close(reading)


def test_short_lines_that_wait_for_the_reader_take_no_more_memory_than_long_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(terminal_copy, "ROOM", MIB)
    reading, writing = full_pipe()
    shower = Shower(writing, lambda lost: None)
    stream = Stream(OpenStream(1, "rank 0's stdout", b"/0.out", 0, 1), -1, ByteCounts.create())
    with counted_memory() as used:
        for number in range(MIB // 40):
            shower.take(stream, b"%040d" % number)
        assert used() < 1.1 * MIB
    shower.settle()
    os.close(reading)


def test_teed_output_waits_for_a_reader_that_still_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(teed_output, "PATIENCE", 60.0)
    monkeypatch.setattr(teed_output, "FINISH_LIMIT", 120.0)
    reading, writing = full_pipe()
    monkeypatch.setattr(terminal, "stream", lambda number: writing)
    path = tmp_path / "stdout.log"
    path.write_text("line\n" * 100_000)
    tail_log = TailLog("default", {0: str(path)}, sys.__stdout__, {0: ""})
    teed = TeedOutput([tail_log])
    tail_log.start()
    with ThreadPoolExecutor(1) as pool:
        unshown = pool.submit(teed.finish)
        received = b""
        while not unshown.done() or select.select([reading], [], [], 0.0)[0]:
            if select.select([reading], [], [], 0.05)[0]:
                received += os.read(reading, 1 << 16)
        assert unshown.result() == []
    assert received.replace(b".", b"") == path.read_bytes()
    os.close(reading)


UNREADABLE = """
import os, sys
from torch.distributed.elastic.multiprocessing.tail_log import TailLog
from resilience.launcher.output import teed_output

teed_output.FINISH_LIMIT = 0.5
tail_log = TailLog("default", {0: sys.argv[1]}, sys.stdout, {0: ""})
teed = teed_output.TeedOutput([tail_log])
tail_log.start()
print(*teed.finish())
"""


def test_agent_ends_although_the_disk_of_a_teed_file_does_not_answer(tmp_path: Path) -> None:
    path = tmp_path / "stdout.log"
    os.mkfifo(path)  # nobody opens it for writing, so opening it blocks
    ended = subprocess.run([sys.executable, "-c", UNREADABLE, str(path)], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    assert f"the end of the workers' stdout is not shown here, {teed_output.UNREAD}; see {path}" in ended.stdout
