"""What an agent asks of the job's store: one request in two seconds while it waits, and what changed at a restart."""

from __future__ import annotations

import random
from typing import Any

import pytest

from resilience.core import group_ranks, membership
from resilience.core.budget import Budget
from resilience.core.membership import Arrived, Left, Membership, NodeSeat
from resilience.core.rendezvous import Refusal, Rendezvous
from resilience.core.supervision import Rules, Supervision, WorkerStates
from resilience.core.terms import Terms
from tests.launcher_simulation.jobs import Job
from tests.launcher_simulation.schedules import RULES, Fails, Schedule
from tests.unit.core.agents import TERMS, Run, agent, seat

MONITOR_INTERVAL = 0.1  # seconds between two looks of an agent at its workers


def test_node_that_waits_for_a_place_asks_the_store_once_in_two_seconds() -> None:
    run = Run()
    leader, waiting = agent(run, "leader"), agent(run, "waiting")
    run.interrupted_at = 10.0
    run.run(leader.join(seat("leader")))  # leads, and gives up
    successor = agent(run, "successor", Terms(least=3, most=3))
    run.interrupted_at = run.now + 100.0
    run.operations = 0
    assert isinstance(run.run(successor.join(seat("successor"))), Refusal)
    assert run.operations <= 165  # it leads: 3 requests in two seconds, whatever the number of nodes
    run.interrupted_at, run.operations = run.now + 100.0, 0
    run.store.data["leader/0/1"] = run.store.data["leader/0/2"] = "leader"
    assert isinstance(run.run(waiting.join(seat("waiting"))), Refusal)
    assert run.operations <= 75


def running(run: Run) -> Supervision:
    """Return an agent whose workers run, one of two nodes."""
    own = agent(run, "own")
    run.counts("other")
    own.membership = Membership(cycle=0, seats=(seat("own"), seat("other")))
    own.arrivals = type(own.arrivals)(last=own.membership)
    supervision = Supervision(own, Rules("any-failed", Budget(3)), hosts_store=False)
    run.run(own._log.write(Membership(), own.membership))
    assert run.run(supervision.began()) is None
    run.operations = 0
    return supervision


def look_for(run: Run, supervision: Supervision, seconds: float) -> Any:
    end = run.now + seconds
    verdict = None
    while verdict is None and run.now < end:
        verdict = run.run(supervision.look(WorkerStates(are_living=True)))
        run.now += MONITOR_INTERVAL
    return verdict


def test_node_whose_workers_run_asks_the_store_once_in_two_seconds() -> None:
    run = Run()
    supervision = running(run)
    assert look_for(run, supervision, 200.0) is None
    assert run.operations <= 120  # of them 100 looks at its neighbour, the log and the counter of the cycle


def test_verdict_of_another_agent_is_obeyed_at_the_next_look() -> None:
    run = Run()
    supervision = running(run)
    look_for(run, supervision, 5.0)
    run.store.data["end/0"] = '{"outcome":"completed","node":"other"}'
    assert look_for(run, supervision, MONITOR_INTERVAL).outcome == "completed"


def test_verdict_is_found_without_a_notification() -> None:
    """The connection of the wait is lost, or the hint."""
    run = Run(is_told=False)
    supervision = running(run)
    look_for(run, supervision, 5.0)
    run.store.data["end/0"] = '{"outcome":"completed","node":"other"}'
    assert look_for(run, supervision, 25.0).outcome == "completed"


def test_membership_is_found_without_a_notification() -> None:
    run = Run(is_told=False)
    waiting = agent(run, "waiting")
    run.counts("leader")
    run.store.data["leader/0/0"] = "leader"
    membership = Membership(cycle=0, seats=(seat("leader"), seat("waiting")))
    join = waiting.join(seat("waiting"))
    answer, found = None, None
    while found is None:
        try:
            operation = join.send(answer)
        except StopIteration as stop:
            found = stop.value
            break
        answer = run.perform(operation)
        if run.now > 3.0 and "cycle/0" not in run.store.data:
            run.run(Rendezvous("leader", "leader", TERMS)._log.write(Membership(), membership))
    assert found == membership
    assert run.now < 3.0 + 10 * TERMS.interval + 1.0


def test_agent_that_was_taken_for_lost_ends_its_workers_though_no_next_cycle_is_formed() -> None:
    """The next cycle may begin at any moment, without it."""
    run = Run()
    supervision = running(run)
    run.run(Rendezvous("other", "other", TERMS).tell_lost("own", run.now))
    assert look_for(run, supervision, 5.0).detail == "the others went on without this node"


# -- memberships --------------------------------------------------------------------------------------


def next_membership(last: Membership, rng: random.Random, number: int) -> Membership:
    """Return a membership after `last`: some nodes left, some came, most are there again."""
    known = membership.begin(last)
    gone = [each for each in last.seats if rng.random() < 0.1]
    back = [each for each in last.seats if each not in gone]
    new = [seat(f"node{number}.{index}") for index in range(rng.randrange(4))]
    entries = [Left(each.id) for each in gone] + [Arrived(each, last.cycle) for each in (*back, *new)]
    rng.shuffle(entries)
    known = membership.fold(known, entries)
    return membership.form(known, rng.randrange(1, 40), group_ranks.assign)


@pytest.mark.parametrize("seed", range(40))
def test_membership_is_the_one_before_with_what_has_changed(seed: int) -> None:
    rng = random.Random(seed)
    last = membership.form(
        membership.fold(membership.begin(Membership()), [Arrived(seat(f"node{index}")) for index in range(30)]),
        25,
        group_ranks.assign,
    )
    for number in range(10):
        new = next_membership(last, rng, number)
        change = membership.decode_change(membership.encode(membership.difference(last, new)))
        assert membership.changed(last, change) in (new, None)
        last = new
        if not last.seats:
            break


def test_node_reads_at_a_restart_what_has_changed_and_not_all_seats() -> None:
    seats = tuple(NodeSeat(f"node{number}/0123456789ab", f"node{number}", "10.0.0.1", 29400) for number in range(1250))
    first = Membership(cycle=0, seats=seats, holders=tuple(each.node for each in seats), by="leader")
    other = NodeSeat(seats[0].id, seats[0].node, "10.0.0.1", 29401)  # the first node's store is a new one
    second = Membership(1, (other, *seats[1:]), holders=first.holders, by="leader")
    change = membership.encode(membership.difference(first, second))
    assert len(membership.encode(second)) > 60_000 and len(change) < 200
    assert membership.changed(first, membership.decode_change(change)) == second
    assert (
        membership.changed(Membership(), membership.difference(Membership(), first)) is None
    )  # nobody knows any of it


def test_restarts_leave_what_decides_and_nothing_else() -> None:
    """One small key for each cycle's membership, leader, verdict and counter, and for each failure."""
    faults = tuple(Fails(1, cycle, 1.0) for cycle in range(4))
    left = {}
    for restarts in (2, 4):
        rules = Rules(RULES.policy, Budget(9), apart=30.0)
        comes = (0.0, 0.1, 0.2, 0.3)
        job = Job(Schedule(1, comes, Terms(4, 4), rules, faults[:restarts], node_hosts_store=False))
        assert job.run().cycles == restarts + 1
        left[restarts] = {key for key in job.store.data if not key.startswith(("log/", "job/nodes/"))}
        entries = sorted(int(key.removeprefix("log/")) for key in job.store.data if key.removeprefix("log/").isdigit())
        assert entries[0] >= 4 * (restarts - 1)  # of the last two cycles
        nodes = {key for key in job.store.data if key.startswith("job/nodes/") and key.count("/") > 2}
        assert {key.split("/")[2] for key in nodes} == {str(restarts)}
        assert sum(key.startswith("membership/") for key in job.store.data) <= 2
    assert len(left[4]) - len(left[2]) <= 2 * 5
