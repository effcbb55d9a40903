"""A rank that waits in the constructor of a store is freed when the iteration is interrupted."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest

from resilience.facts import events
from tests.process import constructing
from tests.support.ranks import Job, free_port

Start = Callable[..., Job]


def target(function: Callable[..., object]) -> str:
    return f"{constructing.__name__}:{function.__name__}"


def assert_none_was_ended(job: Job) -> None:
    assert not job.of(events.AbortStuck)
    assert not job.of(events.RankSignalled)


def test_rank_goes_on_whose_iterations_store_lost_its_host_while_it_connects(start: Start) -> None:
    job = start(3, target(constructing.connect_to_the_iterations_store))
    for rank in (1, 2):
        job.await_sign("entered", rank)
    os.kill(job.monitor_pid(1), signal.SIGKILL)
    job.await_record(events.MonitorLost, rank=1)
    job.let_on("entered")
    job.await_sign("connects", 2)
    job.let_on("raises")
    ended = job.wait_ranks()
    assert ended[0].code == 3
    assert [rank.value for rank in ended[1:]] == [2, 2]
    assert_none_was_ended(job)


@contextmanager
def refusing() -> Iterator[int]:
    """A port where nobody listens, and nobody else will."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield bound.getsockname()[1]


@contextmanager
def silent() -> Iterator[int]:
    """The port of a server that accepts connections and says nothing, as one that is stopped does."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(100)
        yield listener.getsockname()[1]


@contextmanager
def dropping() -> Iterator[int]:
    """A port whose host drops packets, as one that is down does: the kernel drops what a full listener cannot take."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        with socket.create_connection(listener.getsockname()):
            yield listener.getsockname()[1]


@contextmanager
def leaving() -> Iterator[int]:
    """The port of a server that ends when a client has seen it."""
    with socket.socket() as bound, socket.socket() as listener:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        bound.bind(("127.0.0.1", 0))  # nobody else gets the port
        listener.bind(bound.getsockname())
        listener.listen()

        def serve() -> None:
            listener.accept()[0].close()
            listener.close()

        threading.Thread(target=serve, daemon=True).start()
        yield bound.getsockname()[1]


@pytest.mark.parametrize("server", [refusing, silent, dropping, leaving])
def test_rank_goes_on_that_was_connecting_to_a_store_that_never_answers(
    start: Start, server: Callable[[], AbstractContextManager[int]]
) -> None:
    with server() as port:
        job = start(2, target(constructing.connect_to_a_store_of_its_own), port=port)
        job.await_sign("connects", 1)
        job.let_on("raises")
        assert [rank.value for rank in job.wait()] == [1, 1]
    assert_none_was_ended(job)


def test_rank_goes_on_that_was_hosting_a_store_and_waiting_for_a_rank_that_raised(start: Start) -> None:
    job = start(2, target(constructing.host_a_store_of_its_own), port=free_port())
    job.await_sign("connects", 0)
    job.let_on("raises")
    assert [rank.value for rank in job.wait()] == [1, 1]
    assert_none_was_ended(job)


def test_rank_goes_on_that_was_building_a_group_over_a_store_made_in_the_function(start: Start) -> None:
    job = start(2, target(constructing.build_a_group_over_a_store_of_its_own), port=free_port())
    job.await_sign("builds", 0)
    job.await_sign("raises", 1)
    job.let_on("raises")
    assert [rank.value for rank in job.wait()] == [1, 1]
    assert_none_was_ended(job)


def test_timeout_that_a_constructor_was_given_is_kept(start: Start) -> None:
    with refusing() as port:
        (rank,) = start(1, target(constructing.construct_with_a_timeout), port=port).wait()
    assert rank.value["timeouts"] == (40.0, 50.0)
    assert rank.value["answers"] == 3
    assert f"127.0.0.1:{port} within 1.5 s" in rank.value["error"]
    assert rank.value["has_waited"]
