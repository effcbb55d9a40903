"""The agent's handle of its drain process: what it waits for, and what becomes of a stream that is not handed over."""

from __future__ import annotations

import os
import signal
import threading
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from resilience.launcher.launch import pass_on_output
from resilience.launcher.output import DrainProcess
from resilience.launcher.signals import Signals
from tests.process.children import child

OUTPUT = b"x" * 79 + b"\n"
LINES = 1 << 14  # more than a pipe holds


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
def test_person_who_asks_again_is_in_a_hurry_and_a_scheduler_is_not(number: int, is_hurried: bool) -> None:
    def body(line: Connection) -> None:
        signals = Signals("SIGTERM,SIGINT")
        os.kill(os.getpid(), number)
        line.send((signals.is_hurried(), signals.take(), signals.is_hurried()))

    with child(body) as agent:
        assert agent.hear() == (is_hurried, [number], False)
