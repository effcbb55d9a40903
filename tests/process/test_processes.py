"""Real processes: how they end, what they do, and that nobody else is ever meant by their pid."""

from __future__ import annotations

import ctypes
import errno
import os
import queue
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from resilience.facts.interruptions import Exit
from resilience.system import processes
from resilience.system.processes import Process
from tests.process.children import LIMIT, child, hear, hold
from tests.process.left_behind_jobs import use_up_descriptors

SYS_EXIT = {"x86_64": 60, "aarch64": 93}[os.uname().machine]


def end_by(what: Callable[[], object]) -> Callable[[Connection], None]:
    def body(line: Connection) -> None:
        hold(line)
        what()

    return body


def kill_by(number: int) -> Callable[[], object]:
    return lambda: os.kill(os.getpid(), number)


ENDS = pytest.mark.parametrize(
    ("what", "expected"),
    [
        (lambda: os._exit(0), Exit(code=0)),
        (lambda: os._exit(3), Exit(code=3)),
        (kill_by(signal.SIGKILL), Exit(signal="SIGKILL")),
        (kill_by(signal.SIGSEGV), Exit(signal="SIGSEGV")),
        (kill_by(signal.SIGRTMIN + 5), Exit(signal=f"signal {signal.SIGRTMIN + 5}")),
    ],
)


@ENDS
def test_end_of_a_process_is_learned_without_reaping_it(what: Callable[[], object], expected: Exit) -> None:
    with child(end_by(what)) as other:
        other.hear()
        process = Process(other.pid)
        other.tell()
        assert process.has_ended(LIMIT)
        assert process.exit_status(LIMIT) == expected
        other.wait()  # it was still there to be reaped


@ENDS
def test_end_of_a_reaped_process_is_learned_or_said_to_be_unknown(what: Callable[[], object], expected: Exit) -> None:
    with child(end_by(what)) as other:
        other.hear()
        process = Process(other.pid)
        other.tell()
        other.wait()
        assert process.has_ended(LIMIT)
        assert process.state() is None and process.is_reaped()
        release = tuple(int(part) for part in os.uname().release.split(".")[:2])
        assert process.exit_status(0.0) == (expected if release >= (6, 15) else Exit())


def test_process_that_runs_on_has_no_exit_status() -> None:
    with child(hold) as other:
        other.hear()
        process = Process(other.pid)
        assert not process.has_ended()
        assert process.exit_status(0.0) == Exit()
        other.send_signal(signal.SIGSTOP)
        os.waitpid(other.pid, os.WUNTRACED)
        stopped = process.state()
        assert stopped is not None and stopped.state == "T"
        assert process.exit_status(0.0) == Exit()  # a stop is no end, though it has a signal too


def test_signal_reaches_the_process_and_is_not_sent_after_its_end() -> None:
    with child(hold) as other:
        other.hear()
        process = Process(other.pid)
        assert process.send(signal.SIGTERM)
        assert os.WTERMSIG(other.wait()) == signal.SIGTERM
        assert not process.send(signal.SIGTERM)


def test_process_that_never_was_cannot_be_held() -> None:
    with child(lambda line: None) as other:
        other.wait()
        with pytest.raises(ProcessLookupError):
            Process(other.pid)


@contextmanager
def thread_of_this_process() -> Iterator[int]:
    """Yield the number of a thread, which runs until the body is left."""
    started: queue.SimpleQueue[int] = queue.SimpleQueue()
    done = threading.Event()

    def body() -> None:
        started.put(threading.get_native_id())
        done.wait()

    thread = threading.Thread(target=body)
    thread.start()
    try:
        yield started.get(timeout=LIMIT)
    finally:
        done.set()
        thread.join()


def test_number_that_a_thread_has_now_is_no_process() -> None:
    with thread_of_this_process() as number:
        identity = processes.identity_of(number)
        with pytest.raises(ProcessLookupError):
            Process(number)
        assert processes.await_end(identity, 0.0)
        assert processes.await_end((number, identity[1] - 1), 0.0)
        processes.kill(identity)


@pytest.mark.parametrize(
    ("error", "has_ended"), [(errno.ENOENT, True), (errno.EINVAL, True), (errno.ESRCH, True), (errno.EMFILE, False)]
)
def test_process_has_ended_only_if_the_kernel_knows_no_such_process(
    error: int, has_ended: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pidfd_open(_: int) -> int:
        raise OSError(error, os.strerror(error))

    with child(hold) as other:
        other.hear()
        identity = processes.identity_of(other.pid)
        monkeypatch.setattr(os, "pidfd_open", pidfd_open)
        assert processes.await_end(identity, 0.0) is has_ended
        processes.kill(identity)


def test_process_whose_number_another_one_has_now_has_ended_and_the_other_is_not_touched() -> None:
    with child(hold) as other:
        other.hear()
        pid, start_time = processes.identity_of(other.pid)
        assert processes.await_end((pid, start_time - 1), 0.0)
        processes.kill((pid, start_time - 1))
        assert not processes.await_end((pid, start_time), 0.0)
        processes.kill((pid, start_time))
        assert os.WTERMSIG(other.wait()) == signal.SIGKILL


def test_process_counts_as_alive_if_too_many_files_are_open_to_see_it() -> None:
    def body(line: Connection) -> None:
        here, parent = processes.identity_of(os.getpid()), processes.identity_of(os.getppid())
        files = use_up_descriptors()
        seen = [(processes.is_alive(process), processes.await_end(process, 0.0)) for process in (here, parent)]
        os.close(files.pop())
        line.send(seen)

    with child(body) as other:
        assert other.hear() == [(True, False)] * 2


def test_process_is_neither_reaped_nor_asleep_if_too_many_files_are_open_to_see_it() -> None:
    def body(line: Connection) -> None:
        parent = Process(os.getppid())
        files = use_up_descriptors()
        seen = parent.state(), parent.is_reaped(), parent.has_ended(), processes.is_asleep(parent.pid)
        os.close(files.pop())
        line.send(seen)

    with child(body) as other:
        assert other.hear() == (None, False, False, False)


def test_process_is_not_opened_without_its_start_time() -> None:
    def body(line: Connection) -> None:
        files = use_up_descriptors()
        os.close(files.pop())
        try:
            Process(os.getppid())
        except OSError as error:
            number = error.errno
        os.close(files.pop())
        line.send(number)

    with child(body) as other:
        assert other.hear() == errno.EMFILE


def test_state_tells_what_the_process_uses() -> None:
    def body(line: Connection) -> None:
        Path(f"/proc/{os.getpid()}/comm").write_text("a) R (b")  # a name that looks like fields
        memory = bytearray(32 << 20)
        threading.Thread(target=lambda: hear(line)).start()
        while sum(os.times()[:2]) < 0.1:
            pass
        line.send(len(memory))
        threading.Event().wait()

    with child(body) as other:
        other.hear()
        seen = Process(other.pid).state()
    assert seen is not None
    assert seen.rss_bytes > 32 << 20
    assert (seen.threads, seen.wait_status) == (2, None)
    assert seen.state in ("R", "S")  # it may not have got to sleep yet
    assert seen.cpu_s >= 0.05
    own = processes.state(os.getpid())
    assert own is not None and seen.start_time >= own.start_time


def test_process_has_not_ended_while_one_of_its_threads_runs() -> None:
    def body(line: Connection) -> None:
        def tell_and_hold() -> None:
            while main_thread_state() != "Z":
                time.sleep(0.001)
            line.send(None)
            hear(line)
            os._exit(0)

        threading.Thread(target=tell_and_hold).start()
        ctypes.CDLL(None).syscall(SYS_EXIT, 0)  # ends the main thread, and nothing else

    def main_thread_state() -> str:
        seen = processes.state(os.getpid())
        assert seen is not None
        return seen.state

    with child(body) as other:
        identity = processes.identity_of(other.pid)
        other.hear()
        assert not processes.await_end(identity, 0.0)
        other.tell()
        assert Process(other.pid).has_ended(LIMIT)
        assert processes.await_end(identity, 0.0)
        other.status = 0  # await_end has reaped it


def test_descriptor_beyond_the_reach_of_select_is_waited_for() -> None:
    """A rank with many files open has its pidfd above 1023."""

    def body(line: Connection) -> None:
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(2048, most), most))
        many = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
        process = Process(os.getppid())
        line.send((len(many), process.pidfd, process.has_ended()))

    with child(body) as other:
        _, number, has_ended = other.hear()
    assert number > 1023
    assert has_ended is False
