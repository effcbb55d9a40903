"""What does one rank say that it died, failed or hung of?  A record, looked at alone.

`symptom` gives a record its class and says whether anything in it shows that somebody else made it: an
error that only tells of a lost connection, silence inside a collective. What ranks mean to each other
is `attribution.verdict`'s. Stacks are read by the files they name: libraries, this package, the user's code."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Literal

import msgspec

from resilience.core import hangs
from resilience.core.attribution import (
    Category,
    FaultOrigin,
    Frame,
    Interruption,
    InterruptionRecord,
)
from resilience.core.communication import left_communication, lost_loader_process
from resilience.core.deadlines import limited
from resilience.core.user_frames import is_ours, is_users

Class = Literal[
    "exception",  # user code raised
    "left",  # a rank left with a BaseException
    "exited",  # the process ended without saying goodbye
    "killed",  # SIGKILL from outside
    "out_of_memory",
    "crashed",  # a signal of its own making: SIGSEGV, SIGABRT …
    "told_to_stop",  # SIGTERM, SIGINT … that we did not send
    "stopped",  # process state T
    "blocked_in_kernel",  # process state D
    "blocked_in_native_code",  # sits in C with the interpreter's lock, or heeds no interrupt there
    "waits_for_lock",  # of Python, and does not get it
    "busy_without_progress",
    "input_stall",
    "storage_stall",
    "hung",
    "hook_failed",
    "hook_hung",
    "missed_completion",
    "went_on",  # while others were still waiting for it
    "communication",  # everybody waits, nobody is missing
    "desynchronised",
    "common",  # most ranks failed in the same way
    "node_lost",
    "store_lost",
    "monitor_lost",
    "ended_by_monitor",  # for what it had done in an iteration before
    "unknown",
]

CLASSES: Mapping[Class, str] = {
    "exception": "raised an exception",
    "left": "left of its own accord",
    "exited": "ended without an exception",
    "killed": "killed by SIGKILL",
    "out_of_memory": "killed for memory",
    "crashed": "crashed in native code",
    "told_to_stop": "told to stop",
    "stopped": "stopped",
    "blocked_in_kernel": "blocked in the kernel",
    "blocked_in_native_code": "stuck in native code",
    "waits_for_lock": "waiting for a lock",
    "busy_without_progress": "busy, without progress",
    "input_stall": "waiting for input",
    "storage_stall": "waiting for storage",
    "hung": "hanging",
    "hook_failed": "failed in a hook",
    "hook_hung": "hanging in a hook",
    "missed_completion": "did not come to the end",
    "went_on": "went on while others waited",
    "communication": "all wait at the same line",
    "desynchronised": "waiting in another collective than the others",
    "common": "failed like most others",
    "node_lost": "lost with the node",
    "store_lost": "the store was lost",
    "monitor_lost": "lost the monitor",
    "ended_by_monitor": "a rank ended by its own monitor, late",
    "unknown": "unknown",
}
"""What each class means, in words behind a rank."""

_CATEGORIES: tuple[tuple[str, Category], ...] = (
    (r"\bcuda\b|\bnccl\b|\bcublas|\bcudnn|device-side assert|\becc\b|xid", "accelerator"),
    (r"no space left|read-only file system|input/output error|stale file handle|disk quota|checkpoint", "storage"),
    (r"address already in use|name or service not known|name resolution|no route to host|network is", "network"),
    (r"\bMemoryError\b|out of memory|cannot allocate memory", "host"),
)
_GIVES_UP = frozenset(f"resilience.errors.{name}" for name in ("RestartAbort", "RestartError", "RankDiscarded"))
_CRASHES = frozenset(("SIGSEGV", "SIGABRT", "SIGBUS", "SIGFPE", "SIGILL", "SIGTRAP", "SIGSYS"))
_INPUT = frozenset(("data", "input", "dataloader", "load"))
_STORAGE = frozenset(("checkpoint", "save", "storage"))


class Symptom(msgspec.Struct, frozen=True):
    """What one rank alone has on record. is_own: nothing says that somebody else made it. is_guess: it is its own only
    because no other rank had a fault."""

    rank: int
    what: Class
    record: InterruptionRecord
    rule: int
    confidence: float
    is_own: bool
    reason: str = ""  # why it is not its own, or may not be
    is_guess: bool = False


def main_stack(record: InterruptionRecord) -> tuple[Frame, ...]:
    """Return the main thread's stack out of a record's: the one that went through the wrapper."""
    for thread in record.stacks:
        if "MainThread" in thread.thread or any(
            frame.function in ("_call_function", "wrapped") and is_ours(frame) for frame in thread.frames
        ):
            return thread.frames
    return record.stacks[-1].frames if record.stacks else ()


def origin_of(record: InterruptionRecord) -> FaultOrigin:
    """Return whose fault a record's exception is. Only a wrapper decides; of any other program an error that left a
    communication call stays undecided."""
    if record.origin is not None:
        return record.origin
    error = record.exception
    return "communication" if error is not None and left_communication(error) else "own"


def gives_up(record: InterruptionRecord) -> bool:
    """Return True if a rank ended because of what had happened before: too few ranks are left, or it has no place."""
    return record.exception is not None and record.exception.type in _GIVES_UP


def is_inside(stack: tuple[Frame, ...]) -> bool:
    """Whether a main thread's stack is in user code, rather than in our own waiting."""
    for frame in reversed(stack):
        if is_ours(frame):
            return False
        if is_users(frame):
            return True
    return False


def category_of(record: InterruptionRecord) -> Category:
    """Return the category that a record shows by itself, for metrics; "unknown" is allowed."""
    return category(symptom(record))


def symptom(
    record: InterruptionRecord,
    signalled: str | None = None,
    stack: tuple[Frame, ...] = (),
    sections: tuple[str, ...] = (),
) -> Symptom:
    """Look at one record alone. signalled: the limit for which our monitor signalled the rank. stack: of
    its main thread, where the record has none. sections: that the rank itself saw open before anything was cut."""
    kind = record.interruption
    if kind is Interruption.TERMINATED:
        return _exit_symptom(record, signalled)
    is_ending = record.stage == "ending" and record.exception is not None  # then it matters why, not that it takes long
    if kind in (Interruption.EXCEPTION, Interruption.BASE_EXCEPTION) or is_ending:
        return _exception_symptom(record)
    if kind in (Interruption.SOFT_TIMEOUT, Interruption.HARD_TIMEOUT):
        return _hang_symptom(record, main_stack(record) or stack, sections)
    if kind is Interruption.MONITOR_PROCESS_EXCEPTION:
        return Symptom(record.rank, "monitor_lost", record, 1, 0.9, True)
    if record.detector is not None and record.detector.name == "completion_barrier":
        why = "waited for the others in the completion barrier"
        return Symptom(record.rank, "missed_completion", record, 3, 0.0, False, why)
    return Symptom(record.rank, "node_lost", record, 1, 0.7, True)


def _exit_symptom(record: InterruptionRecord, signalled: str | None) -> Symptom:
    end = record.exit
    if signalled is not None:
        why = f"was ended by its own monitor ({signalled})"
        return Symptom(record.rank, "killed", record, 1, 0.0, False, why)
    if record.exception is not None and (end is None or end.signal is None):
        # A program without a Wrapper: the interpreter told on stderr what ended it.
        return _exception_symptom(msgspec.structs.replace(record, stage=None))
    what: Class = "exited"
    if end is not None and end.oom:
        what = "out_of_memory"
    elif end is not None and end.signal in _CRASHES:
        what = "crashed"
    elif end is not None and end.signal == "SIGKILL":
        what = "killed"
    elif end is not None and end.signal is not None:
        what = "told_to_stop"
    return Symptom(record.rank, what, record, 1, 0.95, True)


def _exception_symptom(record: InterruptionRecord) -> Symptom:
    origin = origin_of(record)
    if origin == "consequence":
        why = "its error followed from another rank's fault or from the abort"
        return Symptom(record.rank, "exception", record, 2, 0.0, False, why)
    if record.stage not in (None, "run", "outside", "ending"):
        return Symptom(record.rank, "hook_failed", record, 2, 0.9, True)
    what: Class = "left" if record.interruption is Interruption.BASE_EXCEPTION else "exception"
    if origin == "communication" or (record.exception is not None and left_communication(record.exception)):
        why = "its error left a communication call, where a peer's end shows too"
        is_own = origin == "own"
        return Symptom(record.rank, what, record, 2, 0.4 if is_own else 0.0, is_own, why, is_guess=is_own)
    return Symptom(record.rank, what, record, 2, 0.9, True)


def _hang_symptom(record: InterruptionRecord, stack: tuple[Frame, ...], sections: tuple[str, ...]) -> Symptom:
    rank, detector = record.rank, record.detector.name if record.detector is not None else ""
    process = record.process
    state = process.state if process is not None else None
    if detector == "abort":
        return Symptom(rank, "hung", record, 3, 0.0, False, "could not be freed by the abort of this restart")
    if limited(detector).kind == "hook":
        return Symptom(rank, "hook_hung", record, 2, 0.9, True)
    if state in ("T", "t"):
        return Symptom(rank, "stopped", record, 4, 0.9, True)
    if hangs.in_collective(stack) or record.hang == "in_collective":
        return Symptom(rank, "hung", record, 3, 0.0, False, "waited in a collective for somebody else")
    if state == "D":
        return Symptom(rank, "blocked_in_kernel", record, 4, 0.8, True)
    if record.interruption is Interruption.HARD_TIMEOUT and detector in ("watchdog", "leave"):
        return Symptom(rank, "blocked_in_native_code", record, 5, 0.8, True)
    if record.hang == "holds_gil":
        return Symptom(rank, "blocked_in_native_code", record, 5, 0.9, True)
    if detector != "watchdog" and hangs.is_busy(process):
        return Symptom(rank, "busy_without_progress", record, 6, 0.7, True)
    otherwise: Class = "waits_for_lock" if record.hang == "on_lock" else "hung"
    what = hung_in((*(section.name for section in record.open_sections), *sections), otherwise)
    return Symptom(rank, what, record, 7, 0.7 if stack else 0.5, True)


def hung_in(sections: Iterable[str], otherwise: Class) -> Class:
    """Return what it is called if a rank hangs in these sections."""
    names = {part for section in sections for part in re.split(r"[^a-z]+", section.lower())}
    return "input_stall" if names & _INPUT else "storage_stall" if names & _STORAGE else otherwise


def category(found: Symptom) -> Category:
    """Return the category that a symptom shows."""
    record = found.record
    match found.what:
        case "exception" | "hook_failed" | "left":
            error = record.exception
            text = "" if error is None else f"{error.type}: {error.message}"
            if found.is_guess or origin_of(record) == "communication":
                return "network"
            if error is not None and lost_loader_process(error):
                return "host"
            return next((name for pattern, name in _CATEGORIES if re.search(pattern, text, re.I)), "user_code")
        case "exited" | "busy_without_progress" | "blocked_in_native_code" | "waits_for_lock" | "hook_hung" | "hung":
            return "user_code" if found.is_own else "unknown"
        case "out_of_memory" | "stopped" | "node_lost" | "monitor_lost":
            return "host"
        case "told_to_stop":
            return "scheduler"
        case "blocked_in_kernel" | "input_stall" | "storage_stall":
            return "storage"
    return "unknown"
