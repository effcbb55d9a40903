"""Limits fit a run whose workload and shape are those of the runs they were learned from."""

from __future__ import annotations

import msgspec
import pytest

from resilience.calibration.differences import advice, differences, harmless, serious
from resilience.facts.configuration import Configuration

LEARNED = Configuration("jobs/train.py", "", 8, 8, ("--lr", "1", "--steps", "100"), "2.13.0")


def changed(**values: object) -> Configuration:
    made: Configuration = msgspec.structs.replace(LEARNED, **values)
    return made


@pytest.mark.parametrize(
    ("now", "told"),
    [
        (changed(script="/elsewhere/train.py"), ""),
        (changed(torch="2.14.0"), "torch '2.13.0' before, '2.14.0' now"),
        (changed(arguments=("--lr", "2", "--steps", "100")), "arguments '--lr 1' before, '--lr 2' now"),
        (changed(arguments=()), "arguments '--lr 1 --steps 100' before, '' now"),
        (changed(ranks_per_node=0), ""),
    ],
)
def test_differences_that_do_not_matter_by_themselves_are_listed(now: Configuration, told: str) -> None:
    found = differences(LEARNED, now)
    assert (serious(found), harmless(found)) == ("", told)


@pytest.mark.parametrize(
    ("now", "what"),
    [
        (changed(script="other.py"), "workload 'train.py' before, 'other.py' now"),
        (changed(key="large"), "workload 'train.py' before, 'large' now"),
        (changed(world_size=16), "world size '8' before, '16' now: limits hold for 8 ranks"),
        (changed(world_size=4), "world size '8' before, '4' now"),
        (changed(ranks_per_node=4), "ranks per node '8' before, '4' now"),
    ],
)
def test_another_workload_or_shape_is_serious(now: Configuration, what: str) -> None:
    assert serious(differences(LEARNED, now)).startswith(what)


def test_limits_hold_from_the_ranks_that_were_observed_to_those_they_were_fitted_for() -> None:
    for ranks, fits in ((8, True), (512, True), (1024, True), (1025, False), (7, False)):
        assert (serious(differences(LEARNED, changed(world_size=ranks), ranks=1024)) == "") is fits


def test_advice_for_another_size_is_given_only_if_it_helps() -> None:
    before = Configuration("train.py", world_size=8, ranks_per_node=8)
    on_more_nodes, on_one = (Configuration("train.py", world_size=16, ranks_per_node=n) for n in (8, 16))
    assert advice(before, on_more_nodes, 8) == "; calibrate with --ranks 16"
    assert advice(before, on_one, 8) == ""
    assert advice(before, msgspec.structs.replace(on_more_nodes, script="other.py"), 8) == ""
    for size, ranks in ((8, 8), (4, 8), (16, 16)):
        assert advice(before, Configuration("train.py", world_size=size), ranks) == ""
    assert "calibrate on runs of this shape" in serious(differences(before, on_one))


def test_key_of_the_user_stands_for_the_script() -> None:
    first, second = changed(key="large"), changed(key="large", script="new.py")
    assert serious(differences(first, second)) == ""


def test_long_arguments_are_cut() -> None:
    words = harmless(differences(LEARNED, changed(arguments=("x" * 500,))))
    assert len(words) < 300
