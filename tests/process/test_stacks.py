"""Stacks of real processes, in every state in which one may hang."""

from __future__ import annotations

import ctypes
import faulthandler
import itertools
import os
import select
import shutil
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from resilience.system import processes, stacks
from resilience.system.processes import Process
from resilience.system.stacks import Dump
from tests.process.children import LIMIT, Child, child, hold

needs_py_spy = pytest.mark.skipif(
    shutil.which("py-spy", path=os.path.dirname(sys.executable)) is None, reason="py-spy is not installed"
)


_lines: dict[int, int] = {}  # pid of a process that is armed -> where a thread of it is asked


@contextmanager
def armed(hang: Callable[[Connection], object]) -> Iterator[tuple[Child, Process, Dump]]:
    """A process that has armed itself and hangs in `hang`. A thread of it answers."""
    questions, asking = os.pipe()

    def answer() -> None:
        while number := os.read(questions, 8):
            stacks.answer(int.from_bytes(number, "little"))

    def body(line: Connection) -> None:
        os.close(asking)
        fd = stacks.arm().fd
        threading.Thread(target=answer, daemon=True).start()
        line.send(fd)
        hang(line)

    with child(body) as other:
        os.close(questions)
        # The memory is reached through /proc, as a monitor reaches it through an inherited descriptor.
        fd = os.open(f"/proc/{other.pid}/fd/{other.hear()}", os.O_RDWR)
        _lines[other.pid] = asking
        try:
            yield other, Process(other.pid), Dump(fd)
        finally:
            os.close(fd)
            os.close(_lines.pop(other.pid))


def take(process: Process, dump: Dump, thorough: bool) -> stacks.Stacks:
    def ask(number: int) -> bool:
        return os.write(_lines[process.pid], number.to_bytes(8, "little")) == 8

    return stacks.capture(process, dump, thorough, ask)


def nobody(number: int) -> bool:
    """There is no thread to ask."""
    return False


def await_method(method: str, process: Process, dump: Dump, thorough: bool = False) -> stacks.Stacks:
    """Take stacks until they come that way: the process may still be on its way to where it hangs, or have no turn."""
    deadline = time.monotonic() + LIMIT
    while (found := take(process, dump, thorough)).method != method:
        assert time.monotonic() < deadline, found
    return found


def names(found: stacks.Stacks, thread: int = 0) -> list[str]:
    return [frame.function for frame in found.threads[thread].frames]


# -- it answers ---------------------------------------------------------------------------------------


def test_blocked_process_shows_all_its_threads_the_main_one_first() -> None:
    def wait_in_thread(at_work: threading.Event) -> None:
        at_work.set()
        threading.Event().wait()

    def hang(line: Connection) -> None:
        at_work = threading.Event()
        threading.Thread(target=wait_in_thread, args=(at_work,), daemon=True).start()
        at_work.wait()
        hold(line)

    with armed(hang) as (other, process, dump):
        other.hear()
        found = await_method("own-thread", process, dump)
    assert (found.method, found.reason, found.is_gil_held) == ("own-thread", "", False)
    assert [stack.thread.split()[0] for stack in found.threads] == ["MainThread", "Thread"]
    assert "hang" in names(found) and names(found)[-1] != "hang"  # innermost last
    assert "wait_in_thread" in names(found, 1)
    main = found.threads[0].frames
    assert next(frame for frame in main if frame.function == "hang").file == __file__


def test_process_that_holds_the_interpreter_lock_in_c_answers() -> None:
    def hold_the_lock(line: Connection) -> None:
        line.send("ready")
        ctypes.PyDLL(None).usleep(60_000_000)  # a PyDLL call keeps the lock

    with armed(hold_the_lock) as (other, process, dump):
        other.hear()
        found = await_method("faulthandler", process, dump)
    assert (found.is_gil_held, found.reason) == (True, "the asked thread waits for the GIL")
    assert "hold_the_lock" in names(found)


def test_held_interpreter_lock_is_noticed_though_the_host_gives_us_no_turn_within_the_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def hold_the_lock(line: Connection) -> None:
        line.send("ready")
        ctypes.PyDLL(None).usleep(60_000_000)

    monkeypatch.setattr(stacks, "ASK_LIMIT", 0.0)
    with armed(hold_the_lock) as (other, process, dump):
        other.hear()
        found = await_method("faulthandler", process, dump)
    assert found.is_gil_held


def test_lock_that_another_thread_holds_in_c_is_noticed_too() -> None:
    def hang(line: Connection) -> None:
        threading.Thread(target=ctypes.PyDLL(None).usleep, args=(60_000_000,)).start()
        line.send("not reached, if the thread was faster")

    with armed(hang) as (_, process, dump):
        found = await_method("faulthandler", process, dump)
    assert found.is_gil_held


def test_process_in_c_without_the_interpreter_lock_answers_for_itself() -> None:
    def hang(line: Connection) -> None:
        line.send("ready")
        ctypes.CDLL(None).usleep(60_000_000)

    with armed(hang) as (other, process, dump):
        other.hear()
        found = await_method("own-thread", process, dump)
    assert not found.is_gil_held and "hang" in names(found)


def test_busy_process_that_keeps_the_lock_is_left_alone_until_it_is_to_be_killed() -> None:
    """Whether its threads can end meanwhile is not known, and faulthandler's dump may crash it then."""

    def hang(line: Connection) -> None:
        line.send("ready")
        deque(itertools.repeat(None), maxlen=0)  # in C, with the lock, for ever

    with armed(hang) as (other, process, dump):
        other.hear()
        found = await_method("none", process, dump)
        assert not found.is_gil_held
        assert found.reason == f"the asked thread did not answer within {stacks.ASK_LIMIT:g} s"
        found = await_method("faulthandler", process, dump, thorough=True)
    assert "hang" in names(found)
    assert found.reason == f"the asked thread did not answer within {stacks.ASK_LIMIT:g} s"


def test_name_that_is_no_text_or_has_several_lines_does_not_tear_the_dump() -> None:
    def hang(line: Connection) -> None:
        space: dict[str, Callable[..., None]] = {}
        exec(compile("def odd(hold, line): hold(line)", "caf\udce9\nof\u2028x.py", "exec"), space)
        space["odd"](hold, line)

    with armed(hang) as (other, process, dump):
        other.hear()
        found = await_method("own-thread", process, dump)
    assert [frame.file for frame in found.threads[0].frames if frame.function == "odd"] == [r"caf\udce9 of x.py"]


def test_each_request_gets_its_own_dump() -> None:
    def first(line: Connection) -> None:
        hold(line)

    def second(line: Connection) -> None:
        hold(line)

    with armed(lambda line: (first(line), second(line))) as (other, process, dump):
        other.hear()
        before = await_method("own-thread", process, dump)
        again = await_method("own-thread", process, dump)
        other.tell()
        other.hear()
        after = await_method("own-thread", process, dump)
    assert ["first" in names(found) for found in (before, again, after)] == [True, True, False]
    assert "second" in names(after)


def test_answer_that_comes_too_late_is_no_part_of_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    with armed(hold) as (other, process, dump):
        other.hear()
        numbers: list[int] = []

        def keep(number: int) -> bool:
            numbers.append(number)
            return True

        def pass_on(number: int) -> bool:
            for each in (*numbers, number):
                os.write(_lines[process.pid], each.to_bytes(8, "little"))
            return True

        assert dump.ask(process.pid, keep).method == "none"
        monkeypatch.setattr(stacks, "ASK_LIMIT", LIMIT)
        monkeypatch.setattr(stacks, "_ALL_ASLEEP", sys.maxsize)
        found = dump.ask(process.pid, pass_on)
    assert [stack.thread.split()[0] for stack in found.threads] == ["MainThread"], found


def test_file_of_dumps_does_not_grow_without_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacks, "_MOST", 1000)
    with armed(hold) as (other, process, dump):
        other.hear()
        sizes = []
        for _ in range(6):
            found = await_method("own-thread", process, dump)
            assert found.threads[0].thread.startswith("MainThread")
            sizes.append(os.fstat(dump.fd).st_size)
    assert max(sizes) < 1000 + 2 * sizes[0]


def test_many_threads_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacks, "ASK_LIMIT", LIMIT)  # one question must do

    def hang(line: Connection) -> None:
        stop = threading.Event()
        for _ in range(60):
            threading.Thread(target=stop.wait, daemon=True).start()
        hold(line)

    with armed(hang) as (other, process, dump):
        other.hear()
        found = take(process, dump, thorough=False)
    assert found.method == "own-thread", found
    assert len(found.threads) == 61
    assert found.threads[0].thread.startswith("MainThread") and "hang" in names(found)


def test_arming_twice_keeps_the_one_dump_there_can_be() -> None:
    with child(lambda line: line.send(stacks.arm() is stacks.arm())) as other:
        assert other.hear() is True


# -- it is not harmed ---------------------------------------------------------------------------------


def recurse(depth: int) -> int:
    return depth and recurse(depth - 1)


def start_and_end_threads() -> Iterator[None]:
    while True:
        threads = [threading.Thread(target=recurse, args=(30,)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        yield


def start_and_end_native_threads() -> Iterator[None]:
    """Each takes the GIL for a moment, as a callback of a library does."""
    kind = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)
    callback = kind(lambda _: (recurse(20), None)[1])
    thread = ctypes.c_ulong()
    library = ctypes.CDLL(None)
    while True:
        library.pthread_create(ctypes.byref(thread), None, callback, None)
        library.pthread_join(thread, None)
        yield


def reduce_and_differentiate() -> Iterator[None]:
    """Threads of gloo call back into Python, and those of autograd run for threads that end."""
    import torch
    import torch.distributed as dist

    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    ones, weights = torch.ones(8), torch.ones(8, requires_grad=True)
    while True:
        dist.all_reduce(ones, async_op=True).get_future().then(lambda done: None).wait()
        thread = threading.Thread(target=lambda: (weights * 2).sum().backward())
        thread.start()
        thread.join()
        yield


def take_often(dumps: int, churn: Callable[[], Iterator[None]]) -> None:
    def hang(line: Connection) -> None:
        has_run = threading.Event()

        def go_on() -> None:
            for _ in churn():
                has_run.set()

        for _ in range(2):
            threading.Thread(target=go_on, daemon=True).start()
        assert has_run.wait(LIMIT)  # until then an import may wait for the disk: it sleeps with the GIL
        line.send("ready")
        threading.Event().wait()

    with armed(hang) as (other, process, dump):
        other.hear()
        taken = 0
        while taken < dumps:
            found = take(process, dump, thorough=False)
            # On a busy host a thread may be late to answer; then nothing was done to the process.
            assert found.method == "own-thread" or not found.is_gil_held, found.reason
            if process.has_ended():
                pytest.fail(
                    f"wait status {other.wait()} after {taken} dumps: {dump.fatal_signal()}, {dump.last_words()}"
                )
            if found.method == "own-thread":
                assert found.threads[0].thread.startswith("MainThread") and "hang" in names(found)
                taken += 1


CHURNS = (start_and_end_threads, start_and_end_native_threads, reduce_and_differentiate)


@pytest.mark.parametrize("churn", CHURNS)
def test_dumps_while_threads_start_and_end_harm_nothing(churn: Callable[[], Iterator[None]]) -> None:
    take_often(300, churn)


@pytest.mark.slow
@pytest.mark.parametrize("churn", CHURNS)
def test_ten_thousand_dumps_while_threads_start_and_end_harm_nothing(churn: Callable[[], Iterator[None]]) -> None:
    take_often(10_000, churn)


# -- it does not --------------------------------------------------------------------------------------


def stop(other: Child) -> None:
    other.send_signal(signal.SIGSTOP)
    os.waitpid(other.pid, os.WUNTRACED)


def test_stopped_process_is_said_to_be_stopped() -> None:
    with armed(hold) as (other, process, dump):
        other.hear()
        stop(other)
        size = os.fstat(dump.fd).st_size
        found = take(process, dump, thorough=False)
        other.send_signal(signal.SIGCONT)
        other.tell()
        assert other.wait() == 0
        assert os.fstat(dump.fd).st_size == size  # nobody asked it
    assert (found.method, found.threads) == ("none", ())
    assert found.reason == "the process is stopped and answers no signal"


@needs_py_spy
def test_stopped_process_is_read_from_outside_where_that_is_allowed() -> None:
    with armed(hold) as (other, process, dump):
        other.hear()
        stop(other)
        found = take(process, dump, thorough=True)
    if found.method == "none":
        pytest.skip(f"not allowed here: {found.reason}")
    assert found.method == "py-spy" and "stopped" in found.reason
    assert "hold" in names(found)
    assert found.threads[0].thread.startswith("MainThread")


def test_process_that_ignores_the_signal_is_given_up_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    def ignore(line: Connection) -> None:
        signal.signal(stacks.DUMP_SIGNAL, signal.SIG_IGN)
        hold(line)

    monkeypatch.setattr(stacks, "DUMP_LIMIT", 0.05)
    monkeypatch.setattr(shutil, "which", lambda *_, **__: None)
    with armed(ignore) as (other, process, dump):
        other.hear()
        found = stacks.capture(process, dump, thorough=True, ask=nobody)
    assert found.method == "none"
    why = "no thread of the process can be asked; faulthandler did not answer within 0.05 s (process state "
    assert found.reason.startswith(why)


def test_process_without_a_thread_to_ask_writes_no_dump_if_it_may_live_on() -> None:
    with armed(hold) as (other, process, dump):
        other.hear()
        size = os.fstat(dump.fd).st_size
        found = stacks.capture(process, dump, thorough=False, ask=nobody)
        assert os.fstat(dump.fd).st_size == size
    assert (found.method, found.reason) == ("none", "no thread of the process can be asked")


def test_process_whose_state_cannot_be_read_has_not_ended_for_that(monkeypatch: pytest.MonkeyPatch) -> None:
    with armed(hold) as (other, process, dump):
        other.hear()
        monkeypatch.setattr(processes, "state", lambda pid: None)
        assert take(process, dump, thorough=False).method == "own-thread"


def test_missing_py_spy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda *_, **__: None)
    with armed(hold) as (other, process, dump):
        other.hear()
        stop(other)
        found = take(process, dump, thorough=True)
    assert found.reason == "the process is stopped and answers no signal; py-spy is not installed"


@pytest.mark.parametrize(
    ("script", "limit", "reason"),
    [
        ("echo 'Error: Permission denied' >&2; exit 1", 60.0, "py-spy failed: Error: Permission denied"),
        ("echo '{'", 60.0, "py-spy failed: DecodeError"),
        ("exec tail -f /dev/null", 0.2, "py-spy did not answer within 0.2 s"),
    ],
)
def test_py_spy_that_fails_is_named(
    script: str, limit: float, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "py-spy"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setattr(shutil, "which", lambda *_, **__: str(program))
    monkeypatch.setattr(stacks, "PY_SPY_LIMIT", limit)
    with armed(hold) as (other, process, dump):
        other.hear()
        stop(other)
        found = take(process, dump, thorough=True)
    assert (found.method, found.reason) == ("none", f"the process is stopped and answers no signal; {reason}")


def test_path_that_leads_to_a_file_server_without_an_answer_holds_up_no_monitor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pipe that nobody writes to stands for a folder of the path: it blocks who opens it, as a dead server does."""
    pipe = tmp_path / "bin"
    os.mkfifo(pipe)
    monkeypatch.setattr(shutil, "which", lambda *_, **__: pipe.open().close())
    monkeypatch.setattr(stacks, "PY_SPY_LIMIT", 0.2)
    found: list[stacks.Stacks] = []
    with armed(hold) as (other, process, dump):
        other.hear()
        stop(other)
        monitor = threading.Thread(target=lambda: found.append(take(process, dump, thorough=True)), daemon=True)
        monitor.start()
        monitor.join(20.0)
        os.close(os.open(pipe, os.O_RDWR | os.O_NONBLOCK))  # lets it go
    reason = "the process is stopped and answers no signal; py-spy did not answer within 0.2 s"
    assert [(each.method, each.reason) for each in found] == [("none", reason)]


def test_process_that_has_ended_has_no_stacks() -> None:
    with armed(hold) as (other, process, dump):
        other.hear()
        other.send_signal(signal.SIGKILL)
        assert process.has_ended(LIMIT)
        assert take(process, dump, thorough=True).reason == "the process has ended"
        other.wait()
        assert take(process, dump, thorough=True).reason == "the process has ended"
        assert dump.last_words() == ()


@pytest.mark.parametrize("is_reaped", [False, True])
@pytest.mark.parametrize("thorough", [False, True])
def test_process_that_ends_while_it_is_asked_holds_no_lock(thorough: bool, is_reaped: bool) -> None:
    with armed(hold) as (other, process, dump):
        other.hear()

        def ask(number: int) -> bool:
            other.send_signal(signal.SIGKILL)
            assert process.has_ended(LIMIT)
            if is_reaped:
                other.wait()
            return True

        found = stacks.capture(process, dump, thorough, ask)
    assert (found.method, found.reason, found.is_gil_held) == ("none", "the process has ended", False)


# -- it crashes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL])
def test_crash_leaves_its_stacks_and_its_signal(number: signal.Signals) -> None:
    def crash(line: Connection) -> None:
        hold(line)
        os.kill(os.getpid(), number)

    with armed(crash) as (other, _, dump):
        other.hear()
        assert (dump.fatal_signal(), dump.last_words()) == (None, ())
        other.tell()
        assert os.WTERMSIG(other.wait()) == number
        assert dump.fatal_signal() == number.name
        main, *_ = dump.last_words()
    assert main.thread.startswith("MainThread") and main.frames[-1].function == "crash"


def test_crash_of_a_forked_child_is_not_taken_for_its_parents() -> None:
    """As of a DataLoader's worker."""

    def segfault(line: Connection) -> None:
        faulthandler._sigsegv()

    def body(line: Connection) -> None:
        dump = stacks.arm()
        size = os.fstat(dump.fd).st_size

        def inherit(inner: Connection) -> None:
            stacks_of_child = stacks.arm()
            inner.send(stacks_of_child is dump)

        with child(inherit) as again:
            is_same = again.hear()
        pid = os.fork()
        if pid == 0:
            segfault(line)
        _, status = os.waitpid(pid, 0)
        line.send((status & 0x7F, os.fstat(dump.fd).st_size - size, dump.fatal_signal(), is_same))

    with child(body) as other:
        assert other.hear() == (signal.SIGSEGV, 0, None, False)


def test_forked_child_that_let_go_of_its_output_does_not_keep_it_open() -> None:
    """As a monitor does, which outlives its rank: whoever reads the rank's output must see its end."""
    read, write = os.pipe()

    def body(line: Connection) -> None:
        os.dup2(write, 2)
        os.close(write)
        stacks.arm()

        def outlive(inner: Connection) -> None:
            os.dup2(os.open(os.devnull, os.O_RDWR), 2)
            hold(inner)

        with child(outlive) as again:
            again.hear()
            os.close(2)
            line.send("let go")
            hold(line)

    with child(body) as other:
        os.close(write)
        other.hear()
        assert select.select([read], [], [], LIMIT)[0]
        assert os.read(read, 1) == b""
        other.hear()
        other.tell()
    os.close(read)


def test_users_own_crash_handler_is_left_alone(tmp_path: Path) -> None:
    def body(line: Connection) -> None:
        own = (tmp_path / "own").open("w")
        faulthandler.enable(own)
        line.send(stacks.arm().fd)
        hold(line)
        faulthandler._sigsegv()

    with child(body) as other:
        dump = Dump(os.open(f"/proc/{other.pid}/fd/{other.hear()}", os.O_RDWR))
        other.tell()
        other.wait()
        assert dump.fatal_signal() is None
    assert "Segmentation fault" in (tmp_path / "own").read_text()
