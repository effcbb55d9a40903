"""May the job start its workers once more?  One budget for the whole job, by what failed and when.

`max_restarts` is the ceiling. Below it: the same failure three times in a row without progress ends the job,
for a fourth time would end like the third; so does a number of restarts after which the job never gets further
than it was, whatever it fails of; and one failure that comes again and again within the window
ends it too, even if steps are made in between. Progress is a higher step than any rank of the job has reported.

A program need not report steps. As long as no rank has, nobody knows whether the job makes progress: a program that
writes checkpoints may be killed ten times and be right to go on. Then only exceptions count as repetition, because an
exception with the same stack points to the program, and a cycle that ran for `steady_s` counts as progress.

All failures of a job are one list in its store (`launcher.budget`), one for each cycle; each agent times them by its
own clock from when it first saw them."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from resilience.core.attribution import InterruptionRecord

FAILED = 1
_HANG, _EXCEPTION = "limit:", "exception:"
NO_STEP = "this script reports no step, so progress is unknown; call resilience.step(n) in its training loop"
_OF_IMPORTS = ("ModuleNotFoundError", "SyntaxError", "IndentationError", "TabError")


class Failure(msgspec.Struct, frozen=True):
    """A failure that a cycle ended with. fingerprint: equal for repetitions; rank: -1 if it was the node's;
    step: the highest that this agent knows of so far, -1 before the first; at: seconds, on the clock of whoever
    decides; ran: seconds for which the cycle's workers had run; is_final: the program cannot start, so that starting
    it again is of no use; silent_for_s: of a rank that hung."""

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

    @property
    def is_hang(self) -> bool:
        """Whether a limit was exceeded, as fingerprints tell it."""
        return self.fingerprint.startswith(_HANG)

    @property
    def is_exception(self) -> bool:
        """Whether the program raised an exception, as fingerprints tell it."""
        return self.fingerprint.startswith(_EXCEPTION)


class Budget(msgspec.Struct, frozen=True):
    """What is allowed; 0 switches a rule off, but not max_restarts. window_s: seconds; steady_s: seconds after
    which a cycle counts as progress where no rank tells steps."""

    max_restarts: int
    same_limit: int = 3
    stalled_restarts: int = 5
    same_in_window: int = 10
    window_s: float = 3600.0
    same_exit_code: int = 93
    steady_s: float = 600.0


class Answer(msgspec.Struct, frozen=True):
    """May it start again; if not, with which exit code the job ends. same_in_a_row: without progress."""

    is_restart: bool
    why: str
    used: int
    left: int
    same_in_a_row: int
    exit_code: int = 0


def decide(budget: Budget, history: Sequence[Failure], failure: Failure) -> Answer:
    """Return what follows from a failure, given the failures before, oldest first.

    What the history has of the failure's own cycle is left out: a cycle counts once, and whichever of its
    agents asks, before or after another one has noted what it saw."""
    history = [past for past in history if past.cycle != failure.cycle]
    used = len(history)
    same = same_in_a_row(budget, history, failure)
    left = budget.max_restarts - used
    step = max(past.step for past in (*history, failure))

    def stop(why: str, code: int) -> Answer:
        why = why if step >= 0 or failure.is_final else f"{why}; {NO_STEP}"
        return Answer(False, why, used, max(0, left), same, code)

    if failure.is_final and not history and step < 0:
        return stop(f"the program cannot start: {failure.what}", FAILED)
    if budget.same_limit and same >= budget.same_limit:
        progress = f" without progress beyond step {step}" if step >= 0 else ""
        return stop(f"the same failure {same} times in a row{progress}: {failure.what}", budget.same_exit_code)
    if left <= 0:
        return stop(f"all {budget.max_restarts} restarts are used", FAILED)
    starts = _since_progress(budget, [*history, failure])
    if budget.stalled_restarts and step >= 0 and starts > budget.stalled_restarts:
        return stop(f"no worker has come beyond step {step} in {starts} starts", budget.same_exit_code)
    often = 1 + sum(
        past.fingerprint == failure.fingerprint and failure.at - past.at <= budget.window_s for past in history
    )
    if budget.same_in_window and often > budget.same_in_window and _may_repeat(step, failure):
        return stop(
            f"the same failure {often} times within {budget.window_s:g} s: {failure.what}", budget.same_exit_code
        )
    return Answer(True, failure.what, used + 1, left - 1, same)


def same_in_a_row(budget: Budget, history: Sequence[Failure], failure: Failure) -> int:
    """Return how many times in a row, this one included, the job failed so without progress in between."""
    all_of_them = [*history, failure]
    if not _may_repeat(max(each.step for each in all_of_them), failure):
        return 1
    progress = _progress(budget, all_of_them)
    count = 0
    for past, made in zip(reversed(all_of_them), reversed(progress), strict=True):
        if past.fingerprint != failure.fingerprint or made != progress[-1]:
            break
        count += 1
    return count


def _may_repeat(step: int, failure: Failure) -> bool:
    """Return True if the same failure again would be a repetition. step: the highest of the job, -1 if none is
    reported: then only an exception is."""
    return step >= 0 or failure.is_exception


def _since_progress(budget: Budget, failures: Sequence[Failure]) -> int:
    """Return how many failures in a row came without progress in between, of whatever kind."""
    progress = _progress(budget, failures)
    return progress.count(progress[-1])


def _progress(budget: Budget, failures: Sequence[Failure]) -> list[int]:
    """Return how often progress had been made up to each failure."""
    made, step = 0, -1
    counts = []
    for each in failures:
        # An agent that came late, or whose ranks report nothing, knows a lower step than the job has made.
        if each.step > step or (step < 0 and each.ran >= budget.steady_s):
            made += 1
        step = max(step, each.step)
        counts.append(made)
    return counts


def fingerprint(record: InterruptionRecord) -> str:
    """Return what is equal for repetitions of a failure: the exception, the limit, or the exit."""
    if record.exception is not None:
        return _EXCEPTION + record.exception.fingerprint
    if record.detector is not None and record.detector.name != "exit":
        return _HANG + record.detector.name
    if record.exit is not None and record.exit.signal is not None:
        return f"signal:{record.exit.signal}" + (":oom" if record.exit.oom else "")
    if record.exit is not None and record.exit.code is not None:
        return f"exit:{record.exit.code}"
    return record.interruption.value


def is_of_an_import(record: InterruptionRecord) -> bool:
    """Return True if a program failed while it imported its modules: one is unknown, or has a syntax error."""
    raised, end = record.exception, record.exit
    if raised is None or raised.type not in _OF_IMPORTS or end is None or not end.code:
        return False
    return all(frame.function == "<module>" for frame in raised.stack if not frame.file.startswith("<frozen "))


def describe(record: InterruptionRecord) -> str:
    """Return a failure in a few words, on one line."""
    if record.exception is not None:
        return _line(f"{record.exception.type}: {record.exception.message}")
    return _line(record.message) or record.interruption.value


def _line(text: str) -> str:
    return " ".join(text.split())[:200]


def table(history: Sequence[Failure]) -> list[str]:
    """Return all failures of a job as lines of a table, oldest first."""
    rows = [("cycle", "rank", "node", "step", "what")]
    rows += [(str(each.cycle), _number(each.rank), each.node, _number(each.step), each.what) for each in history]
    sizes = [max(len(row[column]) for row in rows) for column in range(4)]
    return ["  ".join([*(cell.ljust(size) for cell, size in zip(row, sizes, strict=False)), row[4]]) for row in rows]


def _number(value: int) -> str:
    return "-" if value < 0 else str(value)
