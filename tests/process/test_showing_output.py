"""The thread that shows workers' output at the launcher's stdout or stderr, whose reader may be gone."""

from __future__ import annotations

import fcntl
import os
import time

import pytest

from resilience.launcher.output import terminal_copy
from resilience.launcher.output.byte_counts import ByteCounts
from resilience.launcher.output.drained_stream import Stream
from resilience.launcher.output.streams import OpenStream, StreamLost
from resilience.launcher.output.terminal_copy import Shower
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
