"""What a monitor learns from the page of its rank: which signs there were, and how long it was silent."""

from __future__ import annotations

import pytest

from resilience.core.observation import Doing
from resilience.core.silences import START, SUSPECT, Shown, Silence, SilencesOfKind
from resilience.facts.limits import Rule
from resilience.facts.seats import Seat
from resilience.monitor.listening import Listener
from resilience.monitor.page import MonitorSide, Page, RankSide

RULE = Rule()


class Watched:
    """A rank's page, and the listener of its monitor."""

    def __init__(self) -> None:
        page = Page.create()
        self.rank, self._monitor = RankSide(page), MonitorSide(page)
        self.listener = Listener()
        self.seat(0)
        page.close()

    def seat(self, iteration: int, doing: Doing = Doing.FUNCTION) -> None:
        self.rank.set_seat(Seat(0, 0, 1, 1, iteration=iteration))
        self.rank.doing(doing)

    def look(self, is_healthy: bool = True) -> Silence | None:
        finished, _ = self._monitor.drain()
        view = self._monitor.read()
        self.listener.take(finished, view, is_healthy)
        return self.listener.silence(RULE, view.since)

    @property
    def counts(self) -> dict[str, int]:
        """How many silences there were after the warm-up, by kind."""
        return {kind: silences.count for kind, silences in self.listener.shown.silences.items()}


@pytest.fixture
def watched() -> Watched:
    return Watched()


def test_rank_that_shows_nothing_is_not_silent(watched: Watched) -> None:
    assert watched.look() is None


@pytest.mark.parametrize("sign", ["step", "heartbeat", "ping", "section"])
def test_first_sign_begins_the_first_silence(watched: Watched, sign: str) -> None:
    match sign:
        case "step":
            watched.rank.step(0)
        case "heartbeat":
            watched.rank.heartbeat()
        case "ping":
            watched.rank.ping()
        case "section":
            watched.rank.enter("load")
    silence = watched.look()
    assert silence is not None
    assert silence.kind == ("load" if sign == "section" else "")


def test_each_step_ends_a_silence_whenever_the_monitor_looks(watched: Watched) -> None:
    for number in range(20):
        watched.rank.step(number)
        if number % 7 == 3:
            watched.look()
    watched.look()
    assert watched.counts == {"": 14}  # 20 steps have 19 silences between them, 5 of them are the warm-up


def test_sections_have_silences_of_their_own(watched: Watched) -> None:
    for number in range(20):
        watched.rank.step(number)
        watched.rank.enter("data")
        if number % 3 == 0:
            watched.look()
        watched.rank.leave("data")
    watched.look()
    counts = watched.counts
    assert counts["data"] == 15
    assert counts[""] == 29  # before and after each


def test_heartbeats_count_from_the_first_one_on(watched: Watched) -> None:
    for _ in range(20):
        watched.rank.heartbeat()
    watched.look()
    assert watched.counts == {"": 13}  # the first gap is found when the second heartbeat comes


def test_what_an_unhealthy_rank_shows_is_not_learned(watched: Watched) -> None:
    for number in range(20):
        watched.rank.step(number)
    watched.look(is_healthy=False)
    assert watched.counts == {}


def test_section_that_an_exception_left_is_not_learned(watched: Watched) -> None:
    for number in range(20):
        watched.rank.step(number)
        watched.rank.enter("data")
        watched.rank.leave("data", failed=True)
    watched.look()
    assert set(watched.counts) == {""}


@pytest.mark.parametrize("how", ["program", "outside"])
def test_silence_before_a_new_beginning_is_forgotten(watched: Watched, how: str) -> None:
    for number in range(20):
        watched.rank.step(number)
    assert watched.look() is not None
    match how:
        case "program":  # the same number again, as a program has it that a Wrapper hands back
            watched.seat(0)
        case "outside":
            watched.rank.doing(Doing.OUTSIDE)
    assert watched.look() is None
    assert watched.counts == {"": 14}  # what the job has shown stays


def test_next_iteration_owes_its_first_sign_and_forgets_the_silence_before(watched: Watched) -> None:
    for number in range(20):
        watched.rank.step(number)
    watched.look()
    watched.rank.doing(Doing.HOOK)
    assert watched.look() is None
    watched.seat(1)
    for _ in range(2):
        silence = watched.look()
        assert silence is not None
        assert (silence.kind, silence.allowed) == ("", START * RULE.first)
    assert watched.counts == {"": 14}


def test_warm_up_begins_again_with_each_iteration(watched: Watched) -> None:
    for iteration in range(3):
        watched.seat(iteration)
        for number in range(20):
            watched.rank.step(number)
        watched.look()
    assert watched.counts == {"": 3 * 14}


def test_next_worker_of_a_rank_begins_with_what_the_job_has_shown() -> None:
    shown = Shown({"": SilencesOfKind(1.0, {0: 3})}, {0: 3})
    listener = Listener(shown)
    assert listener.shown == shown
    silence = listener.silence(RULE, since=7.0)
    assert silence is not None
    assert (silence.since, silence.allowed) == (7.0, START * RULE.first)


def test_end_of_a_program_has_the_generous_limit(watched: Watched) -> None:
    """Nothing was learned about the end: loggers and uploads may take minutes there."""
    three_kinds_of_pause = {0: 3, 10: 3, 20: 3}
    watched.listener = Listener(Shown({"": SilencesOfKind(1.0, three_kinds_of_pause)}, {-40: 100}))
    for number in range(20):
        watched.rank.step(number)
    running = watched.look()
    assert running is not None and (running.allowed, running.is_learned) == (RULE.least, True)
    watched.rank.ends()
    ending = watched.look()
    assert ending is not None and (ending.allowed, ending.is_learned) == (RULE.first, False)
    assert ending.suspect_at == ending.since + SUSPECT * RULE.first


def test_end_of_a_program_has_the_generous_limit_before_its_second_round_too(watched: Watched) -> None:
    watched.rank.step(1)
    running = watched.look()
    watched.rank.ends()
    ending = watched.look()
    assert running is not None and running.allowed == START * RULE.first
    assert ending is not None and ending.allowed == RULE.first


def test_end_of_a_program_that_owes_its_first_sign_has_the_generous_limit(watched: Watched) -> None:
    watched.listener = Listener(Shown({"": SilencesOfKind(1.0, {0: 3})}, {0: 3}))
    running = watched.look()
    watched.rank.ends()
    ending = watched.look()
    assert running is not None and running.allowed == START * RULE.first
    assert ending is not None
    assert (ending.allowed, ending.suspect_at) == (RULE.first, ending.since + SUSPECT * RULE.first)


def looks_before_its_first_sign(listener: Listener, *seconds: float) -> list[bool]:
    """Whether it is time to report a suspicion, at each of these looks."""
    page = Page.create()
    RankSide(page).doing(Doing.FUNCTION)
    view = MonitorSide(page).read()
    told = []
    for at in seconds:
        listener.take([], view, is_healthy=True)
        silence = listener.silence(RULE, view.since)
        told.append(silence is not None and listener.is_suspect(silence, view.since + at))
    page.close()
    return told


SHOWN = Shown({"": SilencesOfKind(1.0, {0: 3})}, {0: 3})


def test_suspicion_before_the_first_sign_is_reported_once() -> None:
    looks = [20.0 * number for number in range(40)]
    told = looks_before_its_first_sign(Listener(SHOWN), *looks)
    assert [at for at, is_told in zip(looks, told, strict=True) if is_told] == [RULE.first]


def test_no_sign_is_expected_of_a_new_node_or_after_a_program_could_not_attach() -> None:
    assert Listener(SHOWN, is_first_sign_expected=False).silence(RULE, 0.0) is None
    listener = Listener(SHOWN)
    listener.expect_nothing()
    assert listener.silence(RULE, 0.0) is None
    assert listener.shown == SHOWN
