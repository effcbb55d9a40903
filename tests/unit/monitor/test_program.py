"""What the monitor's program says to an agent that reads late."""

from __future__ import annotations

import errno
import functools
import gc
import os
import resource
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from resilience.facts.identity import Origin
from resilience.facts.interruptions import Exit
from resilience.facts.limits import Limits
from resilience.monitor import messages
from resilience.monitor import program as module
from resilience.monitor.program import OUTBOX, Program
from resilience.system import terminal
from resilience.system.channel import close_all, listen, pair
from resilience.system.processes import identity_of

CONNECTED = messages.Connected(2, messages.Attachment(2, is_locked=True))


class LateAgent:
    """An agent that has not read for long, so its channel is full, and its monitor."""

    def __init__(self, folder: Path) -> None:
        self.channel, line = pair()
        self.program = Program(line, listen(folder / "socket"))
        while not self.program._outbox:
            self.program.tell(messages.Gone(1, Exit(), goodbye=True))

    def read(self) -> list[tuple[messages.ToAgent, list[int]]]:
        """Return all messages up to the answer of a probe, with their descriptors."""
        self.channel.send(messages.encode(messages.ProbeMonitor(7)))
        monitor = threading.Thread(target=self.program.run)
        monitor.start()
        read: list[tuple[messages.ToAgent, list[int]]] = []
        try:
            deadline = time.monotonic() + 30.0
            while messages.Alive(7) not in [message for message, _ in read[-1:]]:
                received = self.channel.receive_with_fds(1.0)
                if received is not None:
                    read.append((messages.decode_for_agent(received[0]), received[1]))
                assert time.monotonic() < deadline, f"no answer; the last of {len(read)} messages: {read[-1:]}"
        finally:
            self.channel.send(messages.encode(messages.Leave()))
            monitor.join()
        return read


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[LateAgent]:
    agent = LateAgent(tmp_path)
    yield agent
    agent.channel.close()
    agent.program._agent_channel.close()
    agent.program._listener.close()


@pytest.mark.parametrize("is_number_reused", [False, True])
def test_late_agent_gets_the_files_of_a_program_that_has_left_meanwhile(
    agent: LateAgent, tmp_path: Path, is_number_reused: bool
) -> None:
    (tmp_path / "page").write_text("the page")
    fd = os.open(tmp_path / "page", os.O_RDONLY)
    agent.program.tell(CONNECTED, [fd])
    os.close(fd)
    others = [os.open(os.devnull, os.O_RDONLY)] if is_number_reused else []
    assert others in ([], [fd])
    ((message, fds),) = [(message, fds) for message, fds in agent.read() if fds]
    assert (message, os.read(fds[0], 100)) == (CONNECTED, b"the page")
    for each in (*others, *fds):
        os.close(each)


def test_message_with_files_that_no_agent_reads_keeps_no_file_open(agent: LateAgent) -> None:
    before = os.listdir("/proc/self/fd")
    fd = os.open(os.devnull, os.O_RDONLY)
    agent.program.tell(CONNECTED, [fd])
    os.close(fd)
    for number in range(OUTBOX):
        agent.program.tell(messages.Alive(-number))
    assert os.listdir("/proc/self/fd") == before
    read = [message for message, _ in agent.read()]
    assert CONNECTED not in read and messages.Alive(1 - OUTBOX) in read


def test_message_whose_files_cannot_be_copied_is_dropped_alone(agent: LateAgent) -> None:
    before = os.listdir("/proc/self/fd")
    fds = [os.open(os.devnull, os.O_RDONLY) for _ in range(2)]
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest_free = os.dup(fds[0])
    os.close(lowest_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free + 1, hard))  # room for one of two copies
    try:
        agent.program.tell(CONNECTED, fds)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    close_all(fds)
    assert os.listdir("/proc/self/fd") == before
    agent.program.tell(messages.Alive(1))
    read = [message for message, _ in agent.read()]
    assert CONNECTED not in read and messages.Alive(1) in read


def test_attempt_to_watch_a_worker_without_enough_descriptors_keeps_no_file_open(
    agent: LateAgent, tmp_path: Path
) -> None:
    origin = Origin("job", "n", "rank", os.getpid(), initial_rank=0, rank=0, world_size=1)
    assigned = messages.Assigned(*identity_of(os.getpid()), origin, bytes(tmp_path), Limits())
    gc.collect()  # files of earlier tests
    before = os.listdir("/proc/self/fd")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    failures = 0
    for left in (0, 1, 2, 3):  # beside that of the list itself; a worker takes five
        free = [fd for fd in range(3, 1000) if str(fd) not in before]
        resource.setrlimit(resource.RLIMIT_NOFILE, (free[left], hard))
        try:
            agent.program._opened(assigned)
        except OSError:
            failures += 1
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    gc.collect()
    assert (failures, set(os.listdir("/proc/self/fd")) - set(before)) == (4, set())


def test_newcomer_that_has_gone_before_it_is_known_whose_child_it_is_keeps_no_file_open(
    agent: LateAgent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(pid: int, ancestor: int) -> bool:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    program = agent.program
    origin = Origin("job", "n", "rank", os.getpid(), initial_rank=0, rank=0, world_size=1)
    program._next.append((messages.Assigned(*identity_of(os.getpid()), origin, bytes(tmp_path), Limits()), []))
    program._adopt = messages.Adopt("job", "n", bytes(tmp_path), Limits())
    before = os.listdir("/proc/self/fd")
    newcomer, channel = pair()
    monkeypatch.setattr(module, "is_descendant", fail)
    program._watch_newcomer(channel, messages.Introduced(0, 1))
    newcomer.close()
    monkeypatch.setattr(module, "is_descendant", lambda pid, ancestor: False)
    while program._selector._calls:
        for key, _ in program._selector.select(30.0):
            if key.fd == -1:
                key.data()
    assert (len(program._next), list(program._waiting)) == (1, [])
    assert os.listdir("/proc/self/fd") == before


def test_line_of_a_monitor_without_a_free_descriptor_waits_for_no_reader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_blocking: list[bool] = []

    def run(program: Program) -> None:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
        try:
            module._print("words")
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        program._listener.close()
        program._agent_channel.close()

    def put(descriptor: int, data: bytes, until: float) -> int:
        is_blocking.append(os.get_blocking(descriptor))
        return len(data)

    reading, writing = os.pipe()
    monkeypatch.setattr(terminal, "STDERR", writing)
    monkeypatch.setattr(terminal, "stream", functools.cache(terminal.stream.__wrapped__))
    monkeypatch.setattr(terminal, "put", put)
    monkeypatch.setattr(module, "ignore_job_signals", lambda: None)
    monkeypatch.setattr(Program, "run", run)
    channel, line = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    module.main([str(line.detach()), str(listen(tmp_path / "socket").detach())])
    assert is_blocking == [False]
    channel.close()
    close_all([reading, writing, terminal.stream(writing)])
