"""In which way a rank hangs, from what is seen of it."""

from __future__ import annotations

import pytest

from resilience.core.hang_kind import WORDS, classify, cpu_share, in_collective, is_busy, shows_life
from resilience.facts.interruptions import Frame, Hang, ProcessInfo

USER = (Frame("/home/me/train.py", 12, "<module>"), Frame("/home/me/train.py", 7, "step"))
COLLECTIVE = (*USER, Frame("/venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", 2, "all_reduce"))
BACKWARD = (*USER, Frame("/venv/lib/python3.11/site-packages/torch/autograd/graph.py", 8, "_engine_run_backward"))
FORWARD = (*USER, Frame("/venv/lib/python3.11/site-packages/torch/nn/parallel/distributed.py", 8, "_pre_forward"))
TORCH = "/venv/lib/python3.11/site-packages/torch"
UNSHARD = (
    *USER,
    Frame(f"{TORCH}/distributed/fsdp/_fully_shard/_fsdp_collectives.py", 8, "foreach_all_gather_copy_out"),
)
PIPELINE = (*USER, Frame(f"{TORCH}/distributed/pipelining/schedules.py", 8, "_wait_batch_p2p"))
RENDEZVOUS = (*USER, Frame(f"{TORCH}/distributed/elastic/utils/store.py", 8, "barrier"))
TENSOR = (*USER, Frame(f"{TORCH}/distributed/tensor/_dispatch.py", 440, "dispatch"))
WAIT_TENSOR = (
    *USER,
    Frame(f"{TORCH}/distributed/_functional_collectives.py", 142, "wait_tensor"),
    Frame(f"{TORCH}/_ops.py", 1158, "__call__"),
)
OPERATOR = (*USER, Frame(f"{TORCH}/_ops.py", 1158, "__call__"))
WRITES = (*USER, Frame(f"{TORCH}/distributed/checkpoint/filesystem.py", 472, "_write_files_from_queue"))
GATHERS = (
    *USER,
    Frame(f"{TORCH}/distributed/checkpoint/utils.py", 200, "gather_object"),
    Frame(f"{TORCH}/distributed/distributed_c10d.py", 3000, "gather_object"),
)
BLOCKED = ProcessInfo(state="D", cpu_s_delta=0.0, over_s=1.0)
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
        (IDLE, UNSHARD, "all_gather_work.wait()", "futex_do_wait", False, "in_collective"),
        (IDLE, UNSHARD, "", "", False, "in_collective"),  # its source cannot be read
        (IDLE, PIPELINE, "w.wait()", "futex_do_wait", False, "in_collective"),
        (IDLE, RENDEZVOUS, "store.wait([last_member_key])", "poll", False, "in_collective"),
        (IDLE, WAIT_TENSOR, "return self._op(*args, **kwargs)", "futex_do_wait", False, "in_collective"),
        (BUSY, WAIT_TENSOR, "", "", False, "in_collective"),
        (IDLE, OPERATOR, "", "futex_do_wait", False, "in_call"),
        (IDLE, TENSOR, "", "futex_do_wait", False, "in_collective"),
        (BUSY, TENSOR, "", "", False, "in_loop"),  # it computes
        (BUSY, UNSHARD, "", "", False, "in_loop"),
        (BLOCKED, UNSHARD, "", "", False, "in_kernel"),
        (IDLE, TENSOR, "", "", True, "holds_gil"),
        (BLOCKED, WRITES, "os.fsync(stream.fileno())", "folio_wait_bit_common", False, "in_kernel"),
        (IDLE, WRITES, "os.fsync(stream.fileno())", "folio_wait_bit_common", False, "in_call"),
        (IDLE, GATHERS, "", "futex_do_wait", False, "in_collective"),
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


@pytest.mark.parametrize("hang", ["stopped", "in_kernel", "in_loop", "holds_gil"])
def test_rank_that_is_known_to_do_something_else_waits_only_if_it_called_a_collective(hang: Hang) -> None:
    assert not in_collective(TENSOR, hang)
    assert in_collective(TENSOR) and in_collective(TENSOR, "in_call")
    assert in_collective(COLLECTIVE, hang)
    assert not in_collective(WRITES) and not in_collective(())


def test_rank_that_sleeps_between_signs_of_life_is_in_no_call_that_does_not_return() -> None:
    sleeps = (*USER, Frame("/home/me/train.py", 9, "poll"))
    assert classify(IDLE, sleeps, "time.sleep(0.1)", "hrtimer_nanosleep") == "in_call"
    assert classify(IDLE, sleeps, "time.sleep(0.1)", "hrtimer_nanosleep", shows_life=True) is None
    assert classify(BUSY, sleeps, "while True: pass", shows_life=True) == "in_loop"


@pytest.mark.parametrize(
    ("ages_s", "expected"),
    [((), False), ((9.9,), False), ((5.0,), False), ((4.9,), True), ((60.0, 0.1), True), ((60.0, 9.0), False)],
)
def test_sign_of_life_in_the_second_half_of_a_silence_counts(ages_s: tuple[float, ...], expected: bool) -> None:
    assert shows_life(ages_s, 10.0) is expected


def test_use_of_processors_is_unknown_without_two_looks() -> None:
    assert cpu_share(None) == cpu_share(ProcessInfo(state="R", over_s=0.0, cpu_s_delta=1.0)) == 0.0
    assert not is_busy(ProcessInfo(state="R"))
    assert not is_busy(None)


def test_wait_that_has_just_ended_is_no_loop() -> None:
    """As by the end of the rank that was waited for, before the monitor of this one looked."""
    for longer, expected in ((ProcessInfo("R", 0.3, 3.5, runnable_s=0.4), "runs_again"), (BUSY, "in_loop")):
        assert classify(BUSY, USER, "while True: pass", longer=longer) == expected
    assert classify(BUSY, WAIT_TENSOR, longer=ProcessInfo("R", 0.3, 3.5, runnable_s=0.4)) == "in_collective"
