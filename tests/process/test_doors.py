"""What can another user of the host do to a job?  Neither lead a node, nor speak to a monitor, nor pose as one."""

from __future__ import annotations

import os
import re
import signal
import socket
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

import resilience
from resilience.errors import MonitorError
from resilience.facts import events
from resilience.fault_tolerance import FaultToleranceConfig, RankMonitorServer
from resilience.monitor import connect as attaching
from resilience.monitor import messages
from resilience.system import private
from resilience.system.channel import connect, listen
from resilience.system.environment import agent_node_name, node_name
from tests.process.children import LIMIT, Child, child, hold
from tests.support.ranks import Job, started
from tests.support.server import ForkServer

Start = Callable[..., Job]
NOBODY = 65534
WAIT_FOR_SIGN = "tests.process.jobs:wait_for_sign"
FIRST_107 = "x" * 107  # bytes of a socket's name that the kernel takes


@contextmanager
def foreign(body: Callable[[Connection], object]) -> Iterator[Child]:
    """Run `body` as another user."""
    if os.geteuid() != 0:
        pytest.skip("ANOTHER USER IS NOT TESTED HERE: run as root, who can become one")

    def as_nobody(line: Connection) -> None:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
        body(line)

    with child(as_nobody) as other:
        yield other


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that every user can enter and write to, unlike those that pytest makes."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        Path(name).chmod(0o777)
        yield Path(name)


def assert_has_leader(job: Job) -> None:
    """A rank that dies together with its monitor is missed by nobody but its node's leader."""
    monitor = job.monitor_pid(1)
    for rank in range(2):
        job.await_record(events.StageStarted, rank=rank, where=lambda event: event.stage == "run")
    os.kill(monitor, 9)
    job.signal(1, 9)
    stood_in = job.await_record(events.RankStoodInFor, rank=0, where=lambda event: event.initial_rank == 1)
    assert stood_in.event.result == "excluded"


# -- the leader of a node ------------------------------------------------------------------------


def test_names_that_another_user_holds_keep_no_node_from_its_leader(start: Start) -> None:
    def squat(line: Connection) -> None:
        held = [socket.socket(socket.AF_UNIX) for _ in range(4)]
        for call, each in enumerate(held):
            each.bind(f"\0resilience/doors/{call}/{node_name()}"[:107])
            each.listen()
        line.send("ready")
        signal.pause()  # to the end of the test, however long that takes

    with foreign(squat) as other:
        assert other.hear() == "ready"
        job = start(2, WAIT_FOR_SIGN, env={"RESILIENCE_JOB_ID": "doors"}, options={"heartbeat_timeout": 2.0})
        assert_has_leader(job)
        (job.folder / "go").touch()
        assert job.wait_ranks()[0].value == 1


def test_jobs_whose_long_names_begin_alike_have_a_leader_each(fork_server: ForkServer, tmp_path: Path) -> None:
    with ExitStack() as stack:
        jobs = []
        for end in ("one", "two"):
            (tmp_path / end).mkdir()
            env = {"RESILIENCE_JOB_ID": FIRST_107 + end}
            options = {"options": {"heartbeat_timeout": 2.0}}
            jobs.append(stack.enter_context(started(fork_server, tmp_path / end, 2, WAIT_FOR_SIGN, options, env)))
        for job in jobs:
            assert_has_leader(job)
        for job in jobs:
            (job.folder / "go").touch()
            assert job.wait_ranks()[0].value == 1


def test_agents_of_jobs_whose_long_names_begin_alike_have_the_hosts_name_each() -> None:
    def take(line: Connection) -> None:
        line.send([agent_node_name(FIRST_107 + end) for end in ("one", "two", "two")])

    with child(take) as other:
        names = other.hear()
    assert names == [names[0], names[0], f"{names[0]}-1"]


# -- folders -------------------------------------------------------------------------------------


def test_folder_of_ours_cannot_be_entered_by_another_user() -> None:
    folder = private.make()
    os.close(private.enter(folder))

    def try_it(line: Connection) -> None:
        tries = (lambda: os.open(folder, os.O_RDONLY), lambda: private.enter(folder), lambda: os.rmdir(folder))
        failures = []
        for each in tries:
            try:
                each()
            except OSError as error:
                failures.append(type(error).__name__)
        line.send(failures)

    try:
        with foreign(try_it) as other:
            assert other.hear() == ["PermissionError"] * 3
    finally:
        private.remove(folder)
    assert not Path(folder).exists()


def test_folder_that_another_user_made_or_can_enter_is_refused(open_folder: Path) -> None:
    def make(line: Connection) -> None:
        (open_folder / "theirs").mkdir(mode=0o700)
        hold(line)

    with foreign(make) as other:
        other.hear()
        with pytest.raises(PermissionError, match="expected a folder of mode 700"):
            private.enter(str(open_folder / "theirs"))
        other.tell()
    with pytest.raises(PermissionError, match="expected a folder of mode 700"):
        private.enter(str(open_folder))
    (open_folder / "link").symlink_to(private.make())
    with pytest.raises(OSError, match="Not a directory"):
        private.enter(str(open_folder / "link"))
    private.remove(os.readlink(open_folder / "link"))


# -- monitors ------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [None, 0o666])
def test_another_user_is_not_let_in_by_a_monitor(mode: int | None, open_folder: Path, tmp_path: Path) -> None:
    """Neither by the file's mode nor, where somebody has opened that up, by the monitor itself."""
    path = open_folder / "socket"
    server = RankMonitorServer.run_in_subprocess(FaultToleranceConfig(), str(path), folder=tmp_path)

    def try_it(line: Connection) -> None:
        try:
            channel = connect(str(path), LIMIT)
        except PermissionError:
            line.send("PermissionError")
            return
        answer = channel.receive(LIMIT)
        assert answer is not None
        line.send(messages.decode_for_rank(answer))

    if mode is not None:
        path.chmod(mode)
    try:
        with foreign(try_it) as other:
            answer = other.hear()
    finally:
        server.close()
    if mode is None:
        assert answer == "PermissionError"
    else:
        assert isinstance(answer, messages.Refused)
        assert answer.why.endswith(f"belongs to user {NOBODY}")


def test_worker_does_not_speak_to_a_monitor_of_another_user(open_folder: Path) -> None:
    path = open_folder / "socket"

    def pose(line: Connection) -> None:
        listener = listen(path)
        path.chmod(0o666)
        hold(line)
        listener.close()

    with foreign(pose) as other:
        assert other.hear() == "ready"
        with pytest.raises(MonitorError, match=rf"belongs to user {NOBODY}, this process to {os.geteuid()}"):
            attaching.attach(str(path), LIMIT)
        other.tell()


# -- what is read --------------------------------------------------------------------------------


def test_nothing_that_comes_from_another_process_is_unpickled() -> None:
    """The one exception is the plan of a monitor, which its own rank writes into a pipe that nobody else has."""
    home = Path(resilience.__file__).parent
    unsafe = re.compile(
        r"^\s*(import|from) (pickle|marshal|shelve|dill)\b|(gather|broadcast|scatter|send|recv)_object|yaml\.load\(",
        re.M,
    )
    found = {str(path.relative_to(home)) for path in home.rglob("*.py") if unsafe.search(path.read_text())}
    assert found == {"inprocess/_runtime/monitor_process.py"}
