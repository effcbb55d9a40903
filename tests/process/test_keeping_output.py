"""The files that keep workers' output, on a disk that does not answer for a while, or until the end of the job.

The disk is a named pipe in place of an output file: its opening waits until somebody reads it."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from resilience.launcher.output import output_files
from resilience.launcher.output.byte_counts import ByteCounts
from resilience.launcher.output.drain import Drain
from resilience.launcher.output.drained_stream import Stream
from resilience.launcher.output.output_files import Keeper
from resilience.launcher.output.streams import Finished, FinishStreams, OpenStream, StreamLost, decode_for_agent, encode
from resilience.run_folder.stamps import Stamps
from resilience.system.channel import listen, pair
from tests.process.memory import MIB, counted_memory
from tests.support.disks import lose_descriptor

PIPE = 1 << 16  # bytes that a pipe holds
CHUNK = b"x" * (PIPE - 1) + b"\n"


class Disk:
    """A named pipe."""

    def __init__(self, path: Path) -> None:
        self.path = path
        os.mkfifo(path)
        self._reading: int | None = None

    def answer(self) -> None:
        """Accept what is written from now on, as much as a pipe holds."""
        if self._reading is None:
            self._reading = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK)

    def content(self) -> bytes:
        """Return what was written so far."""
        if self._reading is None:
            return b""
        with contextlib.suppress(BlockingIOError):
            return os.read(self._reading, PIPE)
        return b""

    def close(self) -> None:
        """Let a thread go that waits."""
        self.answer()
        assert self._reading is not None
        os.close(self._reading)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    pipe = Disk(tmp_path / "0.out")
    yield pipe
    pipe.close()


def said_at_the_end(folder: Path, disk: Disk, written: bytes) -> list[object]:
    """Run a drain process's loop from a worker's last output to the end of the job; return its messages."""
    agents, drains = pair()
    reading, writing = os.pipe()
    os.write(writing, written)
    os.close(writing)
    (folder / "listener").mkdir()
    said: list[object] = []
    with listen(folder / "listener" / "drain") as listener:
        drain = Drain(drains, listener, ByteCounts.create())
        agents.send(encode(OpenStream(1, "rank 0's stdout", os.fsencode(disk.path), 0, 0)), [reading])
        agents.send(encode(FinishStreams()))
        loop = threading.Thread(target=drain.run, daemon=True)
        loop.start()
        while Finished() not in said:
            message = agents.receive(60.0)
            assert message is not None, said
            said.append(decode_for_agent(message))
        loop.join(60.0)
        assert not loop.is_alive()
    for end in (agents, drains):
        end.close()
    os.close(reading)
    return said


def stream_of(disk: Disk) -> Stream:
    return Stream(OpenStream(1, "rank 0's stdout", os.fsencode(disk.path), 0, 0), -1, ByteCounts.create())


def fill(keeper: Keeper, stream: Stream) -> int:
    """Fill the queue; return how many bytes wait in it."""
    waiting = 0
    while not keeper.is_full:
        keeper.take(stream, CHUNK, is_stalled=False)
        waiting += len(CHUNK)
    return waiting


def test_disk_that_pauses_at_the_end_of_a_job_gets_the_last_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, disk: Disk
) -> None:
    looks = 0

    def stalled_for(keeper: Keeper, now: float) -> float:
        nonlocal looks
        looks += 1
        if looks > 5:
            disk.answer()
        return 4.9

    monkeypatch.setattr(Keeper, "stalled_for", stalled_for)
    said = said_at_the_end(tmp_path, disk, b"the last words\n")
    assert disk.content() == b"the last words\n"
    assert not [each for each in said if isinstance(each, StreamLost)]


def test_disk_that_hangs_until_the_end_of_a_job_costs_output_that_is_all_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, disk: Disk
) -> None:
    monkeypatch.setattr(Keeper, "stalled_for", lambda keeper, now: 5.0)
    said = said_at_the_end(tmp_path, disk, b"the last words\n")
    assert [(each.place, each.count, each.why) for each in said if isinstance(each, StreamLost)] == [
        ("file", len(b"the last words\n"), "the disk does not answer")
    ]


def test_sum_at_the_end_counts_what_was_dropped_and_what_still_waits(disk: Disk) -> None:
    told: list[StreamLost] = []
    keeper = Keeper(told.append)
    stream = stream_of(disk)
    keeper.open(stream)
    waiting = fill(keeper, stream)
    for _ in range(2):
        keeper.take(stream, CHUNK, is_stalled=True)
    keeper.close(stream)
    keeper.settle()
    assert [each.count for each in told] == [len(CHUNK), waiting + 2 * len(CHUNK)]


def await_all(keeper: Keeper) -> None:
    is_written = threading.Event()
    keeper.call(is_written.set)
    assert is_written.wait(60.0)


@pytest.mark.parametrize("rest", [b"later\n", b""])
def test_line_about_missing_output_stands_where_it_is_missing(
    disk: Disk, monkeypatch: pytest.MonkeyPatch, rest: bytes
) -> None:
    monkeypatch.setattr(output_files, "ROOM", 0)
    keeper = Keeper(lambda lost: None)
    stream = stream_of(disk)
    keeper.open(stream)
    keeper.take(stream, b"first\n", is_stalled=False)
    keeper.take(stream, b"half a li", is_stalled=False)
    for _ in range(2):
        keeper.take(stream, b"dropped\n", is_stalled=True)
    disk.answer()
    await_all(keeper)
    if rest:
        keeper.take(stream, rest, is_stalled=False)
    keeper.close(stream)
    await_all(keeper)
    note = b"[resilience run: 16 bytes are missing here: the disk does not answer]\n"
    assert disk.content() == b"first\nhalf a li\n" + note + rest


def test_output_has_times_after_the_clock_was_set_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hours = 3600 * 10**9
    times = [9 * hours, hours, hours + 1, hours + output_files.STAMP_EVERY_NS]
    clock = SimpleNamespace(time_ns=iter(times).__next__, monotonic=time.monotonic)
    monkeypatch.setattr(output_files, "time", clock)
    keeper = Keeper(lambda lost: None)
    stream = Stream(OpenStream(1, "rank 0's stdout", os.fsencode(tmp_path / "0.out"), 0, 0), -1, ByteCounts.create())
    keeper.open(stream)
    for _ in times:
        keeper.take(stream, b"line\n", is_stalled=False)
    await_all(keeper)
    stamps = Stamps(tmp_path / "0.out")
    assert [stamps.at(5 * number) for number in range(len(times))] == [times[0], times[1], times[1], times[3]]


def test_short_lines_that_wait_for_the_disk_take_no_more_memory_than_long_ones(
    disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output_files, "ROOM", MIB)
    keeper = Keeper(lambda lost: None)
    stream = stream_of(disk)
    keeper.open(stream)
    with counted_memory() as used:
        for number in range(MIB // 40):
            keeper.take(stream, b"%040d" % number, is_stalled=True)
        assert used() < 1.1 * MIB


def test_file_server_that_fails_as_a_file_is_closed_costs_no_later_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reports failed writes then. The kernel has closed the descriptor nevertheless."""
    close = os.close

    def close_and_fail(descriptor: int) -> None:
        close(descriptor)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    told: list[StreamLost] = []
    keeper = Keeper(told.append)
    stream = Stream(OpenStream(1, "rank 0's stdout", os.fsencode(tmp_path / "0.out"), 1, 0), -1, ByteCounts.create())
    keeper.open(stream)
    keeper.take(stream, b"before its rotation\n", is_stalled=False)
    await_all(keeper)
    with monkeypatch.context() as patched:
        patched.setattr(output_files.os, "close", close_and_fail)
        keeper.take(stream, b"after\n", is_stalled=False)
        keeper.close(stream)
        await_all(keeper)
    assert (tmp_path / "0.out").read_bytes() == b"after\n"
    assert not told


def test_output_goes_on_once_a_file_server_that_failed_over_works_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output_files, "REOPEN_EVERY", 0.0)
    keeper = Keeper(lambda lost: None)
    stream = Stream(OpenStream(1, "rank 0's stdout", os.fsencode(tmp_path / "0.out"), 0, 0), -1, ByteCounts.create())
    keeper.open(stream)
    keeper.take(stream, b"first\n", is_stalled=False)
    await_all(keeper)
    descriptor = keeper._files[1]._fd
    assert descriptor is not None
    with monkeypatch.context() as server:
        lose_descriptor(descriptor, errno.ESTALE, server)
        for line in (b"lost\n", b"second\n"):
            keeper.take(stream, line, is_stalled=False)
        await_all(keeper)
    note = f"[resilience run: 5 bytes are missing here: {os.strerror(errno.ESTALE)}]\n".encode()
    assert (tmp_path / "0.out").read_bytes() == b"first\n" + note + b"second\n"
    keeper.close(stream)
    await_all(keeper)


def test_write_that_fails_in_an_unknown_way_is_counted_and_ends_no_later_one(
    disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[StreamLost] = []
    keeper = Keeper(told.append)
    stream = stream_of(disk)
    disk.answer()
    keeper.open(stream)

    def fail(*_: object) -> None:
        raise MemoryError

    with monkeypatch.context() as broken:
        broken.setattr(output_files._StreamFile, "write", fail)
        keeper.take(stream, b"lost\n", is_stalled=False)
    await_all(keeper)
    keeper.take(stream, b"later\n", is_stalled=False)
    keeper.close(stream)
    await_all(keeper)
    assert disk.content().endswith(b"later\n")
    assert [(lost.count, lost.why) for lost in told][-1] == (5, "MemoryError: ")
