"""How does a rank hang?  One word, from what its monitor observes before it sends the rank anything.

A limit alone cannot tell these apart: stopped from outside, waiting in a collective, looping, stuck in C with or
without the GIL, or waiting for a Python lock that is never released. The evidence is the state of the process, its CPU
use, the position of the main thread in the program and in the kernel, and whether another of its threads gets the GIL.
A pure function. Missing evidence is ignored; without any evidence the result is None."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from resilience.facts.interruptions import Frame, Hang, ProcessInfo

WORDS: Mapping[Hang, str] = {
    "stopped": "the process is stopped",
    "in_kernel": "in a system call that cannot be interrupted",
    "in_collective": "waiting in a collective",
    "in_loop": "running, in a loop",
    "runs_again": "running again, after it had waited",
    "holds_gil": "in C that keeps the interpreter's lock",
    "on_lock": "waiting for a lock",
    "in_call": "in a call that does not return",
}
"""The meaning of each word."""

BUSY = 0.8  # of a processor, used by all threads together
# Share of the time in which the main thread is runnable: below 0.01 in a waiting call, above 0.4 in a loop that shares
# the GIL.
RUNNABLE = 0.25

# Files whose functions call collectives and wait for them. NCCL may use a whole processor for that.
_COLLECTIVE = re.compile(
    r"/torch/distributed/(distributed_c10d|_functional_collectives|c10d_logger)\.py$|/torch/nn/parallel/distributed\.py$"
)
# FSDP, pipelines and stores wait in other files of the package, without using a processor. The remaining files compute
# (DTensor) or write checkpoints.
_DISTRIBUTED = re.compile(r"/torch/distributed/(?!checkpoint/)")
_DISPATCHER = re.compile(r"/torch/_ops\.py$")  # through which `wait_tensor` is called
_ELSEWHERE: frozenset[Hang | None] = frozenset(("stopped", "in_kernel", "in_loop", "holds_gil"))
_WAITING = re.compile(r"/(threading|logging/__init__|multiprocessing/synchronize)\.py$|^<frozen importlib\.")
_WAITS = frozenset(("acquire", "_acquire_restore", "wait", "wait_for", "join", "_wait_for_tstate_lock", "__enter__"))
_STANDARD = re.compile(r"/lib/python3\.\d+/(?!site-packages|dist-packages)|^<frozen")
_WORK_WAIT = re.compile(r"\.wait\(")
_ACQUIRES = re.compile(r"\.acquire\(|^\s*with\b")


def shows_life(ages_s: Iterable[float], silent_for_s: float) -> bool:
    """Return True if a program shows signs of life although what it owes has been missing for `silent_for_s`. ages_s:
    how long ago the last sign of each kind came. One that came right after the beginning of this silence says nothing
    about the rest."""
    return any(age_s < silent_for_s / 2 for age_s in ages_s)


def is_busy(process: ProcessInfo | None) -> bool:
    """Return True if the process uses a processor, or would use one if others left it free."""
    if process is None:
        return False
    # On an overloaded host, a loop gets only a small part of a processor, but it is always runnable.
    return cpu_share(process) >= BUSY or runnable_share(process) >= RUNNABLE


def cpu_share(process: ProcessInfo | None) -> float:
    """Return the part of one processor that was used; more than 1 if several threads ran."""
    if process is None or process.cpu_s_delta is None or not process.over_s:
        return 0.0
    return process.cpu_s_delta / process.over_s


def runnable_share(process: ProcessInfo | None) -> float:
    """Return the part of the time in which the main thread ran or waited for a processor."""
    if process is None or not process.over_s:
        return 0.0
    if process.runnable_s is None:  # unknown: an old record, or a kernel without CONFIG_SCHED_INFO
        return 1.0 if process.state == "R" and cpu_share(process) >= 0.1 else 0.0
    return process.runnable_s / process.over_s


def in_collective(stack: tuple[Frame, ...], hang: Hang | None = None) -> bool:
    """Return True if a stack waits inside torch.distributed. hang: how the rank hangs, if known: the parts of
    torch.distributed that call no collectives themselves also compute, read and write."""
    file = _file_of_call(stack)
    return _COLLECTIVE.search(file) is not None or (hang not in _ELSEWHERE and _DISTRIBUTED.search(file) is not None)


def _file_of_call(stack: tuple[Frame, ...]) -> str:
    """Return the file of the innermost frame, not counting torch's dispatcher; "" if there is none."""
    return next((frame.file for frame in reversed(stack) if not _DISPATCHER.search(frame.file)), "")


def in_backward(stack: tuple[Frame, ...]) -> bool:
    """Return True if the innermost Python frame runs autograd's engine, in which DDP's reducer waits for others."""
    return bool(stack) and stack[-1].function == "_engine_run_backward" and "/torch/autograd/" in stack[-1].file


def classify(
    process: ProcessInfo | None,
    stack: tuple[Frame, ...],
    line: str = "",
    waits_in: str = "",
    is_gil_held: bool = False,
    longer: ProcessInfo | None = None,
    shows_life: bool = False,
) -> Hang | None:
    """Return how a rank hangs, None if there is no evidence, or if it sleeps between other signs of life.

    process: with its CPU use during the silence. stack: of the main thread, innermost last; line: the source line of
    its innermost frame. waits_in: the kernel function in which the main thread sleeps, empty if unknown. is_gil_held:
    the thread that was asked for stacks waits for the GIL while all other threads sleep. longer: the process over more
    of the silence, if known. shows_life: heartbeats, steps or starts and ends of sections came while the limit of
    something else was exceeded, so calls do return."""
    state = None if process is None else process.state
    if state is not None and state in "Tt":
        return "stopped"
    if _COLLECTIVE.search(_file_of_call(stack)):
        return "in_collective"
    if state == "D":
        return "in_kernel"
    if is_busy(process):
        # The wait may just have ended, for example because the awaited rank ended.
        return "in_loop" if longer is None or is_busy(longer) else "runs_again"
    if is_gil_held:
        return "holds_gil"
    if in_collective(stack) or in_backward(stack) or (stack and _waits_for_work(stack[-1], line)):
        return "in_collective"
    if stack and _is_on_lock(stack[-1], line, waits_in):
        return "on_lock"
    return "in_call" if stack and not shows_life else None


def _waits_for_work(frame: Frame, line: str) -> bool:
    """Return True if the line calls `work.wait()`. That is C++, so no frame shows it. Python's own waits have frames of
    the standard library."""
    return not _STANDARD.search(frame.file) and _WORK_WAIT.search(line) is not None


def _is_on_lock(frame: Frame, line: str, waits_in: str) -> bool:
    """Return True if the main thread waits for a Python lock. Locks sleep in the kernel's futex, but so do many other
    waits, so the frame or the line must show a lock too."""
    if waits_in and "futex" not in waits_in:
        return False
    if _WAITING.search(frame.file):
        return frame.function in _WAITS
    return _ACQUIRES.search(line) is not None
