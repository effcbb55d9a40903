"""An injected fault breaks its process the way it says."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 60.0  # seconds
WAKES = 100  # a main thread that runs gives a sign before each sleep; one that wants the lock looks for it every 5 ms

Broken = Callable[[str], "subprocess.Popen[bytes]"]


@contextmanager
def process(name: str) -> Iterator[subprocess.Popen[bytes]]:
    environment = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
    command = [sys.executable, "-m", "tests.process.breaking", name]
    child = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    try:
        with child:
            yield child
            child.kill()  # without effect where it has ended by its fault
    finally:
        child.wait(LIMIT)


@pytest.fixture
def broken() -> Iterator[Broken]:
    """Start a process with a fault; it is ended with the test."""
    with ExitStack() as stack:
        yield lambda name: stack.enter_context(process(name))


@pytest.mark.parametrize(
    ("fault", "number"),
    [
        ("ABORT", signal.SIGABRT),
        ("SEGFAULT", signal.SIGSEGV),
        ("KILL", signal.SIGKILL),
        ("TERM", signal.SIGTERM),
        ("INT", signal.SIGINT),
    ],
)
def test_process_dies_by_its_signal(broken: Broken, fault: str, number: int) -> None:
    child = broken(fault)
    told, _ = child.communicate(timeout=LIMIT)
    assert b"struck" in told
    assert child.returncode == -number


@pytest.mark.parametrize("fault", ["ASYNC_EXC", "SIGNAL_EXC"])
def test_exception_reaches_the_main_thread(broken: Broken, fault: str) -> None:
    child = broken(fault)
    told, _ = child.communicate(timeout=LIMIT)
    assert told.endswith(b"\nInjectedException\n")
    assert child.returncode == 0


def test_process_is_stopped(broken: Broken) -> None:
    child = broken("STOP")
    _, status = os.waitpid(child.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status)
    assert os.WSTOPSIG(status) == signal.SIGSTOP


def test_interpreter_is_held(broken: Broken) -> None:
    child = broken("GIL")
    assert child.stdout is not None
    told, before, now = b"", 0, 0
    while b"struck" not in told or now - before < WAKES:
        now = wakes(child.pid)  # before the look for a sign
        if select.select([child.stdout], [], [], 0.01)[0]:
            sign = os.read(child.stdout.fileno(), 65536)
            assert sign, "the process has ended"
            told += sign
            assert len(told) < LIMIT * 100, "the main thread goes on"
            before = now = wakes(child.pid)
    assert child.poll() is None


def wakes(pid: int) -> int:
    """Return how often a process's main thread has gone to sleep, and so how often it woke up."""
    status = Path(f"/proc/{pid}/task/{pid}/status").read_text()
    return int(status.partition("\nvoluntary_ctxt_switches:")[2].split()[0])
