"""The rendezvous on a real etcd: who is lost, the first node included, takes nothing along."""

from __future__ import annotations

import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import pytest
import torch.distributed as dist
from torch.distributed.elastic.rendezvous import RendezvousParameters

from resilience.core.cycle import CycleDecision, encode
from resilience.core.restart import Read
from resilience.errors import StoreError
from resilience.facts import events
from resilience.launcher.rendezvous import etcd_store
from resilience.launcher.rendezvous.job_store import RendezvousStore
from resilience.launcher.rendezvous.job_store import meet as meet_in_store
from resilience.system.store import execute
from tests.process.launching import Launched, await_arrival, launcher
from tests.process.rendezvousing import agents, meet
from tests.support.etcd import MISSING, running_etcd
from tests.support.pids import child_named
from tests.support.ranks import Job, free_port
from tests.support.server import ForkServer

pytestmark = pytest.mark.skipif(
    bool(MISSING), reason=f"THE RENDEZVOUS ON ETCD IS NOT TESTED HERE: missing {', '.join(MISSING)}"
)
HAS_IPV6 = Path("/proc/net/if_inet6").exists() and "lo" in Path("/proc/net/if_inet6").read_text().split()
# A node counts as lost after 10 s of silence: etcd writes each change to the disk before it answers, which takes
# seconds where others use the disk.
ALIVE = {"keep_alive_interval": 0.5, "keep_alive_max_attempt": 20}
SOON_LOST = ALIVE | {"keep_alive_max_attempt": 10}
QUICK = "keep_alive_interval=0.5,keep_alive_max_attempt=20,last_call_timeout=20"


@pytest.fixture
def endpoint(tmp_path: Path) -> Iterator[str]:
    """Where an etcd listens that ends with the test."""
    here = f"127.0.0.1:{free_port()}"
    with running_etcd(tmp_path, here):
        yield here


def parameters_of(endpoint: str, **conf: Any) -> RendezvousParameters:
    return RendezvousParameters(backend="etcd", endpoint=endpoint, run_id="job", min_nodes=1, max_nodes=1, **conf)


def store_in_etcd(endpoint: str, **conf: Any) -> RendezvousStore:
    """Return the job's store as an agent reaches it. Agents on etcd host nothing."""
    return meet_in_store(parameters_of(endpoint, **conf), cast(Any, None), 30.0)


@pytest.mark.parametrize("backend", ["etcd", "etcd-v2"])
def test_agents_on_etcd_restart_with_a_fresh_store(
    fork_server: ForkServer, tmp_path: Path, endpoint: str, backend: str
) -> None:
    with agents(fork_server, tmp_path, "2", backend=backend, endpoint=endpoint, **ALIVE) as job:
        them = [job.start("a"), job.start("b")]
        assert [agent.answer() for agent in them] == [False, False]  # nobody hosts
        first = meet(them)
        them[0].do("job_store", "set", "restarts", "1")
        second = meet(them)
        assert [told.cycle for told in second] == [1, 1]
        assert [told.rank for told in second] == [told.rank for told in first]
        assert [told.store for told in second] == [[], []]
        assert them[1].do("job_store", "get", "restarts") == b"1"


def test_loss_of_the_first_node_and_all_its_processes_is_survived(
    fork_server: ForkServer, tmp_path: Path, endpoint: str
) -> None:
    with agents(fork_server, tmp_path, "1:3", backend="etcd", endpoint=endpoint, **ALIVE) as job:
        them = [job.start(node) for node in "abc"]
        for agent in them:
            agent.answer()
        told = meet(them)
        first = next(agent for agent, each in zip(them, told, strict=True) if each.rank == 0)
        rest = [agent for agent in them if agent is not first]
        rest[0].do("job_store", "add", "restarts", 2)
        first.kill()  # its store process goes with it
        again = meet(rest)
        assert sorted(each.rank for each in again) == [0, 1]
        assert rest[1].do("job_store", "add", "restarts", 0) == 2


def test_job_that_is_over_leaves_nothing_in_etcd(fork_server: ForkServer, tmp_path: Path, endpoint: str) -> None:
    for _ in range(2):  # the same id serves again
        with agents(fork_server, tmp_path, "2", backend="etcd", endpoint=endpoint, **ALIVE) as job:
            them = [job.start("a"), job.start("b")]
            for agent in them:
                agent.answer()
            assert [told.cycle for told in meet(them)] == [0, 0]
            assert them[0].do("shutdown") is True
            assert them[1].do("shutdown") is True


def test_job_whose_last_agent_was_killed_before_it_left_leaves_nothing_in_etcd(
    fork_server: ForkServer, tmp_path: Path, endpoint: str
) -> None:
    for _ in range(2):  # the same id serves again
        with agents(fork_server, tmp_path, "2", backend="etcd", endpoint=endpoint, **SOON_LOST) as job:
            them = [job.start("a"), job.start("b")]
            for agent in them:
                agent.answer()
            assert [told.cycle for told in meet(them)] == [0, 0]
            them[0].do("set_closed", "over")
            them[1].kill()
            assert them[0].do("leave") is True


def test_what_a_killed_attempt_has_left_is_not_the_next_ones(
    fork_server: ForkServer, tmp_path: Path, endpoint: str
) -> None:
    for attempt in range(2):
        with agents(fork_server, tmp_path, "1", backend="etcd", endpoint=endpoint, attempt=attempt, **ALIVE) as job:
            agent = job.start("a")
            agent.answer()
            assert [told.cycle for told in meet([agent])] == [0]
            agent.do("set_closed", "the job failed")
            agent.kill()


def test_wait_for_a_key_costs_etcd_three_requests_however_long_it_takes(endpoint: str) -> None:
    host, _, port = endpoint.partition(":")
    settings = etcd_store.settings_of(parameters_of(endpoint))
    waiting, writing = (etcd_store.connect(settings, host, int(port)) for _ in range(2))
    asked: list[str] = []
    execute = waiting._client.api_execute
    waiting._client.api_execute = lambda path, *args, **options: asked.append(path) or execute(path, *args, **options)
    with pytest.raises(TimeoutError, match="not in etcd after 1 s"):
        waiting.wait(["key"], timedelta(seconds=1))
    assert len(asked) <= 3
    asked.clear()
    waiter = threading.Thread(target=waiting.wait, args=(["key"], timedelta(seconds=60)))
    waiter.start()
    while len(asked) < 2:  # it has looked, and waits
        time.sleep(0.01)
    writing.set("other", "1")
    writing.set("key", "1")
    waiter.join(30)
    assert not waiter.is_alive()
    assert len(asked) == 3


def test_key_that_is_deleted_while_it_is_read_counts_as_absent_at_once(
    endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last two agents of a job may both find that nobody is left: one deletes what the other one reads."""
    settings = etcd_store.settings_of(parameters_of(endpoint))
    host, _, port = endpoint.partition(":")
    reading, deleting = (etcd_store.connect(settings, host, int(port)) for _ in range(2))
    deleting.set("job/entry", "there")
    find = reading.check
    monkeypatch.setattr(reading, "check", lambda keys: (find(keys), deleting.forget())[0])
    monkeypatch.setattr(reading, "wait", lambda keys: pytest.fail(f"it waits for {keys}"))
    assert execute(Read(("entry",)), dist.PrefixStore("job", reading)) == (None,)


def test_request_during_a_restart_of_etcd_is_answered_afterwards(tmp_path: Path) -> None:
    """An agent counts as lost if its lease runs out, not if one request fails."""
    here = f"127.0.0.1:{free_port()}"
    with running_etcd(tmp_path, here):
        store = store_in_etcd(here)
        client = store.connect()
        assert client.add("count", 1) == 1
    answers: list[int] = []
    counting = threading.Thread(target=lambda: answers.append(client.add("count", 1)), daemon=True)
    connecting = threading.Thread(target=lambda: answers.append(store.connect().add("other", 5)), daemon=True)
    for thread in (counting, connecting):
        thread.start()
    counting.join(1.0)
    assert not answers
    with running_etcd(tmp_path, here):
        for thread in (counting, connecting):
            thread.join(50)
    assert sorted(answers) == [2, 5]


def test_agent_that_is_cut_off_stops_asking_an_etcd_that_is_away(tmp_path: Path) -> None:
    here = f"127.0.0.1:{free_port()}"
    with running_etcd(tmp_path, here):
        store = store_in_etcd(here, read_timeout=3600)
        client = store.connect()
    store.cut()
    with pytest.raises(OSError, match="etcd does not answer"):
        client.add("count", 1)
    assert store.forget is not None
    for ask in (store.connect, store.forget):  # at the end of a job, too
        with pytest.raises(StoreError, match=f"etcd at {here} .*check --rdzv-endpoint"):
            ask()


def test_etcd_without_its_v2_api_is_refused_with_what_to_do(tmp_path: Path) -> None:
    here = f"127.0.0.1:{free_port()}"
    with running_etcd(tmp_path, here, "--enable-v2=false"):
        store = store_in_etcd(here, read_timeout=3600)
        with pytest.raises(StoreError, match=f"etcd at {here} .*--enable-v2=true"):
            store.connect()


def test_etcd_with_a_certificate_for_its_name_is_asked_by_that_name(tmp_path: Path) -> None:
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=localhost"]
    command += ["-addext", "subjectAltName=DNS:localhost", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(command, check=True, capture_output=True)
    port = free_port()
    options = "--cert-file", str(certificate), "--key-file", str(key)
    with running_etcd(tmp_path, f"127.0.0.1:{port}", *options, protocol="https"):
        store = store_in_etcd(f"localhost:{port}", protocol="https", ca_cert=str(certificate))
        assert store.connect().add("count", 1) == 1
        by_address = store_in_etcd(f"127.0.0.1:{port}", protocol="https", ca_cert=str(certificate), read_timeout=3600)
        with pytest.raises(StoreError, match=r"TLS fails: .*IP address mismatch"):
            by_address.connect()


@pytest.mark.skipif(not HAS_IPV6, reason="this host has no IPv6")
def test_etcd_is_reached_at_an_ipv6_address(tmp_path: Path) -> None:
    here = f"[::1]:{free_port()}"
    with running_etcd(tmp_path, here):
        assert store_in_etcd(here).connect().add("count", 1) == 1


# -- jobs under the launcher --------------------------------------------------------------------------

Launch = Callable[..., Launched]


@pytest.fixture
def launch(start: Callable[..., Job], tmp_path: Path, endpoint: str) -> Launch:
    begin = launcher(start, tmp_path)

    def on_etcd(script: str, nodes: str, **env: str) -> Launched:
        options = ("--rdzv-backend", "etcd")
        return begin(script, *options, nodes=nodes, agents=2, nproc=1, conf=QUICK, endpoint=endpoint, **env)

    return on_etcd


@pytest.mark.slow
def test_job_ends_well_though_etcd_is_restarted_when_its_worker_ends(start: Callable[..., Job], tmp_path: Path) -> None:
    here = f"127.0.0.1:{free_port()}"
    conf = "keep_alive_interval=0.2,keep_alive_max_attempt=600,last_call_timeout=0.1"
    with running_etcd(tmp_path, here):
        job = launcher(start, tmp_path)(
            "say('up'); await_file('go'); say('done')",
            *("--rdzv-backend", "etcd"),
            nodes="1:2",
            agents=1,
            nproc=1,
            conf=conf,
            endpoint=here,
        )
        job.await_worker("up.0.0")
    (job.folder / "go").touch()
    job.await_worker("done.0.0")
    with running_etcd(tmp_path, here):
        assert job.wait() == [0]
    assert not job.of(events.StoreLost)


def restarts(job: Launched) -> list[tuple[int | None, str, int]]:
    """Return the cycle, the reason and the number of each restart."""
    return [(each.origin.cycle, each.event.why, each.event.restarts_used) for each in job.of(events.RestartDecided)]


MEETS = """
import torch.distributed as dist
dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), wait_for_workers=False).set("key", "value")
say("up")
if cycle == 0:
    await_file("never", 600)
"""


@pytest.mark.slow
def test_cycle_of_a_spare_whose_store_process_has_died_is_followed_by_one_with_a_fresh_store(
    start: Callable[..., Job], tmp_path: Path, endpoint: str
) -> None:
    options = ("--rdzv-backend", "etcd", "--max-restarts", "0")
    job = launcher(start, tmp_path)(MEETS, *options, nodes="2", agents=2, nproc=1, conf=QUICK, endpoint=endpoint)
    for rank in range(2):
        job.await_worker(f"up.0.{rank}")
    spare = job.more()
    parameters = RendezvousParameters(backend="etcd", endpoint=endpoint, run_id="test", min_nodes=1, max_nodes=1)
    client = meet_in_store(parameters, cast(Any, None), 30.0).connect()
    await_arrival(dist.PrefixStore("resilience/test", client), "node2")
    child_named(spare.job.pids[0], "resilience-store").kill()
    job.job.signal(0, signal.SIGTERM)
    assert (job.wait(), spare.wait()) == ([143, 0], [0])
    # A node that notices the end of cycle 1 before it has begun has no record of it.
    ends = {(each.event.outcome, each.event.detail) for each in job.of(events.CycleEnded) if each.origin.cycle == 1}
    assert ends <= {("interrupted", "the store process of node2 is gone")}
    assert sorted(path.name for path in job.folder.glob("up.*")) == ["up.0.0", "up.0.1", "up.2.0", "up.2.1"]
    assert restarts(job) == []


def test_first_node_is_evicted_and_the_other_one_goes_on(launch: Launch) -> None:
    job = launch("say('up')\nif size == 2: await_file('never')", nodes="1:2")
    for rank in range(2):
        job.await_worker(f"up.0.{rank}")
    assert "hosts the job's store" not in job.output(0, 2)
    job.job.signal(0, signal.SIGTERM)
    assert job.wait() == [143, 0]
    assert (job.folder / "up.1.0").exists()
    assert restarts(job) == []


@pytest.mark.slow
def test_nodes_whose_store_processes_are_killed_start_others(launch: Launch) -> None:
    """The one that hosts the workers' store of this cycle, and the one that may host that of the next."""
    job = launch("say('up')\nif cycle < 2: await_file(f'go.{cycle}'); sys.exit(rank)", nodes="2")
    for cycle in range(2):
        for rank in range(2):
            job.await_worker(f"up.{cycle}.{rank}")
        for agent in job.job.pids:
            child_named(agent, "res-store").kill()
        (job.folder / f"go.{cycle}").touch()
    assert job.wait() == [0, 0]
    assert not job.of(events.StoreLost)


@pytest.mark.slow
def test_spare_goes_on_when_all_nodes_of_the_cycle_are_lost(launch: Launch) -> None:
    job = launch("say('up')\nif cycle == 0: await_file('never')", nodes="1")
    job.await_worker("up.0.0")
    (began,) = job.of(events.CycleStarted)
    first = int(str(began.origin.node).removeprefix("node"))
    spare = f"node{1 - first}"
    job.await_record(events.CyclePhaseStarted, spare, lambda event: event.phase == "rendezvous")
    job.job.signal(first, signal.SIGKILL)
    assert job.wait_agent(1 - first).code == 0
    job.wait()
    assert restarts(job) == [(0, f"node node{first} is lost", 1)]


def all_agents_are_killed(job: Launched) -> None:
    for rank in range(2):
        job.await_worker(f"up.0.{rank}")
    for number in range(2):
        job.job.signal(number, signal.SIGKILL)
    assert job.wait() == [-signal.SIGKILL] * 2


def test_nodes_that_come_back_after_all_agents_were_killed_go_on_with_the_job(launch: Launch, tmp_path: Path) -> None:
    """etcd still has the job: it has the same attempt, and the loss is one restart."""
    job = launch("print('ran', flush=True)\nsay('up')\nif cycle == 0: await_file('never')", nodes="2")
    all_agents_are_killed(job)
    again = job.again(0, 2)
    assert again.wait() == [0, 0]
    assert restarts(again) == [(0, "node node0, node1 is lost", 1)]
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["job"]
    for cycle, rank in ((0, 0), (0, 1), (1, 0), (1, 1)):
        assert (tmp_path / "runs" / "job" / "output" / str(cycle) / f"{rank}.out").read_text() == "ran\n"


def test_node_that_finds_a_job_that_is_over_and_has_no_agent_ends_with_an_error(
    start: Callable[..., Job], fork_server: ForkServer, tmp_path: Path, endpoint: str
) -> None:
    conf = "keep_alive_interval=0.5,keep_alive_max_attempt=10,last_call_timeout=0.1"
    options: dict[str, Any] = {"nodes": "1:2", "nproc": 1, "conf": conf, "endpoint": endpoint}
    job = launcher(start, tmp_path)("say('up'); await_file('never')", "--rdzv-backend", "etcd", **options)
    job.await_worker("up.0.0")
    job.job.signal(0, signal.SIGKILL)
    assert job.wait() == [-signal.SIGKILL]
    with agents(fork_server, tmp_path, "1:2", backend="etcd", endpoint=endpoint, run_id="test", **SOON_LOST) as others:
        last = others.start("last")
        last.answer()
        last.do("set_closed", encode(CycleDecision("completed", "last")))
        last.kill()
    (job.folder / "up.0.0").unlink()
    again = job.again(0)
    assert again.wait() == [2]
    assert "the store holds this job, which is over (completed)" in again.output(0, 2)
    assert "RESILIENCE_ATTEMPT with a number" in again.output(0, 2)
    assert list(job.folder.glob("up.*")) == []


@pytest.mark.slow
@pytest.mark.parametrize("variable", ["RESILIENCE_ATTEMPT", "SLURM_RESTART_COUNT"])
def test_nodes_that_come_back_with_another_attempt_begin_a_new_job(
    launch: Launch, tmp_path: Path, variable: str
) -> None:
    job = launch("say('up'); await_file('never')", nodes="2")
    all_agents_are_killed(job)
    before = sorted((tmp_path / "runs" / "job").rglob("*"))
    again = launch("print('ran', flush=True)", nodes="2", **{variable: "1"})
    assert again.wait() == [0, 0]
    assert sorted((tmp_path / "runs" / "job").rglob("*")) == before
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["job", "job@1"]
    for rank in range(2):
        assert (tmp_path / "runs" / "job@1" / "output" / "0" / f"{rank}.out").read_text() == "ran\n"
