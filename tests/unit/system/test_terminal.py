"""Writing to somebody who may not read."""

from __future__ import annotations

import io
import os
import time
from collections.abc import Iterator

import pytest

from resilience.system import terminal
from resilience.system.terminal import put

PAST = 0.0


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    yield ends
    for end in ends:
        os.close(end)


def test_all_is_taken_where_there_is_room_also_after_the_moment(pipe: tuple[int, int]) -> None:
    data = bytes(range(256)) * 128
    assert put(pipe[1], data, PAST) == len(data)
    assert os.read(pipe[0], 1 << 20) == data


def test_put_stops_at_a_full_pipe_and_the_rest_can_follow(pipe: tuple[int, int]) -> None:
    data = os.urandom(200_000)
    taken = put(pipe[1], data, PAST)
    assert 0 < taken < len(data)
    got = os.read(pipe[0], taken)
    assert put(pipe[1], data[taken:], PAST) > 0
    assert got == data[:taken]


def test_pipe_without_a_reader_takes_nothing() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    assert put(writing, b"words", time.monotonic() + 60) == 0
    os.close(writing)
    assert put(writing, b"words", time.monotonic() + 60) == 0


class Stream(io.StringIO):
    """A text stream whose `fileno` returns or raises this."""

    def __init__(self, number: object) -> None:
        super().__init__()
        self._number = number

    def fileno(self) -> int:
        if isinstance(self._number, BaseException):
            raise self._number
        return self._number  # type: ignore[return-value]


@pytest.mark.parametrize("number", [-1, None, NotImplementedError(), OSError(), "2", 1 << 40])
def test_stream_without_a_usable_descriptor_harms_nobody(number: object) -> None:
    stream = Stream(number)
    terminal.say(stream, "words")
    assert stream.getvalue() == ("" if number == 1 << 40 else "words")


def test_pipe_that_is_opened_once_more_never_waits(pipe: tuple[int, int]) -> None:
    again = terminal.stream.__wrapped__(pipe[1])
    assert again != pipe[1] and not os.get_blocking(again) and os.get_blocking(pipe[1])
    os.write(again, b"x")
    assert os.read(pipe[0], 10) == b"x"
    os.close(again)


def test_file_is_written_through_the_descriptor_itself(tmp_path: object) -> None:
    with open(os.path.join(str(tmp_path), "log"), "wb") as file:
        assert terminal.stream.__wrapped__(file.fileno()) == file.fileno()
