"""The job's list of failures: agents that ask at once, come late, or die on the way."""

from __future__ import annotations

import random
from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilience.core import job_budget
from resilience.core.budget import Answer, Budget, Failure
from resilience.errors import StoreError
from resilience.facts.interruptions import ExceptionInfo, Exit, Frame, Interruption, InterruptionRecord
from resilience.launcher.rendezvous import driving
from resilience.launcher.rendezvous.driving import Driver
from tests.unit.launcher.stores import Killed, Store


class JobBudget:
    """One agent's view of the job's budget, performed on a store."""

    def __init__(self, store: Store, allowed: Budget) -> None:
        self._budget = job_budget.JobBudget(allowed)
        self._run = Driver(store, lambda: False).run
        self._run(self._budget.open())

    @property
    def used(self) -> int:
        return self._run(self._budget.used())

    @property
    def same_in_a_row(self) -> int:
        assert self.used >= 0  # reads the list
        return self._budget.same_in_a_row

    def history(self) -> list[Failure]:
        return self._run(self._budget.history())

    def decide(self, failure: Failure) -> Answer:
        return self._run(self._budget.decide(failure))

    def spend(self, failure: Failure) -> None:
        self._run(self._budget.spend(failure))


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(driving, "time", made)
    return made


def failure(cycle: int, kind: str = "x", step: int | None = None, node: str = "a") -> Failure:
    return Failure(cycle, kind, kind, node, 0, cycle if step is None else step)


def test_all_agents_read_one_list_in_one_order() -> None:
    store = Store()
    a, b = JobBudget(store, Budget(9)), JobBudget(store, Budget(9))
    a.spend(failure(0, "x"))
    b.spend(failure(1, "y"))
    assert [each.fingerprint for each in a.history()] == [each.fingerprint for each in b.history()] == ["x", "y"]
    assert a.used == b.used == JobBudget(store, Budget(9)).used == 2


def test_all_agents_count_the_same_failures_in_a_row_also_one_that_has_just_joined() -> None:
    store = Store()
    decider, other = JobBudget(store, Budget(9)), JobBudget(store, Budget(9))
    assert decider.same_in_a_row == other.same_in_a_row == 0
    for cycle, (kind, step, count) in enumerate((("x", 5, 1), ("y", 5, 1), ("y", 5, 2), ("y", 6, 1))):
        answer = decider.decide(failure(cycle, kind, step))
        decider.spend(failure(cycle, kind, step))
        counts = [agent.same_in_a_row for agent in (decider, other, JobBudget(store, Budget(9)))]
        assert [answer.same_in_a_row, *counts] == [count] * 4


def test_failure_of_a_worker_is_final_where_its_program_cannot_start() -> None:
    raised = InterruptionRecord(
        rank=1,
        interruption=Interruption.EXCEPTION,
        exception=ExceptionInfo("ValueError", "bad", "abc", (Frame("t.py", 3, "main"),)),
        exit=Exit(code=1),
    )
    at_import = ExceptionInfo("SyntaxError", "invalid", "abc", (Frame("t.py", 3, "<module>"),))
    found = job_budget.failure_of(raised, 3, "a", 7, 2.0)
    assert (found.what, found.is_final, found.cycle, found.rank) == ("ValueError: bad", False, 3, 1)
    found = job_budget.failure_of(raised, 3, "a", 7, 2.0, "there is no such file")
    assert (found.what, found.is_final) == ("there is no such file", True)
    found = job_budget.failure_of(msgspec.structs.replace(raised, exception=at_import), 3, "a", 7, 2.0)
    assert (found.what, found.is_final) == ("SyntaxError: invalid", True)


def test_exit_status_2_is_a_usage_error_only_of_python_that_has_just_started() -> None:
    ended = InterruptionRecord(rank=1, interruption=Interruption.TERMINATED, exit=Exit(code=2))
    for is_python, ran, kind in ((True, 2.0, "usage error"), (False, 2.0, "exit"), (True, 100.0, "exit")):
        found = job_budget.failure_of(ended, 0, "a", -1, ran, is_python=is_python)
        assert (found.kind, found.fingerprint) == (kind, "exit:2")


def test_cycle_is_charged_once_if_several_agents_note_it() -> None:
    store = Store()
    a, b = JobBudget(store, Budget(9)), JobBudget(store, Budget(9))
    a.spend(failure(0, "first"))
    b.spend(failure(0, "second"))
    a.spend(failure(0, "third"))
    assert [each.fingerprint for each in b.history()] == ["first"]


def test_failure_happens_when_an_agent_sees_it_by_its_own_clock(clock: Clock) -> None:
    store = Store()
    a, b = JobBudget(store, Budget(99, same_in_window=3, window_s=60.0)), JobBudget(store, Budget(99))
    for cycle in range(3):
        clock.now += 3600.0
        b.spend(failure(cycle))
        assert a.used == cycle + 1
    clock.now += 3600.0
    assert a.decide(failure(3)).is_restart
    assert [each.at for each in a.history()] == [4600.0, 8200.0, 11800.0]


def test_agent_that_comes_late_takes_what_it_finds_for_old(clock: Clock) -> None:
    store = Store()
    first = JobBudget(store, Budget(99))
    for cycle in range(12):
        first.spend(failure(cycle))
    late = JobBudget(store, Budget(99, same_in_window=3, window_s=3600.0))
    assert late.used == 12
    assert late.decide(failure(12)).is_restart
    for cycle in range(12, 15):
        first.spend(failure(cycle))
    assert not late.decide(failure(15)).is_restart  # what happens while it is there counts


def test_store_that_is_gone_is_said() -> None:
    store = Store()
    budget = JobBudget(store, Budget(9))

    def gone() -> None:
        raise RuntimeError("Connection reset by peer")

    store.before = gone
    for ask in (lambda: budget.used, budget.history, lambda: budget.spend(failure(0))):
        with pytest.raises(StoreError, match="Connection reset"):
            ask()


@given(st.integers(0, 10**6), st.integers(2, 5), st.integers(1, 6))
def test_agents_that_interleave_and_die_at_any_operation_leave_a_list_without_gap_or_doubt(
    seed: int, agents: int, cycles: int
) -> None:
    """In each cycle every agent notes what it saw. Between any two operations of one, others may do all of
    theirs; any may die before any operation. What one has read, nobody ever reads otherwise."""
    chance = random.Random(seed)
    store = Store()
    budgets = {name: JobBudget(store, Budget(99)) for name in range(agents)}
    read: list[list[str]] = []
    noted: set[int] = set()

    for cycle in range(cycles):
        waiting = sorted(budgets)
        chance.shuffle(waiting)

        def act(name: int, cycle: int = cycle) -> None:
            budget = budgets[name]
            try:
                budget.decide(failure(cycle, f"{cycle} by {name}"))
                budget.spend(failure(cycle, f"{cycle} by {name}"))
                noted.add(cycle)
                read.append([each.fingerprint for each in budget.history()])
            except Killed:
                del budgets[name]

        def before(waiting: list[int] = waiting, act: Callable[[int], None] = act) -> None:
            if waiting and chance.random() < 0.3:
                act(waiting.pop())
            if len(budgets) > 1 and chance.random() < 0.05:
                raise Killed

        store.before = before
        while waiting:
            act(waiting.pop())
        store.before = lambda: None
        if not budgets:
            return

    final = [each.fingerprint for each in JobBudget(store, Budget(99)).history()]
    told = [int(each.split()[0]) for each in final]
    assert sorted(set(told)) == sorted(told)  # each cycle at most once
    assert set(told) >= noted
    for known in read:
        assert known == final[: len(known)]
    for budget in budgets.values():
        assert [each.fingerprint for each in budget.history()] == final
