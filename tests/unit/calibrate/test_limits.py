"""Limits are fitted, merged and tested for the configuration that was observed, and within the target."""

from __future__ import annotations

import itertools
import random

import msgspec
import pytest

from resilience.calibrate.held_out import backtest
from resilience.calibrate.limits import DEFAULT, Target, calibrate
from resilience.calibrate.observed import ObservedCut, ObservedDeadline, ObservedRun, StartValues
from resilience.calibrate.timings import Input
from resilience.calibration.fitting import MONTH
from resilience.calibration.limits_file import SCHEMA, Alarms, Deadline, OutsideLimit, RankGroupLimit, Timeouts
from resilience.calibration.unended import Cut
from resilience.errors import ConfigurationError
from resilience.facts.configuration import Configuration
from resilience.facts.phases import Phases

EIGHT, SIXTY_FOUR = (Configuration("train.py", world_size=world) for world in (8, 64))
SAVE = Deadline(
    5.0,
    "ok",
    "fitted earlier",
    1e-6,
    expected_false_alarms_per_month=Alarms(0.05, 2.0),
    false_alarms_per_occurrence=Alarms(1e-6, 1e-4),
    groups=(RankGroupLimit("0-3", 2.0, "ok", "fitted earlier"),),
    outside=OutsideLimit(1.0, "ok", "fitted earlier", Phases((10,), 20)),
)
POOLED = Target(is_pooled=True)


def steps(n: int = 2000, seed: int = 1, first: float | None = None) -> ObservedDeadline:
    """Return steps of about 0.1 s after one cold start. first: duration of the first one, in seconds."""
    chance = random.Random(seed)
    values = [0.1 * chance.uniform(1.0, 1.1) for _ in range(n)]
    if first is not None:
        values[0] = first
    kept = [(number, seconds, float(number)) for number, seconds in enumerate(values)]
    return ObservedDeadline([StartValues("cold", dict(enumerate(values[:16])))], kept, n=n, max_s=max(values))


def run(name: str, configuration: Configuration = EIGHT, observed: ObservedDeadline | None = None) -> ObservedRun:
    deadline = observed or steps()
    seconds = sum(seconds for _, seconds, _ in deadline.kept)
    return ObservedRun(name, configuration, configuration.world_size, seconds, {"step": deadline})


def merged(
    now: Configuration,
    before: Configuration = EIGHT,
    ranks: int = 0,
    target: Target = DEFAULT,
    alarms: float = 1.0,
    horizon_s: float = MONTH,
    save: Deadline = SAVE,
) -> Deadline:
    """Return the earlier limit of a section that the new runs do not have, as it is written again."""
    previous = Timeouts(SCHEMA, before, "", alarms, horizon_s, ranks or before.world_size, {"section:save": save})
    runs = [run(name, now) for name in ("a", "b")]
    return calibrate(Input(runs, []), target, previous).deadlines["section:save"]


def test_earlier_limits_of_the_same_configuration_are_kept_as_they_are() -> None:
    assert merged(EIGHT) == SAVE


def test_earlier_limits_of_another_world_size_are_refused_with_what_to_do() -> None:
    with pytest.raises(ConfigurationError, match=r"world size '8' before, '64' now.*another --out file.*--pool"):
        merged(SIXTY_FOUR)


def test_earlier_limits_that_the_user_pools_lose_those_of_single_ranks_and_known_phases() -> None:
    known = merged(SIXTY_FOUR, target=POOLED)
    assert (known.timeout_s, known.groups, known.outside) == (5.0, (), None)


def test_earlier_limits_fitted_for_more_ranks_are_kept_without_those_of_single_ranks() -> None:
    known = merged(SIXTY_FOUR, ranks=64)
    assert (known.timeout_s, known.groups, known.outside) == (5.0, (), None)


@pytest.mark.parametrize(
    ("target", "alarms", "horizon_s", "words"),
    [
        (Target(ranks=64), 1.0, MONTH, "fitted for 8 ranks, the target is for 64"),
        (Target(false_alarms=0.1), 1.0, MONTH, "fitted for 10 times as many false alarms as the target allows"),
        (DEFAULT, 1.0, MONTH / 30, "fitted for 30 times as many false alarms"),
    ],
    ids=["more ranks", "fewer false alarms", "longer horizon"],
)
def test_earlier_limits_state_no_rate_for_more_ranks_or_a_stricter_target(
    target: Target, alarms: float, horizon_s: float, words: str
) -> None:
    known = merged(EIGHT, target=target, alarms=alarms, horizon_s=horizon_s)
    assert (known.timeout_s, known.status) == (5.0, "provisional")
    assert words in known.reason
    assert known.expected_false_alarms_per_month == known.false_alarms_per_occurrence == Alarms()
    assert known.outside is not None
    assert [part.status for part in (*known.groups, known.outside)] == ["provisional", "provisional"]
    again = merged(EIGHT, target=target, alarms=alarms, horizon_s=horizon_s, save=known)
    assert again.reason == known.reason


@pytest.mark.parametrize(
    ("alarms", "horizon_s", "target"),
    [(0.5, MONTH, DEFAULT), (1.0, 12 * MONTH, DEFAULT), (0.333333, MONTH, Target(false_alarms=1 / 3))],
)
def test_earlier_limits_keep_their_rate_for_an_equal_or_easier_target(
    alarms: float, horizon_s: float, target: Target
) -> None:
    assert merged(EIGHT, target=target, alarms=alarms, horizon_s=horizon_s) == SAVE


def test_earlier_limits_state_no_rate_above_their_share_of_a_target_that_more_deadlines_share() -> None:
    alone = msgspec.structs.replace(SAVE, expected_false_alarms_per_month=Alarms(0.5, 2.0))
    known = merged(EIGHT, save=alone)
    assert (known.timeout_s, known.status) == (5.0, "provisional")
    assert known.reason == "fitted earlier; its share of the target is 0.25 false alarms in 30 d now"


def test_deadline_shares_the_target_with_those_that_are_not_asked_for() -> None:
    runs = [run(name) for name in ("a", "b")]
    for one in runs:
        one.deadlines |= {name: steps(seed=seed) for seed, name in enumerate("xyz", 5)}
    together = calibrate(Input(runs, []), DEFAULT).deadlines["step"]
    for one in runs:
        one.excluded = frozenset("xyz")
        one.deadlines = {"step": one.deadlines["step"]}
    alone = calibrate(Input(runs, []), DEFAULT).deadlines["step"]
    assert (alone.p, alone.timeout_s) == (together.p, together.timeout_s)
    (one, *_) = backtest(runs, DEFAULT).answers
    assert one.p == pytest.approx(alone.p, rel=1e-9)


def test_earlier_phases_end_with_other_arguments_because_they_may_be_elsewhere() -> None:
    known = merged(Configuration("train.py", world_size=8, arguments=("--resume",)))
    assert (known.groups, known.outside) == (SAVE.groups, None)


def test_pooled_runs_of_two_world_sizes_have_no_limits_of_single_ranks() -> None:
    runs = [run("a", SIXTY_FOUR), run("b", EIGHT)]
    for each in runs:
        each.groups = {"step": {"0-3": steps(seed=2), "4-7": steps(seed=3)}}
    assert calibrate(Input(runs, []), POOLED).deadlines["step"].groups == ()
    assert calibrate(Input(runs[:1], []), POOLED).deadlines["step"].groups


ON_TWO, ON_ONE, UNKNOWN = (Configuration("train.py", world_size=8, ranks_per_node=n) for n in (4, 8, 0))


def test_runs_that_differ_are_refused_in_any_order() -> None:
    runs = [run("two nodes", ON_TWO), run("one node", ON_ONE), run("unknown", UNKNOWN)]
    for order in itertools.permutations(runs):
        with pytest.raises(ConfigurationError, match="ranks per node"):
            calibrate(Input(list(order), []))
    for pair in ((runs[0], runs[2]), (runs[2], runs[0])):
        assert calibrate(Input(list(pair), [])).configuration == ON_TWO


def test_runs_of_two_sizes_are_refused_without_an_option_that_does_not_help() -> None:
    with pytest.raises(ConfigurationError, match="Calibrate them separately, or use --pool") as refused:
        calibrate(Input([run("a", EIGHT), run("b", SIXTY_FOUR)], []), Target(ranks=64))
    assert "--ranks" not in str(refused.value)


def test_limits_of_runs_that_the_user_pools_hold_from_the_smallest_world_on() -> None:
    table = Configuration(table="t.csv")
    runs = [run("a", SIXTY_FOUR), run("b", EIGHT), ObservedRun("t", table, 1, 200.0, {"step": steps()})]
    for order in itertools.permutations(runs):
        made = calibrate(Input(list(order), []), POOLED)
        assert (made.configuration, made.ranks) == (EIGHT, 64)


def test_earlier_limits_are_compared_with_every_run() -> None:
    previous = Timeouts(SCHEMA, ON_ONE, "", 1.0, MONTH, 8, {"section:save": SAVE})
    runs = [run("unknown", UNKNOWN), run("two nodes", ON_TWO)]
    for order in (runs, runs[::-1]):
        with pytest.raises(ConfigurationError, match="limits file and run two nodes differ: ranks per node"):
            calibrate(Input(order, []), DEFAULT, previous)


@pytest.mark.parametrize(
    ("names", "shown"),
    [
        (("a", "b", "c"), ["a", "b", "c"]),
        (("a", "a", "b"), ["a (1 of 2)", "a (2 of 2)", "b"]),
        (("a", "a", "a"), ["a (1 of 3)", "a (2 of 3)", "a (3 of 3)"]),
    ],
)
def test_backtest_tests_each_run_even_if_runs_share_a_name(names: tuple[str, ...], shown: list[str]) -> None:
    test = backtest([run(name, observed=steps(seed=seed)) for seed, name in enumerate(names)], DEFAULT)
    assert [answer.left_out for answer in test.answers] == shown
    assert [answer.n for answer in test.answers] == [2 * 1999] * 3
    assert test.tested == test.recorded == 3 * 1999


@pytest.mark.parametrize("target", [DEFAULT, Target(ranks=64)], ids=["as observed", "more ranks"])
def test_backtest_tests_the_probability_that_calibrate_uses(target: Target) -> None:
    runs = [run(name, observed=steps(seed=seed)) for seed, name in enumerate("ab")]
    for each in runs:
        each.deadlines["save"] = steps(seed=9)
    fitted = calibrate(Input(runs, []), target).deadlines
    answers = backtest(runs, target).answers
    assert len(answers) == 4
    for answer in answers:
        assert answer.p == pytest.approx(fitted[answer.deadline].p, rel=1e-9)


def test_backtest_of_a_single_full_run_fits_its_beginning_and_tests_the_rest() -> None:
    observed = steps(1001, first=30.0)
    observed.cuts = [ObservedCut(Cut(0.3, "killed"), 500, "cold")]
    only = ObservedRun("t.csv:0", Configuration(table="t.csv"), 1, 100.0, {"step": observed})
    test = backtest([only], DEFAULT)
    (answer,) = test.answers
    assert (answer.left_out, answer.n, answer.exposure) == ("the last 40 % of t.csv:0", 600, 400)
    assert answer.max_s < 30.0  # first occurrences are no part of it
    assert (test.tested, test.recorded, test.untested) == (400, 1000, {})


def test_backtest_of_one_run_of_which_only_a_sample_is_kept_asks_for_a_second_run() -> None:
    observed = steps()
    observed.is_whole = False
    test = backtest([run("a", observed=observed)], DEFAULT)
    assert (test.answers, test.tested) == ([], 0) and test.recorded > 0
    assert test.untested == {"step": "a single run folder cannot be split; give a second run"}


def test_backtest_keeps_deadlines_of_two_configurations_apart() -> None:
    runs = [
        ObservedRun(f"{table}:{number}", Configuration(table=table), 1, 100.0, {"step": steps(n, seed=number)})
        for table, sizes in (("a.csv", (20, 1000)), ("b.csv", (10, 2000)))
        for number, n in enumerate(sizes)
    ]
    test = backtest(runs, DEFAULT)
    assert test.too_little == {"step (table a.csv)": (19, 1018), "step (table b.csv)": (9, 2008)}


def test_backtest_fits_with_the_occurrences_that_a_limit_ended_as_calibrate_does() -> None:
    runs = [run(name, observed=steps(seed=seed)) for seed, name in enumerate("abc")]
    runs[0].deadlines["step"].cuts = [ObservedCut(Cut(0.3, "killed"), 500, "cold")]
    timeouts = {answer.left_out: answer.timeout_s for answer in backtest(runs, Target(min_timeout=0.001)).answers}
    assert timeouts["a"] < 0.3
    assert timeouts["b"] == timeouts["c"] == pytest.approx(1.5 * 0.3)


def test_backtest_tests_the_claim_of_a_limit_that_few_durations_allow() -> None:
    """Three in 1,998 is what counting allows. The last run exceeds the limit 84 times."""
    later = steps(1000, seed=3)
    later.kept = [(n, 1.0 if n % 12 == 11 else seconds, at) for n, seconds, at in later.kept]
    later.max_s = 1.0
    runs = [run("a", observed=steps(1000)), run("b", observed=steps(1000, seed=2)), run("c", observed=later)]
    answers = {answer.left_out: answer for answer in backtest(runs, Target(min_timeout=0.001)).answers}
    assert [answers[name].status for name in "abc"] == ["provisional", "provisional", "short"]
    assert [answers[name].is_worse for name in "abc"] == [False, False, True]
    assert answers["c"].exceeded == 83


def test_backtest_counts_durations_late_enough_for_a_suspicion_before_the_limit() -> None:
    later = steps(seed=3)
    later.kept[100] = (100, 2.0, 100.0)
    runs = [run("a"), run("b", observed=steps(seed=2)), run("c", observed=later)]
    (answer,) = [each for each in backtest(runs, Target(min_timeout=4.0)).answers if each.left_out == "c"]
    assert (answer.timeout_s, answer.exceeded, answer.suspected) == (4.0, 0, 1)


def test_rates_are_those_of_the_job_that_the_limits_are_for() -> None:
    runs = [run(name, observed=steps(12_000, seed=seed)) for seed, name in enumerate("ab")]
    usual, large = (calibrate(Input(runs, []), Target(false_alarms=100.0, ranks=ranks)) for ranks in (0, 80))
    for name in ("step", "step.first"):
        for columns in ("expected_false_alarms_per_month", "false_alarms_per_occurrence"):
            before, now = (getattr(made.deadlines[name], columns) for made in (usual, large))
            if name == "step":  # counting does not depend on the limit
                assert now.distribution_free_upper == pytest.approx(10 * before.distribution_free_upper)
            else:
                assert now == before == Alarms()  # too few starts
    known = large.deadlines["step"]
    monthly, each = known.expected_false_alarms_per_month.model_upper, known.false_alarms_per_occurrence.model_upper
    assert known.status == "ok" and known.ranks == 8
    assert monthly is not None and each is not None
    assert each <= 10 * known.p * 1.0001 and monthly <= 100.0 / 2 * 1.0001  # half of the target is for first steps
    smaller = calibrate(Input(runs, []), Target(false_alarms=100.0, ranks=2)).deadlines["step"]
    assert smaller == usual.deadlines["step"]


def test_probability_of_a_false_alarm_is_one_at_most() -> None:
    runs = [run(name, observed=steps(50, seed=seed)) for seed, name in enumerate("ab")]
    known = calibrate(Input(runs, []), Target(ranks=8000)).deadlines["step"]
    assert known.false_alarms_per_occurrence.distribution_free_upper == 1.0
    assert known.expected_false_alarms_per_month.distribution_free_upper == pytest.approx(MONTH / known.every_s)


def first_steps(*seconds: float, target: Target) -> Deadline:
    """Return the limit of first steps, from one run with this first step for each of these durations."""
    runs = [run(f"run {number}", observed=steps(200, number, first)) for number, first in enumerate(seconds)]
    return calibrate(Input(runs, []), target).deadlines["step.first"]


def test_first_occurrences_share_half_of_the_target_among_a_hundred_starts_in_thirty_days() -> None:
    monthly, daily = (first_steps(1.0, target=Target(horizon_s=days * MONTH / 30)) for days in (30, 1))
    assert monthly.p == pytest.approx(1 / 2 / 100)
    assert daily.p == pytest.approx(1 / 2 / (100 / 30))
    assert monthly.reason == "1 start observed, 100 are needed before a rate can be stated"


def test_longest_limit_bounds_first_occurrences_too_and_says_what_exceeds_it() -> None:
    known = first_steps(30.0, target=Target(max_timeout=20.0))
    assert known.timeout_s == 20.0 and known.ratio_to_max == pytest.approx(20.0 / 30.0)
    assert known.warnings == (
        "capped at 20 s, which is 0.67 times the maximum",
        "a healthy occurrence took 30 s, which is above the limit",
    )
    assert first_steps(3.0, target=Target(max_timeout=20.0)).warnings == ()


def test_longest_limit_bounds_first_occurrences_of_many_starts() -> None:
    known = first_steps(*[30.0 + number / 100 for number in range(40)], target=Target(max_timeout=20.0))
    assert known.timeout_s == 20.0
    assert any(warning.startswith("capped at 20 s") for warning in known.warnings)
    assert any("above the limit" in warning for warning in known.warnings)


def test_first_occurrences_are_fitted_with_the_confidence_of_the_target() -> None:
    seconds = [30.0 + (number * 7 % 40) / 100 for number in range(40)]
    counted = [
        first_steps(*seconds, target=Target(confidence=confidence)).false_alarms_per_occurrence.distribution_free_upper
        for confidence in (0.5, 0.99)
    ]
    assert counted[0] is not None and counted[1] is not None and counted[0] < counted[1]


def test_first_limit_that_is_as_long_as_the_usual_one_has_the_ratios_of_that_length() -> None:
    slow = steps(200)
    for number in range(20, 200, 20):
        slow.kept[number] = (number, 2.0, float(number))
    limits = calibrate(Input([run("a", observed=slow)], []), DEFAULT).deadlines
    known = limits["step.first"]
    assert known.timeout_s == limits["step"].timeout_s and known.max_s < 0.2
    assert known.ratio_to_max == pytest.approx((known.timeout_s or 0.0) / known.max_s)
