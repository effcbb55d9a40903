"""The log and the memberships: what is read, what is written twice, what is deleted."""

from __future__ import annotations

import msgspec
import pytest

from resilience.core import membership
from resilience.core.membership import Arrived, Left, Membership, Nothing, encode
from resilience.core.rendezvous_log import HOLE_LIMIT, RendezvousLog
from resilience.core.restart import Add, CompareSet
from resilience.errors import StoreError
from tests.unit.core.agents import Run, seat

FOUR = tuple(map(seat, "abcd"))


def formed(run: Run, last: Membership, by: str = "a", **changes: object) -> Membership:
    """Write the next next_membership, as this agent does."""
    next_membership = msgspec.structs.replace(
        Membership(last.cycle + 1, FOUR, holders=tuple("abcd"), by=by, before=last.by), **changes
    )
    return run.run(RendezvousLog().write(last, next_membership))


def test_place_whose_writer_does_not_write_is_waited_for_and_then_given_up() -> None:
    run = Run()
    run.store.perform(Add("log/count", 1))  # and its writer dies
    run.writes(Arrived(seat("b")))
    log, known = RendezvousLog(), membership.begin(Membership())
    assert run.run(log.read(known)).entries == 0
    run.now += HOLE_LIMIT - 0.1
    assert run.run(log.read(known)).entries == 0
    run.now += 0.2
    found = run.run(log.read(known))
    assert (found.entries, set(found.arrived)) == (2, {"b"})
    assert run.log() == [Nothing(), Arrived(seat("b"))]


def test_entry_that_is_written_just_before_its_place_is_given_up_is_read() -> None:
    run = Run()
    run.store.perform(Add("log/count", 1))
    log, known = RendezvousLog(), membership.begin(Membership())
    run.run(log.read(known))
    run.now += HOLE_LIMIT
    late = encode(Arrived(seat("late")))
    run.before = lambda operation: isinstance(operation, CompareSet) and run.store.data.setdefault("log/0", late)
    assert set(run.run(log.read(known)).arrived) == {"late"}
    assert run.log() == [Arrived(seat("late"))]


def test_entry_whose_place_was_given_up_is_written_at_the_end() -> None:
    run = Run()
    run.before = lambda operation: isinstance(operation, CompareSet) and run.store.data.setdefault(
        "log/0", encode(Nothing())
    )
    assert run.run(RendezvousLog().append(Left("late"))) == 1
    assert run.log() == [Nothing(), Left("late")]


def test_entry_that_may_no_longer_be_true_leaves_its_place_empty() -> None:
    run = Run()
    run.before = lambda operation: isinstance(operation, Add) and setattr(run, "now", run.now + 5.0)
    log = RendezvousLog()
    assert run.run(log.append(Left("lost"), until=run.now + 5.0)) == 0
    assert run.run(log.append(Left("is back"), until=run.now + 4.9)) == 1
    assert run.run(log.append(Left("leaves"))) == 2
    assert run.log() == [Left("lost"), Nothing(), Left("leaves")]


def test_reader_that_is_two_cycles_behind_starts_from_the_newest_membership() -> None:
    run = Run()
    writer = RendezvousLog()
    for name in "ab":
        run.run(writer.append(Arrived(seat(name))))
    first = formed(run, Membership(), entries=2)
    behind = membership.begin(first)
    run.run(writer.append(Left("a")))
    second = formed(run, first, entries=3)
    third = formed(run, second, entries=3)
    run.run(writer.forget(3))
    run.writes(Arrived(seat("new"), known=2))
    found = run.run(RendezvousLog().read(behind))
    assert (found.last, set(found.arrived)) == (third, {"new"})
    assert run.log() == [Arrived(seat("new"), known=2)]  # nothing is written in the place of what was deleted


def test_reader_that_is_behind_a_job_that_is_over_knows_the_nodes_of_its_last_cycle() -> None:
    run = Run()
    writer = RendezvousLog()
    run.run(writer.append(Arrived(seat("a"))))
    first = formed(run, Membership(), entries=1)
    second = formed(run, first, entries=1, seats=FOUR[:2], by="b")
    run.run(writer.forget(1))
    run.run(RendezvousLog().write(second, Membership(2, closed="over", by="a", before="b")))
    run.writes(Left("b"))
    found = run.run(RendezvousLog().read(membership.begin(Membership())))
    assert membership.present(found, found.last) == {"a"}


def test_nothing_new_costs_no_operation() -> None:
    run = Run()
    run.writes(Left("a"))
    log = RendezvousLog()
    known = run.run(log.read(membership.begin(Membership())))
    run.operations = 0
    assert run.run(log.read(known, count=1)) == known
    assert run.operations == 0


def test_next_membership_costs_one_operation_where_little_has_changed_and_the_last_one_few() -> None:
    run = Run()
    first = formed(run, Membership())
    second = formed(run, first, entries=4)
    run.operations = 0
    assert run.run(RendezvousLog().following(first)) == second
    assert run.operations == 1
    third = formed(run, second, entries=5)
    fourth = formed(run, third, entries=6)
    run.operations = 0
    assert run.run(RendezvousLog().newest(third)) == fourth
    assert run.operations == 2
    run.operations = 0
    assert run.run(RendezvousLog().newest(Membership())) == fourth
    assert run.operations == 4
    closed = run.run(RendezvousLog().write(fourth, Membership(cycle=4, closed="over", by="a")))
    run.operations = 0
    assert run.run(RendezvousLog().newest(closed)).closed == "over"
    assert run.operations == 0


def test_last_membership_before_the_end_is_known_from_the_end() -> None:
    run, log = Run(), RendezvousLog()
    first = run.run(log.write(Membership(), Membership(0, (seat("a"),), by="a")))
    second = run.run(log.write(first, Membership(1, (seat("a"), seat("b")), by="b", before="a")))
    end = run.run(log.write(second, Membership(2, closed="over", by="a", before="b")))
    assert run.run(log.before(end)) == second
    assert Run().run(RendezvousLog().before(end)) == end


def test_membership_whose_seats_have_changed_is_read_as_a_whole() -> None:
    run = Run()
    first = formed(run, Membership())
    second = formed(run, first, seats=tuple(map(seat, "wxyz")), holders=tuple("wxyz"), spares=(seat("s"),))
    third = formed(run, second, seats=second.seats, holders=second.holders, excluded=("q",))
    assert run.run(RendezvousLog().following(first)) == second
    assert run.run(RendezvousLog().following(second)) == third
    assert (third.spares, third.excluded) == ((), ("q",))
    fourth = formed(run, third, seats=second.seats, holders=second.holders, excluded=("q",))
    assert run.run(RendezvousLog().following(third)) == fourth
    change = membership.difference(third, fourth)
    assert (change.seats, change.spares, change.excluded) == ((), None, None)


def test_pointer_to_a_membership_that_is_missing_is_an_error() -> None:
    run = Run()
    run.store.data["newest"] = "3"
    with pytest.raises(StoreError, match="the membership of cycle 3 is missing"):
        run.run(RendezvousLog().newest(Membership()))


def test_newcomer_finds_the_newest_membership_behind_a_stale_pointer_and_if_closed() -> None:
    run = Run()
    last = Membership()
    assert run.run(RendezvousLog().newest(last)) == last
    for _ in range(3):
        last = formed(run, last)
    run.store.data["newest"] = "0"  # the agent that formed the later ones died before it wrote more
    assert run.keys("membership/") == ["membership/1/a", "membership/2/a"]
    assert run.run(RendezvousLog().newest(Membership())) == last
    run.run(RendezvousLog().write(last, Membership(cycle=3, closed="over", by="a")))
    assert run.run(RendezvousLog().newest(Membership())).closed == "over"


def test_first_membership_of_a_cycle_stands_and_only_what_is_needed_stays() -> None:
    run = Run()
    first = formed(run, Membership(), by="a")
    assert formed(run, Membership(), by="b", entries=9) == first
    assert formed(run, Membership(), by="a") == first  # its answer was lost, and it asks again
    assert run.run(RendezvousLog().write(Membership(), Membership(cycle=0, closed="over", by="a"))) == first
    assert run.keys("membership/") == ["membership/0/a"]
    assert run.store.data["newest"] == "0"
    second = formed(run, first, by="b")
    assert run.keys("membership/") == ["membership/0/a", "membership/1/b"]  # the first one may be just being read
    third = formed(run, second, by="c")
    assert run.keys("membership/") == ["membership/1/b", "membership/2/c"]
    assert run.run(RendezvousLog().write(third, Membership(cycle=3, closed="over", by="d"))).closed == "over"
    assert run.keys("membership/") == ["membership/2/c"]
    assert run.keys("cycle/") == [f"cycle/{number}" for number in range(4)]
    assert run.store.data["newest"] == "3"


def test_membership_without_one_before_deletes_nothing() -> None:
    run = Run()
    run.store.data["membership/-2/"] = "of another"
    formed(run, Membership())
    assert "membership/-2/" in run.store.data


def test_agent_deletes_its_own_entries_below_a_place_and_each_once() -> None:
    run = Run()
    log = RendezvousLog()
    for name in "abc":
        run.run(log.append(Left(name)))
    run.writes(Left("of another"))
    run.run(log.forget(2))
    assert run.keys("log/") == ["log/2", "log/3", "log/count"]
    run.operations = 0
    run.run(log.forget(4))
    assert run.keys("log/") == ["log/3", "log/count"]
    assert run.operations == 1
