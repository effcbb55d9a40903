"""A worker is asked to stop, or ended: what its monitor lets it know, whatever comes first."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from resilience.monitor import messages
from tests.process.watched import Node, await_line, node
from tests.support.stops import stop

LOOKS = """
import resilience, sys
while True:
    if resilience.stop_requested():
        print("asked", flush=True)
        break
    if not sys.stdin.readline():
        break
    print("looked", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def one(tmp_path: Path) -> Iterator[Node]:
    with node(tmp_path) as made:
        yield made


def look(worker: object) -> str:
    """Have the program look once; answers what it says."""
    worker.stdin.write("\n")  # type: ignore[attr-defined]
    worker.stdin.flush()  # type: ignore[attr-defined]
    return str(worker.stdout.readline()).strip()  # type: ignore[attr-defined]


@pytest.mark.parametrize("first", ["signal", "word"])
def test_sigterm_of_the_agent_ends_a_program_that_takes_a_schedulers_for_a_wish_to_stop(one: Node, first: str) -> None:
    worker = one.start(LOOKS)
    one.hear(messages.Connected)
    assert look(worker) == "looked"
    if first == "word":
        one.monitors.dismiss("another rank failed")
        one.monitors.look()
        one.hear(messages.Looked)  # what was said before it is done
        os.kill(worker.pid, signal.SIGTERM)
    else:
        os.kill(worker.pid, signal.SIGTERM)
        one.hear(messages.Requested)
        one.monitors.dismiss("another rank failed")
    assert worker.wait(60) == -signal.SIGTERM
    assert [message.worker_pid for message in one.said(messages.Requested)] == [worker.pid] * (first == "signal")


def test_program_that_is_being_ended_is_not_told_to_write_a_checkpoint(one: Node) -> None:
    worker = one.start(LOOKS)
    one.hear(messages.Connected)
    one.monitors.dismiss("another rank failed")
    one.monitors.look()
    one.hear(messages.Looked)
    assert look(worker) == "looked"


WAITS = """
import resilience, time
while not resilience.stop_requested():
    time.sleep(0.005)
print("asked", flush=True)
"""


LEAVES = """
import resilience, time
from resilience.fault_tolerance import RankMonitorClient
client = RankMonitorClient()
client.init_workload_monitoring()
resilience.stop_requested()
client.shutdown_workload_monitoring()
print("left", flush=True)
"""


def test_worker_that_has_left_its_monitor_hears_that_the_job_stops(one: Node) -> None:
    worker = one.start(LEAVES + WAITS)
    assert await_line(worker) == "left"
    one.monitors.request_stop()
    assert one.hear(messages.WillStop).is_heard
    assert worker.communicate(timeout=240)[0] == "asked\n"


def test_sigterm_to_a_worker_that_has_left_its_monitor_is_passed_on_to_the_agent(one: Node) -> None:
    worker = one.start(LEAVES + WAITS)
    assert await_line(worker) == "left"
    os.kill(worker.pid, signal.SIGTERM)
    assert one.hear(messages.Requested).action == "Stop"


def test_stop_that_comes_before_its_worker_is_watched_is_kept(one: Node) -> None:
    former = one.start("import sys; sys.stdin.read()")
    worker = one.start(WAITS)
    one.monitors.request_stop()
    one.hear(messages.WillStop, lambda message: message.worker_pid == former.pid)
    former.communicate()
    one.hear(messages.WillStop, lambda message: message.worker_pid == worker.pid)
    assert worker.communicate(timeout=240)[0] == "asked\n"


def test_replacement_monitor_passes_on_a_stop_that_the_lost_one_missed(one: Node) -> None:
    worker = one.start(WAITS)
    one.hear(messages.Connected)
    pid = one.monitors.pid(0)
    assert pid is not None
    stop(pid)  # it hears nothing any more
    one.monitors.request_stop()
    os.kill(pid, signal.SIGKILL)
    one.hear(messages.WillStop, lambda message: message.worker_pid == worker.pid)
    assert worker.communicate(timeout=240)[0] == "asked\n"


def test_long_description_is_cut_and_what_comes_after_it_arrives(one: Node) -> None:
    code = """
import resilience.monitor.client as client
from resilience.monitor import connect
client.stop_requested()
client._launcher_link.request("Continue", "x" * 100_000)
client._launcher_link.request("ExcludeThisNode", "bad memory")
input()
"""
    one.start(code)
    one.hear(messages.Requested, lambda message: message.action == "ExcludeThisNode")
    assert [(each.action, len(each.description)) for each in one.said(messages.Requested)] == [
        ("Continue", messages.DESCRIPTION),
        ("ExcludeThisNode", 10),
    ]
