"""What hooks see through `state.store` is what the restart protocol has written, and what they report acts."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from resilience.core import restart
from resilience.core.restart import COMPLETED, ENTRY, INTERRUPTED, CompareSet, Keys, Read, Set, seat_key
from resilience.errors import ConfigurationError, StoreError
from resilience.facts import events
from resilience.facts.encoding import to_json_text
from resilience.facts.interruptions import Interruption, InterruptionRecord, encode
from resilience.facts.seats import Seat
from resilience.inprocess.hook_store import CallStore, IterationStore
from resilience.system.store import drive, execute

PREFIX = "resilience/0/"
KEYS = Keys(3)
SEAT = Seat(initial_rank=4, rank=1, world_size=3, active_world_size=2, iteration=3)


class Ranks:
    """The store of a job, as its protocol uses it and as a hook of SEAT's rank sees it."""

    def __init__(self, seat: Seat = SEAT) -> None:
        base = dist.HashStore()
        self.emitted: list[events.Event] = []
        self.protocol: Any = dist.PrefixStore(PREFIX, base)
        self.store = IterationStore(seat, CallStore(PREFIX, base, lambda *new: self.emitted.extend(new)))

    def do(self, *protocols: restart.Protocol[Any]) -> None:
        for protocol in protocols:
            drive(protocol, self.protocol)

    def outcome(self) -> str | None:
        (outcome,) = execute(Read((KEYS.outcome,)), self.protocol)
        return None if outcome is None else str(outcome)


@pytest.fixture
def ranks() -> Ranks:
    return Ranks()


def record_of(rank: int, active_rank: int | None) -> InterruptionRecord:
    return InterruptionRecord(rank, Interruption.EXCEPTION, active_rank=active_rank)


def test_interruption_records_are_those_of_the_protocol_with_present_ranks(ranks: Ranks) -> None:
    assert ranks.store.get_interruption_records() == []
    ranks.do(restart.report(KEYS, encode(record_of(4, 1)), 4), restart.report(KEYS, encode(record_of(9, 2)), None))
    lost, gone = record_of(7, None), record_of(6, None)  # of a lost node: only initial ranks are known
    for record, iteration in ((lost, 3), (gone, 2)):
        seat = Seat(record.rank, 0, 3, 2, iteration)
        execute(Set(seat_key(record.rank), to_json_text(seat)), ranks.protocol)
        ranks.do(restart.report(KEYS, encode(record), None))
    found = ranks.store.get_interruption_records()
    assert [(record.rank, record.interruption) for record in found] == [
        (1, Interruption.EXCEPTION),
        (2, Interruption.EXCEPTION),
        (0, Interruption.EXCEPTION),
        (6, Interruption.EXCEPTION),  # it has no place in this iteration
    ]


def test_initial_ranks_are_those_that_arrived_at_the_start(ranks: Ranks) -> None:
    with pytest.raises(StoreError, match="rank 2 has not arrived at the start"):
        ranks.store.get_initial_rank(2)
    ranks.do(restart.arrive(KEYS.start, 0, 3, "0"), restart.arrive(KEYS.start, 2, 3, "6"))
    assert [ranks.store.get_initial_rank(rank) for rank in range(3)] == [0, 4, 6]
    for rank in (-1, 3, "1"):
        with pytest.raises(
            ConfigurationError, match=f"there is no rank {rank!r} in this iteration, which has the ranks 0 to 2"
        ):
            ranks.store.get_initial_rank(rank)  # type: ignore[arg-type]
    at_entry = Ranks(Seat(1, 1, 2, 2, ENTRY)).store
    assert [at_entry.get_initial_rank(rank) for rank in range(2)] == [0, 1]


def test_completion_is_seen_once_the_function_has_returned_on_a_rank(ranks: Ranks) -> None:
    assert not ranks.store.is_any_rank_completed()
    execute(Set(KEYS.returned, "1"), ranks.protocol)
    assert ranks.store.is_any_rank_completed()


def test_rank_that_a_hook_terminates_is_terminated_for_all(ranks: Ranks) -> None:
    assert ranks.store.get_terminated_ranks() == set()
    ranks.store.record_terminated_rank(2)
    ranks.do(restart.mark_terminated(KEYS, 0))
    assert ranks.store.get_terminated_ranks() == {0, 2}
    for rank in (0, 1):
        ranks.do(restart.arrive(KEYS.end, rank, 3))
    last = Seat(0, 2, 3, 2, 3)
    assert drive(restart._agree(KEYS, last, restart.WaitLimits()), ranks.protocol) == {0, 2}
    with pytest.raises(ConfigurationError, match="too late to terminate rank 1: the ranks have agreed"):
        ranks.store.record_terminated_rank(1)
    with pytest.raises(ConfigurationError, match="there is no rank 3"):
        ranks.store.record_terminated_rank(3)


def test_interruption_that_a_hook_records_restarts_all(ranks: Ranks) -> None:
    ranks.do(restart.arrive(KEYS.start, 0, 3, "5"))
    ranks.store.record_interrupted(InterruptionRecord(0, Interruption.TERMINATED))
    assert ranks.store.is_any_rank_iterrupted()
    assert ranks.outcome() == INTERRUPTED
    interrupted, arrived = ranks.emitted
    assert isinstance(interrupted, events.RankInterrupted)
    assert isinstance(arrived, events.InterruptionArrived)
    record = interrupted.record
    assert (record.rank, record.active_rank, record.iteration) == (5, 0, 3)
    assert record.message == "reported by rank 1 through state.store.record_interrupted"
    assert (arrived.fault_of, arrived.position) == (5, 1)
    assert [each.rank for each in ranks.store.get_interruption_records()] == [0]


def test_hook_may_record_several_interruptions_or_restart_without_a_record(ranks: Ranks) -> None:
    ranks.store.record_interrupted([])
    assert not ranks.store.is_any_rank_iterrupted()
    assert ranks.outcome() is None
    own = InterruptionRecord(1, Interruption.SOFT_TIMEOUT, message="the user's own")
    ranks.store.record_interrupted([own, own])
    ranks.store.record_interrupted()
    messages = [record.message for record in ranks.store.get_interruption_records()]
    assert messages == [own.message, own.message, "state.store.record_interrupted was called without a record"]


@pytest.mark.parametrize("iteration", [3, ENTRY])
def test_interruption_by_a_hook_after_the_ranks_have_agreed_is_refused(iteration: int) -> None:
    """rank_assignment and rank_filter run then: the iteration is over, and the next one has not begun."""
    seat = Seat(initial_rank=0, rank=0, world_size=1, active_world_size=1, iteration=iteration)
    ranks, keys = Ranks(seat), Keys(iteration)
    ranks.do(restart.arrive(keys.end, 0, 1))
    assert drive(restart._agree(keys, seat, restart.WaitLimits()), ranks.protocol) == frozenset()
    for record in (None, InterruptionRecord(0, Interruption.EXCEPTION), []):
        with pytest.raises(
            ConfigurationError, match=r"too late to interrupt this iteration: .* raise an exception in the hook"
        ):
            ranks.store.record_interrupted(record)
    assert ranks.store.get_interruption_records() == [] == ranks.emitted


def test_interruption_after_completion_changes_nothing(ranks: Ranks) -> None:
    execute(CompareSet(KEYS.outcome, COMPLETED), ranks.protocol)
    ranks.store.record_interrupted()
    assert ranks.outcome() == COMPLETED


@pytest.mark.parametrize(
    ("name", "arguments", "instead"),
    [
        ("set_initial_rank", (0, 1), "rank_assignment and rank_filter decide"),
        ("record_completed", (), "return from the wrapped function"),
        ("record_base_terminated_rank", (0,), "state.world_size"),
        ("get_base_terminated_count", (), "state.world_size"),
    ],
)
def test_method_without_effect_says_what_to_write(
    ranks: Ranks, name: str, arguments: tuple[int, ...], instead: str
) -> None:
    with pytest.raises(ConfigurationError, match=f"{name} has no meaning in IterationStore: .*{instead}"):
        getattr(ranks.store, name)(*arguments)


def test_store_of_the_call_names_what_belongs_to_an_iteration(ranks: Ranks) -> None:
    base = ranks.store.base_store
    assert base.critical_ranks == ()
    for name in ("get_interruption_records", "is_any_rank_completed", "get_terminated_ranks", "get_initial_rank"):
        with pytest.raises(ConfigurationError, match=f"write state.store.{name}, without base_store"):
            getattr(base, name)()
    base.barrier(0, "ours", 1, timedelta(seconds=1))


def test_name_of_the_api_that_is_not_here_says_what_to_write(ranks: Ranks) -> None:
    with pytest.raises(AttributeError, match=r"'IterationStore' has no attribute 'reentrant_barrier'; write barrier"):
        ranks.store.reentrant_barrier()
    with pytest.raises(AttributeError, match=r"'CallStore' has no attribute 'anything'$"):
        ranks.store.base_store.anything  # noqa: B018


def test_keys_of_hooks_are_apart_from_those_of_the_protocol(ranks: Ranks) -> None:
    ranks.store.set(KEYS.outcome, "a hook's own")
    assert ranks.outcome() is None
