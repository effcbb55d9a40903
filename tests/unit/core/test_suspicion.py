"""A rank that is late against its own past is suspected once, long before its learned limit."""

from __future__ import annotations

import msgspec
import pytest

from resilience.core import shadow
from resilience.core.observation import Doing, Observation, Sign, Suspicion
from resilience.core.standstills import Standstill
from resilience.core.suspicion import AGAIN, STANDS, Suspect, compared, limits_of, looked_again, suspected
from resilience.core.watch import Finding, Watch, decide, exceeded
from resilience.facts.interruptions import Frame, Hang
from resilience.facts.limits import Learned, Limit, Limits


def learned(longest: float, first: int = 2) -> Limits:
    known = Learned(10.0, 1.0, 1.2, first, longest_s=longest)
    return Limits(sections={"train": Limit(hard=10.0)}, learned={"train": known})


def inside(occurrence: int, since: float = 0.0) -> Observation:
    return Observation(doing=Doing.FUNCTION, open_sections=(Sign("train", since, occurrence),))


def test_rank_later_than_ever_is_suspected_once_and_nothing_is_done() -> None:
    limits = learned(2.0)
    suspicion = limits_of(limits)
    told, found = shadow.weigh(suspicion, inside(5), shadow.NOTHING, 2.4)
    assert found == ()
    told, found = shadow.weigh(suspicion, inside(5), told, 2.6)
    assert [(each.limit, each.allowed) for each in found] == [("section:train", 2.5)]
    assert shadow.weigh(suspicion, inside(5), told, 5.0)[1] == ()
    assert decide(Watch(limits=limits), inside(5), 2.6).commands == ()
    assert len(shadow.weigh(suspicion, inside(6, since=6.0), told, 9.0)[1]) == 1


def test_silence_in_which_the_host_stands_still_is_suspected_once_and_stays_so() -> None:
    suspicion = limits_of(learned(2.0))
    told, found = shadow.weigh(suspicion, inside(5), shadow.NOTHING, 2.6)
    assert len(found) == 1
    stood_still = msgspec.structs.replace(inside(5), standstills=(Standstill(2.7, 3.7),))
    told, found = shadow.weigh(suspicion, stood_still, told, 5.0)
    assert found == ()
    assert shadow.lasts(told, "section:train", 0.0)


def test_suspect_is_ended_though_its_host_has_stood_still_since() -> None:
    limits = msgspec.structs.replace(learned(2.0), ends_suspects=True)
    seen = msgspec.structs.replace(
        inside(5), standstills=(Standstill(2.7, 3.7),), suspicion=Suspicion("section:train", 0.0, 2.5)
    )
    assert [(each.limit, each.severity) for each in exceeded(limits, seen, 5.0)] == [("section:train", "hard")]


def test_first_occurrences_are_not_suspected() -> None:
    suspicion = limits_of(learned(2.0, first=2))
    assert shadow.weigh(suspicion, inside(2), shadow.NOTHING, 9.0)[1] == ()
    assert len(shadow.weigh(suspicion, inside(3), shadow.NOTHING, 9.0)[1]) == 1


def test_short_pause_of_a_fast_section_is_no_suspicion() -> None:
    suspicion = limits_of(learned(0.01))
    assert suspicion is not None and suspicion.sections["train"].soft == 2.5


def test_suspicion_shortly_before_the_limit_is_no_news() -> None:
    assert limits_of(learned(7.0)) is None
    assert limits_of(learned(0.0)) is None
    assert limits_of(Limits()) is None


# -- do the others wait for the suspect? ------------------------------------------------------------

PLACE = (Frame("train.py", 3, "main"), Frame("train.py", 9, "read"))
ELSEWHERE = (*PLACE[:1], Frame("train.py", 10, "read"))
SILENT = Finding("section:train", "soft", 2.5, 2.6)
WAIT: dict[int, Hang | None] = {0: "in_collective", 2: "in_collective"}


def first_look(hang: Hang | None = "in_call") -> Suspect:
    return suspected(SILENT, hang, PLACE, 100.0)


def test_two_looks_that_find_the_same_confirm_a_suspicion() -> None:
    once = compared(first_look(), WAIT, 0, 103.0)
    assert (once.look_at, once.is_confirmed) == (103.0 + AGAIN, False)
    again = looked_again(once, "in_call", PLACE)
    assert again is not None and (again.look_at, again.looks) == (None, 2)
    twice = compared(again, WAIT, 0, 105.0)
    assert (twice.look_at, twice.is_confirmed) == (None, True)
    assert (twice.limit, twice.began, twice.allowed) == ("section:train", 100.0, 2.5)


def test_rank_that_has_moved_is_suspected_no_longer() -> None:
    once = compared(first_look(), WAIT, 0, 103.0)
    assert looked_again(once, "in_call", ELSEWHERE) is None
    assert looked_again(once, "on_lock", PLACE) is None
    assert looked_again(once, "in_call", ()) is None


@pytest.mark.parametrize(
    ("hang", "others", "missing"),
    [
        ("in_call", {}, 0),
        ("in_call", {**WAIT, 3: "in_call"}, 0),
        ("in_call", {**WAIT, 3: None}, 0),
        ("in_call", WAIT, 1),
        ("in_loop", WAIT, 0),  # it may compute
        ("in_collective", WAIT, 0),
        (None, WAIT, 0),
    ],
)
@pytest.mark.parametrize("looks", [1, 2])
def test_suspicion_ends_nothing_unless_all_others_are_seen_to_wait_for_a_rank_that_stands(
    hang: Hang | None, others: dict[int, Hang | None], missing: int, looks: int
) -> None:
    suspect = msgspec.structs.replace(first_look(hang), looks=looks)
    assert compared(suspect, others, missing, 103.0) == suspect


def test_rank_that_waits_itself_asks_for_no_others() -> None:
    assert [hang for hang in (*STANDS, "in_loop", "in_collective") if first_look(hang).waits_for_others] == [
        "in_collective"
    ]


def test_silence_is_known_by_its_limit_and_its_start() -> None:
    told, _ = shadow.weigh(limits_of(learned(2.0)), inside(5, 100.0), shadow.NOTHING, 103.0)
    assert shadow.lasts(told, "section:train", 100.0)
    assert not shadow.lasts(told, "section:train", 101.0) and not shadow.lasts(told, "section:other", 100.0)
