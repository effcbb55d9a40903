"""Limits that nobody has set: no healthy pause ends a rank, and a hang is found in time."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest

from resilience.core.silences import (
    ENOUGH,
    FACTOR,
    START,
    WARM_UP,
    Hearing,
    PauseInSection,
    Shown,
    SignOfLife,
    SilencesOfKind,
    begin,
    begin_cycle,
    hear,
    kinds_of_pause,
    present,
    rounds_of,
)
from resilience.core.standstills import Standstill
from resilience.facts.limits import Rule
from tests.support.silent_jobs import SilentJob

MINUTES = 60.0
STEP = 0.5
Pause = Callable[[SilentJob, float], None]


def outside(job: SilentJob, seconds: float) -> None:
    """The script says nothing of its pause."""
    job.pass_time(seconds)


def in_section(name: str) -> Pause:
    def pause(job: SilentJob, seconds: float) -> None:
        with job.section(name):
            job.pass_time(seconds)

    return pause


def train(job: SilentJob, steps: int, seconds: float = STEP) -> None:
    for _ in range(steps):
        job.step()
        job.pass_time(seconds)


def train_with_pauses(job: SilentJob, *pauses: tuple[Pause, float], rounds: int = ENOUGH) -> None:
    """Show each of these pauses `rounds` times, with steps between them."""
    train(job, 20)
    for _ in range(rounds):
        for pause, seconds in pauses:
            train(job, 50)
            pause(job, seconds)
    train(job, 1)


EVALUATION, CHECKPOINT = (in_section("evaluation"), 12.0), (in_section("checkpoint"), 40.0)
COMPILATION = (outside, 20.0)
ALL = (EVALUATION, CHECKPOINT, COMPILATION)


# -- false alarms ------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [1, 2, 3, 7, 100, 5000])
@pytest.mark.parametrize("pause", [outside, in_section("checkpoint"), in_section("evaluation")])
def test_first_pause_of_five_minutes_is_survived_whenever_it_comes(pause: Pause, steps: int) -> None:
    job = SilentJob()
    train(job, steps)
    pause(job, 5 * MINUTES)
    train(job, 10)
    assert job.kills == []


@pytest.mark.parametrize("name", ["checkpoint", "evaluation", "recompilation"])
@pytest.mark.parametrize("is_told", [True, False])
@pytest.mark.parametrize("times", [1, ENOUGH, 500])
def test_job_that_has_shown_two_kinds_of_pause_survives_the_first_of_the_third(
    name: str, is_told: bool, times: int
) -> None:
    pauses = {"checkpoint": 20.0, "evaluation": 7.0, "recompilation": 90.0}
    job = SilentJob()
    shown = [(in_section(other) if is_told else outside, pauses[other]) for other in pauses if other != name]
    train_with_pauses(job, *shown, rounds=times)
    (in_section(name) if is_told else outside)(job, 5 * MINUTES)
    train(job, 10)
    assert job.kills == []


@pytest.mark.parametrize("times", [ENOUGH, 500])
@pytest.mark.parametrize("where", ["", "forward"])
def test_first_pause_where_a_job_has_not_paused_is_survived_though_it_has_paused_elsewhere(
    where: str, times: int
) -> None:
    """It recompiles for the first time after it has evaluated, written checkpoints and exported many times."""
    job = SilentJob()
    for _ in range(times):
        for name, seconds in (("evaluation", 12.0), ("checkpoint", 40.0), ("export", 20.0)):
            for _ in range(20):
                job.step()
                (in_section(where) if where else outside)(job, STEP)
            in_section(name)(job, seconds)
    (in_section(where) if where else outside)(job, 5 * MINUTES)
    train(job, 10)
    assert job.kills == []


def test_first_step_of_a_quarter_of_an_hour_is_survived_in_each_cycle() -> None:
    job = SilentJob()
    for _ in range(3):
        job.step()
        job.pass_time(960.0)  # the slowest first step in the supplied data
        train_with_pauses(job, *ALL)
        job.start_again()
    assert job.kills == []


def test_warm_up_of_a_later_cycle_has_the_generous_limit_again() -> None:
    job = SilentJob()
    train_with_pauses(job, *ALL)
    job.step()
    assert job.hang() < 9 * MINUTES
    job.start_again()
    train(job, 3)
    outside(job, 9 * MINUTES)
    assert job.kills == []


def test_warm_up_teaches_nothing() -> None:
    job = SilentJob()
    train(job, 2)
    outside(job, 200.0)
    train_with_pauses(job, *ALL)
    job.step()
    assert job.is_learned
    assert job.hang() == pytest.approx(FACTOR * (COMPILATION[1] + STEP))


def test_sections_of_each_step_are_no_kinds_of_pause() -> None:
    job = SilentJob()
    for _ in range(1000):
        job.step()
        for name, seconds in (("data", 0.02), ("forward", 0.2), ("backward", 0.4), ("optimizer", 0.1)):
            with job.section(name):
                job.pass_time(seconds)
    assert not job.is_learned
    in_section("checkpoint")(job, 5 * MINUTES)
    assert job.kills == []


def test_random_stragglers_are_no_kinds_of_pause() -> None:
    job, chance = SilentJob(), Random(1)
    for _ in range(20_000):
        train(
            job,
            1,
            0.25 * chance.lognormvariate(0.0, 0.02) * (chance.choice((2, 3, 4)) if chance.random() < 1e-3 else 1),
        )
    assert kinds_of_pause(job.hearing.shown) == 0


def test_a_section_around_the_whole_training_is_no_silence() -> None:
    job = SilentJob()
    with job.section("training"):
        for _ in range(3):
            train(job, 2000)
            outside(job, 8 * MINUTES)
    assert job.kills == []


def test_a_section_that_another_thread_keeps_open_leaves_steps_alone() -> None:
    job = SilentJob()
    train(job, 10)
    with job.section("asynchronous checkpoint"):
        train(job, 10_000)
    assert job.kills == []


def test_job_whose_steps_take_longer_than_the_first_limit_is_left_alone_after_the_first_one() -> None:
    job = SilentJob()
    for _ in range(10):
        job.step()
        job.pass_time(25 * MINUTES)
    assert job.kills == []


def test_program_that_only_loads_is_not_watched_as_if_it_trained() -> None:
    job = SilentJob()
    in_section("init")(job, 913.0)  # the slowest in the supplied data
    in_section("load")(job, 30 * MINUTES)
    assert job.kills == []


@pytest.mark.parametrize("before", [(), (100.25, 100.5)], ids=["no step before it", "steps before it"])
@pytest.mark.parametrize("is_quick", [True, False], ids=["rank is first", "monitor is first"])
def test_time_in_which_the_whole_node_stood_still_is_not_learned(before: tuple[float, ...], is_quick: bool) -> None:
    """The steps before it may not have been read yet when the node was suspended."""
    hearing = Hearing()
    for at in range(101):
        hearing = hear(hearing, [SignOfLife(float(at), "step")], ())
    looks = [[*before, 5000.5], []] if is_quick else [[*before], [5000.5]]
    for steps in looks:
        hearing = hear(hearing, [SignOfLife(at, "step") for at in steps], (), [Standstill(101.5, 5000.25)])
    assert hearing.shown.silences[""].longest <= 2.0


def test_steps_of_a_rank_whose_monitor_stood_still_are_learned() -> None:
    hearing = Hearing()
    for at in range(101):
        hearing = hear(hearing, [SignOfLife(float(at), "step")], ())
    hearing = hear(hearing, [SignOfLife(at, "step") for at in (120.0, 141.0, 160.0)], (), [Standstill(102.0, 161.0)])
    assert hearing.shown.silences[""].longest == 21.0
    silence = present(Rule(), hearing, 0.0)
    assert silence is not None and silence.since == 160.0


def test_what_follows_an_exception_is_not_learned() -> None:
    job = SilentJob()
    train_with_pauses(job, *ALL)
    assert job.is_learned
    before = job.hearing.shown
    with job.section("checkpoint", failed=True):
        job.pass_time(70.0)
    assert job.is_learned
    assert job.hearing.shown.silences["checkpoint"] == before.silences["checkpoint"]


# -- delay -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [2, 3, 10, 1000])
def test_hang_is_found_within_ten_minutes_at_first(steps: int) -> None:
    job = SilentJob()
    train(job, steps)
    job.step()
    assert job.hang() == pytest.approx(10 * MINUTES)


@pytest.mark.parametrize("steps", [2, 10, 1000])
def test_hang_in_a_section_is_found_within_ten_minutes_at_first(steps: int) -> None:
    job = SilentJob()
    train(job, steps)
    job.step()
    with job.section("checkpoint"):
        assert job.hang() == pytest.approx(10 * MINUTES)


def test_hang_is_found_at_ten_times_the_longest_silence_of_its_kind_once_pauses_are_known() -> None:
    job = SilentJob()
    train_with_pauses(job, *ALL)
    job.step()
    assert job.hang() == pytest.approx(FACTOR * (COMPILATION[1] + STEP))  # the step before it is part of the silence
    for name, (_, longest) in (("evaluation", EVALUATION), ("checkpoint", CHECKPOINT)):
        with job.section(name):
            assert job.hang() == pytest.approx(FACTOR * longest)


def test_learned_limit_is_never_below_a_minute() -> None:
    job = SilentJob()
    pauses = [(outside, 1.5), (in_section("evaluation"), 1.2), (in_section("checkpoint"), 1.3)]
    for _ in range(20):
        train(job, 50, 0.05)
        for pause, seconds in pauses:
            pause(job, seconds)
            train(job, 50, 0.05)
    job.step()
    assert job.is_learned
    assert job.hang() == 60.0


def test_a_slow_first_step_does_not_count_after_the_warm_up() -> None:
    job = SilentJob()
    job.step()
    job.pass_time(960.0)
    train(job, 3)
    job.step()
    assert job.hang() == pytest.approx(2 * 960.0)
    train(job, 3)
    job.step()
    assert job.hang() == pytest.approx(10 * MINUTES)


def test_limit_is_called_learned_where_it_follows_from_what_was_shown() -> None:
    job = SilentJob()
    train_with_pauses(job, *ALL)
    assert job.silence is not None and job.silence.is_learned
    with job.section("export"):
        assert job.silence is not None and not job.silence.is_learned
    job.start_again()
    train(job, 3)
    assert job.silence is not None and not job.silence.is_learned


def test_unknown_section_of_a_job_that_has_shown_its_pauses_has_ten_minutes() -> None:
    job = SilentJob()
    train_with_pauses(job, *ALL)
    with job.section("export"):
        assert job.hang() == pytest.approx(10 * MINUTES)


@pytest.mark.parametrize("seed", range(40))
def test_delay_keeps_its_bounds_on_random_jobs(seed: int) -> None:
    chance = Random(seed)
    job = SilentJob()
    step = 10 ** chance.uniform(-2, 0.5)
    pauses = [
        (
            chance.choice((outside, in_section("a"), in_section("b"), in_section("c"))),
            step * 10 ** chance.uniform(0, 2.5),
        )
        for _ in range(chance.randrange(6))
    ]
    longest: dict[str, float] = {}
    for _ in range(chance.randrange(1, 12)):
        train(job, chance.randrange(5, 60), step)
        for pause, seconds in pauses:
            pause(job, min(seconds, 55.0))
    train(job, 8, step)
    job.step()
    delay = job.hang()
    longest = {kind: each.longest for kind, each in job.hearing.shown.silences.items()}
    if job.is_learned:
        assert delay == pytest.approx(max(60.0, 10 * longest[""]))
    else:
        assert delay == pytest.approx(10 * MINUTES)
    assert job.kills == []


def test_hang_before_the_first_round_is_over_is_found_within_the_hour() -> None:
    job = SilentJob()
    job.step()
    assert job.hang() == START * 10 * MINUTES == 60 * MINUTES


def test_rank_that_has_shown_nothing_is_not_watched() -> None:
    assert SilentJob().silence is None


def test_restarted_rank_of_a_job_that_has_shown_rounds_has_an_hour_for_its_first_sign() -> None:
    job = SilentJob()
    train(job, 100)
    job.start_again()
    began = job.now
    silence = job.silence
    assert silence is not None
    assert (silence.since, silence.allowed, silence.suspect_at) == (began, 60 * MINUTES, began + 10 * MINUTES)
    job.step()  # the cycle's first sign
    assert job.silence is not None
    job.hearing = begin(job.hearing)  # a second program of the same worker
    assert job.silence is None


def test_restarted_rank_of_a_job_without_rounds_owes_no_sign() -> None:
    assert present(Rule(), begin_cycle(Shown({"": SilencesOfKind(1.0, {0: 3})}, {})), 0.0) is None


# -- suspicion ---------------------------------------------------------------------------------------


def test_suspicion_comes_before_the_kill() -> None:
    job = SilentJob()
    train(job, 100)
    job.step()
    outside(job, 11 * MINUTES)
    assert len(job.kills) == 1
    assert [seconds for seconds, _ in job.suspicions] == [60.0]


def test_suspicion_is_reported_once_a_silence() -> None:
    job = SilentJob()
    for minutes in (2, 8):
        train(job, 100)
        job.step()
        outside(job, minutes * MINUTES)
    assert [seconds for seconds, _ in job.suspicions] == [60.0, 7.5 * MINUTES]  # ten times the first is far off


def test_pause_that_is_no_longer_than_usual_rouses_no_suspicion() -> None:
    job = SilentJob()
    train_with_pauses(job, (outside, 50.0), rounds=20)
    assert job.suspicions == []


# -- what is counted ---------------------------------------------------------------------------------


def test_kinds_outside_sections_are_told_apart_by_a_factor_of_two() -> None:
    def shown(*pauses: float) -> Shown:
        hearing = Hearing()
        at = 0.0
        for number in range(2000):
            at += pauses[number // 50 % len(pauses)] if number % 50 == 49 else 0.1
            hearing = hear(hearing, [SignOfLife(at, "step")], ())
        return hearing.shown

    assert kinds_of_pause(shown(0.1)) == 0
    assert kinds_of_pause(shown(2.5)) == 1
    assert kinds_of_pause(shown(2.5, 3.0, 3.5)) == 1
    assert kinds_of_pause(shown(2.5, 7.5)) == 2
    assert kinds_of_pause(shown(2.5, 7.5, 25.0)) == 3


def test_signs_of_a_section_opened_between_two_looks_have_their_kind() -> None:
    hearing = Hearing(counts={("step", ""): 10}, last=0.0)
    hearing = hear(hearing, [], (PauseInSection("checkpoint", 1.0),))
    hearing = hear(hearing, [SignOfLife(9.0, "closed", "checkpoint", 1.0)], ())
    hearing = hear(hearing, [SignOfLife(14.0, "closed", "evaluation", 11.0)], ())
    silences = hearing.shown.silences
    assert {kind: each.longest for kind, each in silences.items()} == {"": 2.0, "checkpoint": 8.0, "evaluation": 3.0}


def test_inner_section_is_the_kind_while_sections_nest() -> None:
    hearing = Hearing(counts={("step", ""): 10}, last=0.0)
    signs = [SignOfLife(30.0, "closed", "save", 10.0), SignOfLife(37.0, "closed", "epoch", 5.0)]
    shown = hear(hearing, signs, ()).shown
    assert {kind: each.longest for kind, each in shown.silences.items()} == {"": 5.0, "epoch": 7.0, "save": 20.0}


def test_section_that_is_found_late_does_not_move_the_last_sign_back() -> None:
    hearing = Hearing(counts={("step", ""): 10}, last=10.0)
    hearing = hear(hearing, [SignOfLife(30.0, "closed", "save", 9.0)], ())
    assert {kind: each.longest for kind, each in hearing.shown.silences.items()} == {"save": 20.0}


def test_rounds_are_steps_else_heartbeats_else_the_section_that_was_closed_most_often() -> None:
    sections = {("closed", "data"): 9, ("closed", "save"): 3}
    assert rounds_of({}) == 0
    assert rounds_of(sections) == 8
    assert rounds_of({**sections, ("heartbeat", ""): 5}) == 4
    assert rounds_of({**sections, ("heartbeat", ""): 5, ("step", ""): 3}) == 2


def test_sections_that_open_and_pings_are_no_rounds() -> None:
    hearing = Hearing()
    for at in range(10):
        hearing = hear(hearing, [SignOfLife(float(at), "other")], (PauseInSection("load", 0.0),))
    assert rounds_of(hearing.counts) == 0


def test_rounds_of_the_warm_up_are_not_counted() -> None:
    hearing = hear(Hearing(), [SignOfLife(float(at), "step") for at in range(12)], ())
    assert sum(hearing.shown.rounds.values()) == 12 - 1 - WARM_UP
    assert hearing.start == {"": 1.0}  # there was no silence before the first sign


def test_nothing_is_a_pause_before_it_is_known_how_long_a_round_takes() -> None:
    assert kinds_of_pause(Shown({kind: SilencesOfKind(100.0, {26: 9}) for kind in "abcd"}, {})) == 0


def test_a_round_takes_as_long_as_the_median_one() -> None:
    pauses = {kind: SilencesOfKind(6.0, {10: 9}) for kind in "abc"}  # of about 6 s
    assert kinds_of_pause(Shown(pauses, {-20: 10, 0: 30})) == 0  # most rounds take 1 s
    assert kinds_of_pause(Shown(pauses, {-20: 30, 0: 10})) == ENOUGH


def test_a_cycle_keeps_what_the_job_has_shown_and_forgets_its_signs() -> None:
    hearing = Hearing(
        Shown({"": SilencesOfKind(1.0, {0: 3})}, {0: 3}),
        True,
        {("step", ""): 9},
        {"": 2.0},
        {"": 1.0},
        (),
        5.0,
        4.0,
        5.0,
    )
    assert begin(hearing) == Hearing(shown=hearing.shown)
    assert begin_cycle(hearing.shown) == Hearing(shown=hearing.shown, is_expected=True)
