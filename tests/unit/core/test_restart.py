"""The restart protocol, step by step. What it does under faults is in tests/unit/restart_simulation/test_cluster.py.

Tests whose one argument is `protocol` are also given to every mutant of the module (tests/mutate.py)."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product
from types import ModuleType
from typing import Any

import msgspec
import pytest

from resilience.core import restart
from resilience.core.restart import (
    COMPLETED,
    ENTRY,
    INTERRUPTED,
    LEFT,
    Assign,
    Await,
    Check,
    CompareSet,
    End,
    Ending,
    Keys,
    Read,
    Result,
    RunStage,
    Settle,
    Stage,
    WaitLimits,
)
from resilience.errors import BarrierOverflow, BarrierTimeout
from resilience.facts.encoding import to_json_text
from resilience.facts.interruptions import FaultOrigin
from resilience.facts.seats import Seat
from tests.restart_simulation.store import MemoryStore

LIMITS = WaitLimits()
RETURNED = Result(End.RETURNED)


@pytest.fixture
def protocol() -> ModuleType:
    return restart


def drive(
    steps: restart.Protocol[Any],
    store: MemoryStore,
    stages: Callable[[Stage], Result] = lambda stage: RETURNED,
    assign: Callable[[Assign], Seat | restart.Unassigned | None] = lambda operation: None,
    log: list[Any] | None = None,
) -> Any:
    """Run a protocol alone. What it waits for and is not there never comes."""
    answer: Any = None
    for _ in range(1000):
        try:
            operation = steps.send(answer)
        except StopIteration as stop:
            return stop.value
        if log is not None:
            log.append(operation)
        match operation:
            case RunStage(stage):
                answer = stages(stage)
            case Assign():
                answer = assign(operation)
            case Settle():
                answer = None
            case _:
                answer = store.perform(operation)
    pytest.fail("the protocol does not end")


def alone(iteration: int = 0, **changes: Any) -> Seat:
    """The seat of a rank in a world of its own."""
    return msgspec.structs.replace(Seat(0, 0, 1, 1, iteration), **changes)


def fails_at(failing: Stage, end: End) -> Callable[[Stage], Result]:
    return lambda stage: Result(end, f"{stage.value} failed") if stage is failing else RETURNED


# -- barriers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 31, 32, 33, 64, 65, 1024, 1025, 2000])
def test_barrier_is_done_with_its_last_rank_in_any_order(count: int) -> None:
    store = MemoryStore()
    order = sorted(range(count), key=lambda rank: rank * 2_654_435_761 % 2**32)  # scattered, always alike
    completed = [drive(restart.arrive("b", rank, count), store) for rank in order]
    assert completed == [False] * (count - 1) + [True]
    assert "b/done" in store.data


def test_arriving_again_changes_nothing(protocol: ModuleType) -> None:
    store = MemoryStore()
    for rank in (0, 0, 1, 1):
        assert not drive(protocol.arrive("b", rank, 3), store)
    assert "b/done" not in store.data
    before = dict(store.data)
    drive(protocol.arrive("b", 1, 3), store)
    assert store.data == before


def test_operation_of_a_barrier_touches_one_block_at_any_size(protocol: ModuleType) -> None:
    log: list[Any] = []
    store = MemoryStore()
    for rank in range(5000):
        drive(protocol.arrive("b", rank, 5000), store, log=log)
    assert max(len(operation.keys) for operation in log if isinstance(operation, Check)) == restart.BLOCK
    each = 2 * math.ceil(math.log(5000, restart.BLOCK)) + 1
    assert len(log) <= 5000 * 2 + 5000 / restart.BLOCK * each * 2


@pytest.mark.parametrize("rank", [-1, 3, 4])
def test_rank_beyond_the_count_overflows(rank: int) -> None:
    with pytest.raises(BarrierOverflow, match=r"rank -?\d reached barrier 'b', which was made for 3 ranks") as raised:
        drive(restart.arrive("b", rank, 3), MemoryStore())
    assert (raised.value.rank, raised.value.rendezvous_count, raised.value.group_name) == (rank, 3, "b")  # type: ignore[attr-defined]


def test_overflow_leaves_no_trace(protocol: ModuleType) -> None:
    store = MemoryStore()
    with pytest.raises(BarrierOverflow):
        drive(protocol.arrive("b", 3, 3), store)
    assert store.data == {}


def test_barrier_that_somebody_misses_times_out(protocol: ModuleType) -> None:
    store = MemoryStore()
    log: list[Any] = []
    with pytest.raises(BarrierTimeout, match="rank 0 waited 7 s in barrier 'b' and not all 2 ranks arrived"):
        drive(protocol.barrier("b", 0, 2, 7.0), store, log=log)
    assert Await("b/done", 7.0) in log


def test_timeout_of_a_barrier_names_the_first_missing_ranks(protocol: ModuleType) -> None:
    cases: list[tuple[int, set[int], tuple[int, ...]]] = [  # number of ranks, absent ones, those that are named
        (2, {1}, (1,)),
        (32, {0, 31}, (0, 31)),
        (33, {32}, (32,)),
        (70, {40, 41, 69}, (40, 41)),
        (5000, {3203}, (3203,)),
        (5000, set(range(1, 5000)), tuple(range(1, 32))),
    ]
    for count, absent, first in cases:
        store, log = MemoryStore(), list[Any]()
        for rank in range(count):
            if rank not in absent:
                drive(restart.arrive("b", rank, count), store)
        waiting = next(rank for rank in range(count) if rank not in absent)
        with pytest.raises(BarrierTimeout, match=f"missing at last: {', '.join(map(str, first))}\\.") as raised:
            drive(protocol.barrier("b", waiting, count, 7.0), store, log=log)
        assert raised.value.missing == first  # type: ignore[attr-defined]
        assert len(log[log.index(Await("b/done", 7.0)) :]) <= 1 + math.ceil(math.log(count, restart.BLOCK))


def test_timeout_of_a_barrier_whose_last_rank_came_meanwhile_names_none(protocol: ModuleType) -> None:
    class Late(MemoryStore):
        def perform(self, operation: Any) -> Any:
            answer = super().perform(operation)
            if isinstance(operation, Await):
                for rank in range(count - 1):
                    drive(restart.arrive("b", rank, count), self)
            return answer

    for count in (2, 70):
        with pytest.raises(BarrierTimeout, match="the last of them came too late") as raised:
            drive(protocol.barrier("b", count - 1, count, 7.0), Late())
        assert raised.value.missing == ()  # type: ignore[attr-defined]


def test_completed_barrier_lets_everybody_through(protocol: ModuleType) -> None:
    store = MemoryStore()
    drive(protocol.arrive("b", 1, 2), store)
    assert drive(protocol.barrier("b", 0, 2, 7.0), store) is None
    assert drive(protocol.barrier("b", 1, 2, 7.0), store) is None


# -- one iteration -----------------------------------------------------------------------------------------------


def test_ranks_that_were_looked_at_wait_for_each_other_and_the_missing_are_known(protocol: ModuleType) -> None:
    for count in (2, 32, 33, 70):
        at, store, log = Keys(3), MemoryStore(), []
        for rank in range(1, count):
            assert drive(protocol.witness(at, rank, count, 0.3), store, log=log) is False
            assert log[-1] == Await("3/witnessed/done", 0.3)
        assert drive(protocol.unwitnessed(at, count), store) == [0]
        assert drive(protocol.unwitnessed(at, count + 2), store) == [0, count, count + 1]
        assert drive(protocol.witness(at, 0, count, 0.3), store) is True
        assert drive(protocol.unwitnessed(at, count), store) == []
        assert drive(protocol.witness(at, 1, count, 0.3), store) is True
    assert drive(protocol.witness(Keys(3), 0, 1, 0.3), MemoryStore()) is True


def test_initial_rank_is_found_by_present_rank_once_ranks_have_arrived_at_the_start(protocol: ModuleType) -> None:
    store = MemoryStore()
    with pytest.raises(BarrierTimeout):
        drive(protocol.iterate(Seat(5, 1, 3, 3, 7), LIMITS), store)
    with pytest.raises(BarrierTimeout):
        drive(protocol.stand_in(Seat(4, 2, 3, 3, 7), LIMITS, "record"), store)
    assert [store.data.get(Keys(7).holder(rank)) for rank in range(3)] == [None, "5", "4"]


def test_return_of_an_active_rank_is_noted(protocol: ModuleType) -> None:
    for seat, is_noted in ((Seat(0, 0, 2, 1, 0), True), (Seat(1, 1, 2, 1, 0), False)):
        store = MemoryStore()
        store.data |= {f"{Keys(0).start}/done": "1", Keys(0).outcome: COMPLETED}
        drive(protocol.iterate(seat, LIMITS), store)
        assert (Keys(0).returned in store.data) is is_noted
    log: list[Any] = []
    drive(protocol.iterate(alone(), LIMITS), MemoryStore(), log=log)
    assert log.index(restart.Set(Keys(0).returned, "1")) < log.index(CompareSet(Keys(0).outcome, COMPLETED))
    failed = MemoryStore()
    drive(protocol.iterate(alone(), LIMITS), failed, lambda stage: Result(End.FAILED, "record"))
    assert Keys(0).returned not in failed.data


def test_lone_rank_completes(protocol: ModuleType) -> None:
    store = MemoryStore()
    log: list[Any] = []
    assert drive(protocol.iterate(alone(), LIMITS), store, log=log) == Ending(COMPLETED)
    stages = [operation.stage for operation in log if isinstance(operation, RunStage)]
    assert stages == [Stage.INITIALIZE, Stage.CHECK_BEFORE, Stage.FUNCTION]
    assert store.data["0/outcome"] == COMPLETED
    assert msgspec.json.decode(store.data["seat/0"], type=Seat) == alone()


@pytest.mark.parametrize("failing", [Stage.INITIALIZE, Stage.CHECK_BEFORE, Stage.FUNCTION])
def test_exception_before_the_end_restarts(failing: Stage) -> None:
    store = MemoryStore()
    log: list[Any] = []
    ending = drive(restart.iterate(alone(), LIMITS), store, fails_at(failing, End.FAILED), log=log)
    assert ending == Ending(INTERRUPTED)
    assert store.data["0/records/1"] == f"{failing.value} failed"
    stages = [operation.stage for operation in log if isinstance(operation, RunStage)]
    assert stages[stages.index(failing) + 1 :] == [
        Stage.ABORT,
        Stage.FINALIZE,
        Stage.CHECK_AFTER,
        Stage.COLLECT,
    ]


@pytest.mark.parametrize("failing", [Stage.INITIALIZE, Stage.CHECK_BEFORE, Stage.FUNCTION])
def test_base_exception_ends_the_rank_without_hooks(failing: Stage) -> None:
    store = MemoryStore()
    log: list[Any] = []
    ending = drive(restart.iterate(alone(), LIMITS), store, fails_at(failing, End.FATAL), log=log)
    assert ending == Ending(LEFT)
    assert [operation.stage for operation in log if isinstance(operation, RunStage)][-1] is Stage.ABORT
    assert store.data["0/terminated/1"] == "0"
    assert "0/end/done" in store.data


@pytest.mark.parametrize(("fault_of", "outcome"), [(None, LEFT), (1, INTERRUPTED)])
def test_exit_that_another_ranks_fault_has_led_to_does_not_end_its_rank(fault_of: int | None, outcome: str) -> None:
    store = MemoryStore()

    def stages(stage: Stage) -> Result:
        if stage is Stage.FUNCTION:
            if fault_of is not None:
                drive(restart.report(Keys(0), "1 failed", fault_of), store)
            return Result(End.FATAL, "0 exits", "communication")
        return RETURNED

    assert drive(restart.iterate(alone(), LIMITS), store, stages).outcome == outcome
    assert ("0/terminated/1" in store.data) == (outcome == LEFT)


def test_report_ends_the_wait_for_a_store_that_is_not_published(protocol: ModuleType) -> None:
    store = MemoryStore()
    log: list[Any] = []
    assert drive(protocol.report(Keys(0), "a record", None), store, log=log) == INTERRUPTED
    assert store.data["0/server"] == "none"
    written = [operation.key for operation in log if isinstance(operation, CompareSet)]
    assert written == ["0/outcome", "0/server"]  # a rank that wakes finds the iteration decided


def test_report_keeps_the_address_of_a_published_store(protocol: ModuleType) -> None:
    store = MemoryStore()
    store.data["0/server"] = "10.0.0.1:4242"
    drive(protocol.report(Keys(0), "a record", None), store)
    assert store.data["0/server"] == "10.0.0.1:4242"


@pytest.mark.parametrize("failing", [Stage.FINALIZE, Stage.CHECK_AFTER])
def test_failing_hook_after_a_fault_excludes_the_rank(failing: Stage) -> None:
    store = MemoryStore()
    drive(restart.report(Keys(0), "of another rank", 1), store)
    run: list[Stage] = []

    def stages(stage: Stage) -> Result:
        run.append(stage)
        if stage is failing:
            return Result(End.FATAL, "hook failed")
        return Result(End.INTERRUPTED) if stage is Stage.FUNCTION else RETURNED

    assert drive(restart.iterate(alone(), LIMITS), store, stages) == Ending(LEFT)
    assert run[-1] is failing  # a rank that could not clean up is not checked
    assert store.data["0/records/2"] == "hook failed"
    assert store.data["0/terminated/1"] == "0"


@pytest.mark.parametrize(("end", "outcome"), [(End.FAILED, COMPLETED), (End.FATAL, LEFT)])
def test_spare_that_fails_after_completion_waits_for_nobody(end: End, outcome: str) -> None:
    """Found by simulation: it waited for the end of ranks that had long returned, until the barrier timed out."""
    store = MemoryStore()
    active, spare = Seat(0, 0, 2, 1, 0), Seat(1, 1, 2, 1, 0)
    drive(restart.arrive(Keys(0).start, 1, 2), store)
    assert drive(restart.iterate(active, LIMITS), store) == Ending(COMPLETED)
    log: list[Any] = []
    ending = drive(restart.iterate(spare, LIMITS), store, fails_at(Stage.INITIALIZE, end), log=log)
    assert ending == Ending(outcome)
    assert store.data["0/records/1"] == "initialize failed"
    assert not any(isinstance(operation, Await) for operation in log[-3:])


def test_rank_that_waits_in_vain_for_completion_interrupts(protocol: ModuleType) -> None:
    store = MemoryStore()
    drive(protocol.arrive(Keys(0).start, 1, 2), store)
    drive(protocol.arrive(Keys(0).end, 1, 2), store)  # the other one is dead by now, and represented
    assert drive(protocol.iterate(Seat(0, 0, 2, 2, 0), LIMITS), store) == Ending(INTERRUPTED)
    assert "completion barrier within 120 s" in store.data["0/records/1"]


def test_success_that_came_first_stands(protocol: ModuleType) -> None:
    store = MemoryStore()
    assert drive(protocol.iterate(alone(), LIMITS), store) == Ending(COMPLETED)
    assert drive(protocol.report(Keys(0), "late", 0), store) == COMPLETED
    assert store.data["0/outcome"] == COMPLETED


def test_success_that_is_later_than_the_limit_and_earlier_than_the_report_stands(protocol: ModuleType) -> None:
    store = MemoryStore()
    drive(protocol.arrive(Keys(0).start, 1, 2), store)
    steps, answer = protocol.iterate(Seat(0, 0, 2, 2, 0), LIMITS), None
    while (operation := steps.send(answer)) != protocol.AwaitOutcome("0/outcome", LIMITS.completion):
        answer = RETURNED if isinstance(operation, RunStage) else store.perform(operation)
    assert drive(protocol.iterate(Seat(1, 1, 2, 2, 0), LIMITS), store) == Ending(COMPLETED)
    ending = None
    answer = False  # the limit was reached a moment before
    while ending is None:
        try:
            operation = steps.send(answer)
        except StopIteration as stop:
            ending = stop.value
        else:
            answer = store.perform(operation)  # it runs no stage any more
    assert ending == Ending(COMPLETED)


def test_rank_that_leaves_is_listed_by_its_current_rank(protocol: ModuleType) -> None:
    seat = alone(initial_rank=3)
    for steps in (protocol.iterate(seat, LIMITS), protocol.stand_in(seat, LIMITS, "gone")):
        store = MemoryStore()
        drive(steps, store, fails_at(Stage.FUNCTION, End.FATAL))
        assert (store.data["0/terminated/1"], store.data["0/frozen"]) == ("0", "0")


def test_spare_that_leaves_after_completion_departs_under_its_current_rank(protocol: ModuleType) -> None:
    store = MemoryStore()
    drive(protocol.arrive(Keys(0).start, 1, 2), store)
    drive(protocol.iterate(Seat(0, 0, 2, 1, 0), LIMITS), store)
    spare = Seat(initial_rank=5, rank=1, world_size=2, active_world_size=1, iteration=0)
    assert drive(protocol.iterate(spare, LIMITS), store, fails_at(Stage.INITIALIZE, End.FATAL)) == Ending(LEFT)
    assert "0/exit/0/1" in store.data


def test_timeout_names_the_current_rank(protocol: ModuleType) -> None:
    seat = Seat(initial_rank=5, rank=1, world_size=2, active_world_size=2, iteration=ENTRY)
    with pytest.raises(BarrierTimeout) as raised:
        drive(protocol.enter(seat, LIMITS), MemoryStore())
    assert raised.value.rank == 1  # type: ignore[attr-defined]


def test_arrival_orders_come_from_the_store_and_are_unique(protocol: ModuleType) -> None:
    store = MemoryStore()
    for record in "abc":
        assert drive(protocol.report(Keys(0), record, None), store) == INTERRUPTED
    assert [store.data[f"0/records/{position}"] for position in (1, 2, 3)] == ["a", "b", "c"]


def test_one_operation_gives_a_record_its_place_and_one_writes_it(protocol: ModuleType) -> None:
    log: list[Any] = []
    drive(protocol.stand_in(alone(3), LIMITS, "gone"), MemoryStore(), log=log)
    assert [each for each in log if type(each).__name__ == "AddRecord"] == [protocol.AddRecord("3/records", 1, 3, 0)]
    assert [each for each in log if type(each).__name__ == "SetRecord"] == [protocol.SetRecord("3/records/1", "gone")]


# -- departing ---------------------------------------------------------------------------------------------------


def test_rank_departs_without_waiting(protocol: ModuleType) -> None:
    log: list[Any] = []
    drive(protocol.depart(Seat(0, 0, 2, 2, 0), LIMITS, False), MemoryStore(), log=log)
    assert not any(isinstance(operation, Await) for operation in log)


def test_rank_that_holds_the_store_waits_for_all_others_and_not_for_ever(protocol: ModuleType) -> None:
    log: list[Any] = []
    drive(protocol.depart(Seat(0, 0, 2, 2, 0), LIMITS, True), MemoryStore(), log=log)
    assert log[-1] == Await("0/exit/done", LIMITS.barrier)


# -- standing in -------------------------------------------------------------------------------------------------


def test_lone_dead_rank_is_excluded(protocol: ModuleType) -> None:
    store = MemoryStore()
    assert drive(protocol.stand_in(alone(), LIMITS, "gone"), store) == "excluded"
    assert store.data["0/records/1"] == "gone"
    assert store.data["0/frozen"] == "0"


def test_standing_in_again_ends_alike(protocol: ModuleType) -> None:
    store = MemoryStore()
    drive(protocol.stand_in(alone(), LIMITS, "gone"), store)
    before = dict(store.data)
    assert drive(protocol.stand_in(alone(), LIMITS, "gone"), store) == "excluded"
    assert {key: store.data[key] for key in before} == before
    assert "0/records/2" not in store.data  # the incident is over: nothing is added to it


def test_rank_that_died_after_completion_changes_nothing(protocol: ModuleType) -> None:
    store = MemoryStore()
    drive(protocol.iterate(alone(), LIMITS), store)
    assert drive(protocol.stand_in(alone(), LIMITS, "gone"), store) == COMPLETED
    assert "0/terminated" not in store.data


def test_rank_that_died_after_completion_has_departed_for_the_rank_that_holds_the_store(protocol: ModuleType) -> None:
    store = MemoryStore()
    seats = [Seat(rank, rank, 2, 2, 0) for rank in range(2)]
    store.data[Keys(0).outcome] = COMPLETED
    drive(protocol.depart(seats[0], LIMITS, False), store)
    assert f"{Keys(0).exit}/done" not in store.data
    assert drive(protocol.stand_in(seats[1], LIMITS, "gone"), store) == COMPLETED
    assert f"{Keys(0).exit}/done" in store.data


def test_last_call_waits_for_the_other_ranks_and_at_most_last_call_wait(protocol: ModuleType) -> None:
    log: list[Any] = []
    seat, store = Seat(0, 0, 2, 2, 0), MemoryStore()
    drive(protocol.arrive(Keys(0).start, 1, 2), store)
    limits = WaitLimits(barrier=2.0, completion=3.0, last_call=7.0)
    with pytest.raises(BarrierTimeout):  # the other rank never answers
        drive(protocol.iterate(seat, limits), store, fails_at(Stage.FUNCTION, End.FAILED), log=log)
    assert Await(f"{Keys(0).last_call}/done", 7.0) in log


def test_rank_that_gave_up_waiting_leaves_without_a_second_wait(protocol: ModuleType) -> None:
    seat, store, log = Seat(0, 0, 2, 2, 0), MemoryStore(), list[Any]()
    with pytest.raises(BarrierTimeout):
        drive(protocol.iterate(seat, LIMITS), store)
    assert drive(protocol.leave(seat, LIMITS, "gave up", has_waited=True), store, log=log) == "excluded"
    assert not [operation for operation in log if isinstance(operation, Await)]
    assert drive(protocol._agree(Keys(0), Seat(1, 1, 2, 2, 0), LIMITS), store) == {0}


def test_rank_that_gave_up_and_came_last_ends_the_agreement_itself(protocol: ModuleType) -> None:
    store, log = MemoryStore(), list[Any]()
    drive(protocol.arrive(Keys(0).end, 1, 2), store)
    seat = Seat(3, 0, 2, 2, 0)
    assert drive(protocol.stand_in(seat, LIMITS, "gave up", has_waited=True), store, log=log) == "excluded"
    assert store.data[Keys(0).frozen] == "0"


def test_rank_that_gave_up_leaves_at_once_only_if_the_next_world_is_without_it(protocol: ModuleType) -> None:
    """The other rank arrives at last, at each point of the way out of the one that gave up, and the other way round."""
    waiting, late = Seat(0, 0, 2, 2, 0), Seat(1, 1, 2, 2, 0)
    outcomes = set()
    for first, points in product((0, 1), range(20)):
        store = MemoryStore()
        drive(protocol.arrive(Keys(0).end, 0, 2), store)  # then it waited in vain
        actors = [
            protocol.stand_in(waiting, LIMITS, "gave up", has_waited=True),
            protocol._agree(Keys(0), late, LIMITS),
        ]
        answers: list[Any] = [None, None]
        results: list[Any] = [None, None]
        turns = [first] * points + [1 - first] * 40 + [first] * 40
        for actor in turns:
            if results[actor] is not None:
                continue
            try:
                operation = actors[actor].send(answers[actor])
                answers[actor] = None if isinstance(operation, Assign) else store.perform(operation)
            except StopIteration as stop:
                results[actor] = stop.value
        outcomes.add((results[0], store.data[Keys(0).frozen]))
    assert outcomes == {("excluded", "0"), ("discarded", "none")}  # the assignment was asked, and discarded it


def test_rank_that_died_after_the_agreement_is_followed_and_interrupts_the_next_iteration(protocol: ModuleType) -> None:
    store = MemoryStore()
    assert drive(protocol.enter(alone(ENTRY), LIMITS), store) == Ending(INTERRUPTED)
    steps = protocol.stand_in(alone(ENTRY), LIMITS, "gone")
    assert drive(steps, store, assign=lambda operation: alone(operation.seat.iteration + 1)) == "excluded"
    assert "-1/records/1" not in store.data
    assert store.data["0/records/1"] == "gone"
    assert store.data["0/outcome"] == INTERRUPTED


def test_rank_that_gets_no_seat_needs_no_stand_in(protocol: ModuleType) -> None:
    store = MemoryStore()
    drive(protocol.enter(alone(ENTRY), LIMITS), store)
    assert drive(protocol.stand_in(alone(ENTRY), LIMITS, "gone"), store, assign=lambda operation: None) == "discarded"
    assert store.data["0/discarded/0"] == "1"


def test_rank_whose_assignment_failed_is_not_noted_as_discarded(protocol: ModuleType) -> None:
    store = MemoryStore()
    drive(protocol.enter(alone(ENTRY), LIMITS), store)
    steps = protocol.stand_in(alone(ENTRY), LIMITS, "gone")
    assert drive(steps, store, assign=lambda operation: restart.Unassigned(1)) == "discarded"
    assert "0/discarded/0" not in store.data


# Initial rank 3 was rank 2 of three. Rank 0 of these is terminated; initial rank 2 becomes rank 0 of two.
UNASSIGNED = Seat(3, 2, 3, 3, 0)
OTHER = Seat(2, 0, 2, 2, 1)
PLACE = Seat(3, 1, 2, 2, 1)


def look_for_a_place(
    protocol: ModuleType, store: MemoryStore, limit: float = 120.0, log: list[Any] | None = None
) -> Any:
    return drive(protocol._place_left(UNASSIGNED, frozenset((0,)), 4, limit), store, log=log)


def take_place(store: MemoryStore, seat: Seat) -> None:
    store.data[restart.seat_key(seat.initial_rank)] = to_json_text(seat)
    start = Keys(seat.iteration).start
    drive(restart.arrive(start, seat.rank, seat.world_size, str(seat.initial_rank)), store)


def test_rank_whose_assignment_failed_takes_the_place_that_is_left_without_a_wait(protocol: ModuleType) -> None:
    store, log = MemoryStore(), []  # type: ignore[var-annotated]
    take_place(store, OTHER)
    assert look_for_a_place(protocol, store, log=log) == PLACE
    assert not [operation for operation in log if isinstance(operation, Await)]
    assert (store.data["1/unassigned/3"], store.data["1/claim/1"]) == ("1", "3")


def test_rank_whose_assignment_failed_is_listed_for_the_ranks_that_would_wait_for_it(protocol: ModuleType) -> None:
    store, log = MemoryStore(), []  # type: ignore[var-annotated]
    take_place(store, OTHER)

    def listed(iteration: int) -> Any:
        return drive(protocol.unassigned_after(iteration), store)

    assert listed(0) == frozenset()
    store.data |= {"1/unassigned_ranks": "1"}  # its writer was killed before it wrote the rank
    look_for_a_place(protocol, store, log=log)
    written = [operation.key for operation in log if isinstance(operation, restart.Set)]
    assert written[:2] == ["1/unassigned/3", "1/unassigned_ranks/2"]
    assert (listed(0), listed(1)) == (frozenset((UNASSIGNED.rank,)), frozenset())


def test_rank_that_leaves_publishes_its_seat_first(protocol: ModuleType) -> None:
    store, log = MemoryStore(), []  # type: ignore[var-annotated]
    seat = Seat(3, 0, 1, 1, 0)
    assert drive(protocol.leave(seat, LIMITS, "raised"), store, log=log) == "excluded"
    assert log[0] == restart.Set("seat/3", to_json_text(seat))


def test_stand_in_publishes_each_seat_to_which_it_follows(protocol: ModuleType) -> None:
    """Ranks whose assignment failed learn the next world from it, if no rank that lives has a seat there."""
    store = MemoryStore()
    drive(protocol.enter(alone(ENTRY), LIMITS), store)
    drive(protocol.stand_in(alone(ENTRY), LIMITS, "gone"), store, assign=lambda operation: alone())
    assert store.data["seat/0"] == to_json_text(alone())
    assert "0/discarded/0" not in store.data


def test_place_is_not_taken_from_a_rank_that_is_late_if_the_assignment_discards_some_rank(protocol: ModuleType) -> None:
    """Initial rank 3 of four has failed; it would have got no seat, like rank 2. Rank 0 is slow, rank 1 has arrived."""
    seat, store = Seat(3, 3, 4, 4, 0), MemoryStore()
    take_place(store, Seat(1, 1, 2, 2, 1))

    def look(limit: float) -> Any:
        return drive(protocol._place_left(seat, frozenset(), 4, limit), store)

    with pytest.raises(BarrierTimeout):
        look(0.4)
    drive(protocol.discard(Seat(2, 2, 4, 4, 0), frozenset()), store)
    with pytest.raises(BarrierTimeout):
        look(0.4)
    take_place(store, Seat(0, 0, 2, 2, 1))
    assert look(0.4) is None
    assert "1/claim/0" not in store.data


def test_rank_that_is_terminated_is_not_discarded_too(protocol: ModuleType) -> None:
    seat, store = Seat(3, 1, 4, 4, 0), MemoryStore()  # initial rank 3 is rank 1 now
    drive(protocol.discard(seat, frozenset((1,))), store)
    assert store.data == {}
    drive(protocol.discard(seat, frozenset((3,))), store)
    assert store.data == {"1/discarded/3": "1"}


def test_place_is_found_again_when_the_others_have_gone_on(protocol: ModuleType) -> None:
    store = MemoryStore()
    take_place(store, OTHER)
    assert look_for_a_place(protocol, store) == PLACE
    store.data[restart.seat_key(3)] = to_json_text(PLACE)
    take_place(store, msgspec.structs.replace(OTHER, iteration=2))
    assert look_for_a_place(protocol, store) == PLACE


def test_rank_without_a_place_leaves_when_all_others_have_gone_on(protocol: ModuleType) -> None:
    store, log = MemoryStore(), []  # type: ignore[var-annotated]
    take_place(store, msgspec.structs.replace(OTHER, iteration=2))
    assert look_for_a_place(protocol, store, log=log) is None
    assert not [operation for operation in log if isinstance(operation, Await)]
    assert "1/claim/1" not in store.data


def test_place_is_waited_for_until_the_others_have_come(protocol: ModuleType) -> None:
    class Late(MemoryStore):
        looks = 0

        def perform(self, operation: Any) -> Any:
            if isinstance(operation, Await):
                self.looks += 1
                if self.looks == 3:
                    take_place(self, OTHER)
            return super().perform(operation)

    store = Late()
    assert look_for_a_place(protocol, store) == PLACE
    assert store.looks == 3


def test_place_that_another_rank_has_claimed_meanwhile_is_left_to_it(protocol: ModuleType) -> None:
    store = MemoryStore()
    store.data["1/claim/0"] = "5"
    assert drive(protocol._claim(Keys(1), 3, {}, [0, 1]), store) == 1
    assert (store.data["1/claim/0"], store.data["1/claim/1"]) == ("5", "3")
    assert drive(protocol._claim(Keys(1), 7, {}, [0, 1]), store) is None


def test_place_that_the_rank_has_claimed_is_asked_for_first(protocol: ModuleType) -> None:
    store, log = MemoryStore(), []  # type: ignore[var-annotated]
    store.data |= {"1/claim/0": "5", "1/claim/1": "3"}
    assert drive(protocol._claim(Keys(1), 3, {0: "5", 1: "3"}, []), store, log=log) == 1
    assert [operation.key for operation in log] == ["1/claim/1"]


def test_place_that_the_others_do_not_leave_in_time_is_given_up(protocol: ModuleType) -> None:
    with pytest.raises(BarrierTimeout, match="initial rank 3") as caught:
        look_for_a_place(protocol, MemoryStore(), limit=2.0)
    assert (caught.value.rank, caught.value.rendezvous_count, caught.value.limit) == (2, 3, 2.0)


def test_everybody_learns_the_first_agreement(protocol: ModuleType) -> None:
    store = MemoryStore()
    first = Ending(INTERRUPTED, frozenset())
    assert drive(protocol.enter(alone(ENTRY), LIMITS), store) == first
    drive(protocol.mark_terminated(Keys(ENTRY), 0), store)  # too late
    assert drive(protocol.enter(alone(ENTRY), LIMITS), store) == first


def test_mark_that_was_never_written_counts_for_nobody(protocol: ModuleType) -> None:
    store = MemoryStore()
    steps = protocol.mark_terminated(Keys(ENTRY), 5)
    store.perform(next(steps))  # and then killed
    assert drive(protocol.enter(alone(ENTRY), LIMITS), store) == Ending(INTERRUPTED)


def test_compare_and_set_and_plain_reads_are_all_the_store_needs() -> None:
    """Whatever store the user brings has these; anything else would ask for more."""
    log: list[Any] = []
    drive(restart.iterate(alone(), LIMITS), MemoryStore(), fails_at(Stage.FUNCTION, End.FAILED), log=log)
    drive(restart.stand_in(alone(1), LIMITS, "gone"), MemoryStore(), log=log)
    kinds = (restart.Set, restart.Add, CompareSet, Check, Read, Await, RunStage)
    assert {kind for operation in log for kind in kinds if isinstance(operation, kind)} == set(kinds)
    assert all(isinstance(operation, kinds) for operation in log)


# -- whose fault an error is -----------------------------------------------------------------------------------------


def settled(
    protocol: ModuleType,
    before: Callable[[MemoryStore], object] = lambda store: None,
    after: Callable[[MemoryStore], object] = lambda store: None,
    answers: bool = True,
    origin: FaultOrigin = "communication",
    end: End = End.FAILED,
) -> list[FaultOrigin]:
    """Return what rank 0 of two learns of its error. before, after: what happens in the store before and after it
    reports the error. answers: rank 1 answers the last call."""
    store = MemoryStore()
    drive(protocol.arrive("0/start", 1, 2), store)

    def stages(stage: Stage) -> Result:
        if stage is Stage.FUNCTION:
            before(store)
            return Result(end, "0 failed", origin)
        if stage is Stage.ABORT:
            after(store)
            if answers:
                drive(protocol.arrive("0/last_call", 1, 2), store)
            drive(protocol.arrive("0/end", 1, 2), store)
        return RETURNED

    log: list[Any] = []
    drive(protocol.iterate(Seat(0, 0, 2, 2, 0), LIMITS), store, stages, log=log)
    return [operation.origin for operation in log if isinstance(operation, Settle)]


def reports(protocol: ModuleType, is_own: bool) -> Callable[[MemoryStore], object]:
    return lambda store: drive(protocol.report(Keys(0), "1 failed", 1 if is_own else None), store)


def test_error_of_a_communication_call_is_the_ranks_own_if_nobody_else_has_a_fault(protocol: ModuleType) -> None:
    assert settled(protocol) == ["own"]
    assert settled(protocol, end=End.FATAL) == ["own"]


def test_error_of_a_communication_call_is_nobodys_fault_if_another_rank_has_one(protocol: ModuleType) -> None:
    assert settled(protocol, before=reports(protocol, is_own=True)) == ["consequence"]
    assert settled(protocol, after=reports(protocol, is_own=True)) == ["consequence"]


def test_order_of_arrival_decides_between_two_errors_of_communication_calls(protocol: ModuleType) -> None:
    assert settled(protocol, before=reports(protocol, is_own=False)) == ["consequence"]
    assert settled(protocol, after=reports(protocol, is_own=False)) == ["own"]


def test_error_of_a_communication_call_is_nobodys_fault_while_a_rank_is_missing(protocol: ModuleType) -> None:
    assert settled(protocol, answers=False) == ["consequence"]


def test_survivor_is_cleared_whose_error_came_before_the_dead_ranks_record(protocol: ModuleType) -> None:
    def stand_in(store: MemoryStore) -> None:
        steps = protocol.stand_in(Seat(1, 1, 2, 2, 0), LIMITS, "1 died")
        while not isinstance(operation := steps.send(None if not sent else sent.pop()), Await):
            sent.append(store.perform(operation))

    sent: list[Any] = []
    assert settled(protocol, after=stand_in, answers=False) == ["consequence"]


@pytest.mark.parametrize("other", [True, False])
def test_fault_of_a_ranks_own_needs_no_settling(other: bool) -> None:
    assert settled(restart, before=reports(restart, other), origin="own") == []
    assert settled(restart, after=reports(restart, other), origin="own") == []


def test_missed_completion_is_no_fault_of_the_rank_that_waited(protocol: ModuleType) -> None:
    store = MemoryStore()
    drive(protocol.arrive("0/start", 1, 2), store)
    with pytest.raises(BarrierTimeout):
        drive(protocol.iterate(Seat(0, 0, 2, 2, 0), LIMITS), store)
    assert "0/records/1" in store.data
    assert "0/fault" not in store.data


def test_fault_is_put_down_before_the_outcome_wakes_another_rank(protocol: ModuleType) -> None:
    log: list[Any] = []
    drive(protocol.report(Keys(0), "1 failed", 1), MemoryStore(), log=log)
    keys = [operation.key for operation in log]
    assert keys.index("0/fault") < keys.index("0/outcome")


def test_first_of_the_faults_of_ranks_own_counts_whatever_record_came_first(protocol: ModuleType) -> None:
    store, log = MemoryStore(), []
    for rank, is_own in ((3, False), (2, True), (1, True), (2, True)):  # the last one: a stand-in says it again
        drive(protocol.report(Keys(0), f"{rank} failed", rank if is_own else None), store, log=log)
    added = [operation.fault_of for operation in log if type(operation).__name__ == "AddRecord"]
    assert added == [None, 2, 2, 2]


def test_fault_is_that_of_an_initial_rank_whatever_its_present_number(protocol: ModuleType) -> None:
    seat = Seat(5, 0, 1, 1, 0)
    raised, died, hook = MemoryStore(), MemoryStore(), MemoryStore()
    drive(protocol.iterate(seat, LIMITS), raised, fails_at(Stage.FUNCTION, End.FAILED))
    drive(protocol.stand_in(seat, LIMITS, "gone"), died)
    drive(protocol.report(Keys(0), "an echo", None), hook)
    drive(protocol.iterate(seat, LIMITS), hook, fails_at(Stage.FINALIZE, End.FATAL))
    assert [store.data["0/fault"] for store in (raised, died, hook)] == ["5"] * 3


def test_rank_that_has_left_learns_who_does_not_go_on_or_nothing(protocol: ModuleType) -> None:
    store, seat = MemoryStore(), Seat(0, 0, 3, 3, 4)
    assert isinstance(protocol.terminated_of(seat, 1.0).send(None), Await)
    assert drive(protocol.terminated_of(seat, 1.0), store) is None
    for frozen, ranks in (("none", set()), ("0 2", {0, 2})):
        store.data["4/frozen"] = frozen
        assert drive(protocol.terminated_of(seat, 1.0), store) == ranks
