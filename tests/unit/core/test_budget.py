"""What a failure brings about, given those before it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from resilience.core.budget import (
    NO_STEP,
    USAGE_ERROR_S,
    WRONG_USE,
    Budget,
    Failure,
    FailureKind,
    decide,
    describe,
    fingerprint,
    is_of_an_import,
    is_usage_error,
    kind_of,
    same_in_a_row,
    table,
)
from resilience.facts.interruptions import Detector, ExceptionInfo, Exit, Frame, Interruption, InterruptionRecord

BUDGET = Budget(max_restarts=10)
DAY = 86400.0
KINDS: dict[str, FailureKind] = {
    **dict.fromkeys(("exception:a", "exception:x", "exception:y"), "exception"),
    "limit:heartbeat": "hang",
    "lost node1": "lost node",
}


def failures(*kinds: str, steps: list[int] | None = None, apart: float = 1.0, ran: float = 0.0) -> list[Failure]:
    """Return one failure a cycle; progress is made between any two unless steps say otherwise."""
    told = steps if steps is not None else [10 * number for number in range(len(kinds))]
    return [
        Failure(
            number, kind, f"it was {kind}", "node0", 0, step, at=number * apart, ran=ran, kind=KINDS.get(kind, "exit")
        )
        for number, (kind, step) in enumerate(zip(kinds, told, strict=True))
    ]


def answer(budget: Budget, all_of_them: list[Failure]):  # type: ignore[no-untyped-def]
    return decide(budget, all_of_them[:-1], all_of_them[-1])


# -- the same failure in a row ------------------------------------------------------------------------


def test_third_identical_failure_without_progress_ends_the_job_with_its_own_exit_code() -> None:
    same = failures("x", "x", "x", steps=[5, 5, 5])
    assert answer(BUDGET, same[:2]).is_restart
    third = answer(BUDGET, same)
    assert (third.is_restart, third.exit_code, third.same_in_a_row) == (False, 93, 3)
    assert third.why == "the same failure 3 times in a row without progress beyond step 5: it was x"
    assert answer(replace(BUDGET, same_exit_code=17), same).exit_code == 17


def test_another_failure_or_a_step_in_between_begins_anew() -> None:
    assert answer(BUDGET, failures("x", "x", "y", "x", steps=[5] * 4)).is_restart
    assert answer(BUDGET, failures("x", "x", "x", steps=[5, 5, 6])).same_in_a_row == 1
    assert answer(BUDGET, failures("x", "x", "x", "x", steps=[5, 6, 6, 6])).same_in_a_row == 3


def test_zero_switches_the_rule_off() -> None:
    off = replace(BUDGET, same_limit=0, same_in_window=0, stalled_restarts=0)
    assert answer(off, failures(*"xxxxxxxxxx", steps=[5] * 10)).is_restart


def test_lower_step_of_another_agent_is_no_progress_and_hides_none() -> None:
    # Agents know the steps of their own ranks: one that came late knows of fewer.
    assert answer(BUDGET, failures("x", "x", "x", steps=[9, 2, 9])).same_in_a_row == 3
    assert answer(BUDGET, failures("x", "x", "x", steps=[9, 2, 4])).same_in_a_row == 3


# -- no further than before ---------------------------------------------------------------------------


def test_job_that_never_gets_further_than_it_was_is_ended_whatever_it_fails_of() -> None:
    stalled = failures(*"abcdef", steps=[7, 3, 7, 0, 5, 7])
    assert all(answer(BUDGET, stalled[:number]).is_restart for number in range(1, 6))
    sixth = answer(BUDGET, stalled)
    assert (sixth.is_restart, sixth.exit_code) == (False, 93)
    assert sixth.why == "no worker has come beyond step 7 in 6 starts"
    assert answer(replace(BUDGET, stalled_restarts=0), stalled).is_restart
    assert answer(BUDGET, failures(*"abcdefg", steps=[7, 3, 7, 8, 5, 7, 8])).is_restart  # once it did


# -- a program that cannot start ----------------------------------------------------------------------


def test_program_that_cannot_start_is_not_started_again() -> None:
    (first,) = failures("exit:2", steps=[-1])
    answered = answer(BUDGET, [replace(first, is_final=True)])
    assert (answered.is_restart, answered.exit_code, answered.used) == (False, 1, 0)
    assert answered.why == "the program cannot start: it was exit:2"


def test_program_that_has_started_before_gets_its_restarts_when_its_files_are_gone() -> None:
    before, now = failures("x", "exit:2", steps=[-1, -1])
    assert answer(BUDGET, [before, replace(now, is_final=True)]).is_restart
    (reached,) = failures("exit:2", steps=[7])
    assert answer(BUDGET, [replace(reached, is_final=True)]).is_restart


def raised(kind: str, *functions: str, code: int = 1) -> InterruptionRecord:
    frames = tuple(Frame("<frozen runpy>" if name == "_run_code" else "t.py", 3, name) for name in functions)
    return InterruptionRecord(
        rank=0,
        interruption=Interruption.EXCEPTION,
        exception=ExceptionInfo(kind, "no_such", "abc", frames),
        exit=Exit(code=code),
    )


def test_only_a_missing_module_or_syntax_error_at_import_counts_as_import_error() -> None:
    assert is_of_an_import(raised("ModuleNotFoundError", "_run_code", "<module>", "<module>"))
    assert is_of_an_import(raised("SyntaxError", "<module>"))
    assert not is_of_an_import(raised("ModuleNotFoundError", "<module>", "main"))
    assert not is_of_an_import(raised("ImportError", "<module>"))
    assert not is_of_an_import(raised("ModuleNotFoundError", "<module>", code=0))
    assert not is_of_an_import(replace(raised("ModuleNotFoundError", "<module>"), exit=None))


def test_agent_that_knows_no_step_does_not_end_a_job_that_has_made_some() -> None:
    assert answer(BUDGET, failures("p", "q", "r", "lost node1", steps=[100, 200, 300, -1])).is_restart


# -- programs that report no steps --------------------------------------------------------------------


def test_program_that_reports_no_step_has_the_whole_budget_for_whatever_is_no_exception() -> None:
    """Nothing but the launcher was replaced: `--max-restarts` is what it was under torchrun."""
    for kind in ("signal:SIGKILL", "exit:3", "limit:heartbeat", "lost node1"):
        killed = failures(*[kind] * 11, steps=[-1] * 11)
        for number in range(1, 11):
            answered = answer(BUDGET, killed[:number])
            assert (answered.is_restart, answered.same_in_a_row) == (True, 1)
        last = answer(BUDGET, killed)
        assert (last.is_restart, last.exit_code) == (False, 1)
        assert last.why == f"all 10 restarts are used; {NO_STEP}"


@pytest.mark.parametrize(
    ("most", "why"), [(0, "no restart is allowed"), (1, "the only restart is used"), (2, "all 2 restarts are used")]
)
def test_budget_that_is_used_up_says_so_in_words(most: int, why: str) -> None:
    budget = replace(BUDGET, max_restarts=most)
    assert answer(budget, failures(*["signal:SIGKILL"] * (most + 1))).why.startswith(why)


def test_exception_that_comes_again_ends_a_program_that_reports_no_step() -> None:
    same = failures(*["exception:x"] * 3, steps=[-1] * 3)
    third = answer(BUDGET, same)
    assert (third.is_restart, third.exit_code) == (False, 93)
    assert third.why == f"the same failure 3 times in a row: it was exception:x; {NO_STEP}"
    assert answer(BUDGET, failures("exception:x", "exception:x", "exit:1", "exception:x", steps=[-1] * 4)).is_restart


def usage_errors(count: int) -> list[Failure]:
    ended = failures(*["exit:2"] * count, steps=[-1] * count)
    return [replace(each, kind="usage error") for each in ended]


def test_usage_error_that_comes_again_ends_a_program_that_reports_no_step() -> None:
    third = answer(BUDGET, usage_errors(3))
    assert (third.is_restart, third.exit_code, third.same_in_a_row) == (False, 93, 3)
    assert third.why == f"the same failure 3 times in a row: it was exit:2; {WRONG_USE}"
    assert answer(BUDGET, usage_errors(2)).is_restart
    assert answer(replace(BUDGET, same_limit=0), usage_errors(10)).is_restart
    assert answer(replace(BUDGET, same_limit=0), usage_errors(11)).exit_code == 1  # no restart is left
    assert answer(replace(BUDGET, same_limit=0, max_restarts=20), usage_errors(11)).exit_code == 93  # within the window


@pytest.mark.parametrize("number", [0, 1, 2])
def test_the_same_exit_status_at_another_time_is_no_usage_error(number: int) -> None:
    """A program that ran for longer had begun to work: each restart may help."""
    ended = usage_errors(3)
    ended[number] = replace(ended[number], kind="exit")
    assert answer(BUDGET, ended).is_restart
    many = [replace(each, kind="exit") for each in usage_errors(11)]
    assert answer(Budget(max_restarts=100, same_limit=0), [*many, *usage_errors(12)[11:]]).is_restart
    with_steps = [replace(each, step=4) for each in ended]
    assert answer(BUDGET, with_steps).exit_code == 93  # as before: with steps each exit status counts


def test_cycle_that_ran_for_ten_minutes_is_progress_of_a_program_that_reports_no_step() -> None:
    early = failures(*["exception:x"] * 3, steps=[-1] * 3, ran=BUDGET.steady_s - 1)
    assert answer(BUDGET, early).exit_code == 93
    after_a_while = [replace(early[0], ran=BUDGET.steady_s), *early[1:]]
    assert answer(BUDGET, after_a_while).same_in_a_row == 3
    assert answer(BUDGET, [*early[:2], replace(early[2], ran=BUDGET.steady_s)]).same_in_a_row == 1


def test_signal_that_comes_again_is_a_repetition_once_steps_are_reported() -> None:
    assert answer(BUDGET, failures(*["signal:SIGKILL"] * 3, steps=[4, -1, 4])).exit_code == 93


def test_where_steps_are_reported_time_is_no_progress() -> None:
    assert answer(BUDGET, failures("x", "x", "x", steps=[5, 5, 5], ran=DAY)).exit_code == 93


# -- the window, and the ceiling ----------------------------------------------------------------------


def test_same_failure_too_often_within_the_window_ends_the_job_although_steps_are_made() -> None:
    budget = Budget(max_restarts=100, same_in_window=4, window_s=10.0)
    assert answer(budget, failures(*"xxxx")).is_restart
    fifth = answer(budget, failures(*"xxxxx"))
    assert (fifth.is_restart, fifth.exit_code) == (False, 93)
    assert "5 times within 10 s" in fifth.why
    assert answer(budget, failures(*"xyxyxyxy")).is_restart
    assert answer(budget, failures(*"xxxxxxxxx", apart=3.0)).is_restart
    assert answer(replace(budget, same_in_window=0), failures(*"xxxxx")).is_restart


def test_program_that_accepts_its_arguments_at_last_is_not_ended_for_the_window() -> None:
    budget = Budget(max_restarts=100, same_limit=0)
    rejected = usage_errors(12)
    assert not answer(budget, rejected).is_restart
    assert answer(budget, [*rejected[:11], replace(rejected[11], kind="exit")]).is_restart


def test_job_that_advances_and_has_used_its_restarts_ends_with_1_whatever_it_failed_of() -> None:
    """With the launcher's own limits: its scheduler starts it again, and it goes on from its checkpoint."""
    equal = failures(*"xxxxxxxxxxx", apart=300.0)
    assert answer(BUDGET, equal[:10]).is_restart
    last = answer(BUDGET, equal)
    assert (last.is_restart, last.exit_code, last.why) == (False, 1, "all 10 restarts are used")


def test_failure_in_a_row_without_restarts_left_ends_the_job_with_exit_code_93() -> None:
    last = answer(replace(BUDGET, max_restarts=2), failures(*"xxx", steps=[3] * 3))
    assert (last.exit_code, last.why) == (
        93,
        "the same failure 3 times in a row without progress beyond step 3: it was x",
    )


def test_starts_without_progress_and_without_restarts_left_end_the_job_with_exit_code_93() -> None:
    stalled = answer(replace(BUDGET, max_restarts=5), failures(*"abcdef", steps=[3] * 6))
    assert (stalled.exit_code, stalled.why) == (93, "no worker has come beyond step 3 in 6 starts")


@pytest.mark.parametrize("most", [0, 1, 5])
def test_max_restarts_is_the_ceiling(most: int) -> None:
    all_of_them = failures(*"abcdef"[: most + 1])
    for number in range(1, most + 1):
        answered = answer(Budget(most), all_of_them[:number])
        assert (answered.is_restart, answered.used, answered.left) == (True, number, most - number)
    last = answer(Budget(most), all_of_them)
    assert (last.is_restart, last.exit_code, last.left) == (False, 1, 0)


# -- what holds for any history -----------------------------------------------------------------------

histories = st.lists(
    st.tuples(
        st.sampled_from(["exception:x", "exception:y", "signal:SIGKILL"]),
        st.integers(-1, 6),
        st.sampled_from([0.0, 700.0]),
        st.sampled_from([0.0, 1.0, 5000.0]),
    ),
    min_size=1,
    max_size=25,
)
budgets = st.builds(
    Budget,
    max_restarts=st.integers(0, 12),
    same_limit=st.integers(0, 4),
    stalled_restarts=st.integers(0, 4),
    same_in_window=st.integers(0, 5),
)


def made(drawn: list[tuple[str, int, float, float]]) -> list[Failure]:
    at, built = 0.0, []
    for cycle, (kind, step, ran, apart) in enumerate(drawn):
        at += apart
        built.append(Failure(cycle, kind, kind, "n", 0, step, at, ran, kind=KINDS.get(kind, "exit")))
    return built


@given(budgets, histories)
def test_job_ends_after_at_most_its_restarts_and_only_for_a_reason_that_holds(
    budget: Budget, drawn: list[tuple[str, int, float, float]]
) -> None:
    all_of_them = made(drawn)
    now, past = all_of_them[-1], all_of_them[:-1]
    answered = decide(budget, past, now)
    highest = max(each.step for each in all_of_them)
    if answered.is_restart:
        assert len(past) < budget.max_restarts and answered.exit_code == 0
        assert (answered.used, answered.left) == (len(past) + 1, budget.max_restarts - len(past) - 1)
        return
    assert answered.exit_code in (1, 93) and answered.left >= 0
    may_repeat = highest >= 0 or now.kind == "exception"
    row = (
        budget.same_limit
        and may_repeat
        and len(past) + 1 >= budget.same_limit
        and all(each.fingerprint == now.fingerprint for each in all_of_them[-budget.same_limit :])
    )
    often = sum(each.fingerprint == now.fingerprint and now.at - each.at <= budget.window_s for each in all_of_them)
    before = [each.step for each in all_of_them]
    further = max(
        (at for at, step in enumerate(before) if step > max(before[:at], default=-1)), default=0
    )  # the last one that had come further
    is_stalled = highest >= 0 and len(before) - further > budget.stalled_restarts > 0
    if answered.exit_code == 93:
        too_often = may_repeat and often > budget.same_in_window > 0 and len(past) < budget.max_restarts
        assert row or too_often or is_stalled
    else:
        assert len(past) >= budget.max_restarts


@given(budgets, histories)
def test_row_is_the_longest_end_of_equal_failures_without_progress(
    budget: Budget, drawn: list[tuple[str, int, float, float]]
) -> None:
    all_of_them = made(drawn)
    expected = 1
    may_repeat = max(each.step for each in all_of_them) >= 0 or all_of_them[-1].kind == "exception"
    for begin in range(len(all_of_them) - 2, -1, -1) if may_repeat else ():  # the definition, anew for each length
        row, before = all_of_them[begin:], all_of_them[: begin + 1]
        known = max(each.step for each in before)
        rose = any(each.step > known for each in row[1:])
        silent_but_long = any(
            each.ran >= budget.steady_s and max(e.step for e in all_of_them[: each.cycle]) < 0 for each in row[1:]
        )
        if len({each.fingerprint for each in row}) > 1 or rose or silent_but_long:
            break
        expected = len(row)
    assert same_in_a_row(budget, all_of_them[:-1], all_of_them[-1]) == expected


@given(budgets, histories)
def test_answer_is_the_same_once_the_failure_itself_is_in_the_list(
    budget: Budget, drawn: list[tuple[str, int, float, float]]
) -> None:
    all_of_them = made(drawn)
    assert decide(budget, all_of_them, all_of_them[-1]) == decide(budget, all_of_them[:-1], all_of_them[-1])


# -- words --------------------------------------------------------------------------------------------


def record(**known: object) -> InterruptionRecord:
    return InterruptionRecord(rank=1, interruption=Interruption.TERMINATED, **known)  # type: ignore[arg-type]


def test_fingerprint_tells_failures_apart_and_repetitions_not() -> None:
    error = ExceptionInfo("ValueError", "batch 17", "abc", (Frame("t.py", 3, "f"),))
    kinds = [
        record(exception=error, exit=Exit(code=1)),
        record(exit=Exit(code=1)),
        record(exit=Exit(code=2)),
        record(exit=Exit(signal="SIGKILL")),
        record(exit=Exit(signal="SIGKILL", oom=True)),
        record(detector=Detector("section:data", 3.0), exit=Exit(signal="SIGKILL")),
        record(detector=Detector("step", 3.0), exit=Exit(signal="SIGKILL")),
        record(),
    ]
    assert len(set(map(fingerprint, kinds))) == len(kinds)
    again = record(exception=replace(error, message="batch 18"), pid=7, step=9)
    assert fingerprint(again) == fingerprint(kinds[0])
    assert list(map(kind_of, kinds)) == ["exception", "exit", "exit", "exit", "exit", "hang", "hang", "exit"]


def test_end_without_a_known_status_has_the_fingerprint_of_its_interruption() -> None:
    assert fingerprint(record(exit=Exit())) == Interruption.TERMINATED.value


def test_usage_error_is_exit_status_2_soon_after_the_start_and_no_exception() -> None:
    error = ExceptionInfo("ValueError", "batch 17", "abc", (Frame("t.py", 3, "f"),))
    soon = USAGE_ERROR_S - 1
    assert is_usage_error(record(exit=Exit(code=2)), soon)
    assert is_usage_error(record(exit=Exit(code=2), detector=Detector("exit")), soon)
    assert not is_usage_error(record(exit=Exit(code=2)), USAGE_ERROR_S)
    for other in (
        record(exit=Exit(code=1)),
        record(exit=Exit(code=3)),
        record(exit=Exit(signal="SIGINT")),  # signal 2
        record(exit=Exit(code=2), exception=error),
        record(exit=Exit(code=2), detector=Detector("step", 3.0)),
        record(),
    ):
        assert not is_usage_error(other, soon)


def test_table_has_a_line_a_failure_whatever_the_message() -> None:
    told = describe(record(exception=ExceptionInfo("ValueError", "one\n  two\nthree", "abc")))
    assert told == "ValueError: one two three"
    assert len(describe(record(message="x" * 9999))) <= 200
    lines = table([Failure(0, "x", told, "node0", 1, 7), Failure(1, "y", "node node1 is lost", "node1", -1, -1)])
    assert lines == [
        "cycle  rank  node   step  what",
        "0      1     node0  7     ValueError: one two three",
        "1      -     node1  -     node node1 is lost",
    ]


def test_failure_without_an_exception_is_described_by_its_message_or_else_by_its_kind() -> None:
    assert describe(record(message="process 7\nended")) == "process 7 ended"
    assert describe(record()) == Interruption.TERMINATED.value


def test_first_death_without_a_step_is_no_repetition_even_where_one_is_the_limit() -> None:
    budget = Budget(max_restarts=3, same_limit=1)
    assert decide(budget, [], made([("signal:SIGKILL", -1, 0.0, 0.0)])[0]).is_restart
    assert not decide(budget, [], made([("exception:a", -1, 0.0, 0.0)])[0]).is_restart


@pytest.mark.parametrize(
    ("interruption", "detector"), [(Interruption.UNRESPONSIVE, "look"), (Interruption.HARD_TIMEOUT, "watchdog")]
)
def test_failed_program_that_was_seen_shutting_down_is_an_end_and_no_hang(
    interruption: Interruption, detector: str
) -> None:
    """A limit, or another rank's, only showed it. Two exit codes are two failures."""
    code, signalled, silent = (
        InterruptionRecord(1, interruption, detector=Detector(detector), exit=end, stage="ending")
        for end in (Exit(code=3), Exit(signal="SIGINT"), None)
    )
    assert [(fingerprint(each), kind_of(each)) for each in (code, signalled, silent)] == [
        ("exit:3", "exit"),
        ("signal:SIGINT", "exit"),
        (f"limit:{detector}", "hang"),
    ]
