"""A rank that is late against its own past is suspected once, long before its learned limit."""

from __future__ import annotations

from resilience.core import shadow
from resilience.core.suspicion import limits_of
from resilience.core.watch import Doing, Learned, Limit, Limits, Observation, Sign, Watch, decide


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
