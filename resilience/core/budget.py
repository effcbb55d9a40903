"""May the job start its workers once more?  One budget for the whole job, based on which failures occurred and when.

`max_restarts` is the ceiling. Three rules end the job earlier: the same failure comes three times in a row without
progress, so another restart would end like the last two; several restarts bring no progress, whatever the failures
are; one failure recurs too often within the window, even if steps are made in between. Progress is a higher step than
any rank of the job has reported before. The first two say that another start of the job would not help. The third does
not say so: if the ceiling is reached too, the job ends like any other that has used its restarts.

A program need not report steps. If no rank has reported one, progress is unknown: a program that writes checkpoints may
be killed ten times and rightly continue. Then only exceptions count as repetitions, because an exception with the same
stack points to the program, and usage errors: a Python program that exits with 2 soon after its start has most likely
rejected its arguments, which are the same in each start. A cycle that ran for `steady_s` counts as progress.

The failures of a job are one list in its store (`core.job_budget`), with one entry for each cycle. Each agent times
them with its own clock, from when it first read them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from resilience.facts.in_words import count
from resilience.facts.interruptions import InterruptionRecord

FAILED = 1
NO_STEP = "this script reports no step, so progress is unknown; call resilience.step(n) in its training loop"
WRONG_USE = "exit status 2 before the first step usually means wrong arguments: see the end of the worker's stderr"
USAGE_ERROR = 2  # the exit status of argparse, optparse and click for wrong arguments
USAGE_ERROR_S = 60.0  # seconds: a program that runs for longer, imports included, has probably accepted its arguments
FailureKind = Literal["exception", "hang", "exit", "usage error", "lost node"]
_OF_IMPORTS = ("ModuleNotFoundError", "SyntaxError", "IndentationError", "TabError")


class Failure(msgspec.Struct, frozen=True):
    """A failure that ended a cycle. fingerprint: equal for repetitions; rank: -1 if the node failed; step: the highest
    that this agent knows so far, -1 before the first; at: seconds, on the clock of the deciding agent; ran: seconds
    that the cycle's workers had run; is_final: the program cannot start, so a restart is useless; silent_for_s: of a
    rank that hung; kind: "exit" is any end of a worker that is nothing else."""

    cycle: int
    fingerprint: str
    what: str
    node: str
    rank: int
    step: int
    at: float = 0.0
    ran: float = 0.0
    is_final: bool = False
    silent_for_s: float | None = None
    kind: FailureKind = "exit"


class Budget(msgspec.Struct, frozen=True):
    """The limits of the budget. 0 switches a rule off, except max_restarts. window_s: seconds; steady_s: seconds after
    which a cycle counts as progress if no rank reports steps."""

    max_restarts: int
    same_limit: int = 3
    stalled_restarts: int = 5
    same_in_window: int = 10
    window_s: float = 3600.0
    same_exit_code: int = 93
    steady_s: float = 600.0


class Answer(msgspec.Struct, frozen=True):
    """Whether the job may restart; if not, the exit code of the job. same_in_a_row: equal failures without progress."""

    is_restart: bool
    why: str
    used: int
    left: int
    same_in_a_row: int
    exit_code: int = 0


def decide(budget: Budget, history: Sequence[Failure], failure: Failure) -> Answer:
    """Return what follows from a failure. history: the earlier failures, oldest first.

    Entries of the failure's own cycle are ignored: a cycle counts once, whichever of its agents asks, and whether or
    not another agent has already noted its failure."""
    history = [past for past in history if past.cycle != failure.cycle]
    used = len(history)
    same = same_in_a_row(budget, history, failure)
    left = budget.max_restarts - used
    step = max(past.step for past in (*history, failure))

    def stop(why: str, code: int) -> Answer:
        if step < 0 and not failure.is_final:
            why = f"{why}; {WRONG_USE if failure.kind == 'usage error' else NO_STEP}"
        return Answer(False, why, used, max(0, left), same, code)

    if failure.is_final and not history and step < 0:
        return stop(f"the program cannot start: {failure.what}", FAILED)
    if budget.same_limit and same >= budget.same_limit and _may_repeat(step, failure):
        progress = f" without progress beyond step {step}" if step >= 0 else ""
        return stop(f"the same failure {count(same, 'time')} in a row{progress}: {failure.what}", budget.same_exit_code)
    starts = _since_progress(budget, [*history, failure])
    if budget.stalled_restarts and step >= 0 and starts > budget.stalled_restarts:
        return stop(f"no worker has come beyond step {step} in {count(starts, 'start')}", budget.same_exit_code)
    if left <= 0:  # before the last rule: a job that advances may well be started again by its scheduler
        return stop(_used_up(budget.max_restarts), FAILED)
    often = 1 + sum(_is_same(step, past, failure) and failure.at - past.at <= budget.window_s for past in history)
    if budget.same_in_window and often > budget.same_in_window and _may_repeat(step, failure):
        return stop(
            f"the same failure {count(often, 'time')} within {budget.window_s:g} s: {failure.what}",
            budget.same_exit_code,
        )
    return Answer(True, failure.what, used + 1, left - 1, same)


def _used_up(max_restarts: int) -> str:
    match max_restarts:
        case 0:
            return "no restart is allowed"
        case 1:
            return "the only restart is used"
        case _:
            return f"all {max_restarts} restarts are used"


def same_in_a_row(budget: Budget, history: Sequence[Failure], failure: Failure) -> int:
    """Return how many times in a row, including this one, the job failed in the same way without progress."""
    failures = [*history, failure]
    step = max(past.step for past in failures)
    if not _may_repeat(step, failure):
        return 1
    progress = _progress(budget, failures)
    repeats = 0
    for past, advances in zip(reversed(failures), reversed(progress), strict=True):
        if not _is_same(step, past, failure) or advances != progress[-1]:
            break
        repeats += 1
    return repeats


def _may_repeat(step: int, failure: Failure) -> bool:
    """Return True if the same failure again counts as a repetition. step: the highest of the job, -1 if none was
    reported; then only an exception or a usage error counts."""
    return step >= 0 or failure.kind in ("exception", "usage error")


def _is_same(step: int, past: Failure, failure: Failure) -> bool:
    return past.fingerprint == failure.fingerprint and _may_repeat(step, past)


def _since_progress(budget: Budget, failures: Sequence[Failure]) -> int:
    """Return how many failures in a row, of any kind, came without progress in between."""
    progress = _progress(budget, failures)
    return progress.count(progress[-1])


def _progress(budget: Budget, failures: Sequence[Failure]) -> list[int]:
    """Return how often the job had made progress before each failure."""
    advances, step = 0, -1
    counts = []
    for failure in failures:
        # A late agent, or one whose ranks report nothing, knows a lower step than the job has reached.
        if failure.step > step or (step < 0 and failure.ran >= budget.steady_s):
            advances += 1
        step = max(step, failure.step)
        counts.append(advances)
    return counts


def fingerprint(record: InterruptionRecord) -> str:
    """Return a text that is equal for repetitions of a failure: the exception, the limit, or the exit."""
    if record.exception is not None:
        return f"exception:{record.exception.fingerprint}"
    if record.detector is not None and not _has_ended(record):
        return f"limit:{record.detector.name}"
    if record.exit is not None and record.exit.signal is not None:
        return f"signal:{record.exit.signal}" + (":oom" if record.exit.oom else "")
    if record.exit is not None and record.exit.code is not None:
        return f"exit:{record.exit.code}"
    return record.interruption.value


def kind_of(record: InterruptionRecord) -> FailureKind:
    """Return which kind of failure a record describes."""
    if record.exception is not None:
        return "exception"
    return "exit" if record.detector is None or _has_ended(record) else "hang"


def is_usage_error(record: InterruptionRecord, ran: float) -> bool:
    """Return True if a Python program has probably rejected its arguments. ran: seconds since it was started."""
    status = None if record.exit is None else record.exit.code
    return kind_of(record) == "exit" and status == USAGE_ERROR and ran < USAGE_ERROR_S


def _has_ended(record: InterruptionRecord) -> bool:
    """Return True if a process or its program ended, whatever limit or look showed it."""
    return record.program_had_failed or (record.detector is not None and record.detector.name == "exit")


def is_of_an_import(record: InterruptionRecord) -> bool:
    """Return True if a program failed while importing its modules: one is unknown or has a syntax error."""
    raised, end = record.exception, record.exit
    if raised is None or raised.type not in _OF_IMPORTS or end is None or not end.code:
        return False
    return all(frame.function == "<module>" for frame in raised.stack if not frame.file.startswith("<frozen "))


def describe(record: InterruptionRecord) -> str:
    """Return a failure in a few words, on one line."""
    if record.exception is not None:
        return _line(record.exception.in_words)
    return _line(record.message) or record.interruption.value


def _line(text: str) -> str:
    return " ".join(text.split())[:200]


def table(history: Sequence[Failure]) -> list[str]:
    """Return all failures of a job as lines of a table, oldest first."""
    rows = [("cycle", "rank", "node", "step", "what")]
    rows += [(str(past.cycle), _number(past.rank), past.node, _number(past.step), past.what) for past in history]
    sizes = [max(len(row[column]) for row in rows) for column in range(4)]
    return ["  ".join([*(cell.ljust(size) for cell, size in zip(row, sizes, strict=False)), row[4]]) for row in rows]


def _number(value: int) -> str:
    return "-" if value < 0 else str(value)
