"""In which way a rank hangs, from what is seen of it."""

from __future__ import annotations

import pytest

from resilience.core.attribution import Frame, ProcessInfo
from resilience.core.hang_kind import WORDS, classify, cpu_share, is_busy

USER = (Frame("/home/me/train.py", 12, "<module>"), Frame("/home/me/train.py", 7, "step"))
COLLECTIVE = (*USER, Frame("/venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", 2, "all_reduce"))
BACKWARD = (*USER, Frame("/venv/lib/python3.11/site-packages/torch/autograd/graph.py", 8, "_engine_run_backward"))
FORWARD = (*USER, Frame("/venv/lib/python3.11/site-packages/torch/nn/parallel/distributed.py", 8, "_pre_forward"))
EVENT = (*USER, Frame("/usr/lib/python3.11/threading.py", 320, "wait"))
IDLE = ProcessInfo(state="S", cpu_s_delta=0.0, over_s=1.0)
BUSY = ProcessInfo(state="R", cpu_s_delta=0.95, over_s=1.0)


@pytest.mark.parametrize(
    ("process", "stack", "line", "waits_in", "is_gil_held", "word"),
    [
        (ProcessInfo(state="T"), (), "", "do_signal_stop", False, "stopped"),
        (ProcessInfo(state="t"), COLLECTIVE, "", "", True, "stopped"),  # by a debugger, wherever it was
        (ProcessInfo(state="D"), USER, "", "", False, "in_kernel"),
        (IDLE, COLLECTIVE, "", "futex_do_wait", False, "in_collective"),
        (BUSY, COLLECTIVE, "", "", False, "in_collective"),  # NCCL waits so
        (BUSY, USER, "while True: pass", "", True, "in_loop"),
        (ProcessInfo(state="R", cpu_s_delta=0.2, over_s=1.0), USER, "", "", True, "in_loop"),  # a full host
        # A loop that got a tenth of a processor while it wanted one, and one that was seen as it handed over the GIL.
        (ProcessInfo("R", 0.03, 1.0, runnable_s=1.0), USER, "while True: pass", "", False, "in_loop"),
        (ProcessInfo("S", 0.3, 1.0, runnable_s=0.6), USER, "while True: pass", "futex_do_wait", False, "in_loop"),
        (ProcessInfo("R", 0.02, 1.0, runnable_s=0.03), USER, "lib.read(fd)", "", False, "in_call"),  # it was woken once
        (IDLE, USER, "lib.read(fd)", "pipe_read", True, "holds_gil"),
        (IDLE, EVENT, "", "futex_do_wait", True, "holds_gil"),  # a thread of its own has it
        (IDLE, USER, "lib.read(fd)", "pipe_read", False, "in_call"),
        (IDLE, USER, "lib.read(fd)", "", False, "in_call"),
        (IDLE, USER, "    lock.acquire()", "futex_do_wait", False, "on_lock"),
        (IDLE, USER, "    with self._lock:", "", False, "on_lock"),
        (IDLE, USER, "    with library.guard:", "pipe_read", False, "in_call"),
        (IDLE, USER, "    native.run()", "futex_do_wait", False, "in_call"),
        (IDLE, EVENT, "", "futex_do_wait", False, "on_lock"),
        (IDLE, (Frame("/usr/lib/python3.11/threading.py", 9, "run"),), "", "futex_do_wait", False, "in_call"),
        (IDLE, FORWARD, "", "futex_do_wait", False, "in_collective"),
        (IDLE, BACKWARD, "", "futex_do_wait", False, "in_collective"),
        (BUSY, BACKWARD, "", "", False, "in_loop"),  # it computes
        (IDLE, USER, "    work.wait()", "futex_do_wait", False, "in_collective"),
        (IDLE, (Frame("/usr/lib/python3.11/subprocess.py", 9, "wait"),), "x.wait()", "do_wait", False, "in_call"),
        (IDLE, (), "", "futex_do_wait", False, None),
        (None, (), "", "", False, None),
    ],
)
def test_word_says_in_which_way_it_hangs(
    process: ProcessInfo | None,
    stack: tuple[Frame, ...],
    line: str,
    waits_in: str,
    is_gil_held: bool,
    word: str | None,
) -> None:
    assert classify(process, stack, line, waits_in, is_gil_held) == word
    assert word is None or WORDS[word]  # type: ignore[index]


def test_use_of_processors_is_unknown_without_two_looks() -> None:
    assert cpu_share(None) == cpu_share(ProcessInfo(state="R", over_s=0.0, cpu_s_delta=1.0)) == 0.0
    assert not is_busy(ProcessInfo(state="R"))
    assert not is_busy(None)
