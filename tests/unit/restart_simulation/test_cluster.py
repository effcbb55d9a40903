"""The protocol under faults, in a virtual cluster: every schedule keeps every invariant.

Many more of the same run with `python -m tests.simulate`; `python -m tests.mutate` shows that they can fail."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import msgspec
import pytest

from resilience.core import restart
from resilience.core.restart import Add, Await, Check, CompareSet, End, Read, RunStage, Set, Stage
from resilience.errors import InternalError
from resilience.facts.seats import Seat
from tests.restart_simulation.cluster import Cluster, ScheduleReport
from tests.restart_simulation.faults import (
    HOOKS,
    OPERATIONS,
    VICTIMS,
    Fail,
    FalseSuspicion,
    Fault,
    Freeze,
    KillFault,
    Linger,
    Misassign,
    Pause,
    Raise,
    Schedule,
    Stall,
    Victim,
    draw,
    everywhere,
    late_returns,
    raised_everywhere,
)


def run(*faults: Fault, ranks: int = 4, **settings: Any) -> ScheduleReport:
    return Cluster(Schedule(seed=1, ranks=ranks, faults=faults, **settings)).run()


# -- stories -----------------------------------------------------------------------------------------------------


def test_undisturbed_job_completes_in_one_iteration() -> None:
    report = run()
    assert report.iterations == 1
    assert report.ends == ("completed",) * 4


def test_exception_restarts_everybody() -> None:
    report = run(Fail(2, 0, Stage.FUNCTION))
    assert report.iterations == 2
    assert report.ends == ("completed",) * 4


def test_base_exception_ends_its_rank_and_the_others_go_on() -> None:
    assert run(Fail(2, 0, Stage.FUNCTION, End.FATAL)).ends == ("completed", "completed", "left", "completed")


def test_exit_after_an_error_of_a_communication_call_ends_its_rank_only_if_nobody_else_failed() -> None:
    exits = Fail(2, 0, Stage.FUNCTION, End.FATAL, "communication")
    assert run(exits).ends == ("completed", "completed", "left", "completed")
    schedules = [Schedule(seed=seed, ranks=4, faults=(KillFault(1, "rank", 14), exits)) for seed in range(8)]
    ends = {Cluster(schedule).run().ends for schedule in schedules}  # invariant: no healthy rank excluded
    assert ("completed", "killed", "completed", "completed") in ends


@pytest.mark.parametrize("stage", HOOKS)
def test_failing_hook_restarts_before_the_function_and_excludes_after_a_fault(stage: Stage) -> None:
    report = run(Fail(1, 0, Stage.FUNCTION), Fail(2, 0, stage))
    excluded = stage in (Stage.FINALIZE, Stage.CHECK_AFTER)
    assert report.ends[2] == ("left" if excluded else "completed")


def test_killed_rank_is_excluded_within_seconds() -> None:
    report = run(KillFault(2, "rank", 14))
    assert report.ends == ("completed", "completed", "killed", "completed")
    assert report.seconds < 20.0


def test_rank_and_monitor_that_die_together_are_noticed_by_a_neighbour() -> None:
    report = run(KillFault(2, "both", 14))
    assert report.ends == ("completed", "completed", "killed", "completed")
    assert 30.0 < report.seconds < 60.0
    assert report.vain_waits == ()


def test_sleeping_function_is_restarted_and_nobody_is_killed() -> None:
    report = run(Stall(2, 0, Stage.FUNCTION, "sleep"))
    assert report.ends == ("completed",) * 4
    assert 60.0 < report.seconds < 80.0


def test_stuck_function_is_killed_after_the_hard_limit() -> None:
    report = run(Stall(2, 0, Stage.FUNCTION, "stuck"))
    assert report.ends == ("completed", "completed", "killed", "completed")
    assert 90.0 < report.seconds < 120.0


def test_function_that_takes_long_to_leave_is_waited_for() -> None:
    report = run(Fail(1, 0, Stage.FUNCTION), Stall(2, 0, Stage.FUNCTION, "spin"), Linger(2, 0, 80.0))
    assert report.ends == ("completed",) * 4


def test_pause_within_the_limits_costs_nobody_his_place() -> None:
    assert run(Fail(1, 0, Stage.FUNCTION), Pause(2, 20, 50.0)).ends == ("completed",) * 4


def test_rank_that_returns_when_the_others_give_up_completes_with_them_or_restarts_with_them() -> None:
    outcomes = set()
    for schedule in late_returns(ranks=3, rank=1, limit=120.0):
        cluster = Cluster(schedule)
        assert cluster.run().ends == ("completed",) * 3
        outcomes.add((cluster.store.data["0/outcome"], "0/records/1" in cluster.store.data))
    assert outcomes == {("completed", False), ("completed", True), ("interrupted", True)}


def test_unexplained_wait_breaks_an_invariant() -> None:
    broken = ModuleType("broken")
    vars(broken).update(vars(restart), iterate=_iterate_and_wait)
    with pytest.raises(InternalError, match=r"no vain wait: .* waited 120 s for nothing, others were late for 50 s"):
        Cluster(Schedule(0, 3, (Pause(1, 6, 50.0),)), protocol=broken).run()


def test_rank_that_was_late_for_over_100_s_excuses_no_later_wait() -> None:
    late = Schedule(0, 3, (Stall(1, 0, Stage.FUNCTION, "slow", 150.0),))
    assert Cluster(late).run().vain_waits  # it is late until the others give up, which explains their wait
    broken = ModuleType("broken")
    vars(broken).update(vars(restart), iterate=_iterate_and_wait_after_a_restart)
    with pytest.raises(InternalError, match=r"no vain wait: .* waited 120 s for nothing, others were late for 0 s"):
        Cluster(late, protocol=broken).run()


def test_store_that_stands_still_for_longer_than_a_hang_may_last_costs_nobody() -> None:
    for at in (0.0, 0.5, 1.0, 2.0, 3.0):
        report = run(Fail(1, 0, Stage.FUNCTION), Freeze(0, at, 95.0))
        assert report.ends == ("completed",) * 4


def test_pause_of_the_store_explains_a_wait_although_the_others_end_stages_meanwhile() -> None:
    report = Cluster(draw(1736958, 3, 8)).run()  # and just after it a rank dies together with its monitor
    assert "for 0/frozen" in report.vain_waits[0]


def test_rank_that_raises_before_it_publishes_its_seat_keeps_nobody_waiting() -> None:
    """The other rank of its world has no seat, and learns the size of the world from it."""
    faults = FalseSuspicion(0, 0.7107945524543071), Misassign(3, 0), Raise(2, 22, times=1, after=False)
    report = Cluster(Schedule(3173332, 4, faults, 4, assignment="grouped")).run()
    assert report.ends == ("discarded", "discarded", "raised", "raised")
    assert report.vain_waits == ()


def test_rank_without_a_place_leaves_although_all_others_have_gone_on_meanwhile() -> None:
    faults = Misassign(0, 0), KillFault(1, "both", 15), Fail(3, 1, Stage.INITIALIZE)
    report = Cluster(Schedule(5465642, 7, faults, 7, assignment="grouped", block=3, latency=3.0)).run()
    assert report.ends == ("raised", "killed", *("completed",) * 5)


def test_rank_taken_for_dead_is_excluded_and_told_so() -> None:
    report = run(Stall(1, 0, Stage.FUNCTION, "slow", 30.0), FalseSuspicion(2, 5.0))
    assert report.ends == ("completed", "completed", "discarded", "completed")


def test_spare_steps_in() -> None:
    report = run(KillFault(0, "rank", 14), active=3)
    assert report.ends == ("killed", "completed", "completed", "completed")


def test_several_faults_at_once_are_one_restart() -> None:
    report = run(*(Fail(rank, 0, Stage.FUNCTION) for rank in range(4)))
    assert report.iterations == 2
    assert report.ends == ("completed",) * 4


def test_last_rank_goes_on_alone() -> None:
    report = run(*(KillFault(rank, "rank", 14 + rank) for rank in range(1, 4)))
    assert report.ends == ("completed", "killed", "killed", "killed")


def test_job_without_anybody_left_ends() -> None:
    report = run(*(KillFault(rank, "both", 12) for rank in range(4)))
    assert report.ends == ("killed",) * 4


@pytest.mark.parametrize("unassigned", [(2,), (1, 2), (0, 3)])
@pytest.mark.parametrize("entry", [True, False])
def test_assignment_that_fails_on_some_ranks_costs_these_ranks_only(unassigned: tuple[int, ...], entry: bool) -> None:
    faults = [Misassign(rank, restart.ENTRY if entry else 0) for rank in unassigned]
    report = run(Fail(1, 0, Stage.FUNCTION), *faults)
    assert report.ends == tuple("raised" if rank in unassigned else "completed" for rank in range(4))
    assert report.seconds < 20.0
    assert report.vain_waits == ()


def test_assignment_that_fails_on_every_rank_ends_the_job_at_once() -> None:
    report = run(*(Misassign(rank, restart.ENTRY) for rank in range(4)))
    assert report.ends == ("raised",) * 4
    assert report.seconds < 20.0


def test_assignment_that_fails_on_all_ranks_but_one_leaves_that_one_alone() -> None:
    assert run(*(Misassign(rank, restart.ENTRY) for rank in range(3))).ends == ("raised",) * 3 + ("completed",)


@pytest.mark.parametrize("victim", VICTIMS)
def test_rank_that_looks_for_a_place_may_die_at_each_of_its_operations(victim: Victim) -> None:
    for operation in range(1, OPERATIONS + 1):
        faults = (Misassign(1, 0), Fail(2, 0, Stage.FUNCTION), KillFault(1, victim, operation), Misassign(3, 0))
        Cluster(Schedule(seed=operation, ranks=5, faults=faults)).run()


# -- many schedules ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", range(6))
def test_every_invariant_holds_in_drawn_schedules(batch: int) -> None:
    for seed in range(1_000_000 + 500 * batch, 1_000_000 + 500 * (batch + 1)):
        Cluster(draw(seed)).run()


@pytest.mark.parametrize("times", [1, 2, 3, 99])
def test_rank_interrupted_at_each_operation_and_again_on_its_way_out_holds_nobody_up(times: int) -> None:
    for restarts in (0, 1, 2):
        for schedule in raised_everywhere(times, ranks=3, rank=1, restarts=restarts, latency=0.01):
            report = Cluster(schedule).run()
            assert report.seconds < 2.0
            assert report.ends[0] == report.ends[2] == "completed"


@pytest.mark.parametrize("victim", VICTIMS)
@pytest.mark.parametrize("restarts", [0, 1, 2])
def test_process_may_die_at_each_of_its_operations(victim: Victim, restarts: int) -> None:
    for block in (2, 32):
        for schedule in everywhere(victim, ranks=3, rank=1, restarts=restarts, block=block):
            Cluster(schedule).run()


def test_seed_repeats_its_run() -> None:
    for seed in range(20):
        traces: list[list[Any]] = [[], []]
        for trace in traces:
            Cluster(draw(seed), trace=lambda *step, trace=trace: trace.append((step[0], step[1], str(step[2])))).run()
        assert traces[0] == traces[1]


def test_protocol_that_does_not_meet_is_found_out() -> None:
    broken = ModuleType("broken")
    vars(broken).update(vars(restart), iterate=_iterate_without_meeting)
    with pytest.raises(InternalError, match=r"start together: .* only \[\] have come"):
        Cluster(draw(0), protocol=broken).run()


def _iterate_and_wait(seat: Seat, limits: restart.WaitLimits) -> restart.Protocol[restart.Ending]:
    yield Set(restart.seat_key(seat.initial_rank), msgspec.json.encode(seat).decode())
    yield Await("nothing", limits.barrier)
    return restart.Ending(restart.COMPLETED)


def _iterate_and_wait_after_a_restart(seat: Seat, limits: restart.WaitLimits) -> restart.Protocol[restart.Ending]:
    return (yield from (restart.iterate if seat.iteration == 0 else _iterate_and_wait)(seat, limits))


def _iterate_without_meeting(seat: Seat, limits: restart.WaitLimits) -> restart.Protocol[restart.Ending]:
    yield Set(restart.seat_key(seat.initial_rank), msgspec.json.encode(seat).decode())
    yield RunStage(Stage.INITIALIZE)
    return restart.Ending(restart.COMPLETED)


# -- at 10,000 ranks ---------------------------------------------------------------------------------------------


class Measured:
    """What each rank asked of the store, and how much went there and back."""

    def __init__(self, ranks: int) -> None:
        self.largest = 0
        self.operations: dict[str, int] = {}
        self.cluster = Cluster(Schedule(seed=0, ranks=ranks, faults=(KillFault(7, "rank", 14),)), trace=self.take)
        self.report = self.cluster.run()

    def take(self, now: float, who: str, operation: object) -> None:
        held = self.cluster.store.data
        match operation:
            case Set(key, value) | CompareSet(key, value):
                size = len(key) + len(value) + len(held.get(key, ""))
            case Add(key) | Await(key):
                size = len(key) + 8
            case Check(keys):
                size = sum(map(len, keys)) + 1
            case Read(keys):
                size = sum(len(key) + len(held.get(key, "")) for key in keys)
            case _:
                return
        self.operations[who] = self.operations.get(who, 0) + 1
        self.largest = max(self.largest, size)


def test_restart_of_160_ranks_takes_each_as_few_operations_as_of_40_and_all_small() -> None:
    small, large = Measured(40), Measured(160)  # two levels of blocks in each barrier
    assert max(large.operations.values()) <= max(small.operations.values())
    assert large.largest <= restart.BLOCK * len("99/completion/0/9999 ")


@pytest.mark.slow
def test_restart_of_10_000_ranks_costs_each_what_it_costs_each_of_1_000() -> None:
    small, large = Measured(1_000), Measured(10_000)
    for measured in (small, large):
        assert measured.report.iterations == 2
        assert measured.report.ends.count("completed") == len(measured.report.ends) - 1
    # One level more in each barrier (32 x 32 < 10,000), two operations each, for those who complete a block.
    barriers = 8
    assert max(large.operations.values()) <= max(small.operations.values()) + 2 * barriers
    assert large.largest <= restart.BLOCK * len("99/completion/0/9999 ")
