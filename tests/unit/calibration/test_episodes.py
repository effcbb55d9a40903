"""Stalls that come in episodes: events are counted, not occurrences, and what was seen once is not known."""

from __future__ import annotations

import random

import pytest

from resilience.calibration.episodes import RUN, LargestDurations, episodes
from resilience.calibration.fitting import fit
from tests.support.stalled_runs import SEVERITIES, Stalls, covered, outcome, outcomes, run

RATES = (1e-6, 1e-4, 1e-3)  # false alarms per occurrence


def test_places_that_follow_one_another_closely_are_one_episode() -> None:
    assert episodes([], 5.0) == 0
    assert episodes([7], 5.0) == 1
    assert episodes([105, 100, 110, 200, 203], 5.0) == 2


def test_occurrences_of_two_runs_are_never_one_episode() -> None:
    tops = LargestDurations.of([(2.0, 10), (2.0, 11), (2.0, RUN), (2.0, RUN + 1)])
    assert tops.events(1.0, 3.0, 4, n=10_000) == pytest.approx(2.0, rel=0.1)


@pytest.mark.parametrize("every", [3, 10, 1000])
def test_phase_that_recurs_regularly_is_as_many_events_as_occurrences(every: int) -> None:
    tops = LargestDurations.of((5.0 if place % every == 0 else 1.0, place) for place in range(5000))
    phases = 1 + 4999 // every
    assert tops.events(4.0, 6.0, phases, n=5000) == phases


def test_independent_occurrences_count_nearly_in_full() -> None:
    chance = random.Random(1)
    tops = LargestDurations.of((chance.random(), place) for place in range(20_000))
    for count in (50, 200, 1000):
        assert 0.9 * count <= tops.events(tops.seconds[-count], 1.0, count, n=20_000) <= count


def test_durations_without_a_known_place_count_one_by_one() -> None:
    assert LargestDurations().events(1.0, 2.0, 20, n=1000) == 20


def test_one_episode_of_twenty_stalls_is_one_event() -> None:
    chance = random.Random(2)
    runs = [run(chance, 20_000, Stalls(share=0.0)) for _ in range(2)]
    runs[0][5000:5020] = [4.0 + chance.random() for _ in range(20)]
    answer = fit(runs, 1e-6)
    assert answer.status == "provisional"
    assert "seen once only, 20 occurrences in a row" in answer.reason


def test_counting_alone_says_less_where_the_slowest_come_in_episodes() -> None:
    chance = random.Random(3)
    runs = [run(chance, 20_000, Stalls(share=1e-2, severity="5 x")) for _ in range(2)]
    answer = fit(runs, 1e-6)
    assert answer.status == "ok"
    assert (answer.distribution_free_upper or 0.0) >= 10 * 3 / 40_000


@pytest.mark.parametrize(
    "length", [pytest.param(5, marks=pytest.mark.slow), 20, pytest.param(50, marks=pytest.mark.slow)]
)
def test_rated_answers_from_stalls_in_episodes_keep_their_rate(length: int) -> None:
    rated = [
        (p, found)
        for severity in sorted(SEVERITIES)
        for share in (1e-3, 1e-2)
        for seed in range(4, 6)
        for p, found in zip(RATES, outcomes(Stalls(share, length, severity, n=20_000), RATES, seed), strict=True)
        if found.is_seen and found.is_rated
    ]
    assert len(rated) >= 2
    assert all(exceeded <= p for p, found in rated for exceeded in found.exceeded)


def test_stalls_of_a_fixed_length_and_severity_get_a_rate() -> None:
    outcomes = [outcome(Stalls(1e-2, 20, "5 x", n=20_000), 1e-6, seed) for seed in range(4)]
    assert [each.is_rated for each in outcomes] == [True] * 4


def test_stalls_in_one_run_of_five_get_no_rate() -> None:
    for severity in sorted(SEVERITIES):
        seen = outcome(Stalls(1e-2, 20, severity, runs=5, stalling=1, n=25_000), 1e-6, 1)
        assert seen.is_seen and not seen.is_rated, severity


@pytest.mark.slow
def test_runs_whose_speeds_differ_by_a_fifth_keep_the_rate_or_get_none() -> None:
    outcomes = [
        outcome(Stalls(share=0.0, run_spread=0.2, runs=runs, stalling=0, n=6000 * runs), 1e-4, seed)
        for runs in (2, 3)
        for seed in range(12)
    ]
    share = covered(outcomes, 1e-4)
    assert share is not None and share >= 0.95
