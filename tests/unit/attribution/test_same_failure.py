"""The report and the restart budget agree which exceptions are the same failure, however they learn of them."""

from __future__ import annotations

import itertools
import traceback

import msgspec
import pytest

from resilience.attribution.culprits import Culprit
from resilience.attribution.incident import Incident
from resilience.attribution.verdict import Verdict
from resilience.core import budget
from resilience.facts.interruptions import ExceptionInfo, Exit, FaultOrigin, Interruption, InterruptionRecord
from resilience.facts.tracebacks import parse
from resilience.inprocess._runtime.failure import describe

RAISES = {
    "a message": "raise ValueError('bad batch 7 in /data/x')",
    "another message": "raise ValueError('bad label 7 in /data/x')",
    "no message": "raise ValueError",
    "a message that begins with a line break": "raise ValueError('\\nsecond line')",
    "several lines": "raise ValueError('first\\nsecond\\nthird')",
    "colours": "raise ValueError('a \\x1b[31mred\\x1b[0m message')",
    "bytes that are no text": "raise ValueError('caf\\udce9 is unknown')",
    "a long message": "raise ValueError('x ' * 5000)",
    "a long quotation": "raise ValueError('\"' + 'a' * 3000 + '\" is unknown')",
    "an operating system's error": "open('/nonexistent/file')",
    "a key": "raise KeyError('seven')",
    "an assertion": "assert 1 == 2",
    "a syntax error": "compile('a b', 'other.py', 'exec')",
    "a kind of syntax error": "class Bad(SyntaxError): pass\nraise Bad('bad token', ('a.conf', 3, 1, 'x'))",
    "a missing module": "import no_such_module",
    "a note": "error = TypeError('bad')\nerror.add_note('a note')\nraise error",
    "a note without a message": "error = TypeError()\nerror.add_note('a note')\nraise error",
    "a cause": "try:\n    {}['x']\nexcept KeyError as error:\n    raise RuntimeError('no') from error",
    "a group": "raise ExceptionGroup('tasks failed', [ValueError('x'), KeyError('y')])",
    "a class of a function": "class Broken(Exception): pass\nraise Broken('x')",
    "a recursion": "def again(n): return again(n + 1)\nagain(0)",
    "a message that cannot be printed": (
        "class Broken(Exception):\n    def __str__(self): raise KeyError('no message')\nraise Broken(1)"
    ),
    "a type with a module": "import socket\nraise socket.gaierror(-2, 'Name or service not known')",
}


def raised_by(code: str) -> tuple[ExceptionInfo, ExceptionInfo]:
    """Return the exception as a Wrapper catches it, and as its traceback at the end of the output shows it."""
    body = "".join(f"    {line}\n" for line in code.splitlines())
    try:
        exec(compile(f"def train():\n{body}\ntrain()\n", "/home/me/train.py", "exec"), {"__name__": "__main__"})
    except Exception as error:
        own = error.with_traceback(None if error.__traceback__ is None else error.__traceback__.tb_next)
        printed = "".join(traceback.format_exception(own)).encode(errors="backslashreplace").decode()
        shown = parse(printed.split("\n"))
        assert shown is not None
        return describe(own), shown
    pytest.fail("the code does not raise")


def in_the_report(error: ExceptionInfo) -> str:
    record = InterruptionRecord(0, Interruption.EXCEPTION, exception=error)
    verdict = Verdict("exception", "user_code", 0, (Culprit(0, "exception", 0.9, 2),))
    return Incident(1, 0, 0, 0, 0, "restarted", "exception", verdict, records=(record,)).fingerprint


def in_the_budget(error: ExceptionInfo) -> str:
    record = InterruptionRecord(0, Interruption.TERMINATED, exception=error, exit=Exit(code=1))
    return budget.fingerprint(record).removeprefix("exception:")


@pytest.mark.parametrize("what", RAISES)
def test_exception_has_one_fingerprint_in_the_report_and_in_the_budget(what: str) -> None:
    caught, printed = raised_by(RAISES[what])
    stored = msgspec.json.decode(msgspec.json.encode(printed), type=ExceptionInfo)
    marks = {of(error) for of in (in_the_report, in_the_budget) for error in (caught, printed, stored)}
    assert len(marks) == 1


def test_unlike_exceptions_are_unlike_in_both() -> None:
    errors = [raised_by(code)[0] for code in RAISES.values()]
    for first, second in itertools.combinations(errors, 2):
        assert in_the_report(first) != in_the_report(second)
        assert in_the_budget(first) != in_the_budget(second)


ENDS = [Exit(signal="SIGKILL"), Exit(signal="SIGKILL", oom=True), Exit(signal="SIGSEGV"), Exit(code=1), Exit(code=7)]


def of_end(end: Exit, rank: int) -> tuple[str, str]:
    """Return the marks of a process's end in the report and in the budget."""
    record = InterruptionRecord(rank, Interruption.TERMINATED, exit=end, pid=100 + rank)
    verdict = Verdict("killed", "unknown", rank, (Culprit(rank, "killed", 0.95, 1),))
    incident = Incident(1, 0, 0, 0, 0, "restarted", "terminated", verdict, records=(record,))
    return incident.fingerprint, budget.fingerprint(record)


def test_report_and_budget_agree_which_ends_are_the_same() -> None:
    """The budget shows an end as it is, and the report shows a hash of that."""
    for first, second in itertools.product(ENDS, ENDS):
        in_report, in_budget = zip(of_end(first, 0), of_end(second, 3), strict=True)
        assert (in_report[0] == in_report[1]) is (in_budget[0] == in_budget[1]) is (first == second)


def of_survivor(rank: int, error: ExceptionInfo, origin: FaultOrigin | None) -> str:
    """Return the fingerprint of a rank that went on while the others waited, if this other rank raised first."""
    record = InterruptionRecord(rank, Interruption.EXCEPTION, exception=error, origin=origin)
    verdict = Verdict("went_on", "user_code", 0, (Culprit(0, "went_on", 0.6, 7),))
    return Incident(1, 0, 0, 0, 0, "restarted", "exception", verdict, records=(record,)).fingerprint


def test_rank_that_went_on_is_the_same_fault_whichever_other_rank_failed_for_it() -> None:
    closed = raised_by("raise RuntimeError('Connection closed by peer')")[0]
    reset = raised_by("raise ConnectionResetError('reset by peer')")[0]
    marks = {of_survivor(1, closed, "consequence"), of_survivor(2, reset, "consequence"), of_survivor(3, reset, None)}
    assert len(marks) == 1
    assert marks.isdisjoint((in_the_report(closed), in_the_report(reset)))
