"""Agents of the launcher, each in a process of its own, and the scripts that they run.

An agent is forked from the fork server, where torch is imported already. Workers are plain scripts, which
start in a tenth of a second; what they do stands in the test. All agents share one run folder, as on a
shared file system."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import signal
import textwrap
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from resilience.core import membership
from resilience.core.restart import Add, Read
from resilience.facts import events
from resilience.facts.records import Record
from resilience.system.store import execute
from tests.support import hosts
from tests.support.account import Account
from tests.support.ranks import Finished, Job, free_port

# Nobody is taken for lost, and no last call ends: a cycle forms when all of its nodes have arrived.
NO_NODE_IS_LOST = "keep_alive_interval=0.2,keep_alive_max_attempt=3000,last_call_timeout=60"
PREAMBLE = """
import os, pathlib, signal, sys, time
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
cycle = int(os.environ["RESILIENCE_CYCLE"])
here = pathlib.Path(__file__).parent

def say(name):
    (here / f"{name}.{cycle}.{rank}").touch()

def await_file(name, limit=250.0):
    until = time.monotonic() + limit
    while not (here / name).exists():
        if time.monotonic() > until:
            sys.exit(f"no {name}")
        time.sleep(0.005)

def await_all():
    say("all")  # an agent that comes to a cycle that has ended by then starts no worker
    for each in range(size):
        await_file(f"all.{cycle}.{each}")
"""


def fail(number: int, *_: object) -> None:
    raise OSError(number, os.strerror(number))


def agent(arguments: list[str]) -> None:
    """Be an agent. The exit status is the launcher's.

    SICK_DEVICE: this node's device is lost once that file exists. DIES=spending: the agent is killed as it is about to
    charge the job's budget, DIES=seated: as soon as it has a place in the first cycle. CGROUP: the node's control
    group. NOHUP: it was started by nohup. UNREAD: nobody reads what it shows. SLOW_ANSWERS: a worker's SIGTERM may come
    a minute before the agent's, and its stack and last lines a minute late, its end a minute after a signal;
    "evidence": the positions of the other ranks, too. LACKS: memory to start a worker, or space on the disk of
    --log-dir, or a process for the zygote, or for modules of --preload, "successor", or a thread for the heartbeat;
    "processes for a moment": as under `ulimit -u` while what the first cycle's workers started still ends; "limits",
    "environment": the agent itself fails, before it runs or as it starts workers. UNRESUMED: a store process that is
    stopped stays so. WAITS: file that it makes when it begins to wait for the rendezvous. FOLDER: the folder it is
    started in. BRIEF: its exporter has no more time at the end than a user's. LATE: workers write their notes as they
    end. UNPROBED: a monitor that does not answer for two minutes is kept. LONG: the first worker that has completed did
    so a week ago. SILENT_ZYGOTE: the zygote never carries out an order. OPEN_FILES: the agent's limit, soft and hard.
    START_FAILS: the start of this agent waits, makes that file with `.waits` to its name, and fails once that file
    exists. FAILS=report: it cannot tell how the job ended."""
    from resilience.core import stopping
    from resilience.core.job_budget import JobBudget
    from resilience.launcher import agent as agents
    from resilience.launcher import cycle_supervisor, launch, monitors, preflight, witnesses, worker_env
    from resilience.launcher.main import main
    from resilience.launcher.output import destinations
    from resilience.launcher.preflight import Devices
    from resilience.launcher.rendezvous import job_store, store_news
    from resilience.launcher.rendezvous.handler import Handler
    from resilience.launcher.worker import zygote
    from resilience.launcher.worker.worker_processes import RunningWorkers
    from resilience.launcher.worker.workers import Workers
    from resilience.monitor import config, starting
    from resilience.telemetry import exporters, restart_lines

    cycle_supervisor.READY = 120.0  # no worker fails before its monitor can tell why
    join = Handler.next_rendezvous
    # Usual limits of the end would cost records if a process stood still for two seconds.
    launch.MONITORS_LIMIT = 60.0
    launch.PREEMPTED_LIMIT = launch.FINISH_LIMIT
    if "BRIEF" in os.environ:
        exporters.REPORT_LIMIT = 10.0
    else:
        launch.EXPORT_LIMIT = 60.0

    zygote.ANSWER_LIMIT = 60.0  # also on a busy host
    if "SILENT_ZYGOTE" in os.environ:
        zygote.ANSWER_LIMIT = 0.3
        zygote._fork_all = lambda *_: threading.Event().wait()  # type: ignore[assignment]

    if "NOHUP" in os.environ:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

    if "FOLDER" in os.environ:
        os.chdir(os.environ["FOLDER"])

    if "UNREAD" in os.environ:
        close_the_readers_eyes()

    if "SLOW_ANSWERS" in os.environ:
        stopping.AGENT_LIMIT = witnesses.LOOK_LIMIT = 60.0
        restart_lines.LIMIT = 60.0
        agents.SHORTAGE_LIMIT = preflight.THREADS_LIMIT = 60.0
        agents.SETTLE = monitors.PROBE_LIMIT = destinations.SILENT_LIMIT = 130.0
        config.GRACE = 60.0  # for a worker that ends by itself after its signal
        starting.PROGRAM = "tests.process.patient_monitor"

    if "UNPROBED" in os.environ:
        monitors.PROBE_LIMIT = 120.0

    if (host := os.environ.get("HOST")) is not None:
        hosts.enter(host)

    if (count := os.environ.get("OPEN_FILES")) is not None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (int(count), int(count)))

    if (group := os.environ.get("CGROUP")) is not None:
        Path(group, "cgroup.procs").write_text(str(os.getpid()))

    if os.environ.get("DIES") == "spending":
        JobBudget.spend = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign]

    if os.environ.get("LACKS") == "memory":
        Workers.start = partial(fail, errno.ENOMEM)  # type: ignore[method-assign]

    if "START_FAILS" in os.environ:

        def fail_when_asked(*_: object) -> None:
            Path(f"{os.environ['START_FAILS']}.waits").touch()
            while not os.path.exists(os.environ["START_FAILS"]):
                time.sleep(0.01)
            fail(errno.EAGAIN)

        monitors.MonitorProcess = fail_when_asked  # type: ignore[assignment, misc]

    if os.environ.get("FAILS") == "report":
        launch.report_end = partial(fail, errno.EIO)

    if os.environ.get("LACKS") == "process":
        fork = os.fork

        def fail_once() -> None:
            os.fork = fork
            fail(errno.EAGAIN)

        os.fork = fail_once  # type: ignore[assignment]

    if os.environ.get("LACKS") == "successor":
        fork, own, refused = os.fork, os.getpid(), list[int]()

        def fail_in_zygote() -> int:
            if os.getpid() != own and not refused:
                refused.append(os.getpid())
                fail(errno.EAGAIN)
            return fork()

        os.fork = fail_in_zygote

    if os.environ.get("LACKS") == "thread":
        begin = threading.Thread.start

        def start(thread: threading.Thread) -> None:
            if thread.name == "resilience heartbeat":
                raise RuntimeError("can't start new thread")
            begin(thread)

        threading.Thread.start = start  # type: ignore[method-assign]

    if os.environ.get("LACKS") == "processes for a moment":
        lack_processes_for_a_moment()

    if "UNRESUMED" in os.environ:
        store_news.continue_if_stopped = lambda pid: False

    if os.environ.get("LACKS") == "space":
        destinations.NamedLogs.reify = partial(fail, errno.ENOSPC)  # type: ignore[method-assign]

    if os.environ.get("LACKS") == "limits":
        launch.limits_of = partial(fail, errno.EIO)

    if os.environ.get("LACKS") == "environment":
        worker_env.specification = partial(fail, errno.EIO)

    if "LONG" in os.environ:
        apart = RunningWorkers.apart.fget  # type: ignore[attr-defined]
        RunningWorkers.apart = property(lambda workers: apart(workers) and 604800.0)  # type: ignore[assignment]

    if "LATE" in os.environ:
        notes = RunningWorkers.notes
        RunningWorkers.notes = lambda workers: [] if workers.living else notes(workers)  # type: ignore[method-assign]

    if os.environ.get("DIES") == "seated":

        def die(handler: Handler) -> None:
            join(handler)
            os.kill(os.getpid(), signal.SIGKILL)

        Handler.next_rendezvous = die  # type: ignore[assignment, method-assign]

    if "WAITS" in os.environ:
        wait = job_store.await_server

        def tell(*args: Any) -> str:
            Path(os.environ["WAITS"]).touch()
            return wait(*args)

        job_store.await_server = tell

    sick = os.environ.get("SICK_DEVICE")
    if sick is not None:
        Devices.look = lambda check: "GPU 0: GPU is lost (15)" if os.path.exists(sick) else ""  # type: ignore[method-assign]
    raise SystemExit(main(arguments))


def lack_processes_for_a_moment() -> None:
    """Refuse the first threads of the checks after the first cycle, and then the first starts of workers."""
    from resilience.launcher.worker.workers import Workers

    begin, start = threading.Thread.start, Workers.start
    cycles: list[Workers] = []
    left = {"threads": 4, "workers": 2}

    def is_refused(kind: str) -> bool:
        left[kind] -= bool(cycles)
        return bool(cycles) and left[kind] >= 0

    def begin_thread(thread: threading.Thread) -> None:
        if thread.name.startswith("resilience-preflight") and is_refused("threads"):
            raise RuntimeError("can't start new thread")
        begin(thread)

    def start_workers(workers: Workers) -> None:
        if is_refused("workers"):
            fail(errno.EAGAIN)
        start(workers)
        cycles.append(workers)

    threading.Thread.start = begin_thread  # type: ignore[method-assign]
    Workers.start = start_workers  # type: ignore[method-assign]


def close_the_readers_eyes() -> None:
    """Have stdout and stderr lead into a pipe that is full, and that nobody empties."""
    _, writing = os.pipe()
    os.set_blocking(writing, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writing, b"." * 4096)
    os.set_blocking(writing, True)
    for stream in (1, 2):
        os.dup2(writing, stream)


class Launched:
    """A job under the launcher: one agent a node, all on this host."""

    def __init__(
        self,
        job: Job,
        folder: Path,
        name: str,
        more: Callable[[int, int | None], Launched] | None = None,
        endpoint: str = "",
    ) -> None:
        self.job = job
        self._more = more
        self.endpoint = endpoint
        self.folder = folder
        self.account = Account(folder / "runs" / name)

    def more(self, count: int = 1) -> Launched:
        """Start further agents of this job. Once; of what it answers again once."""
        assert self._more is not None
        return self._more(count, None)

    def again(self, number: int, count: int = 1) -> Launched:
        """Start agents anew, from this number on: their nodes come back."""
        assert self._more is not None
        return self._more(count, number)

    def wait(self, limit: float = 120.0) -> list[int]:
        """Wait for all agents; answers their exit statuses, -N of one that signal N ended."""
        ended = self.job.wait_ranks(limit)
        self.job.ran_to_its_end = True
        return [os.waitstatus_to_exitcode(each.status) for each in ended]

    def wait_agent(self, number: int, limit: float = 120.0) -> Finished:
        ended = self.job.wait_rank(number, limit)
        assert ended is not None, f"agent {number} has not ended{self.job.output()}"
        return ended

    def output(self, number: int = 0, stream: int = 1) -> str:
        """Return what an agent wrote: stream 1 or 2."""
        return (self.folder / f"{self.job.key}-{number}.{stream}").read_text()

    def of(self, kind: type[events.Event], node: str | None = None) -> list[Record]:
        """Return the agents' records of a kind."""
        return [
            record
            for record in self.account.records()
            if isinstance(record.event, kind) and (node is None or record.origin.node == node)
        ]

    def await_record(
        self,
        kind: type[events.Event],
        node: str | None = None,
        where: Callable[[Any], bool] = lambda event: True,
        limit: float = 120.0,
    ) -> Record:
        """Wait until an agent has told this, and return it."""
        deadline = time.monotonic() + limit
        while time.monotonic() < deadline:
            for record in self.of(kind, node):
                if where(record.event):
                    return record
            time.sleep(0.01)
        raise AssertionError(f"no {kind.__name__} of {node or 'any node'} within {limit} s{self.job.output()}")

    def await_record_of(self, cycle: int, event: events.Event, limit: float = 120.0) -> Record:
        """Wait until an agent has told this event in this cycle, and return the record."""
        deadline = time.monotonic() + limit
        while time.monotonic() < deadline:
            for record in self.of(type(event)):
                if (record.origin.cycle, record.event) == (cycle, event):
                    return record
            time.sleep(0.01)
        raise AssertionError(f"no {event} in cycle {cycle} within {limit} s{self.job.output()}")

    def await_worker(self, name: str, limit: float = 120.0) -> None:
        """Wait until a worker has said `name` (with cycle and rank: `name.cycle.rank`)."""
        self.job.await_sign_file(self.folder / name, limit)

    def rendezvous(self) -> Any:
        """Return a client of the job's store, with the keys of the rendezvous."""
        host, _, port = self.endpoint.rpartition(":")
        return dist.PrefixStore("resilience/test", dist.TCPStore(host, int(port), wait_for_workers=False))

    def await_arrival(self, node: str) -> None:
        """Wait until this node has arrived at the rendezvous."""
        await_arrival(self.rendezvous(), node)

    def worker_pid(self, rank: int, cycle: int = 0) -> int:
        """Return a worker's pid, once its agent has told it."""
        deadline = time.monotonic() + 60.0
        while time.monotonic() < deadline:
            for record in self.of(events.WorkerStarted):
                if (record.origin.cycle, record.event.worker_rank) == (cycle, rank):
                    return int(record.event.worker_pid)
            time.sleep(0.01)
        raise AssertionError(f"no record of worker {rank} in cycle {cycle}{self.job.output()}")


def await_arrival(rendezvous: Any, node: str) -> None:
    """Wait until this node has arrived at the rendezvous whose keys this store has."""
    deadline = time.monotonic() + 120.0
    while node not in arrived(rendezvous):
        assert time.monotonic() < deadline, f"{node} has not arrived"
        time.sleep(0.05)


def arrived(rendezvous: Any) -> set[str]:
    """Return the nodes whose arrival is in the log of the rendezvous."""
    places = range(execute(Add("log/count", 0), rendezvous))
    texts = execute(Read(tuple(f"log/{place}" for place in places)), rendezvous)
    entries = [membership.decode_entry(text) for text in texts if text is not None]
    return {entry.seat.node for entry in entries if isinstance(entry, membership.Arrived)}


def launcher(start: Callable[..., Job], folder: Path) -> Callable[..., Launched]:
    """Return a function that starts a job: script text, options, number of agents.

    The first agent hosts the job's store. conf: of --rdzv-conf; per_agent: environment of each agent, by number;
    endpoint: of the rendezvous, on this host unless it is given. with_ddp: workers have imported what DDP needs.
    `Launched.more` starts further agents of the same job, each a job of its own to the test."""

    def begin(
        script: str,
        *options: str,
        nodes: str = "1",
        agents: int = 1,
        nproc: int = 2,
        conf: str = "",
        per_agent: tuple[dict[str, str], ...] = (),
        endpoint: str = "",
        script_args: str = "",
        with_ddp: bool = False,
        **env: str,
    ) -> Launched:
        path = folder / "script.py"
        path.write_text(PREAMBLE + textwrap.dedent(script))
        endpoint = endpoint or f"127.0.0.1:{free_port()}"
        meeting = ["--rdzv-backend", "c10d", "--rdzv-id", "test"]
        arguments = [
            *(["--nnodes", nodes, *meeting] if agents > 1 or nodes != "1" else []),
            *("--nproc-per-node", str(nproc)),
            *options,
            str(path),
            *script_args.split(),
        ]
        name = env.get("RESILIENCE_JOB_ID", "job")

        def more(count: int, first: int) -> Launched:
            def own(number: int) -> dict[str, str]:
                is_host = f"is_host={int(first + number == 0)}"
                return {
                    "RESILIENCE_NODE": f"node{first + number}",
                    "PET_RDZV_CONF": f"{is_host},{conf}" if conf else is_host,
                    "PET_RDZV_ENDPOINT": endpoint if agents > 1 or nodes != "1" else "",
                    **(per_agent[first + number] if per_agent else {}),
                }

            job = start(
                count,
                f"{__name__}:agent",
                env={"RESILIENCE_JOB_ID": "job", "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1", **env},
                env_of=own,
                are_agents=not with_ddp,
                arguments=arguments,
            )
            following = first + count
            return Launched(job, folder, name, lambda count, at: more(count, following if at is None else at), endpoint)

        return more(agents, 0)

    return begin
