"""In which way does a rank hang?  One word, from what its monitor sees before anything is sent to it.

The state of the process, its use of processors, where the main thread is in the program and in the kernel, and
whether another of its threads gets the GIL tell apart what a limit alone does not: stopped from outside, waiting for
others in a collective, going round in a loop, stuck in C with the interpreter's lock or without, or waiting
for a lock of Python that nobody gives back. A pure function; what cannot be seen is left out, and where
nothing tells, there is no word."""

from __future__ import annotations

import re
from collections.abc import Mapping

from resilience.core.attribution import Frame, Hang, ProcessInfo

WORDS: Mapping[Hang, str] = {
    "stopped": "the process is stopped",
    "in_kernel": "in a system call that cannot be interrupted",
    "in_collective": "waiting in a collective",
    "in_loop": "running, in a loop",
    "holds_gil": "in C that keeps the interpreter's lock",
    "on_lock": "waiting for a lock",
    "in_call": "in a call that does not return",
}
"""What each word means, in a few more."""

BUSY = 0.8  # of a processor
RUNNABLE = 0.1  # of a processor that others want too, of a process that is found ready to run

_COLLECTIVE = re.compile(r"/torch/distributed/|/torch/nn/parallel/distributed\.py$")
_WAITING = re.compile(r"/(threading|logging/__init__|multiprocessing/synchronize)\.py$|^<frozen importlib\.")
_WAITS = frozenset(("acquire", "_acquire_restore", "wait", "wait_for", "join", "_wait_for_tstate_lock", "__enter__"))
_STANDARD = re.compile(r"/lib/python3\.\d+/(?!site-packages|dist-packages)|^<frozen")
_WORK_WAIT = re.compile(r"\.wait\(")
_ACQUIRES = re.compile(r"\.acquire\(|^\s*with\b")


def is_busy(process: ProcessInfo | None) -> bool:
    """Whether the process uses a processor, or would if others left it one."""
    if process is None:
        return False
    # A loop on a host with more to do than processors gets a part of one, and is runnable all the time.
    share = cpu_share(process)
    return share >= BUSY or (process.state == "R" and share >= RUNNABLE)


def cpu_share(process: ProcessInfo | None) -> float:
    """Return the part of one processor that was used; more than 1 if several threads ran."""
    if process is None or process.cpu_s_delta is None or not process.over_s:
        return 0.0
    return process.cpu_s_delta / process.over_s


def in_collective(stack: tuple[Frame, ...]) -> bool:
    """Whether a stack waits inside torch.distributed."""
    return bool(stack) and _COLLECTIVE.search(stack[-1].file) is not None


def in_backward(stack: tuple[Frame, ...]) -> bool:
    """Whether the innermost Python frame of a stack runs autograd's engine, in which DDP's reducer waits for others."""
    return bool(stack) and stack[-1].function == "_engine_run_backward" and "/torch/autograd/" in stack[-1].file


def classify(
    process: ProcessInfo | None,
    stack: tuple[Frame, ...],
    line: str = "",
    waits_in: str = "",
    is_gil_held: bool = False,
) -> Hang | None:
    """Return how a rank hangs, None if nothing tells.

    process: with its use of processors during the silence. stack: of the main thread, innermost last; line: the
    program's text at its innermost frame. waits_in: the kernel's function that the main thread sleeps in, empty
    if unknown. is_gil_held: a thread that was asked waits for the GIL while all others sleep."""
    state = None if process is None else process.state
    if state is not None and state in "Tt":
        return "stopped"
    if in_collective(stack):
        return "in_collective"
    if state == "D":
        return "in_kernel"
    if is_busy(process):
        return "in_loop"
    if is_gil_held:
        return "holds_gil"
    if in_backward(stack) or (stack and _waits_for_work(stack[-1], line)):
        return "in_collective"
    if stack and _is_on_lock(stack[-1], line, waits_in):
        return "on_lock"
    return "in_call" if stack else None


def _waits_for_work(frame: Frame, line: str) -> bool:
    """`work.wait()` is C++ from the first, so no frame shows it. Python's own waits have frames of the standard
    library."""
    return not _STANDARD.search(frame.file) and _WORK_WAIT.search(line) is not None


def _is_on_lock(frame: Frame, line: str, waits_in: str) -> bool:
    """Locks of Python sleep in the kernel's futex, and so does much else: the program must say so too."""
    if waits_in and "futex" not in waits_in:
        return False
    if _WAITING.search(frame.file):
        return frame.function in _WAITS
    return _ACQUIRES.search(line) is not None
