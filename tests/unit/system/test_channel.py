"""The line between a rank and its monitor keeps messages whole and makes nobody wait."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator

import pytest

from resilience.system.channel import LIMIT, Channel, ChannelClosed, pair


@pytest.fixture
def line() -> Iterator[tuple[Channel, Channel]]:
    ours, theirs = pair()
    yield ours, theirs
    ours.close()
    theirs.close()


def test_messages_arrive_whole_and_in_order_both_ways(line: tuple[Channel, Channel]) -> None:
    ours, theirs = line
    assert ours.send(b"one") and ours.send(b"two")
    assert theirs.send(b"three")
    assert [theirs.receive(0.0), theirs.receive(1.0), theirs.receive(0.0)] == [b"one", b"two", None]
    assert ours.receive(1.0) == b"three"


def test_message_may_be_as_long_as_the_limit_and_not_longer(line: tuple[Channel, Channel]) -> None:
    ours, theirs = line
    longest = os.urandom(LIMIT)
    assert ours.send(longest)
    assert theirs.receive(1.0) == longest
    assert not ours.send(longest + b"x")
    assert theirs.receive(0.0) is None  # nothing of it


def test_full_line_refuses_at_once_and_takes_again_when_it_was_read(line: tuple[Channel, Channel]) -> None:
    ours, theirs = line
    sent = 0
    while ours.send(sent.to_bytes(1000, "big")):
        sent += 1
    assert sent > 0 and not ours.send(b"x" * 1000)
    assert theirs.receive(0.0) == bytes(1000)
    received = 1
    while theirs.receive(0.0) is not None:
        received += 1
    assert received == sent  # what was taken came
    assert ours.send(b"again")


def test_end_that_is_gone_is_reported_after_its_last_words(line: tuple[Channel, Channel]) -> None:
    ours, theirs = line
    ours.send(b"last words")
    ours.close()
    assert not theirs.send(b"too late")
    assert theirs.receive(1.0) == b"last words"
    for wait in (0.0, 1.0):
        with pytest.raises(ChannelClosed):
            theirs.receive(wait)


def test_end_is_known_to_be_gone_though_its_last_words_are_not_read_yet(line: tuple[Channel, Channel]) -> None:
    ours, theirs = line
    ours.send(b"last words")
    assert not theirs.is_closed()
    ours.close()
    assert theirs.is_closed()
    assert ours.is_closed()  # of a closed end, nobody is at the other one
    assert theirs.receive(1.0) == b"last words"


def test_own_end_that_is_closed_sends_nothing_and_says_so(line: tuple[Channel, Channel]) -> None:
    ours, _ = line
    ours.close()
    assert not ours.send(b"x")
    for wait in (0.0, 1.0):
        with pytest.raises(ChannelClosed):
            ours.receive(wait)


def test_line_works_in_a_process_with_many_files_open() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(2048, hard), hard))
    many = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        ours, theirs = pair()
        assert theirs.fileno() > 1023
        assert ours.send(b"x")
        assert theirs.receive(1.0) == b"x"
        ours.close()
        theirs.close()
    finally:
        for fd in many:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("with_fds", [False, True])
def test_last_messages_arrive_though_the_other_end_left_unread_messages(with_fds: bool) -> None:
    ours, theirs = pair()
    ours.send(b"never read")
    theirs.send(b"first")
    theirs.send(b"last")
    theirs.close()
    for expected in (b"first", b"last"):
        assert (ours.receive_with_fds(1.0) if with_fds else ours.receive(1.0)) in (expected, (expected, []))
    with pytest.raises(ChannelClosed):
        ours.receive(1.0)
    ours.close()
