"""Whose fault an exception is, and what hooks get to see of it."""

from __future__ import annotations

import asyncio
import builtins
import contextlib
import itertools
import sys
import threading
import traceback
from types import FunctionType

import pytest
from torch.distributed.checkpoint.api import CheckpointException

from resilience.errors import RankShouldRestart, RestartAbort
from resilience.facts.encoding import from_json, to_json
from resilience.facts.interruptions import FaultOrigin, Frame
from resilience.inprocess._runtime import failure


def of_rank_1(error: BaseException) -> CheckpointException:
    return CheckpointException("save", {1: (error, traceback.StackSummary())})


@pytest.fixture(params=[0, 1])
def rank(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setenv("RANK", str(request.param))
    monkeypatch.setenv("WORLD_SIZE", "2")
    return int(request.param)


@pytest.mark.parametrize("is_cutting", [False, True])
def test_checkpoint_that_fails_is_the_fault_of_the_rank_that_it_names(rank: int, is_cutting: bool) -> None:
    cause = OSError("disk full")
    error = of_rank_1(cause)
    origin = failure.origin_of(error, is_cutting)
    followed: FaultOrigin = "consequence" if is_cutting else "communication"
    assert origin == ("own" if rank == 1 else followed)
    assert failure.own_cause(error, origin) is (cause if rank == 1 else None)
    assert failure.restarts_all(error)


def test_checkpoint_that_an_interruption_cut_short_is_nobodys_fault(rank: int) -> None:
    assert failure.origin_of(of_rank_1(RankShouldRestart()), is_cutting=True) == "consequence"


def replaced(*errors: BaseException) -> BaseException:
    """Return the last of these exceptions, each raised while the one before was handled."""
    for before, error in itertools.pairwise(errors):
        error.__context__ = before
    return errors[-1]


def test_rank_leaves_for_ctrl_c_and_for_an_abort_that_followed_from_no_other_exception() -> None:
    gives_up, interruption = RestartAbort(), RankShouldRestart()
    ctrl_c = KeyboardInterrupt()
    assert failure.leaving(replaced(ctrl_c, interruption), None) is ctrl_c
    assert failure.leaving(replaced(gives_up, OSError(), interruption), None) is gives_up
    for error in (SystemExit(3), GeneratorExit(), asyncio.CancelledError(), ValueError()):
        assert failure.leaving(replaced(error, RankShouldRestart()), None) is None
    assert failure.leaving(replaced(RuntimeError("aborted"), RestartAbort(), RankShouldRestart()), None) is None
    assert failure.leaving(replaced(RankShouldRestart(), RestartAbort()), None) is None


def test_what_the_caller_handles_makes_no_rank_leave() -> None:
    outside = KeyboardInterrupt()
    gives_up = RestartAbort()
    assert failure.leaving(replaced(outside, RankShouldRestart()), outside) is None
    assert failure.leaving(replaced(outside, gives_up, RankShouldRestart()), outside) is gives_up


def test_circle_of_exceptions_ends() -> None:
    first, second = ValueError(), OSError()
    first.__context__, second.__context__ = second, first
    assert failure.leaving(first, None) is None


def look_up(key: str) -> None:
    {}[key]


def test_exception_is_described_with_its_notes_and_causes() -> None:
    try:
        try:
            look_up("seven")
        except KeyError as error:
            error.__notes__ = ["of shard 3"]  # type: ignore[attr-defined]
            raise ValueError("no seven") from error
    except ValueError as error:
        error.__notes__ = ["batch 17", "seed 4"]  # type: ignore[attr-defined]
        described = failure.describe(error)
    assert (described.type, described.message, described.notes) == ("ValueError", "no seven", ("batch 17", "seed 4"))
    (cause,) = described.causes
    assert (cause.type, cause.message, cause.relation, cause.notes) == ("KeyError", "'seven'", "cause", ("of shard 3",))
    assert [frame.function for frame in cause.stack][1:] == ["look_up"]


def test_causes_are_those_that_a_traceback_shows() -> None:
    shown: list[tuple[str, ...]] = []
    for raising in ("raise ValueError", "raise ValueError from None", "raise ValueError from OSError()"):
        try:
            exec(f"try:\n 1 / 0\nexcept Exception:\n {raising}")
        except ValueError as error:
            shown.append(tuple(f"{cause.relation} {cause.type}" for cause in failure.describe(error).causes))
    assert shown == [("context ZeroDivisionError",), (), ("cause OSError",)]


def test_cycle_of_causes_ends() -> None:
    first, second = ValueError("a"), ValueError("b")
    first.__cause__, second.__cause__ = second, first
    assert [cause.message for cause in failure.describe(first).causes] == ["b"]


def test_notes_and_causes_are_bounded_whatever_they_are() -> None:
    error: BaseException = ValueError("0")
    error.__notes__ = ["x" * 10**6] * 100 + [7]  # type: ignore[attr-defined,list-item]
    for number in range(100):
        error, before = ValueError(str(number)), error
        error.__cause__ = before
    error.__notes__ = "no list"  # type: ignore[attr-defined]
    described = failure.describe(error)
    assert (len(described.causes), described.notes) == (failure.MAX_CAUSES, ())


def test_note_about_exceptions_of_handlers_has_each_of_them_and_not_the_noted_one() -> None:
    error: BaseException = KeyError("seven")
    try:
        try:
            raise error
        except KeyError:
            try:
                look_up("eight")
            finally:
                look_up("nine")
    except KeyError as raised:
        failure.note_later(error, raised)
    (note,) = error.__notes__  # type: ignore[attr-defined]
    assert note.splitlines()[0].endswith("KeyError: 'nine'")
    assert [name for name in ("seven", "eight", "nine") if f"KeyError: '{name}'\n" in f"{note}\n"] == ["eight", "nine"]
    assert failure.describe(error).notes == (note[: failure.MAX_NOTE],)


class Delegating(Exception):
    """Passes on each attribute that it does not have, as urllib's HTTPError does; without a response, that raises."""

    def __getattr__(self, name: str) -> object:
        return getattr(self.__dict__["file"], name)


def test_exception_whose_attributes_raise_is_described_alone_and_as_a_cause() -> None:
    error, outer = Delegating("not found"), ValueError("no data")
    outer.__cause__ = error
    assert (failure.describe(error).message, failure.describe(error).notes) == ("not found", ())
    assert failure.origin_of(error, is_cutting=False) == "own"
    assert [cause.message for cause in failure.describe(outer).causes] == ["not found"]


def test_exception_of_a_handler_that_cannot_be_formatted_is_noted_by_its_text_and_stack() -> None:
    error, raised = KeyboardInterrupt(), Delegating("not found")
    with contextlib.suppress(Delegating):
        raise raised
    failure.note_later(error, raised)
    (note,) = vars(error)["__notes__"]
    assert note.startswith("afterwards a signal handler raised Delegating: not found\n")
    assert "raise raised" in note


class Unprintable:
    def __str__(self) -> str:
        raise RuntimeError("it cannot be printed")


def test_exception_that_cannot_be_printed_has_one_fingerprint_whatever_its_str_raises() -> None:
    class Broken(Exception):
        def __str__(self) -> str:
            raise self.args[0]

    errors = [Broken(KeyError("rank 0")), Broken(AttributeError("rank 1")), Broken(SystemExit(3))]
    assert len({failure.describe(error).fingerprint for error in errors}) == 1


def test_syntax_error_whose_message_cannot_be_printed_is_described() -> None:
    assert failure.describe(SyntaxError(Unprintable())).message == "<no message: __str__ raised RuntimeError>"


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exception groups are of Python 3.11")
def test_parts_of_a_group_are_reported() -> None:
    group = builtins.ExceptionGroup("two", [ValueError("a"), KeyError("b")])
    causes = failure.describe(group).causes
    assert [(cause.relation, cause.type) for cause in causes] == [("part", "ValueError"), ("part", "KeyError")]


def test_instruction_without_a_line_costs_no_record() -> None:
    """A frame that is looked at between two lines has none, and a record with such a stack was not decoded."""
    seen = []

    def look() -> None:
        assert sys._getframe().f_lineno is None
        seen.append(failure.stack_of(threading.get_ident()))

    FunctionType(look.__code__.replace(co_linetable=b""), globals(), closure=look.__closure__)()
    (stack,) = seen
    (frame,) = (frame for frame in stack if frame.function == "look")
    assert frame.line == 0
    assert from_json(to_json(frame), Frame) == frame
