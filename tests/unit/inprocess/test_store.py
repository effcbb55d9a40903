"""Any torch Store with the mixin has barriers and records; here torch's store in memory, and a dict."""

from __future__ import annotations

import random
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from resilience.core.restart import BLOCK, Add, Protocol, Set
from resilience.errors import (
    BarrierError,
    BarrierOverflow,
    BarrierTimeout,
    ConfigurationError,
    ConfigurationTypeError,
    RestartError,
    StoreError,
)
from resilience.facts.interruptions import Interruption, InterruptionRecord
from resilience.inprocess import store as stores
from resilience.inprocess._runtime.store_barrier import gather
from resilience.inprocess.store import FileStore, PrefixStore, StoreMixin, TCPStore
from tests.unit.inprocess.interleaving import interleaved

SECOND = timedelta(seconds=1)


class MixinLast(dist.HashStore, StoreMixin):
    """In the order in which users of the compatible API write it."""


class MixinFirst(StoreMixin, dist.HashStore):
    pass


class Redefining(dist.HashStore, StoreMixin):
    def barrier(self, *args: Any, **kwargs: Any) -> Any:
        return "the user's own"


def meet(group_name: str, rank: int, count: int, limit: float) -> Protocol[None]:
    """What `StoreMixin.barrier` does with a store of its own. A rank that arrives again takes another place but counts
    once, so a stand-in may repeat the arrival of a rank that was killed at any point."""
    arrivals = yield Add(f"barrier/{group_name}/arrived", 1)
    yield Set(f"barrier/{group_name}/place/{arrivals - 1}", str(rank))
    yield from gather(group_name, rank, count, limit, arrivals)


@pytest.fixture(params=[MixinLast, MixinFirst, lambda: PrefixStore(3, dist.HashStore())])
def store(request: pytest.FixtureRequest) -> Any:
    return request.param()


# -- barriers -----------------------------------------------------------------------------------------


@given(
    ranks=st.sets(st.integers(0, 10**6), min_size=1, max_size=100),
    seed=st.integers(0, 2**32),
)
def test_barrier_lets_go_when_all_have_come_whatever_their_numbers(ranks: set[int], seed: int) -> None:
    begins = {rank: partial(meet, "here", rank, len(ranks), 9.0) for rank in ranks}
    results, store = interleaved(begins, random.Random(seed))
    assert set(results.values()) == {None}
    assert store.widest <= BLOCK
    del begins[min(ranks)]
    results, _ = interleaved(begins, random.Random(seed))
    assert all(isinstance(result, BarrierTimeout) for result in results.values())


@given(count=st.integers(1, 70), seed=st.integers(0, 2**32), killed_after=st.integers(1, 9))
def test_arrival_of_a_killed_rank_can_be_repeated(count: int, seed: int, killed_after: int) -> None:
    victim = random.Random(seed).randrange(count)
    begins = {rank: partial(meet, "here", rank, count, 9.0) for rank in range(count)}
    results, _ = interleaved(begins, random.Random(seed), kill=(victim, killed_after))
    assert set(results.values()) == {None}


@given(count=st.integers(1, 20), surplus=st.integers(0, 20), seed=st.integers(0, 2**32))
def test_barrier_lets_no_more_pass_than_it_is_made_for(count: int, surplus: int, seed: int) -> None:
    begins = {rank: partial(meet, "here", rank, count, 9.0) for rank in range(count + surplus)}
    results, _ = interleaved(begins, random.Random(seed))
    assert sorted(type(result).__name__ for result in results.values()) == (
        ["BarrierOverflow"] * surplus + ["NoneType"] * count
    )


@given(count=st.integers(1, 20), surplus=st.integers(0, 5), seed=st.integers(0, 2**32), killed_after=st.integers(1, 9))
def test_killed_and_repeated_arrival_costs_no_other_rank_its_place(
    count: int, surplus: int, seed: int, killed_after: int
) -> None:
    victim = random.Random(seed).randrange(count + surplus)
    begins = {rank: partial(meet, "here", rank, count, 9.0) for rank in range(count + surplus)}
    results, _ = interleaved(begins, random.Random(seed), kill=(victim, killed_after))
    told = sum(isinstance(result, BarrierOverflow) for result in results.values())
    assert told in (surplus, surplus - 1) and set(map(type, results.values())) <= {type(None), BarrierOverflow}


def test_more_ranks_than_a_barrier_is_made_for_are_told_so(store: Any) -> None:
    store.barrier(5, "here", 1, SECOND)
    store.barrier(5, "here", 1, SECOND)  # the same one again
    with pytest.raises(BarrierOverflow, match="rank 7 is number 2 to reach barrier 'here', which is for 1") as raised:
        store.barrier(7, "here", 1, SECOND)
    assert isinstance(raised.value, BarrierError)
    assert isinstance(raised.value, RestartError)
    assert vars(raised.value)["rendezvous_count"] == 1


def test_barrier_gives_up_after_its_timeout(store: Any) -> None:
    with pytest.raises(BarrierTimeout, match=r"rank 0 waited 0.001 s .* and 1 of 2 ranks came") as raised:
        store.barrier(rank=0, group_name="here", rendezvous_count=2, timeout=timedelta(milliseconds=1))
    assert vars(raised.value)["arrived"] == 1


def test_barriers_of_the_api_do_not_disturb_each_other(store: Any) -> None:
    for name in ("initial_barrier", "iteration_barrier", "completion_barrier", "termination_barrier"):
        getattr(store, name)(rank=0, rendezvous_count=1, timeout=SECOND, timeout_chunk=SECOND)
        with pytest.raises(BarrierOverflow, match=name):
            getattr(store, name)(rank=1, rendezvous_count=1, timeout=SECOND)


def test_method_of_the_users_class_wins_over_the_mixin() -> None:
    assert Redefining().barrier(1) == "the user's own"
    Redefining().initial_barrier(rank=0, rendezvous_count=1, timeout=SECOND)


@pytest.mark.parametrize("timeout", [3, 0.5, None])
def test_barrier_wants_a_timedelta(store: Any, timeout: Any) -> None:
    with pytest.raises(ConfigurationTypeError, match=r"write e\.g\. timeout=timedelta\(seconds="):
        store.barrier(0, "here", 1, timeout)
    with pytest.raises(ConfigurationTypeError, match="timeout_chunk"):
        store.barrier(0, "here", 1, SECOND, timeout_chunk=5)


def test_barrier_wants_a_count(store: Any) -> None:
    with pytest.raises(ConfigurationError, match="rendezvous_count is 0"):
        store.barrier(0, "here", 0, SECOND)


# -- records ------------------------------------------------------------------------------------------


def test_records_come_back_in_the_order_of_their_arrival(store: Any) -> None:
    first = InterruptionRecord(3, Interruption.EXCEPTION, message="a;b\n")
    second = InterruptionRecord(1, Interruption.SOFT_TIMEOUT)
    third = InterruptionRecord(2, Interruption.TERMINATED)
    assert store.get_interruption_records() == []
    store.record_interrupted(first)
    store.record_interrupted([second, third])
    store.record_interrupted()
    assert store.get_interruption_records() == [first, second, third]


def test_completion_is_seen_by_all(store: Any) -> None:
    assert not store.is_any_rank_completed()
    store.record_completed()
    store.record_completed()
    assert store.is_any_rank_completed()


def test_ranks_that_left_are_counted_once(store: Any) -> None:
    for rank in (4, 2, 4):
        store.record_terminated_rank(rank)
        store.record_base_terminated_rank(rank + 10)
    assert store.get_terminated_ranks() == {2, 4}
    assert store.get_base_terminated_count() == 2


def test_initial_ranks_are_found_by_present_rank(store: Any) -> None:
    store.set_initial_rank(0, 5)
    assert store.get_initial_rank(0) == 5
    store.set_timeout(timedelta(milliseconds=1))
    with pytest.raises(StoreError, match=r"no initial rank was set for rank 1 within 0.001 s"):
        store.get_initial_rank(1)


def test_store_in_memory_is_critical_for_nobody(store: Any) -> None:
    assert store.critical_ranks == ()


def test_iterations_do_not_see_each_other() -> None:
    base = dist.HashStore()
    PrefixStore(0, base).record_completed()
    assert not PrefixStore(1, base).is_any_rank_completed()
    assert PrefixStore(0, base).is_any_rank_completed()
    assert PrefixStore(0, base).base_store is base


# -- constructors -------------------------------------------------------------------------------------


def test_tcp_store_says_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigurationError, match="MASTER_ADDR is not set and the store got no host_name"):
        TCPStore()
    with pytest.raises(ConfigurationError, match="MASTER_PORT is not set"):
        TCPStore("localhost")
    monkeypatch.setenv("MASTER_PORT", "http")
    with pytest.raises(ConfigurationError, match="MASTER_PORT is 'http'"):
        TCPStore("localhost")
    with pytest.raises(ConfigurationTypeError, match="timeout is 300"):
        TCPStore("localhost", 1, timeout=300)  # type: ignore[arg-type]


def test_file_store_says_what_it_needs() -> None:
    with pytest.raises(ConfigurationError, match="no path"):
        FileStore()
    with pytest.raises(ConfigurationTypeError, match="timeout is 3"):
        FileStore("/nowhere", timeout=3)  # type: ignore[arg-type]


def test_names_of_the_api_are_there() -> None:
    assert {stores.BarrierError, stores.BarrierTimeout, stores.BarrierOverflow} == {
        BarrierError,
        BarrierTimeout,
        BarrierOverflow,
    }
