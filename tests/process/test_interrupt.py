"""The interrupt against real signals: what it reaches, what it spares, and what cannot stop it.

Each body runs in a process of its own (`tests.process.interrupted`)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from resilience.system.interrupt import Swallow
from tests.process import interrupted
from tests.process.interrupted import RESTARTED
from tests.support.ranks import Job

Run = Callable[..., Any]


@pytest.fixture
def run(start: Callable[..., Job]) -> Run:
    """Run a body in a process, return what it returns."""

    def call(body: Callable[..., Any], **arguments: Any) -> Any:
        job = start(1, f"tests.process.interrupted:{body.__name__}", **arguments)
        [finished] = job.wait_ranks()
        assert finished.code == 0, f"{finished}{job.output()}"
        return finished.value

    return call


def place_of(function: Callable[..., Any]) -> Swallow:
    """The line of `function` that is marked as the place."""
    code = function.__code__
    lines = Path(code.co_filename).read_text().splitlines()
    number = next(n for n in range(code.co_firstlineno, len(lines) + 1) if "the place" in lines[n - 1])
    return Swallow(code.co_filename, number, code.co_name)


PLACES = ["python_loop", "sleep", "event", "lock", "queue", "select", "subprocess", "backward", "library_loop"]


@pytest.mark.parametrize("place", PLACES)
def test_interrupt_reaches_the_main_thread(run: Run, place: str) -> None:
    assert run(interrupted.reach, place=f"in_{place}") == RESTARTED


def test_interrupt_reaches_a_data_loader_and_its_workers_go(run: Run) -> None:
    assert run(interrupted.reach_data_loader) == (RESTARTED, [])


def test_one_interrupter_serves_many_calls_and_lets_values_through(run: Run) -> None:
    run(interrupted.serve_many)


def test_call_that_is_unwanted_when_it_begins_does_not_run(run: Run) -> None:
    run(interrupted.do_not_run)


WAYS = [
    ("enter_condition", 200),
    ("use_queue", 200),
    ("end_with_a_call", 50),
    ("return_from_with", 50),
    ("release_in_finally", 50),
    ("catch_inside", 50),
    ("loop_inside", 50),
    ("switch_gradients_off", 100),
]


@pytest.mark.parametrize(("way", "rounds"), WAYS)
def test_nothing_stays_locked_or_switched_off(run: Run, way: str, rounds: int) -> None:
    # Torch is cut short after STEP_LIMIT, also where this machine gave it no turn meanwhile.
    limit = {"step_limit": 10.0} if way == "switch_gradients_off" else {}
    assert run(interrupted.count_leaks, way=way, rounds=rounds, **limit) == (rounds, 0)


@pytest.mark.parametrize("way", ["enter_condition", "use_queue", "get_logger"])
def test_nothing_stays_locked_on_a_machine_so_busy_that_the_library_takes_long(run: Run, way: str) -> None:
    assert run(interrupted.count_leaks, way=way, rounds=100, step_limit=0.0) == (100, 0)


def test_cleanup_of_user_code_runs_to_its_end(run: Run) -> None:
    run(interrupted.clean_up)


def test_what_user_code_makes_of_it_still_counts_as_arrived(run: Run) -> None:
    run(interrupted.turn_into_another)


def test_destructor_is_not_cut_short(run: Run) -> None:
    run(interrupted.spare_destructor)


def test_import_is_not_cut_short(run: Run) -> None:
    run(interrupted.spare_import)


def test_interrupt_lost_in_a_callback_is_sent_again_and_the_users_hook_is_called(run: Run) -> None:
    run(interrupted.lose_in_callback)


@pytest.mark.parametrize("way", ["except", "suppress", "keeping"])
def test_swallowed_interrupt_is_found_with_its_place_and_sent_again(run: Run, way: str) -> None:
    function = getattr(interrupted, f"swallow_by_{way}")
    assert run(interrupted.reach, place=function.__name__) == ("RankShouldRestart", True, [place_of(function)])


def test_each_swallow_is_reported(run: Run) -> None:
    run(interrupted.report_swallows)


def test_atomic_section_ends_before_the_interrupt(run: Run) -> None:
    run(interrupted.stay_whole)


def test_one_signal_is_enough_to_interrupt_at_the_end_of_an_atomic_section(run: Run) -> None:
    run(interrupted.hold_back_one)


def test_atomic_section_that_a_handler_ends_at_its_entry_or_exit_is_left(run: Run) -> None:
    run(interrupted.leave_what_an_exception_left_open)


def test_atomic_section_that_a_handler_ends_at_any_instruction_is_left_at_once(run: Run) -> None:
    run(interrupted.catch_what_a_handler_raises_at_each_instruction_of_an_atomic_section)


def test_watcher_and_atomic_section_keep_each_other_out(run: Run) -> None:
    run(interrupted.keep_out)


def test_atomic_works_outside_calls_and_in_other_threads_and_in_forked_children(run: Run) -> None:
    run(interrupted.use_atomic_anywhere)


def test_signal_in_use_is_left_to_its_owner(run: Run) -> None:
    run(interrupted.take_another)


@pytest.mark.parametrize("way", ["handler", "mask"])
def test_signal_that_user_code_takes_during_the_call_is_claimed_again(run: Run, way: str) -> None:
    run(interrupted.take_back, way=way)


def test_what_a_handler_raises_while_the_signal_is_claimed_again_reaches_the_program(run: Run) -> None:
    run(interrupted.raise_while_claimed)


def test_each_handler_that_was_put_off_is_called_again_though_the_first_raises(run: Run) -> None:
    run(interrupted.call_all_that_were_put_off)


def test_users_trace_function_stays(run: Run) -> None:
    run(interrupted.keep_trace)


def test_trace_is_off_after_stepping(run: Run) -> None:
    run(interrupted.stop_tracing)


def test_calls_that_cannot_work_are_refused(run: Run) -> None:
    run(interrupted.refuse)


def test_async_raise_reaches_a_thread_that_runs_bytecode(run: Run) -> None:
    run(interrupted.raise_in_thread)


def test_reraise_if_unraisable_raises_again_in_the_main_thread(run: Run) -> None:
    run(interrupted.raise_again)
