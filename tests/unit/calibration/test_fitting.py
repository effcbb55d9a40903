"""Limits with a stated rate: what is claimed holds, what cannot be claimed is refused with the reason."""

from __future__ import annotations

import math
import random

import pytest

from resilience.calibration import fitting, quantiles
from resilience.calibration.fitting import FEWEST, fit, fit_first, fit_pool, trial_probability
from resilience.calibration.pool import pooled
from resilience.calibration.starts import warm_up
from resilience.calibration.tails import split
from resilience.calibration.unended import Cut


def lognormal(n: int, spread: float, seed: int, runs: int = 2) -> list[list[float]]:
    chance = random.Random(seed)
    return [[math.exp(chance.gauss(0.0, spread)) for _ in range(n // runs)] for _ in range(runs)]


def test_tight_data_give_a_limit_above_the_maximum_and_far_below_five_times_it() -> None:
    answer = fit(lognormal(40_000, 0.02, 1), p=1e-6)
    assert answer.status == "ok"
    assert answer.timeout_s is not None
    assert 1.5 * answer.max_s <= answer.timeout_s < 2.5 * answer.max_s
    assert answer.model_upper is not None and answer.model_upper <= 1e-6
    assert answer.distribution_free_upper == pytest.approx(3 / 40_000, rel=0.01)


@pytest.mark.parametrize("spread", [pytest.param(0.02, marks=pytest.mark.slow), 0.3])
def test_stated_rate_covers_the_true_quantile(spread: float) -> None:
    p = 1e-5
    z = 4.2649  # the standard normal is exceeded here with probability 1e-5
    answers = [fit(lognormal(20_000, spread, seed), p) for seed in range(40)]
    rated = [answer for answer in answers if answer.status == "ok"]
    assert len(rated) >= 30
    covered = sum(math.log(answer.timeout_s or 0.0) >= z * spread for answer in rated)
    assert covered >= 0.95 * len(rated)


def test_pareto_tail_is_followed_or_refused_never_undercut() -> None:
    for exponent in (4.0, 2.5, 1.5):
        for seed in range(10):
            chance = random.Random(seed)
            runs = [[chance.paretovariate(exponent) for _ in range(10_000)] for _ in range(2)]
            answer = fit(runs, p=1e-4)
            if answer.status == "ok":
                assert (answer.timeout_s or 0.0) >= 1e4 ** (1 / exponent) * 0.9


def test_runs_that_hardly_vary_and_differ_are_provisional() -> None:
    """Between such runs lie thousands of times the spread of one run's tail."""
    chance = random.Random(1)
    for median, spread in ((1.5, 0.001), (2.0, 0.002), (3.0, 0.02)):
        runs = [[slower * (1.0 + chance.gauss(0.0, spread)) for _ in range(600)] for slower in (1.0, median)]
        answer = fit(runs, p=1e-8)
        assert (answer.status, answer.reason.split(":")[0]) == ("provisional", "the runs differ")
        assert answer.timeout_s == pytest.approx(5.0 * answer.max_s)


def test_any_durations_give_a_limit_or_a_reason() -> None:
    for seed in range(300):
        chance = random.Random(seed)
        spread, scale = 10 ** chance.uniform(-6.0, 0.5), 10 ** chance.uniform(-6.0, 6.0)
        runs = []
        for _ in range(chance.randint(1, 4)):
            median = scale * 10 ** chance.choice((0.0, 0.0, chance.uniform(-3.0, 3.0)))
            slow, apart = 10 ** chance.uniform(0.0, 3.0), chance.randint(1, 400)
            n = chance.choice((1, 20, 60, 600))
            runs.append(
                [median * math.exp(chance.gauss(0.0, spread)) * (slow if i % apart == 7 else 1.0) for i in range(n)]
            )
        cuts = [Cut(scale * 10 ** chance.uniform(-3.0, 3.0), end) for end in ("cut", "killed", "hang")]
        answer = fit(runs, 10 ** chance.uniform(-12.0, -0.5), censored=chance.sample(cuts, chance.randint(0, 3)))
        assert answer.reason
        assert (answer.timeout_s is None) == (answer.status == "insufficient")
        assert answer.timeout_s is None or 1.0 <= answer.timeout_s < math.inf
        assert answer.model_upper is None or 0.0 <= answer.model_upper <= 1.0


def test_few_data_are_insufficient_and_say_how_many_are_needed() -> None:
    answer = fit([[1.0] * 29], p=0.01)
    assert (answer.status, answer.timeout_s) == ("insufficient", None)
    assert "29" in answer.reason and "30" in answer.reason


def test_slowest_mode_seen_once_is_provisional() -> None:
    runs = lognormal(40_000, 0.02, 3)
    runs[0][5] = 40.0
    answer = fit(runs, p=1e-6)
    assert answer.status == "provisional"
    assert answer.timeout_s == pytest.approx(200.0)
    assert "once" in answer.reason
    assert answer.max_s == 40.0


def test_rising_maximum_is_provisional() -> None:
    first, second = lognormal(40_000, 0.02, 4)
    second[-5000::500] = [3.0] * 10
    assert fit([first, second], p=1e-6).status == "provisional"
    assert "rises" in fit([first, second], p=1e-6).reason


def test_runs_that_differ_are_provisional() -> None:
    first, second = lognormal(40_000, 0.02, 5)
    answer = fit([first, [1.4 * seconds for seconds in second]], p=1e-6)
    assert answer.status == "provisional"
    assert "differ" in answer.reason


def test_one_run_is_tentative_and_has_the_higher_floor() -> None:
    answer = fit([lognormal(40_000, 0.02, 6, runs=1)[0]], p=1e-6)
    assert answer.status == "tentative"
    assert (answer.timeout_s or 0.0) >= 2.0 * answer.max_s


def test_between_five_and_twenty_thousand_is_tentative() -> None:
    assert fit(lognormal(8_000, 0.02, 7), p=1e-6).status == "tentative"
    assert fit(lognormal(4_000, 0.02, 7), p=1e-6).status == "short"


def test_short_runs_get_twice_the_maximum_and_claim_what_counting_shows() -> None:
    answer = fit(lognormal(600, 0.02, 7), p=1e-6)
    assert (answer.status, answer.timeout_s) == ("short", pytest.approx(2.0 * answer.max_s))
    assert answer.distribution_free_upper == pytest.approx(3 / 600, rel=0.01)
    assert fit(lognormal(450, 0.02, 7), p=1e-6).status == "provisional"
    assert fit(lognormal(600, 0.02, 7, runs=1), p=1e-6).status == "provisional"


def test_fewer_durations_than_a_short_run_get_three_times_the_maximum_where_they_are_enough() -> None:
    runs = lognormal(90, 0.02, 3)
    known = fit_pool(pooled(runs), 1e-9, min_timeout=0.0, fewest_short=FEWEST)
    assert (known.status, known.timeout_s) == ("short", pytest.approx(3 * known.max_s))
    usual = fit_pool(pooled(runs), 1e-9, min_timeout=0.0)
    assert (usual.status, usual.timeout_s) == ("provisional", pytest.approx(5 * usual.max_s))


def test_short_answers_are_exceeded_no_more_often_than_counting_says() -> None:
    draws = {
        "lognormal": lambda chance: chance.lognormvariate(0.0, 0.3),
        "Pareto": lambda chance: chance.paretovariate(2.5),
        "modes": lambda chance: chance.lognormvariate(0.0, 0.02) * (10.0 if chance.random() < 0.01 else 1.0),
    }
    kept = []
    for name, draw in draws.items():
        for seed in range(10):
            chance = random.Random(f"{name}{seed}")
            answer = fit([[draw(chance) for _ in range(400)] for _ in range(2)], p=1e-7)
            if answer.status == "short":
                over = sum(draw(chance) > (answer.timeout_s or 0.0) for _ in range(5000))
                kept.append(over / 5000 <= (answer.distribution_free_upper or 0.0))
    assert len(kept) >= 15
    assert sum(kept) >= 0.95 * len(kept)


def test_rate_that_shows_in_the_data_needs_a_hundred_only() -> None:
    assert fit(lognormal(200, 0.02, 8), p=0.01).status == "ok"


def test_probability_too_far_beyond_the_data_is_refused_with_the_number_needed() -> None:
    answer = fit(lognormal(20_000, 0.02, 9), p=1e-10)
    assert answer.status == "short"
    assert str(math.ceil(1 / (1e-10 * 1e4))) in answer.reason


def test_tail_too_heavy_is_provisional() -> None:
    chance = random.Random(1)
    runs = [[chance.paretovariate(0.8) for _ in range(20_000)] for _ in range(2)]
    answer = fit(runs, p=1e-8)
    assert answer.status == "provisional"


def test_modes_are_told_apart_and_each_bounded() -> None:
    chance = random.Random(2)
    runs = [
        [(50.0 if i % 1000 == 7 else 1.0) * math.exp(chance.gauss(0.0, 0.02)) for i in range(20_000)] for _ in range(2)
    ]
    answer = fit(runs, p=1e-7)
    assert answer.status == "ok"
    assert [round(mode.median) for mode in answer.modes] == [1, 50]
    assert 75.0 <= (answer.timeout_s or 0.0) < 120.0  # not extrapolated across the gap


def test_smooth_heavy_tail_is_one_mode() -> None:
    chance = random.Random(3)
    values = sorted((chance.paretovariate(1.5) for _ in range(5_000)), reverse=True)
    assert len(split([(value, 1) for value in values])) == 1


def test_hang_is_left_out_and_never_raises_a_limit() -> None:
    runs = lognormal(40_000, 0.02, 10)
    plain = fit(runs, p=1e-6)
    with_hangs = fit(runs, p=1e-6, censored=[Cut(600.0, "hang"), Cut(1800.0, "hang")])
    assert with_hangs.timeout_s == plain.timeout_s
    assert with_hangs.excluded_hangs == (600.0, 1800.0)
    (warning,) = with_hangs.warnings
    assert "2 occurrences" in warning and "1800 s" in warning
    assert fit_first([10.0, 12.0], 0.01, censored=[Cut(600.0, "hang")]).warnings != ()


def test_cut_off_occurrence_counts_as_exposure() -> None:
    runs = lognormal(40_000, 0.02, 11)
    answer = fit(runs, p=1e-6, censored=[Cut(0.5, "cut")] * 400)
    assert (answer.censored, answer.n) == (400, 40_400)


@pytest.mark.parametrize(("seconds", "is_long"), [(1.45, False), (1.5, False), (1.51, True)])
def test_cut_off_occurrence_took_unusually_long_after_one_and_a_half_times_the_longest(
    seconds: float, is_long: bool
) -> None:
    answer = fit([[1.0] * 20_000] * 2, p=1e-6, censored=[Cut(seconds, "cut")])
    assert (answer.censored, bool(answer.warnings)) == (int(not is_long), is_long)


def test_occurrences_that_a_limit_ended_raise_it_up_to_five_times_the_longest_healthy_one() -> None:
    runs = lognormal(40_000, 0.02, 12)
    plain = fit(runs, p=1e-6)
    raised = fit(runs, p=1e-6, censored=[Cut(2.0, "killed"), Cut(2.1, "killed")])
    assert raised.max_s == plain.max_s  # they are no evidence of what is healthy
    assert raised.timeout_s == pytest.approx(1.5 * 2.1)
    assert "it is not known whether they hung; they raise the limit" in raised.warnings[0]
    for seconds in (5.0, 6.0, 600.0):  # a limit above 5 times the longest healthy one may have ended a healthy one too
        bounded = fit(runs, p=1e-6, censored=[Cut(seconds, "killed")])
        assert bounded.timeout_s == pytest.approx(5 * plain.max_s)
        assert f"1 occurrence after {seconds:.4g} s" in bounded.warnings[0]
        assert "whether it hung; it raises the limit" in bounded.warnings[0] and bounded.excluded_hangs == ()


def test_long_occurrences_that_no_limit_ended_raise_it_as_those_that_a_limit_ended_do() -> None:
    runs = lognormal(40_000, 0.02, 12)
    plain = fit(runs, p=1e-6)
    for seconds in (2.1, 600.0):
        killed = fit(runs, p=1e-6, censored=[Cut(seconds, "killed")])
        cut = fit(runs, p=1e-6, censored=[Cut(seconds, "cut")])
        assert cut.timeout_s == killed.timeout_s != plain.timeout_s
        assert cut.excluded_hangs == ()
        (warning,) = cut.warnings
        assert f"1 occurrence after {seconds:.4g} s" in warning and "not known whether" in warning
        assert "limit ended" not in warning


def test_limit_without_any_healthy_occurrence_follows_only_those_that_a_limit_ended() -> None:
    killed = fitting.fit_unended([Cut(10.0, "killed")], 0.01, 1.0)
    assert (killed.timeout_s, killed.status) == (15.0, "provisional")
    assert fitting.fit_unended([Cut(10.0, "killed"), Cut(28_800.0, "cut")], 0.01, 1.0) == killed
    assert "1 occurrence after 10 s" in killed.warnings[0]
    assert fitting.fit_unended([Cut(28_800.0, "cut")], 0.01, 1.0).timeout_s is None


def test_rate_that_is_stated_goes_no_farther_than_the_tail_is_followed() -> None:
    answer = fit([[1.0] * 20_000] * 2, p=1e-6)
    assert answer.model_upper == pytest.approx(1 / (40_000 * fitting.FARTHEST))


def test_maximum_timeout_below_what_the_rate_needs_takes_the_claim_back() -> None:
    answer = fit(lognormal(40_000, 0.3, 13), p=1e-6, max_timeout=3.0)
    assert (answer.status, answer.timeout_s) == ("provisional", 3.0)
    assert fit(lognormal(40_000, 0.02, 13), p=1e-6, min_timeout=60.0).timeout_s == 60.0


def test_drift_and_shift_between_runs_raise_the_level() -> None:
    steady = lognormal(40_000, 0.02, 14)
    drifting = [[seconds * (1 + 0.2 * i / len(run)) for i, seconds in enumerate(run)] for run in steady]
    assert (fit(drifting, 1e-6).level_s or 0.0) > 1.15 * (fit(steady, 1e-6).level_s or 0.0)
    assert fitting.run_shift([1.0, 1.0, 1.1]) > 0.0
    assert fitting.run_shift([1.0, 1.2]) > fitting.run_shift([1.0, 1.01])
    assert fitting.run_shift([1.0]) > fitting.run_shift([1.0, 1.0])


@pytest.mark.parametrize("wrong", [0.0, -1.0, math.nan, math.inf])
def test_durations_that_are_none_are_refused(wrong: float) -> None:
    with pytest.raises(ValueError, match="duration"):
        fit([[1.0, wrong]], p=0.1)


def test_first_occurrences_have_no_rate_until_there_are_enough_starts() -> None:
    assert fit_first([], 0.01).status == "insufficient"
    few = fit_first([10.0, 12.0], 0.01)
    assert (few.status, few.timeout_s) == ("provisional", 60.0)
    assert fit_first([10.0 + i / 100 for i in range(40)], 0.01).timeout_s is not None


def starts(n: int) -> list[float]:
    chance = random.Random(n)
    return [100.0 * chance.lognormvariate(0.0, 0.03) for _ in range(n)]


def test_first_occurrences_of_several_runs_have_a_sure_rate_as_others_do() -> None:
    assert fit_first(starts(100), 5e-3, runs=2).status == "ok"
    assert fit_first(starts(100), 5e-3, runs=1).status == "tentative"
    assert [fit_first(starts(n), 5e-3, runs=7).runs for n in (5, 29, 30)] == [7, 7, 7]


@pytest.mark.parametrize(
    ("p", "needed"), [(0.05, 100), (5e-3, 100), (1e-3, 300), (1e-4, 3000), (1e-5, 5000), (1e-8, 10_000)]
)
def test_reason_says_how_many_durations_a_rate_needs(p: float, needed: int) -> None:
    for n in (5, 29, 40, needed - 1):
        found = fit_first(starts(n), p, runs=2)
        assert found.status in ("short", "provisional")
        assert f"{needed} " in found.reason
    assert fit(lognormal(needed, 0.02, 1), p).status in ("ok", "tentative")
    assert f"{needed} " in fit(lognormal(needed - 2, 0.02, 1), p).reason


@pytest.mark.parametrize(("p", "enough"), [(1e-3, 300), (1e-4, 3000), (2e-5, 15_000), (1e-6, 20_000), (2e-9, 50_000)])
def test_reason_says_how_many_durations_a_sure_rate_needs(p: float, enough: int) -> None:
    assert fit(lognormal(enough, 0.02, 1), p).status == "ok"
    fewer = fit(lognormal(enough - 2, 0.02, 1), p)
    assert fewer.status != "ok" and f"{enough} " in fewer.reason


def test_warm_up_is_found_and_equal_for_all_runs() -> None:
    assert warm_up([[1.0] * 40]) == 1
    assert warm_up([[100.0, 5.0, 3.0] + [1.0] * 40, [90.0] + [1.0] * 40]) == 3
    assert warm_up([[1.0, 2.0]]) == 1


@pytest.mark.parametrize("slow", [5, 31, 33, 48, 50])
def test_warm_up_of_more_than_half_of_the_first_durations_is_found(slow: int) -> None:
    chance = random.Random(slow)
    assert warm_up([[chance.uniform(9.0, 11.0)] * slow + [1.0] * (64 - slow)]) == slow
    assert warm_up([[chance.uniform(0.9, 1.1) for _ in range(slow)] + [1.0] * (64 - slow - 3) + [9.0] * 3]) == 1


def test_target_is_shared_out_over_the_trials_of_the_horizon() -> None:
    assert trial_probability(1.0, 1, 1000.0, 1.0) == pytest.approx(1e-3)
    assert trial_probability(1.0, 4, 1000.0, 1.0) == pytest.approx(2.5e-4)
    assert trial_probability(1.0, 1, 1000.0, 1.0, observed_ranks=8, ranks=80) == pytest.approx(1e-4)
    assert trial_probability(1.0, 1, 1000.0, 1.0, observed_ranks=80, ranks=8) == pytest.approx(1e-3)


@pytest.mark.parametrize(
    ("found", "exact"),
    [
        (quantiles.normal(0.975), 1.95996),
        (quantiles.chi2(0.05, 20), 10.8508),
        (quantiles.chi2(0.05, 400), 354.641),
        (quantiles.student(0.95, 1), 6.3138),
        (quantiles.student(0.95, 2), 2.9200),
        (quantiles.student(0.95, 9), 1.8331),
    ],
)
def test_quantiles_agree_with_tables(found: float, exact: float) -> None:
    assert found == pytest.approx(exact, rel=0.01)


def test_tail_that_reaches_below_its_mode_says_nothing_of_the_top() -> None:
    # 150 values of a wide upper mode with a steep upper end over a tight body: the 200 largest reach into the
    # body, and from there the way up looks like a tail that never ends.
    chance = random.Random(4)
    runs = [
        [
            6.0 * math.exp(-abs(chance.gauss(0.0, 0.4))) if i % 270 == 5 else math.exp(chance.gauss(0.0, 0.02))
            for i in range(20_000)
        ]
        for _ in range(2)
    ]
    level = fit(runs, p=1e-7).level_s
    assert level is not None
    assert level < 100.0  # followed from the body it would be 400,000 s


def test_poisson_probability_agrees_with_tables() -> None:
    assert quantiles.poisson_at_most(10, 62.0) < 1e-10
    assert quantiles.poisson_at_most(3, 4.0) == pytest.approx(0.4335, abs=1e-4)
    assert quantiles.poisson_at_most(0, 0.0) == 1.0
