"""A network that fails between an agent and the job's store: slow, half-open, reset, or not to be found.

The second of two agents comes to the store by a proxy, on this host, so that no privilege is needed. Hosts of
their own, whose lines are cut, are in tests/system/test_hosts.py."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from resilience.core import cycle
from resilience.facts import events
from tests.process.launching import Launched, launcher
from tests.process.test_launcher import await_end
from tests.process.test_launcher_nodes import go, outcomes, whys
from tests.support.proxy import Proxy
from tests.support.ranks import Job, free_port

Launch = Callable[..., Launched]
CONF = "keep_alive_interval=0.25,keep_alive_max_attempt=40,last_call_timeout=20"  # lost after 10 s of silence
WAIT = "say('up')\nawait_file('go')"


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def proxy(port: int) -> Iterator[Proxy]:
    with Proxy(("127.0.0.1", port)) as made:
        yield made


@pytest.fixture
def launch(start: Callable[..., Job], tmp_path: Path, port: int, proxy: Proxy) -> Launch:
    begin = launcher(start, tmp_path)

    def two(script: str = WAIT, *options: str, conf: str = CONF) -> Launched:
        there = {"PET_RDZV_ENDPOINT": f"127.0.0.1:{proxy.port}"}
        where = {"conf": conf, "endpoint": f"127.0.0.1:{port}", "per_agent": ({}, there)}
        job = begin(script, *options, nodes="1:2", agents=2, nproc=1, **where)
        for rank in range(2):
            job.await_worker(f"up.0.{rank}")
        return job

    return two


@pytest.mark.slow
def test_slow_network_below_the_limit_changes_nothing(launch: Launch, proxy: Proxy) -> None:  # F28
    job = launch()
    proxy.set("delay", 0.2)
    until = time.monotonic() + 12.0  # more than the time after which a silent node is lost
    while time.monotonic() < until:
        proxy.await_passed(5)
    go(job)
    assert job.wait() == [0, 0]
    assert whys(job, 0, 1) == [["first"], ["first"]]
    assert job.of(events.RestartDecided) == []


@pytest.mark.parametrize(
    ("mode", "words"),
    [
        ("swallow", "it did not answer for 7.5 s"),
        pytest.param("reset", "the store did not answer", marks=pytest.mark.slow),
    ],
)
def test_lost_line_to_the_store_ends_its_node_with_a_reason_and_the_other_goes_on(
    launch: Launch, proxy: Proxy, mode: str, words: str
) -> None:  # F29
    job = launch()
    old = job.worker_pid(1)
    proxy.set("swallow" if mode == "swallow" else "reset")
    assert job.wait_agent(1).code == 1
    await_end(old)
    said = f"this node leaves the job: node node1 could not reach the job's store at 127.0.0.1:{proxy.port}: {words}"
    assert said in job.output(1, 2)
    assert "store was lost" not in job.output(1, 2) + job.output(0, 2)
    job.await_worker("up.1.0")
    go(job)
    assert job.wait() == [0, 1]
    assert whys(job, 0, 1) == [["first", "failure"], ["first"]]
    assert outcomes(job)["node0"] == ("completed", 0)
    assert [record.event.why for record in job.of(events.RestartDecided)] == ["node node1 is lost"]


def test_slow_worker_of_a_cut_off_node_is_killed_before_its_shutdown_timeout(launch: Launch, proxy: Proxy) -> None:
    script = """
    if cycle == 0 and rank == 1:
        signal.signal(signal.SIGTERM, lambda *_: say("asked"))
    say("up")
    await_file(["go", "never"][rank] if cycle == 0 else "done")
    sys.exit(cycle == 0)
    """
    job = launch(script, "--shutdown-timeout", "300")
    slow = job.worker_pid(1)
    go(job)
    job.await_worker("asked.0.1")  # node 0 has failed, both stop their workers
    proxy.set("swallow")
    job.await_worker("up.1.0")
    await_end(slow)
    go(job, "done")
    assert job.wait() == [0, cycle.EXCLUDED]  # its check before the next cycle does not reach the store


def test_unknown_host_name_is_reported_without_a_traceback(start: Callable[..., Job], tmp_path: Path) -> None:  # F32
    conf = {"PET_RDZV_CONF": "is_host=0,join_timeout=1"}
    job = launcher(start, tmp_path)(WAIT, nodes="2", agents=1, endpoint="node0.invalid:29500", per_agent=(conf,))
    assert job.wait() == [1]
    assert "the name node0.invalid was not found within 1 s" in job.output(0, 2)
    assert "Traceback" not in job.output(0, 2)
