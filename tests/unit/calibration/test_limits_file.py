"""How a new file follows an earlier one."""

from __future__ import annotations

import msgspec
import pytest

from resilience.calibration.differences import differences, serious
from resilience.calibration.fitting import MONTH
from resilience.calibration.limits_file import (
    SCHEMA,
    Alarms,
    Deadline,
    OutsideLimit,
    RankGroupLimit,
    Timeouts,
    in_force,
    of_rank,
    raised,
    succeed,
)
from resilience.facts.configuration import Configuration
from resilience.facts.limits import Limit, Limits, Outside, Rule
from resilience.facts.phases import Phases

PHASES = Phases((10, 20), 30)


def test_limit_that_is_kept_has_its_own_ratios_to_the_new_durations() -> None:
    fresh = Deadline(2.0, "short", "", 1e-6, ratio_to_max=2.0, ratio_to_median=4.0, max_s=1.0, median_s=0.5)
    known = succeed({"step": fresh}, {"step": Deadline(100.0, "ok", "", 1e-6)})["step"]
    assert (known.timeout_s, known.ratio_to_max, known.ratio_to_median) == (100.0, 100.0, 200.0)


def test_limit_that_is_raised_without_a_fit_has_its_own_ratios() -> None:
    fresh = Deadline(None, "insufficient", "", 1e-6, max_s=3.0, median_s=1.0)
    known = succeed({"step": fresh}, {"step": Deadline(2.0, "ok", "", 1e-6)})["step"]
    assert (known.timeout_s, known.ratio_to_max, known.ratio_to_median) == (15.0, 5.0, 15.0)


@pytest.mark.parametrize(
    ("fresh_s", "max_s", "limit_s", "words"),
    [
        (20.0, 30.0, 20.0, "the earlier limit of 100 s is above max_timeout, 20 s"),
        (2.0, 1.0, 20.0, "kept at 20 s"),
        (None, 30.0, 20.0, "kept at 20 s"),
        (None, 1.0, 20.0, "kept at 20 s"),
    ],
)
def test_earlier_limit_is_kept_up_to_the_longest_limit_only(
    fresh_s: float | None, max_s: float, limit_s: float, words: str
) -> None:
    fresh = Deadline(fresh_s, "provisional", "too few", 1e-6, max_s=max_s)
    known = succeed({"step": fresh}, {"step": Deadline(100.0, "ok", "", 1e-6)}, 20.0)["step"]
    assert (known.timeout_s, known.previous_timeout_s) == (limit_s, 100.0)
    assert words in known.reason


def test_longest_limit_bounds_what_only_the_earlier_runs_had() -> None:
    earlier = {"save": Deadline(100.0, "ok", "fitted", 1e-6), "load": Deadline(10.0, "ok", "fitted", 1e-6)}
    known = succeed({}, earlier, 20.0)
    assert (known["save"].timeout_s, known["save"].previous_timeout_s) == (20.0, 100.0)
    assert "the earlier limit of 100 s is above max_timeout, 20 s" in known["save"].reason
    assert known["load"] == earlier["load"]
    assert succeed({}, earlier) == earlier


def test_shortest_limit_bounds_what_only_the_earlier_runs_had() -> None:
    save = Deadline(1.5, "short", "few", 1e-6, groups=(RankGroupLimit("0", 0.5, "short", ""),), max_s=0.5)
    load = msgspec.structs.replace(in_parts(1.5, ("0", 30.0)), timeout_s=40.0)
    known = succeed({}, {"save": save, "load": load, "step": RATED}, min_timeout=30.0)
    assert (known["save"].timeout_s, known["save"].previous_timeout_s, known["save"].ratio_to_max) == (30.0, 1.5, 60.0)
    assert known["save"].reason == "few; raised from 1.5 s to min_timeout, 30 s"
    assert [group.timeout_s for group in (*known["save"].groups, *known["load"].groups)] == [30.0, 30.0]
    assert known["load"].outside is not None and known["load"].outside.timeout_s == 30.0
    assert succeed({}, {"save": load}, min_timeout=40.0)["save"].outside is None
    assert known["step"] == RATED


def test_earlier_limit_that_is_kept_without_a_fit_is_no_shorter_than_the_shortest_limit() -> None:
    fresh = Deadline(None, "insufficient", "too few", 1e-6, max_s=0.5)
    known = succeed({"step": fresh}, {"step": Deadline(1.5, "short", "", 1e-6)}, min_timeout=30.0)["step"]
    assert (known.timeout_s, known.previous_timeout_s) == (30.0, 1.5)


def test_limit_is_raised_without_a_fit_up_to_the_longest_limit_only() -> None:
    fresh = Deadline(None, "insufficient", "too few", 1e-6, max_s=6.0)
    known = succeed({"step": fresh}, {"step": Deadline(5.0, "ok", "", 1e-6)}, 20.0)["step"]
    assert known.timeout_s == 20.0 and "raised from 5 s" in known.reason


RATED = Deadline(
    100.0,
    "ok",
    "fitted",
    1e-6,
    expected_false_alarms_per_month=Alarms(0.5, 2.0),
    false_alarms_per_occurrence=Alarms(1e-6, 1e-4),
    every_s=10.0,
    max_s=30.0,
)


def test_earlier_limit_that_the_longest_limit_shortens_states_no_rate() -> None:
    known = succeed({}, {"save": RATED}, 60.0)["save"]
    assert (known.timeout_s, known.status) == (60.0, "provisional")
    assert known.expected_false_alarms_per_month == Alarms(None, 2.0)  # counting holds for any limit above the maximum
    assert known.false_alarms_per_occurrence == Alarms(None, 1e-4)
    assert known.warnings == ()


def test_earlier_limit_that_becomes_shorter_than_a_healthy_occurrence_says_so() -> None:
    known = succeed({}, {"save": RATED}, 20.0)["save"]
    assert known.expected_false_alarms_per_month == Alarms(None, 259_200.0)  # one for each occurrence
    assert known.false_alarms_per_occurrence == Alarms(None, 1.0)
    assert known.warnings == ("a healthy occurrence took 30 s, which is above the limit",)
    again = succeed({}, {"save": known}, 10.0)["save"]
    assert again.warnings == known.warnings


def test_earlier_limit_of_too_few_durations_stays_without_an_answer() -> None:
    kept = Deadline(100.0, "insufficient", "too few; kept at 100 s", 1e-6, max_s=3.0)
    known = succeed({}, {"save": kept}, 20.0)["save"]
    assert (known.timeout_s, known.status) == (20.0, "insufficient")
    assert known.false_alarms_per_occurrence == Alarms()


@pytest.mark.parametrize("earlier_s", [100.0, 5.0], ids=["kept", "raised"])
def test_limit_without_a_fit_that_is_shorter_than_a_healthy_occurrence_says_so(earlier_s: float) -> None:
    fresh = Deadline(None, "insufficient", "too few", 1e-6, max_s=30.0)
    known = succeed({"step": fresh}, {"step": Deadline(earlier_s, "ok", "", 1e-6)}, 20.0)["step"]
    assert known.timeout_s == 20.0
    assert known.warnings == ("a healthy occurrence took 30 s, which is above the limit",)


def with_groups(*groups: tuple[str, float], outside_s: float) -> Limits:
    """Return the limits of a job of four ranks, whose section `work` has these limits of groups."""
    work = Deadline(
        20.0,
        "short",
        "",
        1e-6,
        groups=tuple(RankGroupLimit(ranks, limit, "short", "") for ranks, limit in groups),
        outside=OutsideLimit(outside_s, "short", "", PHASES),
    )
    return in_force(
        Timeouts(SCHEMA, Configuration("train.py", world_size=4), "", 1.0, MONTH, 4, {"work": work}), Limits()
    )


def in_parts(outside_s: float, *groups: tuple[str, float]) -> Deadline:
    """Return an entry whose limits of groups and outside phases are `short`, and whose usual limit is 20 s."""
    limits = tuple(RankGroupLimit(ranks, seconds, "short", "") for ranks, seconds in groups)
    return Deadline(20.0, "ok", "", 1e-6, groups=limits, outside=OutsideLimit(outside_s, "short", "", PHASES))


@pytest.mark.parametrize(
    ("earlier_s", "kept_s"),
    [(5.0, 5.0), (0.5, 1.0), (20.0, None), (30.0, None)],
    ids=["kept", "raised", "as long as the usual one", "longer than the usual one"],
)
def test_earlier_limit_outside_known_phases_is_kept_below_the_usual_limit(
    earlier_s: float, kept_s: float | None
) -> None:
    earlier = msgspec.structs.replace(in_parts(earlier_s), timeout_s=10.0)
    outside = succeed({"work": in_parts(1.0)}, {"work": earlier})["work"].outside
    assert (None if outside is None else outside.timeout_s) == kept_s


def test_group_of_other_ranks_than_before_follows_the_longest_limit_that_one_of_its_ranks_had() -> None:
    earlier = in_parts(1.0, ("0-2", 6.0), ("3,5-6", 9.0), ("8", 19.0))
    known = succeed({"work": in_parts(1.0, ("0-1,4", 2.0), ("2-3", 2.0), ("7", 3.0))}, {"work": earlier})["work"]
    assert [(group.ranks, group.timeout_s) for group in known.groups] == [("0-1,4", 6.0), ("2-3", 9.0), ("7", 3.0)]
    assert [warning.split(",")[0] for warning in known.warnings] == ["ranks 0-1", "ranks 2-3: kept at 9 s"]


def test_limits_beside_a_usual_limit_that_is_kept_are_kept_too() -> None:
    earlier = msgspec.structs.replace(in_parts(2.0, ("0-1", 6.0), ("2-3", 9.0)), timeout_s=100.0)
    fresh = msgspec.structs.replace(in_parts(1.0, ("0-1", 7.0), ("2-3", 8.0)), status="short")
    known = succeed({"work": fresh}, {"work": earlier})["work"]
    assert known.timeout_s == 100.0 and known.outside is not None and known.outside.timeout_s == 2.0
    assert [group.timeout_s for group in known.groups] == [7.0, 9.0]


def test_limit_that_these_runs_do_not_support_is_not_replaced_by_shorter_ones_beside_it() -> None:
    """What made it long may come again, on any rank and at any position."""
    fresh = msgspec.structs.replace(in_parts(1.0, ("0-1", 7.0), ("2-3", 8.0)), status="short")
    known = succeed({"work": fresh}, {"work": Deadline(100.0, "short", "", 1e-6)})["work"]
    assert ([group.timeout_s for group in known.groups], known.outside) == ([100.0, 100.0], None)
    assert "no limit outside known phases: kept at 100 s, because only an `ok` fit may lower" in known.warnings[-1]


def test_limits_beside_the_usual_one_that_are_left_out_are_named() -> None:
    known = succeed({"work": Deadline(20.0, "short", "", 1e-6)}, {"work": in_parts(2.0, ("0-1", 6.0))})["work"]
    assert (known.groups, known.outside) == ((), None)
    assert [warning.split(" is ")[0].split(" are ")[0] for warning in known.warnings] == [
        "the earlier limits of groups of ranks",
        "the earlier limit outside known phases",
    ]


def test_limit_outside_known_phases_holds_for_a_group_of_ranks_with_a_longer_limit() -> None:
    known = with_groups(("0-1", 2.0), ("2-3", 10.0), outside_s=4.0)
    fast, slow = of_rank(known, 1, 4), of_rank(known, 2, 4)
    assert (slow.sections["work"].hard, slow.outside["work"]) == (10.0, Outside(Limit(hard=4.0), PHASES))
    assert slow.learned["work"].outside_s == 4.0
    assert (fast.sections["work"].hard, fast.outside) == (2.0, {})  # shorter everywhere
    assert fast.learned["work"].outside_s == 0.0


def test_raised_limit_does_not_restore_the_warm_up_limit_replaced_by_its_phases() -> None:
    short = Limit(hard=5.0)
    known = Limits(
        sections={"work": Limit(hard=60.0)},
        outside={"work": Outside(Limit(hard=30.0), PHASES)},
        warmup={"work": short, "save": short},
    )
    longer = raised(known, "work", 90.0)
    assert (longer.sections, longer.warmup) == ({"work": Limit(hard=90.0)}, {"save": short})


def test_first_occurrences_never_have_a_shorter_limit_than_a_stale_one_that_was_raised() -> None:
    deadlines = {
        name: Deadline(seconds, "short", "", 1e-6, occurrences=1)
        for name, seconds in (("work", 2.0), ("work.first", 9.0), ("work.first.iteration", 3.0), ("save.first", 1.0))
    }
    found = Timeouts(SCHEMA, Configuration("train.py"), "", 1.0, MONTH, 1, deadlines)
    longer = raised(in_force(found, Limits(), margin=30.0), "work", 7.0)
    assert longer.sections["work"] == Limit(7.0, 37.0)
    cold, iteration = Limit(9.0, 39.0), Limit(7.0, 37.0)
    assert longer.first["work"].limits == {"cold": cold, "warm": cold, "iteration": iteration}
    assert longer.first["save"].limits["cold"] == Limit(1.0, 31.0)


def test_learned_limits_do_not_hold_in_a_cycle_of_another_size() -> None:
    """Half of the ranks need twice as long for the same batch."""
    deadlines = {"work": Deadline(2.0, "ok", "", 1e-6), "work.first": Deadline(9.0, "ok", "", 1e-6, occurrences=1)}
    found = Timeouts(SCHEMA, Configuration("train.py", world_size=8), "", 1.0, MONTH, 16, deadlines)
    limits = in_force(found, Limits(sections={"save": Limit(hard=60.0)}))
    limits = msgspec.structs.replace(limits, rule=Rule())
    for world in (8, 16, None):
        assert of_rank(limits, 0, world).sections == {"save": Limit(hard=60.0), "work": Limit(hard=2.0)}
    smaller = of_rank(limits, 0, 4)
    assert (smaller.sections, smaller.first, smaller.learned) == ({"save": Limit(hard=60.0)}, {}, {})
    assert smaller.rule == Rule()
    any_world = in_force(msgspec.structs.replace(found, configuration=Configuration(table="t.csv")), Limits())
    assert of_rank(any_world, 0, 4).sections == {"work": Limit(hard=2.0)}


def test_learned_limits_hold_in_the_observed_world_though_the_job_might_have_been_larger() -> None:
    """With `--nnodes 1:4`, the configuration has the ranks of 4 nodes. Only 2 have ever come."""
    deadlines = {"work": Deadline(2.0, "ok", "", 1e-6, ranks=4)}
    found = Timeouts(SCHEMA, Configuration("train.py", world_size=8), "", 1.0, MONTH, 4, deadlines)
    limits = in_force(found, Limits())
    assert [bool(of_rank(limits, 0, world).sections) for world in (2, 4, 8)] == [False, True, False]
    for_more = in_force(msgspec.structs.replace(found, ranks=8), Limits())
    assert [bool(of_rank(for_more, 0, world).sections) for world in (2, 4, 8)] == [False, True, True]


def test_limits_fitted_for_fewer_ranks_than_observed_hold_for_the_observed_number() -> None:
    observed = Configuration("train.py", world_size=8)
    found = Timeouts(SCHEMA, observed, "", 1.0, MONTH, 2, {"work": Deadline(2.0, "ok", "", 1e-6, ranks=8)})
    limits = in_force(found, Limits())
    assert [bool(of_rank(limits, 0, world).sections) for world in (2, 4, 8, 9)] == [False, False, True, False]
    fitting = [
        not serious(differences(observed, Configuration("train.py", world_size=n), found.ranks)) for n in (2, 4, 8, 9)
    ]
    assert fitting == [False, False, True, False]
