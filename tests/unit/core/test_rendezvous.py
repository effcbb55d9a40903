"""One agent's part in a rendezvous: what it reads in the store, what it writes there, and when it gives up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from resilience.core import cycle, membership
from resilience.core.agent_protocol import Counts, Delete
from resilience.core.cycle import CycleDecision
from resilience.core.membership import Arrived, Excluded, Left, Membership, Nothing
from resilience.core.rendezvous import LEAVE_LIMIT, NOTICES, Refusal, Rendezvous
from resilience.core.rendezvous_log import RendezvousLog
from resilience.core.restart import Add, Read, Set
from resilience.core.terms import Terms
from resilience.errors import ConfigurationError
from tests.unit.core.agents import TERMS, Run, agent, seat

DONE = CycleDecision("completed", "a")
ALONE = msgspec.structs.replace(TERMS, least=1)


def join(run: Run, own: Rendezvous) -> Membership | Refusal:
    return run.run(own.join(seat(own.id)))


def formed(run: Run, last: Membership, *ids: str, **changes: Any) -> Membership:
    """Another agent forms the next cycle."""
    made = Membership(last.cycle + 1, tuple(map(seat, ids)), holders=ids, by="other", before=last.by)
    entries = int(run.store.data["log/count"])
    return run.run(RendezvousLog().write(last, msgspec.structs.replace(made, entries=entries, **changes)))


def led(run: Run, cycle: int = 0, by: str = "leader") -> None:
    """Another agent leads, and counts."""
    run.counts(by)
    run.store.data[f"leader/{cycle}/0"] = by


def take_for_lost(run: Run, leader: Rendezvous, id: str) -> None:
    """A leader takes a waiting agent for lost, reads that in the log, and announces it."""
    run.run(leader.tell_lost(id, run.now))
    run.run(leader.read())
    run.run(leader._announce_losses())


def at(run: Run, when: float, act: Callable[[], object]) -> None:
    """Let something happen at a moment, before the operation that comes next."""
    done: list[float] = []

    def before(operation: object) -> None:
        if run.now >= when and not done:
            done.append(run.now)
            act()

    run.before = before


def running(run: Run, *ids: str, terms: Terms = TERMS) -> Rendezvous:
    """Return the agent `own`, which has a seat in cycle 0 beside these."""
    own = agent(run, "own", terms)
    for id in ids:
        run.counts(id)
    own.membership = formed(run, Membership(), *ids, "own")
    own.arrivals = membership.begin(own.membership)
    return own


# -- joining ------------------------------------------------------------------------------------------


def test_first_agent_leads_and_forms_the_cycle_at_the_last_call() -> None:
    run = Run()
    found = join(run, agent(run, "own", msgspec.structs.replace(ALONE, last_call=5.0)))
    assert isinstance(found, Membership) and [each.id for each in found.seats] == ["own"]
    assert 5.0 <= run.now < 8.0
    assert run.store.data["leader/0/0"] == "own"


def test_agent_that_does_not_lead_waits_for_the_membership_and_writes_its_arrival_only() -> None:
    run = Run()
    led(run)
    own = agent(run, "own")
    at(run, 3.0, lambda: formed(run, Membership(), "leader", "own"))
    found = join(run, own)
    assert isinstance(found, Membership) and found.rank_of("own") == 1
    assert run.log() == [Arrived(seat("own"))]
    assert run.keys("leader/") == ["leader/0/0"] and run.store.data["leader/0/0"] == "leader"


def test_agent_that_finds_no_place_waits_for_the_next_cycle_as_a_spare() -> None:
    run = Run()
    led(run)
    own = agent(run, "own")
    done: list[Membership] = []

    def before(operation: object) -> None:
        if run.now >= 3.0 and not done:
            done.append(formed(run, Membership(), "a", "b", spares=(seat("own"),)))
            led(run, 1)
        elif run.now >= 6.0 and len(done) == 1:
            done.append(formed(run, done[0], "a", "own"))

    run.before = before
    assert join(run, own) == done[1]
    assert run.store.data["log/count"] == "1"  # as a spare it has arrived already


def spare_of(run: Run, **changes: Any) -> Rendezvous:
    """Return the agent `own`, which comes as the nodes a and b run cycle 0; another spare leads."""
    run.writes(Arrived(seat("a")), Arrived(seat("b")))
    formed(run, Membership(), "a", "b")
    led(run, 1)
    return agent(run, "own", msgspec.structs.replace(TERMS, join_limit=60.0, **changes))


def test_spare_waits_as_long_as_a_cycle_runs_even_if_it_was_stopped_for_longer_than_its_limit() -> None:
    run = Run()
    own = spare_of(run)
    at(run, 500.0, lambda: setattr(run, "now", 1000.0))
    run.interrupted_at = 2000.0
    found = join(run, own)
    assert isinstance(found, Refusal) and found.kind == "closed"  # it was asked to stop
    assert run.now >= 2000.0


def test_spare_gives_up_if_no_cycle_forms_within_its_limit_after_the_last_one() -> None:
    run = Run()
    own = spare_of(run)
    at(run, 500.0, lambda: run.writes(Left("a"), Left("b", is_lost=True)))
    found = join(run, own)
    assert isinstance(found, Refusal) and found.kind == "late"
    assert 500.0 + 60.0 - TERMS.interval <= run.now <= 500.0 + 60.0 + TERMS.interval


def test_spare_gives_up_within_its_limit_after_a_cycle_whose_node_never_comes_back_from_it() -> None:
    """A node that hangs between two cycles is alive, and has neither arrived nor left."""
    run = Run()
    own = spare_of(run)
    at(run, 500.0, lambda: run.store.data.update({"end/0": "failed"}))
    run.interrupted_at = 2000.0
    found = join(run, own)
    assert isinstance(found, Refusal) and found.kind == "late"
    assert 500.0 + 60.0 - TERMS.interval <= run.now <= 500.0 + 60.0 + TERMS.interval


def test_leading_spare_forms_the_cycle_that_became_due_while_it_stood_still() -> None:
    run = Run()
    own = spare_of(run, most=3)
    run.store.data["leader/1/0"] = "own"
    for id in "ab":
        run.counts(id)

    def stand_still(operation: object) -> None:
        if run.now >= 500.0 and isinstance(operation, Counts) and NOTICES in operation.keys:  # as a look ends
            run.before = lambda operation: None
            run.writes(*(Arrived(seat(id), known=0) for id in "ab"))
            run.now += 100.0

    run.before = stand_still
    found = join(run, own)
    assert isinstance(found, Membership) and {each.id for each in found.seats} == {"a", "b", "own"}
    assert run.now >= 600.0


def test_each_cycle_that_forms_without_a_spare_gives_it_its_whole_limit_again() -> None:
    run = Run()
    own = spare_of(run)

    def another_cycle() -> None:
        formed(run, own.arrivals.last, "a", "b", spares=(seat("own"),))
        led(run, 2)
        run.writes(Left("a"), Left("b"))

    at(run, 50.0, another_cycle)
    found = join(run, own)
    assert isinstance(found, Refusal) and found.kind == "late"
    assert run.now >= 50.0 + 60.0


def test_excluded_node_is_refused_before_it_arrives_and_while_it_waits() -> None:
    run = Run()
    led(run)
    run.run(agent(run, "other").exclude("own", "its device fails"))
    found = join(run, agent(run, "own"))
    assert isinstance(found, Refusal) and found.kind == "closed" and "its device fails" in found.why
    assert run.log() == [Excluded("own", "its device fails")]
    run.run(agent(run, "other").exclude("second", ""))
    assert run.store.data["excluded/second"] == "excluded"
    run = Run()
    led(run)
    at(run, 5.0, lambda: run.run(agent(run, "other").exclude("own", "its device fails")))
    found = join(run, agent(run, "own"))
    assert isinstance(found, Refusal) and "its device fails" in found.why
    assert run.now <= 5.0 + 2 * TERMS.interval


def test_misconfigured_job_is_an_error_for_those_who_come_later_too() -> None:
    run = Run()
    run.run(RendezvousLog().write(Membership(), Membership(cycle=0, closed="wrong", error="rank 1 is missing")))
    with pytest.raises(ConfigurationError, match="rank 1 is missing"):
        join(run, agent(run, "own"))
    assert run.log() == []


def test_rendezvous_that_is_closed_while_an_agent_waits_refuses_it() -> None:
    run = Run()
    led(run)
    at(run, 3.0, lambda: run.run(RendezvousLog().write(Membership(), Membership(cycle=0, closed="over"))))
    assert join(run, agent(run, "own")) == Refusal("closed", "over")


def test_agent_that_comes_late_waits_for_the_newest_cycle_and_leads_no_older_one() -> None:
    run = Run()
    last = Membership()
    for _ in range(3):
        last = formed(run, last, "a", "b")
    led(run, 3)
    at(run, 3.0, lambda: formed(run, last, "a", "own"))
    assert isinstance(join(run, agent(run, "own")), Membership)
    assert run.keys("leader/") == ["leader/3/0"]


def test_agent_that_joins_again_reads_no_entry_twice() -> None:
    run = Run()
    own = running(run, "a")
    run.writes(*[Nothing()] * 5, Arrived(seat("a"), known=0))
    run.run(own.look())
    read: list[str] = []
    run.before = lambda operation: isinstance(operation, Read) and read.extend(operation.keys)
    assert isinstance(join(run, own), Membership)
    assert [key for key in read if key.startswith("log/")] == ["log/6"]


def test_waiting_ends_at_the_agents_stop_or_at_the_limit_and_the_others_know() -> None:
    for interrupted_at, kind, why in (
        (5.0, "closed", "was asked to stop"),
        (float("inf"), "late", "found no place within 60 s (join_timeout)"),
    ):
        run = Run()
        run.interrupted_at = interrupted_at
        led(run)
        found = join(run, agent(run, "own", msgspec.structs.replace(TERMS, join_limit=60.0)))
        assert isinstance(found, Refusal) and found.kind == kind
        assert run.log()[0] == Arrived(seat("own"))
        assert run.log()[1] == Left("own", why)
        assert run.keys("leader/") == ["leader/0/0"]  # it gives up no lead of another one
        assert run.store.data[NOTICES] == "0"


def test_agent_that_is_asked_to_stop_before_it_arrives_does_not_arrive() -> None:
    run = Run()
    led(run)
    run.interrupted_at = 0.0
    found = join(run, agent(run, "own"))
    assert isinstance(found, Refusal) and found.kind == "closed"
    assert run.log() == []


def test_agent_asked_to_stop_while_the_cycle_is_formed_joins_it_and_does_not_leave() -> None:
    run = Run()
    led(run)
    run.interrupted_at = 3.0
    at(run, 3.0, lambda: formed(run, Membership(), "leader", "own"))
    found = join(run, agent(run, "own"))
    assert isinstance(found, Membership) and found.rank_of("own") == 1
    assert run.log() == [Arrived(seat("own"))]


def test_leader_finds_at_its_next_look_that_another_agent_has_formed_the_cycle() -> None:
    for formed_at in (2.5, 2.5 + TERMS.interval):  # one of them is no time at which agents that do not lead look
        run = Run()
        at(run, formed_at, lambda run=run: formed(run, Membership(), "a", "own"))  # type: ignore[misc]
        found = join(run, agent(run, "own", msgspec.structs.replace(TERMS, least=2)))
        assert isinstance(found, Membership) and found.rank_of("own") == 1
        assert run.now <= formed_at + 2 * TERMS.interval


# -- who leads ----------------------------------------------------------------------------------------


def test_leader_that_is_asked_to_stop_gives_up_and_another_one_leads_at_once() -> None:
    run = Run()
    run.interrupted_at = 2.0
    assert isinstance(join(run, agent(run, "first")), Refusal)
    assert run.keys("leader/") == ["leader/0/0", "leader/0/0/given_up"]
    assert run.store.data[NOTICES] == "1"
    run.interrupted_at, began = float("inf"), run.now
    own = agent(run, "own", msgspec.structs.replace(ALONE, last_call=0.0))
    assert isinstance(join(run, own), Membership)
    assert run.store.data["leader/0/1"] == "own"
    assert run.now - began < TERMS.interval  # `first` still counts


def test_leader_that_gives_up_while_another_one_waits_is_succeeded_at_the_next_look() -> None:
    run = Run()
    led(run)

    def give_up() -> None:
        run.store.perform(Set("leader/0/0/given_up", "1"))
        run.store.perform(Add(NOTICES, 1))

    at(run, 5.0, give_up)
    assert isinstance(join(run, agent(run, "own", msgspec.structs.replace(ALONE, last_call=0.0))), Membership)
    assert run.now < 5.0 + 2 * TERMS.interval


def test_lost_leader_is_succeeded_and_gets_no_place() -> None:
    run = Run()
    led(run)
    run.falls_silent("leader")
    run.counts("other")
    run.writes(Arrived(seat("leader")), Arrived(seat("other")))
    run.before = lambda operation: run.store.perform(Add(NOTICES, 1))  # of something else, all the time
    found = join(run, agent(run, "own", msgspec.structs.replace(TERMS, most=3, least=1, last_call=0.0)))
    assert isinstance(found, Membership) and [each.id for each in found.seats] == ["other", "own"]
    assert TERMS.lost_after <= run.now < TERMS.lost_after + 3 * TERMS.interval
    assert run.store.data["leader/0/1"] == "own"
    assert run.store.data["leader/0/0"] == "leader"


def test_agent_that_another_one_was_faster_than_does_not_lead_and_writes_nothing() -> None:
    run = Run()
    led(run)
    run.falls_silent("leader")
    run.counts("faster")
    run.store.data["leader/0/1"] = "faster"
    own = agent(run, "own")
    at(run, 14.0, lambda: formed(run, Membership(), "faster", "own"))
    assert isinstance(join(run, own), Membership)
    assert run.log() == [Arrived(seat("own"))]
    assert run.store.data["leader/0/1"] == "faster"


def test_leader_that_stood_still_takes_the_membership_that_another_one_has_written() -> None:
    run = Run()
    own = agent(run, "own")
    for id in "ab":
        run.counts(id)
    at(run, 0.5, lambda: formed(run, Membership(), "a", "b", spares=(seat("own"),)))
    run.interrupted_at = 5.0
    assert isinstance(join(run, own), Refusal)
    assert own.arrivals.last.cycle == 0


# -- an agent that stood still while it waits ---------------------------------------------------------


def test_agent_that_is_taken_for_lost_while_it_waits_arrives_again() -> None:
    run = Run()
    led(run)
    other = agent(run, "other")
    at(run, 3.0, lambda: take_for_lost(run, other, "own"))
    run.interrupted_at = 8.0
    join(run, agent(run, "own"))
    assert run.log()[:3] == [
        Arrived(seat("own")),
        Left("own", "gave no sign of life for 8 s", True),
        Arrived(seat("own")),
    ]
    assert run.keys("lost/") == []


def test_agent_that_is_taken_for_lost_twice_arrives_again_after_the_second_time() -> None:
    run = Run()
    led(run)
    other = agent(run, "other")
    done: list[object] = []

    def before(operation: object) -> None:
        if run.now >= 3.0 and not done:
            done.append(operation)
            take_for_lost(run, other, "own")
        elif len(done) == 1 and getattr(operation, "key", "") == "lost/own" and not isinstance(operation, Set):
            done.append(operation)
            run.writes(Left("own", "once more"), Arrived(seat("own")), Left("own", "and again"))

    run.before = before
    run.interrupted_at = 8.0
    join(run, agent(run, "own"))
    entries = [entry for entry in run.log() if entry != Left("own", "was asked to stop")]
    assert entries[-1] == Arrived(seat("own"))


def test_agent_that_is_taken_for_lost_as_it_deletes_the_news_of_the_first_time_arrives_again() -> None:
    run = Run()
    led(run)
    other = agent(run, "other")
    done: list[object] = []

    def before(operation: object) -> None:
        if run.now >= 3.0 and not done:
            done.append(operation)
            take_for_lost(run, other, "own")
            run.writes(Arrived(seat("own")))  # it found out by itself
        elif len(done) == 1 and isinstance(operation, Delete) and operation.key == "lost/own":
            done.append(operation)
            take_for_lost(run, other, "own")

    run.before = before
    run.interrupted_at = 5.0
    join(run, agent(run, "own"))
    assert [type(entry) for entry in run.log()] == [Arrived, Left, Arrived, Left, Arrived, Left]


def test_agent_declared_lost_by_an_agent_that_dies_learns_it_from_the_next_leader() -> None:
    run = Run()
    led(run)
    own, other = agent(run, "own"), agent(run, "other")
    at(run, 3.0, lambda: run.writes(Left("own", "gave no sign of life", is_lost=True)))  # nothing more than that
    at_once = run.before

    def before(operation: object) -> None:
        at_once(operation)
        if run.now >= 5.0 and not other.arrivals.entries:
            run.run(other.read())
            run.run(other._announce_losses())

    run.before = before
    run.interrupted_at = 12.0
    join(run, own)
    assert [type(entry) for entry in run.log()] == [Arrived, Left, Arrived, Left]


def test_leader_tells_an_agent_that_it_takes_for_lost_while_it_waits() -> None:
    run = Run()
    for id in "ab":
        run.counts(id)
        run.writes(Arrived(seat(id)))
    run.falls_silent("a")
    run.interrupted_at = 20.0
    join(run, agent(run, "own", msgspec.structs.replace(TERMS, least=4, most=4)))
    assert run.keys("lost/") == ["lost/a"]
    assert run.store.data[NOTICES] == "2"  # the other one: it gave up the lead


def test_agent_that_waits_reads_no_log_for_a_notice_that_is_none_of_its_business() -> None:
    run = Run()
    led(run)
    run.writes(*[Nothing()] * 5)
    at(run, 3.0, lambda: run.run(agent(run, "other").exclude("another", "its device fails")))
    reads: list[str] = []
    looked = run.before

    def before(operation: object) -> None:
        looked(operation)
        if isinstance(operation, Read):
            reads.extend(operation.keys)

    run.before = before
    run.interrupted_at = 12.0
    join(run, agent(run, "own"))
    assert "excluded/own" in reads and not [key for key in reads if key.startswith("log/")]


def test_leader_announces_each_loss_of_a_waiting_agent_once_and_nothing_else() -> None:
    run = Run()
    leader = agent(run, "leader")
    for id, entries, announced in (
        ("lost", [Arrived(seat("lost")), Left("lost", is_lost=True)], 1),
        ("back", [Arrived(seat("back")), Left("back", is_lost=True), Arrived(seat("back"))], 0),
        ("again", [Arrived(seat("again")), Left("again", is_lost=True)], 1),
        ("again", [Arrived(seat("again")), Left("again", is_lost=True)], 1),
        ("ran", [Left("ran", is_lost=True)], 0),
        ("left", [Arrived(seat("left")), Left("left", "was asked to stop")], 0),
    ):
        run.writes(*entries)
        before = int(run.store.data[NOTICES])
        for _ in range(3):
            run.run(leader.read())
            run.run(leader._announce_losses())
        assert int(run.store.data[NOTICES]) - before == announced
        assert (f"lost/{id}" in run.store.data) == bool(announced)


def test_agent_that_was_taken_for_lost_while_it_ran_arrives_once() -> None:
    run = Run()
    own = running(run, "a")
    run.counts("b")
    run.run(agent(run, "other").tell_lost("own", run.now))
    run.store.perform(Set("lost/own", "1"))  # of an earlier wait, that ended before it was read
    run.store.perform(Add(NOTICES, 1))
    run.writes(Left("a"), Arrived(seat("b"), known=0))
    assert isinstance(join(run, own), Membership)
    assert [entry.seat for entry in run.log() if isinstance(entry, Arrived)] == [seat("b"), seat("own")]
    assert run.keys("lost/") == []


def test_leader_that_was_taken_for_lost_arrives_again_also_if_nobody_told_it() -> None:
    run = Run()
    at(run, 1.0, lambda: run.writes(Left("own", "gave no sign of life")))
    found = join(run, agent(run, "own", ALONE))
    assert isinstance(found, Membership) and found.rank_of("own") == 0
    assert run.log() == [Arrived(seat("own")), Left("own", "gave no sign of life"), Arrived(seat("own"))]


def test_leader_that_is_overtaken_by_several_cycles_as_it_reads_takes_the_newest_one() -> None:
    run = Run()
    own = agent(run, "own")
    for id in "ab":
        run.counts(id)
    done: list[object] = []

    def overtake(operation: object) -> None:
        if run.now > 0.5 and operation == Add("log/count", 0) and not done:
            done.append(operation)
            run.writes(Left("own", "gave no sign of life"))
            last = Membership()
            for _ in range(4):
                last = formed(run, last, "a", "b", spares=(seat("own"),))
            del run.store.data["log/1"]  # as its writer does

    run.before = overtake
    run.interrupted_at = 5.0
    assert isinstance(join(run, own), Refusal)
    assert own.arrivals.last.cycle == 3
    assert "membership/0/own" not in run.store.data


def test_leader_that_has_not_read_its_own_arrival_yet_arrives_once() -> None:
    run = Run()
    run.store.perform(Add("log/count", 1))  # whose writer has died
    assert isinstance(join(run, agent(run, "own", ALONE)), Membership)
    assert run.log() == [Nothing(), Arrived(seat("own"))]


def test_agent_that_a_membership_has_left_out_arrives_again() -> None:
    run = Run()
    led(run)
    led(run, 1)

    def form_without() -> None:
        run.writes(Left("own", "gave no sign of life"))
        formed(run, Membership(), "leader", "other")

    at(run, 3.0, form_without)
    run.interrupted_at = 6.0
    join(run, agent(run, "own"))
    assert run.log()[2] == Arrived(seat("own"), known=0)


# -- leading ------------------------------------------------------------------------------------------


def test_leader_waits_for_nodes_of_the_last_cycle_until_they_are_lost() -> None:
    run = Run()
    own = running(run, "a", "b", terms=msgspec.structs.replace(TERMS, least=1, most=3))
    run.writes(Arrived(seat("a"), known=0))
    run.falls_silent("b")
    found = join(run, own)
    assert isinstance(found, Membership) and {each.id for each in found.seats} == {"a", "own"}
    assert TERMS.lost_after <= run.now < TERMS.lost_after + 3 * TERMS.interval


def test_leader_asks_whether_the_job_goes_on_before_each_cycle_but_the_first() -> None:
    run = Run()
    asked: list[int] = []

    def why_not(cycle: int) -> Any:
        asked.append(cycle)
        yield from ()
        return "the budget is used" if len(asked) > 1 else ""

    own = agent(run, "own", msgspec.structs.replace(ALONE, last_call=0.0))

    def joined() -> Any:
        return run.run(own.join_if_continued(seat(own.id), why_not))

    assert isinstance(joined(), Membership) and asked == []
    assert isinstance(joined(), Membership) and asked == [0]
    assert joined() == Refusal("closed", "the budget is used") and asked == [0, 1]


def test_second_node_with_a_rank_is_refused_unless_the_first_one_turns_out_to_be_lost() -> None:
    for is_lost in (False, True):
        run = Run()
        own = agent(run, "own", msgspec.structs.replace(TERMS, least=2, most=3, last_call=3.0))
        run.counts("first")
        run.counts("second")
        if is_lost:
            run.falls_silent("first")
        ranked = [msgspec.structs.replace(seat(id), infra=1) for id in ("first", "second")]
        run.writes(*map(Arrived, ranked))
        found = run.run(own.join(msgspec.structs.replace(seat("own"), infra=0)))
        assert isinstance(found, Membership)
        assert [each.id for each in found.seats] == ["own", "second" if is_lost else "first"]
        assert ("refused/second" in run.store.data) == (not is_lost)
        assert (Left("second", "its rank is taken") in run.log()) == (not is_lost)
        if not is_lost:
            assert run.store.data[NOTICES] == "1"
            with pytest.raises(ConfigurationError, match="give each node its own rank"):
                join(run, Rendezvous("second", "second", TERMS))


def test_node_without_a_rank_of_the_infrastructure_ends_the_job_after_a_last_call() -> None:
    run = Run()
    own = agent(run, "own", msgspec.structs.replace(TERMS, last_call=5.0))
    run.counts("other")
    run.writes(Arrived(seat("other")))
    with pytest.raises(ConfigurationError):
        run.run(own.join(msgspec.structs.replace(seat("own"), infra=0)))
    assert run.now >= 5.0
    assert run.run(own.newest()).error


def test_missing_ranks_have_the_whole_last_call_in_each_cycle() -> None:
    run = Run()
    ranked = {id: msgspec.structs.replace(seat(id), infra=rank) for rank, id in enumerate(("own", "a", "b"))}
    own = agent(run, "own", msgspec.structs.replace(TERMS, least=2, most=3, last_call=5.0))
    for id in "ab":
        run.counts(id)
    run.writes(Arrived(ranked["a"]), Arrived(seat("b")))
    at(run, 4.0, lambda: run.writes(Left("b"), Arrived(ranked["b"])))
    assert isinstance(run.run(own.join(ranked["own"])), Membership)
    run.writes(Arrived(ranked["a"], known=0), Left("b"), Arrived(seat("b"), known=0))
    at(run, run.now + 4.0, lambda: run.writes(Left("b"), Arrived(ranked["b"], known=0)))
    assert isinstance(run.run(own.join(ranked["own"])), Membership)


def test_job_goes_on_without_any_node_of_the_infrastructures_order() -> None:
    for missing in "abc":
        run = Run()
        ranked = {id: msgspec.structs.replace(seat(id), infra=rank) for rank, id in enumerate(("own", "a", "b", "c"))}
        own = agent(run, "own", msgspec.structs.replace(TERMS, least=2, most=4))
        others = {id: ranked[id] for id in "abc"}
        for id in others:
            run.counts(id)
        run.writes(*map(Arrived, others.values()))
        assert isinstance(run.run(own.join(ranked["own"])), Membership)
        began = run.now
        run.writes(Left(missing), *(Arrived(seat, known=0) for id, seat in others.items() if id != missing))
        found = run.run(own.join(ranked["own"]))
        assert isinstance(found, Membership) and missing not in [seat.id for seat in found.seats]
        assert [seat.infra for seat in found.seats] == sorted(seat.infra or 0 for seat in found.seats)
        assert run.now - began < TERMS.last_call


# -- while workers run --------------------------------------------------------------------------------


def test_look_tells_of_nodes_that_wait_and_of_lost_ones() -> None:
    run = Run()
    own = running(run, "a", "b", terms=msgspec.structs.replace(TERMS, most=4))
    run.store.perform(Add("counter", 7))
    assert run.run(own.look("counter")) == (0, frozenset(), False, 7)
    run.writes(Arrived(seat("new")))
    assert run.run(own.look())[:3] == (1, frozenset(), False)
    run.writes(Left("a"))
    assert run.run(own.look())[:3] == (1, frozenset("a"), False)
    run.writes(Arrived(seat("b"), known=0))  # it has left the cycle for the next one
    assert run.run(own.look())[:3] == (2, frozenset("ab"), False)


def test_silent_neighbour_is_declared_lost_and_the_one_before_it_is_watched_next() -> None:
    run = Run()
    own = running(run, "a", "b")
    run.falls_silent("b")
    lost = []
    for _ in range(14):
        lost.append(run.run(own.look()).lost)
        run.now += 2.0
        if run.now == 12.0:
            run.falls_silent("a")
    assert lost[3] == frozenset() and lost[5] == frozenset("b") and lost[-1] == frozenset("ab")
    assert [entry.id for entry in run.log() if isinstance(entry, Left)] == ["b", "a"]
    assert run.keys("lost/") == []  # no agent waits for a place


def test_agent_that_stood_still_declares_no_other_one_lost_before_it_has_looked_again() -> None:
    run = Run()
    own = running(run, "a", "b")
    run.falls_silent("b")
    run.before = lambda operation: isinstance(operation, Add) and setattr(run, "now", run.now + 8.1)
    for _ in range(7):
        assert run.run(own.look()).lost == frozenset()
        run.now += 2.0
    assert run.log()[-1] == Nothing()
    run.before = lambda operation: isinstance(operation, Add) and setattr(run, "now", run.now + 8.0)
    assert run.run(own.look()).lost == frozenset("b")


def test_cycle_is_over_for_an_agent_that_the_others_took_for_lost_or_went_on_without() -> None:
    run = Run()
    own = running(run, "a")
    assert not run.run(own.look()).is_over
    assert not run.run(own.is_taken_for_lost())
    run.writes(Left("own", "gave no sign of life"))
    assert run.run(own.look())[:3] == (0, frozenset({"own"}), True)
    assert run.run(own.is_taken_for_lost())
    run = Run()
    own = running(run, "a")
    run.writes(Arrived(seat("new")))
    formed(run, own.membership, "a", "new")
    assert run.run(own.look()).is_over
    assert run.run(own.is_taken_for_lost())


@pytest.mark.parametrize("entry", [Arrived(seat("new")), Left("a")])
def test_next_cycle_is_noticed_at_the_next_look_where_it_may_be_formed_without_a_further_entry(
    entry: Arrived | Left,
) -> None:
    run = Run()
    own = running(run, "a", terms=msgspec.structs.replace(TERMS, most=4))
    run.writes(entry)
    assert not run.run(own.look()).is_over
    formed(run, own.membership, "a", "new")
    assert run.run(own.look())[0::2] == (0, True)


def test_agent_that_stood_still_reads_what_others_wrote_before_it_answers() -> None:
    run = Run()
    own = running(run, "a", terms=msgspec.structs.replace(TERMS, most=4))
    run.writes(Arrived(seat("new")))
    assert run.run(own.waiting()) == 1
    run.writes(Left("own", "gave no sign of life"))
    assert run.run(own.is_taken_for_lost())


def test_look_asks_for_the_next_membership_where_an_entry_is_new_and_now_and_then() -> None:
    run = Run()
    own = running(run, "a")
    run.run(own.look())
    run.operations = 0
    for _ in range(20):
        run.run(own.look())
    assert 21 <= run.operations <= 23
    run.writes(Nothing())
    run.operations = 0
    run.run(own.look())
    assert run.operations == 3  # the counts, the entry, the membership


def test_first_end_of_a_cycle_stands() -> None:
    run = Run()
    own = running(run, "a")
    assert run.run(own.cycle_end()) is None
    assert not run.run(own.is_end_told())
    assert run.run(own.end_cycle("first")) == "first"
    assert run.run(own.end_cycle("second")) == "first"
    assert run.run(own.cycle_end()) == run.run(own.cycle_end(0)) == "first"
    assert run.run(own.cycle_end(1)) is None
    assert run.run(own.is_end_told())


def test_count_of_other_nodes_excludes_own_leaving_and_gone_nodes() -> None:
    run = Run()
    own = running(run, "a", "b", terms=msgspec.structs.replace(TERMS, most=4))
    assert run.run(own.others(())) == 2
    assert run.run(own.others(("a",))) == 1
    run.writes(Left("b"), Arrived(seat("new")), Arrived(seat("newer")))
    assert run.run(own.others(())) == 3
    assert run.run(own.waiting()) == 2
    run.run(own.close("over"))
    assert run.run(own.waiting()) == 0


# -- the end ------------------------------------------------------------------------------------------


def test_rendezvous_closes_once_with_the_first_reason_even_after_a_new_membership() -> None:
    run = Run()
    own = running(run, "a")
    at(run, 0.0, lambda: formed(run, own.membership, "a"))
    assert run.run(own.close("over")) == "over"
    assert run.run(own.newest()).cycle == 2
    entries = len(run.log())
    assert run.log()[-1] == Nothing()  # those who look at the log first are woken
    assert run.run(running_beside(run, own).close("something else")) == "over"
    assert len(run.log()) == entries


def running_beside(run: Run, own: Rendezvous) -> Rendezvous:
    other = agent(run, "a")
    other.membership, other.arrivals = own.membership, membership.begin(own.membership)
    return other


def test_host_of_the_store_waits_until_the_others_have_left_or_are_lost() -> None:
    run = Run()
    own = running(run, "a", "b")
    run.run(own.leave("done"))
    run.run(own.close("over"))
    run.falls_silent("b")
    at(run, 5.0, lambda: run.writes(Left("a", "done")))
    assert run.run(own.await_leaving(is_host=True))
    assert 8.0 <= run.now < 14.0
    assert Left("own", "done") in run.log()


def test_store_host_waits_up_to_the_limit_for_expected_nodes_to_leave() -> None:
    run = Run()
    own = running(run, "a")
    run.run(own.leave("done"))
    run.writes(Left("a"))
    run.run(own.close("over"))
    at(run, 5.0, lambda: run.writes(Left("late")))
    assert run.run(own.await_leaving(is_host=True, expected=2))
    assert 5.0 <= run.now < 10.0
    began = run.now
    assert not run.run(own.await_leaving(is_host=True, expected=3))
    assert LEAVE_LIMIT < run.now - began < LEAVE_LIMIT + 10.0
    began = run.now
    assert not run.run(own.await_leaving(is_host=True, expected=3, limit=3 * LEAVE_LIMIT))
    assert 3 * LEAVE_LIMIT < run.now - began < 3 * LEAVE_LIMIT + 10.0
    run.interrupted_at = run.now
    began = run.now
    assert not run.run(own.await_leaving(is_host=True, expected=3))
    assert run.now == began


def test_host_of_the_store_waits_as_long_as_the_job_goes_on() -> None:
    run = Run()
    own = running(run, "a")
    run.run(own.leave("left alone"))
    at(run, 3 * TERMS.join_limit, lambda: run.writes(Left("a")))
    assert not run.run(own.await_leaving(is_host=True))  # nobody closed the rendezvous
    assert run.now >= 3 * TERMS.join_limit


def closed_after(run: Run, own: Rendezvous, until: float) -> float | None:
    """Let an agent that has left wait for the others, which leave at a moment. Return when it has closed the
    rendezvous, None if it has not."""
    closed_at: list[float] = []

    def leave() -> None:
        run.before = lambda operation: None
        run.writes(*(Left(id) for id in "ab"))

    def before(operation: object) -> None:
        if not closed_at and run.run(own.newest()).closed:
            closed_at.append(run.now)
        if run.now >= until:
            leave()

    run.before = before
    run.run(own.leave("unhealthy"))
    assert run.run(own.await_leaving(is_host=True)) is bool(closed_at)
    assert run.now >= until
    return closed_at[0] if closed_at else None


def test_host_that_has_left_closes_a_rendezvous_that_too_few_nodes_join_within_the_limit() -> None:
    run, limit = Run(), TERMS.join_limit
    own = agent(run, "own")
    run.counts("a")
    run.writes(Arrived(seat("a")))
    closed_at = closed_after(run, own, 1.2 * limit)
    assert closed_at is not None and limit <= closed_at < limit + 10.0
    assert "too few nodes" in run.run(own.newest()).closed


def test_job_is_stuck_without_a_node_if_no_cycle_runs_and_the_others_are_too_few() -> None:
    run = Run()
    own = running(run, "a")
    assert run.run(own.close_if_stuck("over")) == ""  # `a` may be at work
    run.run(own.end_cycle("a worker failed"))
    assert run.run(own.close_if_stuck("over")) == "over"
    assert run.run(own.close_if_stuck("something else")) == "over"


def test_job_is_not_stuck_if_enough_nodes_have_arrived_just_now() -> None:
    run = Run()
    own = agent(run, "own")
    run.writes(Arrived(seat("a")), Arrived(seat("b")))
    assert run.run(own.close_if_stuck("over")) == ""
    run.writes(Left("b"))
    assert run.run(own.close_if_stuck("over")) == "over"


def test_host_that_has_left_closes_no_rendezvous_that_has_enough_nodes() -> None:
    run = Run()
    own = agent(run, "own")
    for id in "ab":
        run.counts(id)
        run.writes(Arrived(seat(id)))
    assert closed_after(run, own, 3 * TERMS.join_limit) is None


def outside(run: Run, *ids: str) -> Rendezvous:
    """Return the agent `own` of a job in an outside store, which is over; `own` has left."""
    own = running(run, *ids)
    run.run(own.close("over"))
    run.run(own.leave("done"))
    return own


def have_left(run: Run, *ids: str) -> None:
    """Write what these agents write last."""
    for id in ids:
        run.store.perform(Set(f"left/{id}", "1"))


def test_agent_beside_an_outside_store_looks_only_where_it_may_be_one_of_the_last() -> None:
    run = Run()
    own = outside(run, *"abcdefghi")
    run.operations = 0
    assert not run.run(own.await_leaving(is_host=False))  # nine others have still to leave
    assert run.operations == 2
    run.writes(*(Left(id) for id in "abcdefghi"))
    run.store.perform(Add("left", 8))
    have_left(run, *"abcdefghi")
    assert run.run(own.await_leaving(is_host=False))


def test_agent_beside_an_outside_store_leaves_its_keys_to_another_agent_that_still_counts() -> None:
    run = Run()
    own = outside(run, "a", "b")
    run.falls_silent("b")
    began = run.now
    assert not run.run(own.await_leaving(is_host=False))  # `a` lives
    assert run.now - began <= TERMS.interval


def test_agent_beside_an_outside_store_is_the_last_if_the_others_were_killed_before_they_left() -> None:
    run = Run()
    own = outside(run, "a", "b")
    run.falls_silent("a")
    run.falls_silent("b")
    run.writes(Left("b"))
    have_left(run, "b")
    assert run.run(own.await_leaving(is_host=False))
    assert TERMS.lost_after <= run.now <= TERMS.lost_after + 2 * TERMS.interval
    assert [entry.id for entry in run.log() if isinstance(entry, Left) and entry.is_lost] == ["a"]


def test_agent_that_leaves_at_the_same_time_does_not_take_the_place_of_one_that_was_killed() -> None:
    run = Run()
    own = outside(run, "a", "b")
    run.falls_silent("b")
    run.writes(Left("a"))
    have_left(run, "a")
    assert run.run(own.await_leaving(is_host=False))  # although `a` still counts


@pytest.mark.parametrize("is_in_log", [False, True])
def test_agent_of_an_earlier_cycle_is_counted_in_the_stead_of_nobody(is_in_log: bool) -> None:
    run = Run()
    own = outside(run, "a")
    run.store.perform(Add("left", 1))
    have_left(run, "earlier")
    if is_in_log:
        run.writes(Left("a"))
    assert not run.run(own.await_leaving(is_host=False))  # `a` lives, and may still write
    have_left(run, "a")
    assert run.run(own.await_leaving(is_host=False)) is is_in_log


def test_agent_whose_end_is_in_the_log_may_still_write_until_it_is_counted() -> None:
    run = Run()
    own = outside(run, "a")
    run.writes(Left("a"))
    assert not run.run(own.await_leaving(is_host=False))  # `a` still counts


def test_agent_that_was_killed_after_its_end_was_in_the_log_is_waited_for_until_it_is_silent() -> None:
    run = Run()
    own = outside(run, "a")
    run.writes(Left("a"))
    run.falls_silent("a")
    assert run.run(own.await_leaving(is_host=False))
    assert TERMS.lost_after <= run.now <= TERMS.lost_after + 2 * TERMS.interval


def test_agent_beside_an_outside_store_stops_waiting_for_silent_agents_when_it_is_asked_to() -> None:
    run = Run()
    own = outside(run, "a")
    run.falls_silent("a")
    run.interrupted_at = 3.0
    assert not run.run(own.await_leaving(is_host=False))
    assert run.now < TERMS.lost_after


@pytest.mark.parametrize("deleted", ["left", "log/count", "beat/a"])
def test_agent_whose_job_another_agent_has_deleted_deletes_nothing(deleted: str) -> None:
    run = Run()
    own = outside(run, "a")
    run.falls_silent("a")
    at(run, 3.0, lambda: run.store.data.pop(deleted))
    assert not run.run(own.await_leaving(is_host=False))
    assert run.now < TERMS.lost_after


def test_agent_that_leaves_a_job_that_goes_on_in_an_outside_store_does_not_wait() -> None:
    run = Run()
    own = running(run, "a")
    run.falls_silent("a")
    run.run(own.leave("asked to stop"))
    began = run.now
    assert not run.run(own.await_leaving(is_host=False))
    assert run.now == began


@pytest.mark.parametrize("is_over", [False, True])
def test_observer_of_a_job_knows_whether_it_has_agents(is_over: bool) -> None:
    run = Run()
    own = running(run, "a")
    observer = Rendezvous("observer", "observer", TERMS)
    assert run.run(Rendezvous("early", "early", TERMS).has_agents())
    if is_over:
        run.run(own.close("over"))
    run.run(own.leave("done"))
    assert run.run(observer.has_agents())
    run.writes(Left("a"))
    assert not run.run(observer.has_agents())


def test_observer_of_a_job_waits_until_its_agents_have_left() -> None:
    run = Run()
    running(run, "a")
    observer = Rendezvous("observer", "observer", TERMS)
    assert run.run(observer.has_agents())
    at(run, 100.0, lambda: run.writes(Left("a"), Left("own")))
    run.run(observer.await_leaving(is_host=True))
    assert 100.0 <= run.now <= 100.0 + TERMS.interval


def over(run: Run, *ids: str, reason: str = "over") -> Rendezvous:
    """Return a newcomer to a job that is over; all its agents are silent."""
    run.run(running(run, *ids).close(reason))
    for id in (*ids, "own"):
        run.falls_silent(id)
    newcomer = agent(run, "newcomer")
    newcomer.has_lasting_store = True
    return newcomer


def test_newcomer_to_a_job_that_is_over_and_has_no_agent_fails_and_deletes_nothing() -> None:
    run = Run()
    newcomer = over(run, "a", reason=cycle.encode(CycleDecision("failed", "a", detail="rank 3 failed")))
    at(run, 3.0, lambda: run.writes(Nothing()))  # another newcomer leaves
    run.operations = 0
    with pytest.raises(ConfigurationError, match=r"over \(failed, rank 3 failed\).* --rdzv-id .* RESILIENCE_ATTEMPT"):
        join(run, newcomer)
    assert TERMS.lost_after <= run.now <= TERMS.lost_after + 2 * TERMS.interval
    assert run.operations < 20
    run.run(newcomer.leave("its configuration is wrong"))
    assert not run.run(newcomer.await_leaving(is_host=False))
    assert Arrived(seat("newcomer")) not in run.log()


@pytest.mark.parametrize(("reason", "words"), [("all done", "(all done)"), (cycle.encode(DONE), "(completed)")])
def test_newcomer_is_told_how_the_job_ended_that_it_finds(reason: str, words: str) -> None:
    run = Run()
    with pytest.raises(ConfigurationError) as raised:
        join(run, over(run, "a", reason=reason))
    assert words in str(raised.value)


@pytest.mark.parametrize("living", ["a", "own", "spare"])
def test_newcomer_to_a_job_that_is_over_ends_with_it_while_one_of_its_agents_lives(living: str) -> None:
    run = Run()
    newcomer = over(run, "a")
    run.writes(Arrived(seat("spare")))
    run.counts("spare")
    run.falls_silent("spare")
    at(run, 3.0, lambda: run.counts(living))
    assert join(run, newcomer) == Refusal("closed", "over")
    assert run.now < TERMS.lost_after


def test_newcomer_that_is_asked_to_stop_does_not_wait_for_agents_of_a_job_that_is_over() -> None:
    run = Run()
    newcomer = over(run, "a")
    run.interrupted_at = 3.0
    assert join(run, newcomer) == Refusal("closed", "over")
    assert run.now < TERMS.lost_after


def test_agent_of_a_job_that_is_over_ends_with_it_although_no_other_agent_lives() -> None:
    run = Run()
    own = running(run, "a")
    own.has_lasting_store = True
    run.run(own.close("over"))
    run.falls_silent("a")
    run.falls_silent("own")
    assert join(run, own) == Refusal("closed", "over")
    assert run.now == 0.0


def test_agent_that_finds_a_job_that_is_over_in_the_store_of_a_node_has_come_too_late() -> None:
    """The node hosts it for others that still leave, or it is this agent's own, and another node has ended the job."""
    run = Run()
    newcomer = over(run, "a")
    newcomer.has_lasting_store = False
    assert join(run, newcomer) == Refusal("closed", "over")
    assert run.now == 0.0
