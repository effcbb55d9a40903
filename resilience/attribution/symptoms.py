"""Why did one rank die, fail or hang, according to its own record?  Each record is examined alone.

`symptom` assigns a class to a record and says whether the record itself points to another rank as the cause: an error
that only reports a lost connection, or silence inside a collective. `attribution.verdict` compares ranks with each
other. The file of each frame says whether it belongs to a library, this package or the user's code."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Literal

import msgspec

from resilience.core import hang_kind
from resilience.core.communication import left_communication, lost_loader_process
from resilience.core.watch import AGENT_LOST
from resilience.facts.deadlines import parse_limit
from resilience.facts.interruptions import (
    OBEYED,
    Category,
    Exit,
    FaultOrigin,
    Frame,
    Interruption,
    InterruptionRecord,
)
from resilience.facts.user_frames import is_ours, is_users

Class = Literal[
    "exception",  # user code raised
    "left",  # a rank left with a BaseException
    "exited",  # the process ended without saying goodbye
    "ended_unseen",  # so did this one, and nobody saw its exit status
    "killed",  # SIGKILL from outside
    "out_of_memory",
    "crashed",  # a signal that its own code caused: SIGSEGV, SIGABRT …
    "told_to_stop",  # SIGTERM, SIGINT … that this package did not send
    "stopped",  # process state T
    "blocked_in_kernel",  # process state D
    "blocked_in_native_code",  # runs C code that holds the GIL, or that no interrupt reaches
    "waits_for_lock",  # a Python lock that it does not get
    "busy_without_progress",
    "input_stall",
    "storage_stall",
    "hung",
    "hook_failed",
    "hook_hung",
    "missed_completion",
    "went_on",  # while others were still waiting for it
    "communication",  # all ranks wait, none is missing
    "desynchronised",
    "common",  # most ranks failed in the same way
    "node_lost",
    "agent_lost",  # the launcher's, on a node that still answered
    "store_lost",
    "monitor_lost",
    "ended_by_monitor",  # because of an earlier iteration
    "unknown",
]

CLASSES: Mapping[Class, str] = {
    "exception": "raised an exception",
    "left": "left of its own accord",
    "exited": "ended without an exception",
    "ended_unseen": "ended, exit status unknown",
    "killed": "killed by SIGKILL",
    "out_of_memory": "killed for memory",
    "crashed": "crashed in native code",
    "told_to_stop": "asked to stop",
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
    "missed_completion": "did not reach the end",
    "went_on": "continued while others waited",
    "communication": "all wait at the same line",
    "desynchronised": "waiting in a different collective",
    "common": "failed like most others",
    "node_lost": "lost with the node",
    "agent_lost": "lost with the launcher's agent",
    "store_lost": "the store was lost",
    "monitor_lost": "lost the monitor",
    "ended_by_monitor": "a rank ended by its own monitor, late",
    "unknown": "unknown",
}
"""What each class means, as text that follows a rank."""

# What a user's exception is about, by its text, because nothing else says it. The category only labels the incident:
# whose fault it is never depends on text.
_CATEGORIES: tuple[tuple[str, Category], ...] = (
    (r"\bcuda\b|\bnccl\b|\bcublas|\bcudnn|device-side assert|\becc\b|\bxid\b", "accelerator"),
    (
        r"no space left|read-only file system|input/output error|stale file handle|disk quota|\bCheckpointException\b",
        "storage",
    ),
    (
        r"address already in use|name or service not known|name resolution|no route to host"
        r"|network is (?:unreachable|down)",
        "network",
    ),
    (r"\bMemoryError\b|out of memory|cannot allocate memory", "host"),
)
_GIVES_UP = frozenset(f"resilience.errors.{name}" for name in ("RestartAbort", "RestartError", "RankDiscarded"))
_CRASHES = frozenset(("SIGSEGV", "SIGABRT", "SIGBUS", "SIGFPE", "SIGILL", "SIGTRAP", "SIGSYS"))
TORCHRUN_STOPS_WITHIN = 45.0  # seconds: until it looks at its workers again, and those it leaves them after SIGTERM
KILLED_AFTER = 5.0  # seconds from the first end after which torchrun may kill the others: it leaves them 30 by default
QUIET_END = 0.6
"""Confidence of an end that gives no reason, if nothing on record explains it. NCCL's watchdog aborts ranks that wait,
and programs that catch the error of a collective often exit with a code."""
_INPUT = frozenset(("data", "input", "dataloader", "load"))
_STORAGE = frozenset(("checkpoint", "ckpt", "save", "storage"))


class Symptom(msgspec.Struct, frozen=True):
    """What one rank's record shows. is_own: nothing points to another rank as the cause. is_guess: it counts as the
    rank's own fault only if no other rank had a fault. is_quiet: the process ended without giving a reason, as ranks
    also do that give up because of another rank's fault."""

    rank: int
    what: Class
    record: InterruptionRecord
    rule: int
    confidence: float
    is_own: bool
    reason: str = ""  # why the fault is not, or may not be, the rank's own
    is_guess: bool = False
    is_quiet: bool = False


def main_stack(record: InterruptionRecord) -> tuple[Frame, ...]:
    """Return the main thread's stack from a record: the one that passes through the wrapper."""
    for thread in record.stacks:
        if "MainThread" in thread.thread or any(
            frame.function in ("_call_function", "wrapped") and is_ours(frame) for frame in thread.frames
        ):
            return thread.frames
    return record.stacks[-1].frames if record.stacks else ()


def origin_of(record: InterruptionRecord) -> FaultOrigin:
    """Return the origin of a record's exception. Only a wrapper decides it. In any other program, an error out of a
    communication call stays undecided."""
    if record.origin is not None:
        return record.origin
    error = record.exception
    return "communication" if error is not None and left_communication(error) else "own"


def gives_up(record: InterruptionRecord) -> bool:
    """Return True if a rank ended because of earlier faults: too few ranks are left, or it has no place."""
    return record.exception is not None and record.exception.type in _GIVES_UP


def is_end(record: InterruptionRecord) -> bool:
    """Return True if the record is of the end of a rank's process."""
    return record.interruption is Interruption.TERMINATED


def ends_process(record: InterruptionRecord) -> bool:
    """Return True if the process of a rank ended, or was lost with its node: a launcher then stops the others."""
    return is_end(record) or symptom(record).what in ("node_lost", "agent_lost")


def is_inside(stack: tuple[Frame, ...]) -> bool:
    """Return True if a main thread's stack is in user code, not in a wait of this package."""
    for frame in reversed(stack):
        if is_ours(frame):
            return False
        if is_users(frame):
            return True
    return False


def category_of(record: InterruptionRecord) -> Category:
    """Return the category that a record alone shows, for metrics. It may be "unknown"."""
    return category(symptom(record))


def were_stopped(asked: Collection[float], others: Iterable[float]) -> bool:
    """Return True if a request to stop ended some ranks, and no fault shortly before, after which torchrun and
    schedulers stop the others, too.

    asked, others: times in seconds at which ranks ended because they were asked to, and otherwise."""
    return bool(asked) and all(at < min(asked) - TORCHRUN_STOPS_WITHIN for at in others)


def symptom(
    record: InterruptionRecord,
    signalled: str | None = None,
    stack: tuple[Frame, ...] = (),
    sections: tuple[str, ...] = (),
) -> Symptom:
    """Return the symptom of one record. signalled: the limit for which the monitor signalled the rank. stack: of its
    main thread, used if the record has none. sections: those the rank itself reported open before any cut."""
    kind = record.interruption
    if record.program_had_failed:  # any signal of its monitor came later
        return _exit_symptom(record, None) if record.exception is None else _exception_symptom(record)
    if kind is Interruption.TERMINATED:
        return _exit_symptom(record, signalled)
    if kind in (Interruption.EXCEPTION, Interruption.BASE_EXCEPTION):
        return _exception_symptom(record)
    if kind in (Interruption.SOFT_TIMEOUT, Interruption.HARD_TIMEOUT):
        return _hang_symptom(record, main_stack(record) or stack, sections)
    if kind is Interruption.MONITOR_PROCESS_EXCEPTION:
        return Symptom(record.rank, "monitor_lost", record, 1, 0.9, True)
    if record.detector is not None and record.detector.name == "completion_barrier":
        reason = "waited for the others in the completion barrier"
        return Symptom(record.rank, "missed_completion", record, 3, 0.0, False, reason)
    is_agents = record.detector is not None and record.detector.name == AGENT_LOST
    return Symptom(record.rank, "agent_lost" if is_agents else "node_lost", record, 1, 0.7, True)


def _exit_symptom(record: InterruptionRecord, signalled: str | None) -> Symptom:
    end = record.exit
    if signalled is not None:
        reason = f"was ended by its own monitor ({signalled})"
        return Symptom(record.rank, "killed", record, 1, 0.0, False, reason)
    if record.exception is not None and (end is None or end.signal is None):
        # A program without a Wrapper: the interpreter printed the exception to stderr.
        return _exception_symptom(msgspec.structs.replace(record, stage=None))
    what: Class = "exited"
    if end is None or end == Exit():
        what = "ended_unseen"
    elif end.oom:
        what = "out_of_memory"
    elif end.signal in _CRASHES:
        what = "crashed"
    elif end.signal == "SIGKILL":
        what = "killed"
    elif end.is_stop:
        what = "told_to_stop"
    is_quiet = end is None or end.signal == "SIGABRT" or (what in ("exited", "ended_unseen") and end.signal is None)
    is_sure = not is_quiet and (end is None or end.code != OBEYED)  # a program may end with any code
    return Symptom(record.rank, what, record, 1, 0.95 if is_sure else QUIET_END, True, is_quiet=is_quiet)


def _exception_symptom(record: InterruptionRecord) -> Symptom:
    origin = origin_of(record)
    if origin == "consequence":
        reason = "its error followed from another rank's fault or from the abort"
        return Symptom(record.rank, "exception", record, 2, 0.0, False, reason)
    what: Class = "left" if record.interruption is Interruption.BASE_EXCEPTION else "exception"
    if record.stage not in (None, "run", "outside", "ending"):
        what = "hook_failed"
    if origin == "communication" or (record.exception is not None and left_communication(record.exception)):
        reason = "its error came out of a communication call, which also fails when a peer ends"
        is_own = origin == "own"
        return Symptom(record.rank, what, record, 2, 0.4 if is_own else 0.0, is_own, reason, is_guess=is_own)
    return Symptom(record.rank, what, record, 2, 0.9, True)


def own_error(symptom: Symptom) -> Symptom:
    """Return the symptom of a rank that no other rank can have disturbed: an error of a communication call is its own,
    unless the abort caused it."""
    if symptom.record.exception is None or symptom.rule != 2 or origin_of(symptom.record) == "consequence":
        return symptom
    return msgspec.structs.replace(symptom, is_own=True, is_guess=False, confidence=0.9, reason="")


def _hang_symptom(record: InterruptionRecord, stack: tuple[Frame, ...], sections: tuple[str, ...]) -> Symptom:
    rank, detector = record.rank, record.detector.name if record.detector is not None else ""
    process = record.process
    state = process.state if process is not None else None
    if detector == "abort":
        return Symptom(rank, "hung", record, 3, 0.0, False, "could not be freed by the abort of this restart")
    if parse_limit(detector).kind == "hook":
        return Symptom(rank, "hook_hung", record, 2, 0.9, True)
    if state in ("T", "t"):
        return Symptom(rank, "stopped", record, 4, 0.9, True)
    if record.hang == "in_collective" or hang_kind.in_collective(stack, record.hang):
        return Symptom(rank, "hung", record, 3, 0.0, False, "waited in a collective for another rank")
    if not stack and record.hang is None and any(not collective.left for collective in record.last_collectives):
        reason = "had entered a collective and not left it; its stack is not known"
        return Symptom(rank, "hung", record, 3, 0.0, False, reason)
    if state == "D" or record.hang == "in_kernel":
        return Symptom(rank, "blocked_in_kernel", record, 4, 0.8, True)
    if record.interruption is Interruption.HARD_TIMEOUT and detector in ("watchdog", "leave"):
        return Symptom(rank, "blocked_in_native_code", record, 5, 0.8, True)
    if record.hang == "holds_gil":
        return Symptom(rank, "blocked_in_native_code", record, 5, 0.9, True)
    if detector != "watchdog" and (record.hang == "in_loop" or hang_kind.is_busy(process)):
        return Symptom(rank, "busy_without_progress", record, 6, 0.7, True)
    otherwise: Class = "waits_for_lock" if record.hang == "on_lock" else "hung"
    what = hung_in((*(section.name for section in record.open_sections), *sections), otherwise, stack)
    return Symptom(rank, what, record, 7, 0.7 if stack else 0.5, True)


def hung_in(sections: Iterable[str], otherwise: Class, stack: tuple[Frame, ...] = ()) -> Class:
    """Return the class of a hang in these sections. stack: of the main thread, if known."""
    names = {part for section in sections for part in re.split(r"[^a-z]+", section.lower())}
    # `load_checkpoint` is no input, although loading data is.
    if names & _STORAGE:
        return "storage_stall"
    return "input_stall" if names & _INPUT or _waits_for_loader(stack) else otherwise


def _waits_for_loader(stack: tuple[Frame, ...]) -> bool:
    """Return True if a main thread is in torch's data loader, and not in user code that the loader calls. With pinned
    memory it waits for the queue of a thread, which looks like a lock."""
    for frame in reversed(stack):
        if "/torch/utils/data/" in frame.file:
            return True
        if is_users(frame):
            return False
    return False


def category(symptom: Symptom) -> Category:
    """Return the category that a symptom shows."""
    record = symptom.record
    match symptom.what:
        case "exception" | "hook_failed" | "left":
            error = record.exception
            message = "" if error is None else error.in_words
            if symptom.is_guess or origin_of(record) == "communication":
                return "network"
            if error is not None and lost_loader_process(error):
                return "host"
            return next((name for pattern, name in _CATEGORIES if re.search(pattern, message, re.I)), "user_code")
        case "exited" | "busy_without_progress" | "blocked_in_native_code" | "waits_for_lock" | "hook_hung" | "hung":
            return "user_code" if symptom.is_own else "unknown"
        case "out_of_memory" | "stopped" | "node_lost" | "agent_lost" | "monitor_lost":
            return "host"
        case "told_to_stop":
            return "scheduler"
        case "blocked_in_kernel" | "input_stall" | "storage_stall":
            return "storage"
        case (
            "ended_unseen" | "killed" | "crashed" | "missed_completion" | "went_on" | "communication" | "desynchronised"
        ):
            return "unknown"
        case "common" | "store_lost" | "ended_by_monitor" | "unknown":
            return "unknown"
