"""What should the user do next?  Text for ranks, and advice for each class of verdict."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping

from resilience.attribution.symptoms import Class
from resilience.attribution.verdict import Verdict


def ranks_in_words(ranks: Iterable[int], limit: int = 12) -> str:
    """Return ranks as ranges, "0-3, 7". Beyond `limit` ranges, the remaining ranks are only counted."""
    shown, hidden = first_ranks_in_words(ranks, limit)
    return f"{shown}, … and {hidden} more" if hidden else shown


def first_ranks_in_words(ranks: Iterable[int], limit: int) -> tuple[str, int]:
    """Return the first `limit` ranges of ranks, "0-3, 7", and how many ranks are in none of these."""
    ordered = sorted(set(ranks))
    runs: list[list[int]] = []
    for rank in ordered:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1][1:] = [rank]
        else:
            runs.append([rank])
    hidden = len(ordered) - sum(run[-1] - run[0] + 1 for run in runs[:limit])
    return ", ".join("-".join(map(str, run)) for run in runs[:limit]), hidden


def named(ranks: Iterable[int]) -> str:
    ordered = sorted(set(ranks))
    return f"rank{'s' if len(ordered) != 1 else ''} {ranks_in_words(ordered)}"


ADVICE: Mapping[Class, str] = {
    "exception": "read the exception and the line above",
    "left": "the rank left on its own: find out what asked it to leave",
    "exited": "something ended the process without an exception (sys.exit, os._exit, a C library): see its output",
    "ended_unseen": "nothing saw its exit status: see kernel log (dmesg), the container's memory limit, the scheduler",
    "killed": "find out who sent SIGKILL: kernel log (dmesg), the container's memory limit, an administrator",
    "out_of_memory": "the kernel killed it for memory: compare rss across ranks, lower the batch or the workers",
    "crashed": "native code crashed: see the stack if there is one, and the core dump",
    "told_to_stop": "a signal asked the process to end: find out who sent it (preemption is not the job's fault)",
    "stopped": "something stopped the process (SIGSTOP, a debugger, a frozen machine)",
    "blocked_in_kernel": "the kernel does not return from I/O: check the file system and its server",
    "blocked_in_native_code": "native code blocks the interpreter: see the stack taken before the process ended",
    "waits_for_lock": "it waits for a lock that is never released: see the line, and which code takes that lock",
    "busy_without_progress": "the function runs but makes no progress: see the loop at the line above",
    "input_stall": "the input pipeline stalled: check the loader's workers and the storage behind it",
    "storage_stall": "writing or reading a checkpoint stalled: check the storage",
    "hung": "see the line where it waits; if that wait is legitimate, raise the limit that fired",
    "hook_failed": "a hook of the wrapper raised: it must handle a half-finished iteration",
    "hook_hung": "a hook of the wrapper did not return: set a limit for what it waits for",
    "missed_completion": "a rank did not reach the end: raise completion_timeout if it may take that long",
    "went_on": "a rank continued while others still waited for it: look for a collective that it skips",
    "communication": "all ranks wait at the same line; what they wait for is not on record: see which peer is due",
    "desynchronised": "ranks wait in different collectives: look for a condition that differs between ranks",
    "common": "most ranks failed in the same way: check what they share (data, configuration, storage, a node)",
    "node_lost": "a whole node went silent: check the node and its network",
    "agent_lost": "the agent of the launcher ended, and its workers with it: find out what ended it (memory, a kill)",
    "store_lost": "the store was not hosted, or its host was lost or cut off from most ranks: check it and its network",
    "monitor_lost": "a monitor process died: hangs and deaths of this rank are no longer detected",
    "ended_by_monitor": "the rank's own monitor ended it, and the process ended late: see the previous incident",
    "unknown": "the records do not show what broke",
}
MONITOR_REPLACED = "nothing, unless it happens again: then find out what ends monitors (memory, a kill)"
KILLED_BELOW = 137  # the exit status of a shell, or of a container's first process, if its child died of SIGKILL

HANGS: frozenset[Class] = frozenset(
    ("hung", "waits_for_lock", "busy_without_progress", "communication", "desynchronised")
)


def advise(
    verdict: Verdict,
    repeats: int,
    is_stuck: bool,
    progress_unknown: bool,
    swallowed: Iterable[tuple[int, str]],
    exit_codes: Container[int] = (),
) -> tuple[str, ...]:
    """Return what to do next, most important first.

    repeats: number of earlier incidents of the same failure. is_stuck: they came in a row and without progress.
    exit_codes: of the ranks that are blamed or may be. progress_unknown: no limit that detects a lack of progress
    was armed. swallowed: (rank, place) where user code caught the interruption."""
    advice = [ADVICE[verdict.what]]
    if verdict.what == "exception" and len(verdict.culprits) == 1:
        advice = [f"{advice[0]}; the other ranks only followed"]
    if KILLED_BELOW in exit_codes:
        advice.append("exit status 137 may stand for SIGKILL (128 + 9): compare the memory with the container's limit")
    if repeats >= 2:
        end = "another restart will not help; stop and fix it" if is_stuck else "look for what these have in common"
        advice.append(f"the same failure, {repeats + 1} times now: {end}")
    if verdict.what == "hung" and not verdict.culprits:
        advice.append("the awaited rank is not on record: mark the parts of a step with resilience.section")
    if progress_unknown and verdict.what in HANGS:
        advice.append("no limit on progress was armed: use resilience.step and RESILIENCE_STEP_TIMEOUT")
    for rank, place in sorted(set(swallowed))[:3]:
        advice.append(f"rank {rank} swallowed the interruption at {place}: let BaseException through there")
    return tuple(advice)
