"""Code written for the compatible API behaves here as it does there."""

from __future__ import annotations

import ast
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from resilience.facts import events
from tests.support.ranks import Job

Start = Callable[..., Job]
JOBS = "tests.process.compatible_jobs"

# What the compatible API promises, and the tests that hold us to it.
SENTENCES: dict[str, tuple[str, ...]] = {
    "rank_assignment, activate all, rank_filter, RANK and WORLD_SIZE are set before the first iteration": (
        "test_hooks_are_called_in_the_order_of_the_api_and_with_this_ranks_own_cause",
        "test_function_sees_the_active_world",
        "test_all_ranks_are_active_before_a_filter",
    ),
    "initialize, health_check(state, None), function; an inactive rank waits until any rank completed": (
        "test_hooks_are_called_in_the_order_of_the_api_and_with_this_ranks_own_cause",
        "test_inactive_rank_returns_none_when_all_is_well",
        "test_spare_steps_in_for_a_lost_rank",
    ),
    "abort, interrupt, finalize(state, cause), health_check(state, cause), barrier, rank_assignment, iteration + 1": (
        "test_hooks_are_called_in_the_order_of_the_api_and_with_this_ranks_own_cause",
        "test_iterations_count_from_0",
    ),
    "cause is this rank's own exception, None where another rank failed; FaultCounter counts only its own": (
        "test_hooks_are_called_in_the_order_of_the_api_and_with_this_ranks_own_cause",
        "test_faults_of_others_and_checks_before_the_start_do_not_count",
        "test_rank_that_fails_too_often_is_excluded",
    ),
    "what finalize and health_check return is ignored by the Wrapper; Compose hands it on": (
        "test_what_finalize_and_health_check_return_is_ignored",
        "test_pairs_are_handed_on_as_two_arguments",
    ),
    "an exception in abort is recorded, never raised": (
        "test_exception_in_abort_is_recorded_and_the_restart_goes_on_over_a_fresh_store",
    ),
    "raise RankShouldRestart in user code restarts all": ("test_rank_should_restart_raised_by_user_code_restarts_all",),
    "barriers wait at most barrier_timeout, the completion barrier completion_timeout; a miss restarts all": (
        "test_barrier_that_somebody_misses_times_out",
        "test_rank_that_waits_in_vain_for_completion_interrupts",
    ),
    "no single wait is longer than (soft_timeout - progress_watchdog_interval) / 2": (
        "test_rank_that_waits_answers_its_watchdog_twice_within_the_soft_timeout",
        "test_no_single_wait_is_longer_than_a_chunk",
    ),
    "manual ping is disarmed before the completion barrier": (
        "test_rank_that_pinged_waits_for_completion_for_longer_than_its_soft_timeout",
        "test_only_what_the_rank_is_doing_is_weighed",
    ),
    "an Exception in initialize or in the health check before the function restarts all": (
        "test_exception_in_a_hook_before_the_function_restarts_all",
        "test_failing_hook_restarts_before_the_function_and_excludes_after_a_fault",
    ),
    "a BaseException there ends the rank": ("test_job_ends_when_it_has_restarted_too_often",),
    "finalize failing: its own exception leaves this rank, health check skipped": (
        "test_failing_finalize_excludes_its_rank",
    ),
    "the health check after a fault failing: HealthCheckError, the rank leaves": (
        "test_rank_that_fails_too_often_is_excluded",
    ),
    "own rank terminated by assignment: RankDiscarded": (
        "test_rank_that_the_assignment_terminates_is_discarded_and_the_others_go_on",
        "test_group_that_lost_a_member_is_excluded_whole",
    ),
    "ranks still in terminated_ranks after assignment: RestartError": (
        "test_terminated_ranks_that_the_assignment_leaves_over_are_a_restart_error",
    ),
    "a broken invariant: InternalError": ("test_hook_that_breaks_an_invariant_of_the_world_is_an_internal_error",),
    "whatever leaves the loop: a BASE_EXCEPTION record, the rank terminated, the barrier joined, then re-raised": (
        "test_base_exception_ends_its_rank_and_the_others_go_on",
        "test_base_exception_ends_the_rank_without_hooks",
    ),
    "on return every rank records itself as finished, its monitor a dead one; the store's host leaves last": (
        "test_rank_that_died_after_completion_has_departed_for_the_rank_that_holds_the_store",
        "test_store_stays_longer_than_the_barriers_limit_when_the_rank_beside_it_has_left",
    ),
    "a rank in the store's critical_ranks leaves last": (
        "test_rank_that_holds_the_store_waits_for_all_others_and_not_for_ever",
        "test_rank_departs_without_waiting",
        "test_rank_in_critical_ranks_of_the_users_store_leaves_last",
    ),
    "only from the main thread and with no process group alive, checked at each call": (
        "test_call_that_cannot_be_restarted_is_refused",
    ),
    "a wrapped function may be called again in the same process; a call leaves nothing behind": (
        "test_function_can_be_called_several_times",
        "test_calls_leave_nothing_however_they_end_and_each_forks_its_monitor",
    ),
    "keys of the base store carry call number, run id and restart count, since an agent's store outlives restarts": (
        "test_function_can_be_called_several_times",
        "test_killed_rank_shrinks_in_place_and_below_the_minimum_the_launcher_takes_over",
    ),
    "an interrupt that lands in __del__, a weakref or gc callback is delivered again": (
        "test_interrupt_lost_in_a_callback_is_sent_again_and_the_users_hook_is_called",
        "test_destructor_is_not_cut_short",
    ),
    "each phase is a span and a sample of a histogram": (
        "test_iteration_holds_its_stages_and_the_restart_its_phases",
        "test_metrics_have_the_restarts_and_phases_that_were_counted",
        "test_spans_have_the_restarts_and_phases_that_were_counted",
    ),
    "detect: an exception, the soft timeout, the hard timeout, a process that is gone, an unresponsive peer": (
        "test_exception_on_one_rank_restarts_all",
        "test_hang_past_the_soft_limit_restarts_all_in_process",
        "test_rank_that_cannot_be_interrupted_is_killed_with_evidence",
        "test_dead_rank_is_excluded_and_its_end_recorded",
        "test_rank_that_dies_together_with_its_monitor_is_excluded_by_its_neighbour",
    ),
    "detect, unlike the design: a monitor that fails is recorded, and its rank goes on": (
        "test_rank_whose_monitor_is_killed_goes_on_and_says_so",
    ),
    "agree: arrival order comes from the store; the last call closes after last_call_wait at the latest": (
        "test_arrival_orders_come_from_the_store_and_are_unique",
        "test_last_call_waits_for_the_other_ranks_and_at_most_last_call_wait",
    ),
    "finalize, check: each under a limit; a hook that fails or hangs excludes the rank and the record names it": (
        "test_hanging_hook_is_killed_at_the_hard_limit_and_named",
        "test_failing_finalize_excludes_its_rank",
    ),
    "complete, unlike the design: a spare waits for the outcome, not in the barrier": (
        "test_spare_that_fails_after_completion_waits_for_nobody",
    ),
    "regroup: a fresh store in each iteration, its address and port in MASTER_ADDR and MASTER_PORT": (
        "test_exception_in_abort_is_recorded_and_the_restart_goes_on_over_a_fresh_store",
    ),
    "ranks stay watched while in hooks and barriers": (
        "test_hanging_hook_is_killed_at_the_hard_limit_and_named",
        "test_process_that_stands_still_while_it_waits_for_the_store_has_the_limit_of_any_other",
    ),
    "supervision across nodes goes through the store, a counter for each node": (
        "test_each_node_is_watched_by_exactly_one_other_node_whoever_takes_places_when",
        "test_rank_and_monitor_that_die_together_are_noticed_by_a_neighbour",
        "test_leader_of_a_node_asks_the_store_once_a_second_at_any_number_of_nodes",
    ),
    "O(1) store operations for each rank and iteration; none carries O(N) bytes to each of N ranks": (
        "test_restart_of_160_ranks_takes_each_as_few_operations_as_of_40_and_all_small",
        "test_restart_of_10_000_ranks_costs_each_what_it_costs_each_of_1_000",
        "test_operation_of_a_barrier_touches_one_block_at_any_size",
    ),
    "steady state: at most one store operation for each node and second, with the default heartbeat_timeout": (
        "test_leader_of_a_node_asks_the_store_once_a_second_at_any_number_of_nodes",
    ),
    "the ladder: interrupt, cut sockets, SIGTERM, SIGKILL after evidence": (
        "test_hang_past_the_soft_limit_restarts_all_in_process",
        "test_cut_frees_every_rank_and_spares_the_users_connections",
        "test_rank_that_cannot_be_interrupted_is_killed_with_evidence",
        "test_all_ranks_are_seen_before_any_is_cut",
    ),
    "the ladder: the launcher replaces the process, a node is excluded, the job ends with an exit code of its own": (
        "test_killed_rank_shrinks_in_place_and_below_the_minimum_the_launcher_takes_over",
        "test_excluded_node_leaves_and_the_other_goes_on",
        "test_shutdown_stops_all_nodes_with_its_own_exit_code",
    ),
    "abort outside atomic(); atomic() sleeps; an interruption that arrives inside is delivered at its end": (
        "test_atomic_section_ends_before_the_abort_and_the_interruption",
        "test_atomic_section_ends_before_the_interrupt",
        "test_one_signal_is_enough_to_interrupt_at_the_end_of_an_atomic_section",
    ),
    "the restart ends with the first heartbeat or step after the entry": ("test_exception_on_one_rank_restarts_all",),
    "a loop without progress and without a limit is called progress_unknown": (
        "test_loop_without_progress_is_called_unknown_and_nothing_restarts",
    ),
    "hooks may change the state that they get; what initialize, rank_assignment and rank_filter return is used": (
        "test_state_that_hooks_change_or_return_is_in_force",
    ),
    "Compose runs the last one first, is of the nearest shared class, and warns of None": (
        "test_last_hook_runs_first_and_results_are_handed_on",
        "test_composed_hook_is_of_the_kinds_its_parts_share",
        "test_hook_that_returns_nothing_hands_on_what_it_got",
    ),
    "an exception of store_factory reaches the caller as it is": (
        "test_exception_of_the_store_factory_reaches_the_caller_as_it_is",
    ),
    "names of stores and faults; inject_fault is reachable after importing the package": (
        "test_names_of_the_api_are_there",
        "test_names_are_those_of_the_api",
        "test_fault_injection_is_reachable_from_the_package_alone",
    ),
    "parameters, defaults, members and kinds of the names are those of the compatible API": (
        "test_parameters_and_defaults_are_those_of_the_api",
        "test_members_are_those_of_the_api",
        "test_class_is_of_the_kind_that_the_api_says",
        "test_attributes_are_those_of_the_api",
    ),
    "resilience.fault_tolerance has the names and calls of the compatible API": (
        "test_every_name_is_there_and_no_other",
        "test_client_has_the_calls_of_the_compatible_api",
        "test_actions_are_those_of_the_compatible_api",
    ),
    "`with resilience.section(...)` is open while its block runs, closed also by an exception, and may have a limit": (
        "test_user_code_reaches_the_page_of_its_call",
        "test_exception_closes_its_section_as_failed",
        "test_signs_reach_the_launchers_monitor",
        "test_hang_past_the_soft_limit_restarts_all_in_process",
    ),
    "`resilience.heartbeat()` and `resilience.step(n)` are on record; only a higher step is progress": (
        "test_user_code_reaches_the_page_of_its_call",
        "test_first_sign_and_first_step_are_on_record",
        "test_only_a_rise_of_the_step_is_progress",
        "test_step_that_does_not_advance_is_found_by_the_step_limit",
        "test_rank_that_beats_and_does_not_advance_is_found_by_the_step_limit",
    ),
    "section, heartbeat and step do nothing in a script that nobody watches": (
        "test_user_code_outside_a_call_reaches_nothing_and_runs_on",
    ),
    "resilience.integrations.lightning.FaultToleranceCallback(autoresume, calculate_timeouts) in a Trainer": (
        "test_exception_closes_the_sections_and_leaves",
        "test_checkpoint_that_fails_closes_its_section",
        "test_training_that_the_module_cuts_short_leaves_no_section_open",
        "test_flag_says_whether_there_is_nothing_left_to_resume",
        "test_training_resumes_at_the_last_checkpoint_as_if_nothing_had_been",
    ),
    "settings outside the fixed signatures are variables with one definition each": (
        "test_environment_is_read_in_one_place",
        "test_settings_that_exist_are_valid",
    ),
    "RESILIENCE_INTERRUPT_SIGNAL is the signal that interrupts the function": (
        "test_chosen_signal_interrupts_the_function",
    ),
    "RESILIENCE_JOB_ID, else SLURM_JOB_ID, TORCHELASTIC_RUN_ID unless `none`, else agreed through the base store": (
        "test_job_is_named_by_the_nearest_that_knows",
        "test_ranks_without_a_launcher_agree_on_an_attempt_of_their_own",
    ),
    "a hook's limit is hard_timeout": (
        "test_hanging_hook_is_killed_at_the_hard_limit_and_named",
        "test_hook_at_the_end_of_a_call_that_hangs_is_ended_at_hard_timeout_and_named",
    ),
    "CallWrapper: iteration, ping, atomic": (
        "test_hooks_are_called_in_the_order_of_the_api_and_with_this_ranks_own_cause",
        "test_hang_past_the_soft_limit_restarts_all_in_process",
        "test_atomic_section_ends_before_the_abort_and_the_interruption",
    ),
    "ThreadedFinalize, CudaHealthCheck": (
        "test_function_that_hangs_is_left_behind",
        "test_threaded_finalize_works_on_the_device_of_its_rank",
        "test_device_that_hangs_excludes_the_rank",
    ),
    "async_raise, reraise_if_unraisable": (
        "test_async_raise_reaches_a_thread_that_runs_bytecode",
        "test_reraise_if_unraisable_raises_again_in_the_main_thread",
    ),
    "ShiftRanks, FillGaps, FilterGroupedByKey(key_or_fn, condition, timeout)": (
        "test_shifted_ranks_keep_their_order",
        "test_filling_gaps_moves_only_ranks_that_have_no_place_any_more",
        "test_groups_that_fail_the_condition_are_excluded_by_all_alike",
        "test_missing_rank_ends_the_filter_with_a_clear_error",
    ),
    "MaxActiveWorldSize, WorldSizeDivisibleBy": (
        "test_filter_leaves_the_ranks_from_the_active_world_on_in_reserve",
        "test_filters_narrow_down_what_an_earlier_one_left",
    ),
    "StoreMixin: initial ranks, barriers, records, completion, terminated ranks; BarrierTimeout, BarrierOverflow": (
        "test_initial_ranks_are_found_by_present_rank",
        "test_barriers_of_the_api_do_not_disturb_each_other",
        "test_barrier_gives_up_after_its_timeout",
        "test_more_ranks_than_a_barrier_is_made_for_are_told_so",
        "test_records_come_back_in_the_order_of_their_arrival",
        "test_completion_is_seen_by_all",
        "test_ranks_that_left_are_counted_once",
    ),
    "TCPStore with defaults from MASTER_ADDR, MASTER_PORT, WORLD_SIZE; FileStore; PrefixStore(iteration, store)": (
        "test_outside_a_wrapper_rank_0_hosts_and_a_second_store_joins",
        "test_file_store_and_a_users_own_store_work",
        "test_iterations_do_not_see_each_other",
    ),
    "inject_fault(faults, num_faults, keep_alive, delay, seed, callback)": (
        "test_draw_keeps_to_its_bounds_and_is_the_same_for_all",
        "test_seeds_differ",
        "test_process_dies_by_its_signal",
        "test_callback_that_cannot_be_called_is_refused_at_once",
    ),
    "FaultToleranceConfig: from_kwargs, from_yaml_file, from_args, to_yaml_file": (
        "test_every_setting_reads_alike_from_keyword_file_and_flag",
        "test_file_that_was_written_is_read_back",
    ),
    "RetryController(max_iterations, min_world_size, min_active_world_size)": (
        "test_retry_controller_ends_the_job",
        "test_retry_controller_lets_the_job_go_on",
    ),
    "restarts are visible through the logger `resilience`, silent where nobody configured logging": (
        "test_each_rank_logs_one_warning_for_each_restart",
        "test_restarts_are_silent_where_logging_is_not_configured",
    ),
}


def test_what_finalize_and_health_check_return_is_ignored(start: Start) -> None:
    job = start(2, f"{JOBS}:return_anything_from_hooks")
    assert [rank.value for rank in job.wait()] == [1, 1]


def test_initialize_that_returns_none_keeps_the_state_and_warns_its_user(start: Start) -> None:
    job = start(2, f"{JOBS}:forget_the_state")
    other, failing = (rank.value for rank in job.wait())
    assert (other[0], failing[0]) == (1, 1)
    assert len(failing[1]) == 2
    assert len(other[1]) in (1, 2)  # where the other one fails before this rank's hook is due, that is not called
    assert all("UserWarning: the initialize hook" in line for line in (*other[1], *failing[1]))


def test_initialize_that_returns_no_state_ends_the_job_with_a_word_about_it(start: Start) -> None:
    job = start(2, f"{JOBS}:return_a_pair")
    ranks = job.wait()
    assert [rank.type for rank in ranks] == ["RestartAbort"] * 2
    assert all("expected the state: return it" in rank.error for rank in ranks)
    assert {record.event.outcome for record in job.of(events.CallEnded)} == {"left"}


def test_exception_whose_text_cannot_be_had_restarts_all(start: Start) -> None:
    job = start(2, f"{JOBS}:fail_without_words")
    assert [rank.value for rank in job.wait()] == [1, 1]
    assert {record.rank for record in job.interruptions(0)} == {1}


@pytest.mark.parametrize(("has_cause", "cause"), [(False, "None"), (True, "OSError('the disk')")])
def test_rank_should_restart_raised_by_user_code_restarts_all(start: Start, has_cause: bool, cause: str) -> None:
    job = start(2, f"{JOBS}:ask_for_a_restart", has_cause=has_cause)
    assert [rank.value for rank in job.wait()] == [(1, ["None"]), (1, [cause])]
    assert {record.rank for record in job.interruptions(0)} == {1}


def test_exception_of_the_store_factory_reaches_the_caller_as_it_is(start: Start) -> None:
    job = start(2, f"{JOBS}:break_the_store_factory")
    for rank in job.wait_ranks():
        assert (rank.type, rank.error) == ("LookupError", "no store today")


def test_each_rank_logs_one_warning_for_each_restart(start: Start) -> None:
    job = start(2, f"{JOBS}:log_restarts", configured=True)
    for number, rank in enumerate(job.wait()):
        assert [(name, level) for name, level, _ in rank.value] == [("resilience", "WARNING")] * 2
        own = rank.value[number][2]
        assert f"iteration {number}: this rank failed: ValueError: broken in {number}" in own
        assert f"iteration {1 - number}: rank {1 - number} failed" in rank.value[1 - number][2]
    assert len(job.of(events.RestartEnded)) == 4


def test_restarts_are_silent_where_logging_is_not_configured(start: Start) -> None:
    job = start(2, f"{JOBS}:log_restarts", configured=False, env={"RESILIENCE_QUIET": "1"})
    job.wait()
    assert [line for line in job.written().splitlines() if line and not line.startswith("--- ")] == []


def test_hooks_are_called_in_the_order_of_the_api_and_with_this_ranks_own_cause(start: Start) -> None:
    job = start(2, f"{JOBS}:note_the_order_of_hooks")
    for number, rank in enumerate(job.wait()):
        at = f" RANK={number}/2"
        cause = "ValueError('by schedule')" if number == 1 else "None"
        iteration = [f"initialize{at} active", f"health_check(None){at} active", "function"]
        recovery = [f"{hook}{at} aborting" for hook in ("abort", f"finalize({cause})", f"health_check({cause})")]
        first, again = (
            [f"rank_assignment(set()){at} {before}", f"rank_filter{at} active"]
            for before in ("initialized", "aborting")
        )
        assert rank.value == [*first, *iteration, *recovery, *again, *iteration]


def test_rank_that_the_assignment_terminates_is_discarded_and_the_others_go_on(start: Start) -> None:
    ranks = start(2, f"{JOBS}:assign_after_a_fault", what="discard").wait()
    assert (ranks[0].value, ranks[1].type) == (1, "RankDiscarded")


def test_terminated_ranks_that_the_assignment_leaves_over_are_a_restart_error(start: Start) -> None:
    ranks = start(2, f"{JOBS}:assign_after_a_fault", what="leave over").wait()
    assert (ranks[0].type, ranks[1].type) == ("RestartError", "SystemExit")
    assert "ranks [1] are terminated" in ranks[0].error


def test_hooks_at_the_end_of_a_call_run_once_where_it_completes_and_where_a_rank_leaves(start: Start) -> None:
    job = start(2, f"{JOBS}:end_with_hooks")
    assert [rank.value for rank in job.wait()] == [
        ["completed", "completion in iteration 1"],
        ["LookupError('terminate') after SystemExit(3)", "terminate in iteration 0"],
    ]
    failed = job.of(events.HookFailed)
    assert {record.origin.initial_rank: record.event for record in failed} == {
        0: events.HookFailed("completion", "LookupError: completion"),
        1: events.HookFailed("terminate", "LookupError: terminate"),
    }


@pytest.mark.parametrize("hook", ["completion", pytest.param("terminate", marks=pytest.mark.slow)])
def test_hook_at_the_end_of_a_call_that_hangs_is_ended_at_hard_timeout_and_named(start: Start, hook: str) -> None:
    job = start(2, f"{JOBS}:hang_at_end", hook=hook)
    completed, hung = job.wait()
    assert completed.value == "completed"
    assert hung.signal is not None
    (silent,) = job.of(events.RankFellSilent)
    assert (silent.origin.initial_rank, silent.event.limit) == (1, f"hook:{hook}")
    (late,) = [record for record in job.of(events.RankInterrupted) if record.event.record.stage == hook]
    assert "__call__" in [frame.function for frame in late.event.record.stacks[0].frames]
    assert len(job.of(events.RankStoodInFor)) == 0  # the store knew how the rank ended


def test_exception_in_abort_is_recorded_and_the_restart_goes_on_over_a_fresh_store(start: Start) -> None:
    job = start(2, f"{JOBS}:restart_with_a_broken_abort")
    first, second = (rank.value for rank in job.wait())
    assert first == second  # both ranks were told the same place in each iteration
    assert len(first) == len(set(first)) == 2
    failed = job.of(events.AbortFailed)
    assert {record.origin.initial_rank: record.event for record in failed} == dict.fromkeys(
        range(2), events.AbortFailed("OSError: the abort is broken")
    )


def test_rank_that_pinged_waits_for_completion_for_longer_than_its_soft_timeout(start: Start) -> None:
    job = start(2, f"{JOBS}:ping_and_return_long_before_the_other")
    assert [rank.value for rank in job.wait()] == [0, 0]
    assert not job.of(events.RankInterrupted)


def test_rank_in_critical_ranks_of_the_users_store_leaves_last(start: Start, tmp_path: Path) -> None:
    job = start(2, f"{JOBS}:leave_at_last", path=str(tmp_path / "store"))
    assert [rank.value for rank in job.wait()] == [True, True]


def test_atomic_section_ends_before_the_abort_and_the_interruption(start: Start) -> None:
    job = start(2, f"{JOBS}:finish_the_atomic_section")
    job.await_record(events.IterationDecided, rank=0)  # from now on its watcher is ready to abort and interrupt
    job.let_on("in the section")
    assert job.wait()[0].value == ["the section ends", "abort", "RankShouldRestart"]


def test_chosen_signal_interrupts_the_function(start: Start) -> None:
    job = start(2, f"{JOBS}:restart_by_a_chosen_signal", env={"RESILIENCE_INTERRUPT_SIGNAL": "SIGUSR2"})
    assert [rank.value for rank in job.wait()] == [[signal.SIGUSR2]] * 2


@pytest.mark.parametrize("in_copies", [False, True])
def test_state_that_hooks_change_or_return_is_in_force(start: Start, in_copies: bool) -> None:
    job = start(2, f"{JOBS}:change_the_state", in_copies=in_copies)
    job.await_record(
        events.StageStarted, rank=0, where=lambda event: event.stage == "run"
    )  # the spare's hooks have run
    job.let_on("inside")
    active, spare = (rank.value for rank in job.wait())
    assert spare is None
    before = ("rank_assignment", "rank_filter", "initialize", "health_check")
    notes = (*before, "abort", "finalize", "health_check", *before)
    returned_in_vain = {"health_check", "abort", "finalize"}
    kept = tuple(name for name in notes if not in_copies or name not in returned_in_vain)
    assert active == ("0", "1", 0, kept)


@pytest.mark.parametrize(
    ("where", "why"),
    [("thread", "from thread 'mine'"), ("group", "while a process group is initialised")],
)
def test_call_that_cannot_be_restarted_is_refused(start: Start, where: str, why: str) -> None:
    (rank,) = start(1, f"{JOBS}:refused", where=where).wait_ranks()
    assert why in rank.value


def test_each_sentence_of_the_design_has_a_test_that_exists() -> None:
    names = {
        node.name
        for path in (Path(__file__).parents[1]).rglob("test_*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef)
    }
    assert all(SENTENCES.values())
    assert [test for tests in SENTENCES.values() for test in tests if test not in names] == []
