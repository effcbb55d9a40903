"""Restart policies and requests: single claims, and what holds for whatever is seen of nodes."""

from __future__ import annotations

import random
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilience.core.control import (
    GRAVEST_FIRST,
    Nodes,
    Policy,
    Request,
    answer,
    is_premature,
    takes_newcomers,
    weigh,
)

NAMES = "abcde"


class Facts(NamedTuple):
    """What is true of which nodes."""

    all: frozenset[str]
    ended: frozenset[str] = frozenset()
    failed: frozenset[str] = frozenset()
    lost: frozenset[str] = frozenset()

    @property
    def counted(self) -> Nodes:
        bad = self.failed | self.lost
        return Nodes(len(self.all), len(bad), len(self.ended - bad), self.lost, self.all <= self.ended | self.lost)


def nodes(all: str, ended: str = "", failed: str = "", lost: str = "") -> Facts:
    return Facts(frozenset(all), frozenset(ended), frozenset(failed), frozenset(lost))


def call(policy: Policy, seen: Facts, least: int = 2, waited: float = 0.0, limit: float | None = 300.0) -> str:
    return weigh(policy, least, seen.counted, waited, limit)


# -- policies -----------------------------------------------------------------------------------------


def test_any_failed_restarts_for_one_failed_worker_or_one_lost_node() -> None:
    assert call("any-failed", nodes("abc", failed="b")) == "restart"
    assert call("any-failed", nodes("abc", lost="b")) == "restart"
    assert call("any-failed", nodes("abc")) == "go on"


def test_min_healthy_restarts_only_below_the_minimum() -> None:
    assert call("min-healthy", nodes("abc", failed="b")) == "go on"
    assert call("min-healthy", nodes("abc", lost="b")) == "go on"
    assert call("min-healthy", nodes("abc", failed="b", lost="c")) == "restart"
    assert call("min-healthy", nodes("abc", failed="bc")) == "restart"


@pytest.mark.parametrize(("policy", "apart", "said"), [("any-failed", 299.9, False), ("any-failed", 300.0, True)])
def test_worker_may_end_well_before_the_others_of_its_node_for_a_while(
    policy: Policy, apart: float, said: bool
) -> None:
    assert is_premature(policy, apart, 300.0) is said
    assert is_premature("min-healthy", apart, 300.0) is False  # its Wrapper may have given it up
    assert is_premature(policy, 10**9, None) is False


def test_node_that_failed_and_then_is_lost_counts_once() -> None:
    assert call("min-healthy", nodes("abc", failed="b", lost="b")) == "go on"


def test_job_is_complete_once_nobody_runs_any_more_and_enough_are_well() -> None:
    assert call("any-failed", nodes("abc", ended="abc")) == "completed"
    assert call("any-failed", nodes("abc", ended="ab")) == "go on"
    # Under min-healthy the rest of a node, or nothing of it, has gone on without what failed.
    assert call("min-healthy", nodes("abc", ended="abc", failed="c")) == "completed"
    assert call("min-healthy", nodes("abc", ended="ab", lost="c")) == "completed"
    assert call("min-healthy", nodes("abc", ended="ab", failed="c")) == "go on"


def test_exit_with_0_is_premature_once_others_did_not_follow_in_time() -> None:
    assert call("any-failed", nodes("abc", ended="a"), waited=299.0) == "go on"
    assert call("any-failed", nodes("abc", ended="a"), waited=300.0) == "premature"
    assert call("any-failed", nodes("abc", ended="abc"), waited=301.0) == "completed"
    assert call("any-failed", nodes("abc", ended="a"), waited=10**9, limit=None) == "go on"


def test_node_whose_workers_all_failed_does_not_make_others_late() -> None:
    assert call("min-healthy", nodes("abc", ended="a", failed="a"), waited=9999.0) == "go on"


def test_exit_with_0_is_no_success_if_others_fail_waiting_for_it() -> None:
    assert call("any-failed", nodes("ab", ended="a", failed="b")) == "restart"


def test_newcomers_are_taken_by_any_failed_until_a_node_is_through() -> None:
    assert takes_newcomers("any-failed", nodes("ab").counted)
    assert not takes_newcomers("any-failed", nodes("ab", ended="a").counted)
    assert not takes_newcomers("min-healthy", nodes("ab").counted)


some = st.frozensets(st.sampled_from(NAMES))
policies: st.SearchStrategy[Policy] = st.sampled_from(["any-failed", "min-healthy"])


@st.composite
def views(draw: st.DrawFn) -> Facts:
    all = draw(st.frozensets(st.sampled_from(NAMES), min_size=1))
    return Facts(all, draw(some) & all, draw(some) & all, draw(some) & all)


@given(policies, views(), st.data())
def test_partial_facts_never_restart_what_full_facts_let_run(policy: Policy, full: Facts, data: st.DataObject) -> None:
    """Agents learn of failures at different times; facts are never taken back."""
    least = data.draw(st.integers(1, len(full.all)))
    part = Facts(full.all, *(data.draw(some) & facts for facts in (full.ended, full.failed, full.lost)))
    if call(policy, part, least) == "restart":
        assert call(policy, full, least) == "restart"


@given(views())
def test_min_healthy_that_needs_all_nodes_is_any_failed(seen: Facts) -> None:
    for waited in (0.0, 301.0):
        assert call("min-healthy", seen, len(seen.all), waited) == call("any-failed", seen, len(seen.all), waited)


@given(policies, views(), st.integers(1, 5), st.floats(0, 1000))
def test_every_call_has_its_reason(policy: Policy, seen: Facts, least: int, waited: float) -> None:
    made = call(policy, seen, least, waited)
    well = {name for name in seen.all if name not in seen.failed and name not in seen.lost}
    running = {name for name in seen.all if name not in seen.ended and name not in seen.lost}
    if made == "restart":
        assert len(well) < len(seen.all) and (policy == "any-failed" or len(well) < least)
    elif made == "completed":
        assert not running
    elif made == "premature":
        assert running and well & seen.ended and waited >= 300.0
    else:
        assert running
    if made != "restart" and policy == "any-failed":
        assert well == seen.all
    if made != "restart" and policy == "min-healthy":
        assert len(well) >= least or well == seen.all


@given(policies, st.integers(0, 10**6))
def test_every_cycle_comes_to_an_end(policy: Policy, seed: int) -> None:
    """Whatever happens to its nodes, in whatever order: each one ends, fails or is lost at some time."""
    chance = random.Random(seed)
    all = frozenset(NAMES[: chance.randint(1, 5)])
    least = chance.randint(1, len(all))
    facts: dict[str, set[str]] = {"ended": set(), "failed": set(), "lost": set()}
    for name in chance.sample(sorted(all), len(all)):
        what = chance.choice(["ended", "failed", "lost"])
        facts[what].add(name)
        if what == "failed":
            facts["ended"].add(name)
        made = call(policy, Facts(all, *(frozenset(facts[key]) for key in ("ended", "failed", "lost"))), least)
        if made != "go on":
            return
    raise AssertionError("nobody runs, and the cycle goes on")


# -- requests -----------------------------------------------------------------------------------------


def test_continue_and_what_nobody_knows_change_nothing() -> None:
    assert answer([], "n") is None
    assert answer([Request("Continue", "all is well"), Request("Dance")], "n") is None


@pytest.mark.parametrize(
    ("action", "outcome", "again", "code"),
    [
        ("ShutdownWorkload", "shutdown", None, 94),
        ("ExcludeThisNode", "interrupted", "request", 0),
    ],
)
def test_request_brings_about_what_it_says(action: str, outcome: str, again: str | None, code: int) -> None:
    made = answer([Request(action, "because")], "n")
    assert made is not None
    assert (made.outcome, made.again, made.exit_code, made.node) == (outcome, again, code, "n")
    assert "because" in made.detail


@given(st.lists(st.sampled_from([*GRAVEST_FIRST, "Continue", "?"])), st.randoms(use_true_random=False))
def test_gravest_request_is_followed_in_whatever_order_they_come(actions: list[str], chance: random.Random) -> None:
    requests = [Request(action) for action in actions]
    made = answer(requests, "n")
    chance.shuffle(requests)
    assert answer(requests, "n") == made
    for action in GRAVEST_FIRST:
        if action in actions:
            assert made == answer([Request(action)], "n")
            return
    assert made is None
