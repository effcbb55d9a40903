"""The agent's handle of its drain process: what it waits for, and what becomes of a stream that is not handed over."""

from __future__ import annotations

import os
import resource
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from resilience.facts import events
from resilience.launcher.launch import pass_on_output
from resilience.launcher.output import destinations
from resilience.launcher.output import drain as drain_module
from resilience.launcher.output.byte_counts import ByteCounts
from resilience.launcher.output.destinations import DrainProcess
from resilience.launcher.output.drain import Drain
from resilience.launcher.output.drained_stream import Stream
from resilience.launcher.output.output_files import Keeper
from resilience.launcher.output.streams import OpenStream, ProbeDrain, encode
from resilience.launcher.signals import Signals
from resilience.system import processes
from resilience.system.channel import Channel, close_all, connect, listen, pair
from tests.process.children import child

OUTPUT = b"x" * 79 + b"\n"
LINES = 1 << 14  # more than a pipe holds


@pytest.fixture(autouse=True)
def ends_are_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    """A drain process is reaped, however long its end takes."""
    for limit in ("LEAVE_LIMIT", "KILL_LIMIT"):
        monkeypatch.setattr(destinations, limit, 60.0)


def test_slow_reader_gets_all_output_though_sigterm_comes_twice(tmp_path: Path) -> None:
    reading, writing = os.pipe()

    def body(line: Connection) -> None:
        os.dup2(writing, 1)
        signals = Signals("SIGTERM,SIGINT")
        drain = DrainProcess(0)
        stream = drain.open("rank 0's stdout", str(tmp_path / "0.out"), 1)
        for _ in range(LINES):
            os.write(stream, OUTPUT)
        os.close(stream)
        os.kill(os.getpid(), signal.SIGTERM)
        line.send("signalled")
        line.send(pass_on_output(drain, signals, is_preempted=False))
        drain.close()

    with child(body) as agent:
        os.close(writing)
        assert agent.hear() == "signalled"
        reader = threading.Thread(target=read_all, args=(reading,))
        reader.start()
        assert agent.hear() is True
        reader.join()


def read_all(fd: int) -> None:
    while os.read(fd, 1 << 16):
        pass
    os.close(fd)


@pytest.mark.parametrize(("number", "is_hurried"), [(signal.SIGTERM, False), (signal.SIGINT, True)])
def test_pending_sigint_means_hurry_and_pending_sigterm_does_not(number: int, is_hurried: bool) -> None:
    def body(line: Connection) -> None:
        for each in (signal.SIGTERM, signal.SIGINT):  # may be ignored where these tests run, as in the background
            signal.signal(each, signal.SIG_DFL)
        signals = Signals("SIGTERM,SIGINT")
        os.kill(os.getpid(), number)
        line.send((signals.is_hurried(), signals.take(), signals.is_hurried()))

    with child(body) as agent:
        assert agent.hear() == (is_hurried, [number], False)


def test_answer_that_came_while_the_agent_stood_still_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    stood = 0.0
    monkeypatch.setattr(destinations, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + stood))
    drain = DrainProcess(0)

    def stand_still() -> bool:
        nonlocal stood
        select.select(drain.filenos(), [], [])
        stood = 60.0
        return False

    try:
        assert drain.finish(stand_still, 60.0)
    finally:
        drain.close()


def test_stream_that_was_not_handed_over_is_read_by_the_next_drain_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    send, refused, lost = Channel.send, list[bytes](), list[events.Event]()

    def refuse_once(line: Channel, message: bytes, fds: Sequence[int] = ()) -> bool:
        if fds and not refused:
            refused.append(message)
            return False
        return send(line, message, fds)

    monkeypatch.setattr(Channel, "send", refuse_once)
    drain = DrainProcess(0)
    try:
        drain.report_to(lost.append)
        first = drain.pid
        stream = drain.open("rank 0's stdout", str(tmp_path / "0.out"), 0)
        drain.hear()
        assert drain.pid not in (0, first)
        for _ in range(LINES):
            os.write(stream, OUTPUT)
        os.close(stream)
        assert drain.finish(lambda: False, 60.0)
    finally:
        drain.close()
    assert (tmp_path / "0.out").read_bytes() == OUTPUT * LINES
    assert refused and [(event.drain_pid, event.why) for event in lost if isinstance(event, events.DrainLost)] == [
        (first, "it took no message")
    ]


def test_drain_process_that_gets_a_stream_without_its_descriptor_writes_what_it_has_and_exits(tmp_path: Path) -> None:
    agents, drains = pair()
    reading, writing = os.pipe()
    os.write(writing, b"before\n")
    (tmp_path / "listener").mkdir()
    listener = listen(tmp_path / "listener" / "drain")
    drain = Drain(drains, listener, ByteCounts.create())
    agents.send(encode(OpenStream(1, "rank 0's stdout", os.fsencode(tmp_path / "0.out"), 0, 0)), [reading])
    agents.send(encode(OpenStream(2, "rank 0's stderr", os.fsencode(tmp_path / "0.err"), 0, 0)))
    runs = threading.Thread(target=lambda: outcome.append(drain.run()), daemon=True)
    outcome: list[bool] = []
    runs.start()
    runs.join(60.0)
    assert outcome == [False]
    assert Path(listener.getsockname()).exists()  # for the next one
    os.write(writing, b"after\n")
    rest = os.read(reading, 100)
    kept = (tmp_path / "0.out").read_bytes() if (tmp_path / "0.out").exists() else b""
    assert kept + rest == b"before\nafter\n"
    for close in (agents.close, drains.close, listener.close, lambda: close_all([reading, writing])):
        close()


def test_monitor_is_answered_once_streams_that_the_agent_gave_before_it_asked_are_read(tmp_path: Path) -> None:
    """The drain process was slow to start, or stood still: its agent's messages and the request come together."""
    agents, drains = pair()
    listener = listen(tmp_path / "drain")
    ends = [os.pipe() for _ in range(8)]
    agents.send(encode(ProbeDrain()))
    for number, (reading, writing) in enumerate(ends, 1):
        os.write(writing, OUTPUT)
        stream = OpenStream(number, f"rank {number}'s stdout", os.fsencode(tmp_path / f"{number}.out"), 0, 0)
        agents.send(encode(stream), [reading])
    asking = connect(str(tmp_path / "drain"), 60.0)
    asking.send(b"keep")
    with pytest.raises(Answered):
        EndsWithItsAnswer(drains, listener, ByteCounts.create()).run()
    assert asking.receive(60.0) == b"kept"
    assert [path.read_bytes() for path in sorted(tmp_path.glob("*.out"))] == [OUTPUT] * len(ends)
    for close in (agents.close, drains.close, listener.close, asking.close):
        close()
    close_all([writing for _, writing in ends])


class Answered(Exception):
    pass


class EndsWithItsAnswer(Drain):
    """A drain process that reads nothing after it has answered a monitor."""

    def _answer(self, fd: int) -> None:
        super()._answer(fd)
        raise Answered


def test_drain_process_without_a_free_descriptor_uses_no_processor_while_a_monitor_asks(tmp_path: Path) -> None:
    agents, drains = pair()
    listener, counts = listen(tmp_path / "drain"), ByteCounts.create()
    fds = (drains.fileno(), listener.fileno(), counts.fd)
    drain = subprocess.Popen([sys.executable, "-m", drain_module.__name__, *map(str, fds)], pass_fds=fds)
    try:
        agents.send(encode(ProbeDrain()))
        assert agents.receive(60.0) is not None  # it runs, and has raised its limit
        soft, hard = resource.prlimit(drain.pid, resource.RLIMIT_NOFILE)
        taken = set(map(int, os.listdir(f"/proc/{drain.pid}/fd")))
        full = next(fd for fd in range(1000) if fd not in taken)
        resource.prlimit(drain.pid, resource.RLIMIT_NOFILE, (full, hard))
        asking = connect(str(tmp_path / "drain"), 60.0)
        asking.send(b"keep")
        used = cpu_s(drain.pid)
        with pytest.raises(subprocess.TimeoutExpired):
            drain.wait(2.0)
        assert cpu_s(drain.pid) - used < 0.5
        resource.prlimit(drain.pid, resource.RLIMIT_NOFILE, (soft, hard))
        assert asking.receive(60.0) == b"kept"
    finally:
        drain.kill()
        drain.wait()
    for close in (agents.close, drains.close, listener.close, asking.close):
        close()


def cpu_s(pid: int) -> float:
    state = processes.state(pid)
    assert state is not None
    return state.cpu_s


def test_drain_process_has_all_streams_before_it_can_answer_a_monitor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that replaces another one: a monitor may ask it at once."""
    had_messages, start = list[bool](), subprocess.Popen

    def look_and_start(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        had_messages.append(bool(select.select([int(command[-3])], [], [], 0.0)[0]))
        return start(command, **options)

    monkeypatch.setattr(subprocess, "Popen", look_and_start)
    drain = DrainProcess(0)
    try:
        stream, first = drain.open("rank 0's stdout", str(tmp_path / "0.out"), 0), drain.pid
        os.kill(first, signal.SIGKILL)
        while drain.pid in (0, first):
            drain.hear()
        os.close(stream)
        assert drain.finish(lambda: False, 60.0)
    finally:
        drain.close()
    assert had_messages == [False, True]


def test_losses_of_a_replaced_drain_process_stay_in_the_sum(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    drain, lost = DrainProcess(0), list[events.OutputLost]()
    drain.report_to(lambda event: lost.append(event) if isinstance(event, events.OutputLost) else None)
    try:
        stream = drain.open("rank 0's stdout", str(tmp_path / "file" / "0.out"), 0)
        os.write(stream, OUTPUT * 50)  # read as a whole
        while not lost:
            drain.hear()
        os.kill(drain.pid, signal.SIGKILL)
        os.write(stream, OUTPUT)
        os.close(stream)
        assert drain.finish(lambda: False, 60.0)
        (sentence,) = drain.losses()
    finally:
        drain.close()
    assert (lost[0].count, lost[-1].count) == (50 * len(OUTPUT), 51 * len(OUTPUT))
    assert sentence.startswith("4,080 bytes of workers' output could not be kept")


@pytest.mark.parametrize("goes_on_with", [b"", OUTPUT])
def test_output_that_a_killed_drain_process_had_not_written_is_counted_and_its_place_marked(
    tmp_path: Path, goes_on_with: bytes
) -> None:
    path = tmp_path / "0.out"
    os.mkfifo(path)  # without a reader, whoever opens it to write waits, as for a disk that does not answer
    drain, lost = DrainProcess(0), list[events.OutputLost]()
    drain.report_to(lambda event: lost.append(event) if isinstance(event, events.OutputLost) else None)
    try:
        stream = drain.open("rank 0's stdout", str(path), 0)
        os.write(stream, OUTPUT * 50)
        while drain._counts.of(1).read < 50 * len(OUTPUT):
            drain.hear()
        os.kill(drain.pid, signal.SIGKILL)
        reading = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        os.write(stream, goes_on_with)
        os.close(stream)
        assert drain.finish(lambda: False, 60.0)
        (sentence,) = drain.losses()
        content = os.read(reading, 1 << 16)
        os.close(reading)
    finally:
        drain.close()
    why = "the process that reads workers' output was lost: SIGKILL"
    assert [(event.place, event.count, event.why) for event in lost] == [("file", 50 * len(OUTPUT), why)]
    assert sentence.startswith(f"4,000 bytes of workers' output could not be kept ({why}); missing in ")
    assert content == f"[resilience run: 4,000 bytes are missing here: {why}]\n".encode() + goes_on_with


def test_drain_process_that_has_closed_its_line_but_is_not_reaped_yet_was_lost_by_its_signal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drain, lost = DrainProcess(0), list[events.DrainLost]()
    drain.report_to(lambda event: lost.append(event) if isinstance(event, events.DrainLost) else None)
    try:
        stream = drain.open("rank 0's stdout", str(tmp_path / "0.out"), 0)
        os.kill(drain.pid, signal.SIGKILL)
        os.waitid(os.P_PID, drain.pid, os.WEXITED | os.WNOWAIT)
        assert drain._process is not None
        monkeypatch.setattr(
            drain._process, "poll", lambda: None
        )  # as in the moment before the kernel makes it a zombie
        os.close(stream)
        assert drain.finish(lambda: False, 60.0)
    finally:
        drain.close()
    assert [event.why for event in lost] == ["SIGKILL"]


def test_drain_process_that_has_closed_its_line_and_does_not_end_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(destinations, "KILL_LIMIT", 1.0)  # it is stopped, so waiting longer shows nothing
    drain, lost = DrainProcess(0), list[events.DrainLost]()
    drain.report_to(lambda event: lost.append(event) if isinstance(event, events.DrainLost) else None)
    try:
        stream = drain.open("rank 0's stdout", str(tmp_path / "0.out"), 0)
        os.kill(drain.pid, signal.SIGSTOP)
        drain._line._socket.shutdown(socket.SHUT_RDWR)
        os.write(stream, b"late\n")
        os.close(stream)
        assert drain.finish(lambda: False, 60.0)
    finally:
        drain.close()
    assert [event.why for event in lost] == ["it closed its connection"]
    assert (tmp_path / "0.out").read_bytes() == b"late\n"


@pytest.mark.parametrize("before", [b"", b"a whole line\n", b"half a li"])
def test_line_that_marks_missing_output_begins_a_line(tmp_path: Path, before: bytes) -> None:
    (tmp_path / "0.out").write_bytes(before)
    opened = OpenStream(1, "rank 0's stdout", os.fsencode(tmp_path / "0.out"), 0, 0, missing=5, why_missing="lost")
    stream, keeper = Stream(opened, -1, ByteCounts.create()), Keeper(lambda lost: None)
    keeper.open(stream)
    keeper.take(stream, b"after\n", is_stalled=False)
    is_written = threading.Event()
    keeper.call(is_written.set)
    assert is_written.wait(60.0)
    mark = b"[resilience run: 5 bytes are missing here: lost]\n"
    whole = before if before in (b"", b"a whole line\n") else before + b"\n"
    assert (tmp_path / "0.out").read_bytes() == whole + mark + b"after\n"


@pytest.mark.parametrize(("to", "is_shown"), [(0, False), (1, True)])
def test_loss_in_a_file_says_whether_the_terminal_shows_the_output(tmp_path: Path, to: int, is_shown: bool) -> None:
    (tmp_path / "file").touch()
    drain, lost = DrainProcess(0), list[events.OutputLost]()
    drain.report_to(lambda event: lost.append(event) if isinstance(event, events.OutputLost) else None)
    try:
        stream = drain.open("rank 0's stdout", str(tmp_path / "file" / "0.out"), to)
        os.write(stream, OUTPUT)
        os.close(stream)
        assert drain.finish(lambda: False, 60.0)
    finally:
        drain.close()
    assert {(each.place, each.is_shown) for each in lost} == {("file", is_shown)}
