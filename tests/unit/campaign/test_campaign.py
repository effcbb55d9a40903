"""The campaign's cases, truth and score."""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path

import pytest

from tests.campaign import cases, injector, scoring
from tests.campaign.cases import Case
from tests.campaign.contestants import CONTESTANTS, Verdict
from tests.campaign.running import Outcome

KILL = Case(3, 7, "wrapper", 4, "sigkill", 2, 5, ("killed",))
RIGHT = Verdict(2, "killed", 0.95, ((2, 0.95),), False, 1)


def outcome(case: Case = KILL, verdict: Verdict = RIGHT, **known: object) -> Outcome:
    told = {
        "recovered": True,
        "is_equal": True,
        "is_injected": True,
        "is_wedged": False,
        "duration_s": 9.0,
        "orphans": 0,
    }
    return Outcome(case, "ours", verdict, **{**told, **known})  # type: ignore[arg-type]


def test_cases_follow_from_their_seeds() -> None:
    assert list(cases.whole(300)) == list(cases.whole(300))
    assert list(cases.quick()) == list(cases.quick())
    assert list(cases.whole(50, first=1000)) != list(cases.whole(50, first=2000))


def test_whole_campaign_has_every_fault_in_every_mode_and_size() -> None:
    kinds = {(case.mode, case.world, case.fault) for case in cases.whole(3 * 3 * len(cases.FAULTS))}
    assert kinds == {(mode, world, fault) for mode in cases.MODES for world in (2, 4, 8) for fault in cases.FAULTS}


def test_case_is_what_its_file_says() -> None:
    assert cases.from_json(cases.to_json(KILL)) == KILL


def test_injector_shares_no_code_with_the_package() -> None:
    tree = ast.parse(Path(injector.__file__).read_text())
    imported = {name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names}
    imported |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert not {name for name in imported if name.partition(".")[0] in ("resilience", "tests")}


def test_campaign_is_not_in_the_wheel() -> None:
    project = (Path(__file__).parents[3] / "pyproject.toml").read_text()
    assert '[tool.hatch.build.targets.wheel]\npackages = ["resilience"]\n' in project


def test_every_fault_has_a_truth_and_a_way_to_strike() -> None:
    source = Path(injector.__file__).read_text()
    assert [fault for fault in cases.FAULTS if f'"{fault}"' not in source] == []
    assert {fault for fault, classes in cases.FAULTS.items() if not classes} == {"slow"}


@pytest.mark.parametrize(
    "wrong",
    [
        outcome(recovered=False),
        outcome(is_equal=False),
        outcome(is_injected=False),
        outcome(orphans=1),
        outcome(verdict=replace(RIGHT, rank=1, blamed=((1, 0.7),))),
        outcome(verdict=replace(RIGHT, what="exited")),
        outcome(verdict=replace(RIGHT, blamed=((2, 0.95), (0, 0.6)))),
        outcome(verdict=Verdict()),
    ],
)
def test_quick_case_fails_for_anything_that_is_not_as_it_has_to_be(wrong: Outcome) -> None:
    assert scoring.is_passed(outcome()) and not scoring.is_passed(wrong)


def test_harmless_case_passes_if_nobody_is_accused() -> None:
    slow = replace(KILL, fault="slow", classes=())
    assert scoring.is_passed(outcome(slow, Verdict()))
    assert not scoring.is_passed(outcome(slow, RIGHT))


def test_ambiguous_and_unanswered_cases_count_apart() -> None:
    ambiguous = replace(KILL, ambiguous="either may be right")
    outcomes = [outcome(), outcome(ambiguous), outcome(verdict=Verdict())]
    assert (len(scoring.judged(outcomes)), len(scoring.answered(outcomes))) == (2, 1)


def test_interval_is_wilsons() -> None:
    low, high = scoring.Share(9, 10).interval
    assert (low, high) == (pytest.approx(0.596, abs=0.001), pytest.approx(0.982, abs=0.001))
    assert scoring.Share(0, 0).interval == (0.0, 1.0)


def test_table_has_a_column_for_each_mode_and_contestant() -> None:
    theirs = replace(outcome(), contestant="torchrun")
    header = scoring.table([outcome(), theirs]).splitlines()[0]
    assert header == "|  | ours, all modes | ours, wrapper | torchrun |"


def test_torchrun_says_who_failed_in_its_summary(tmp_path: Path) -> None:
    (tmp_path / "output").write_text(
        "E failed (exitcode: -9) local_rank: 2 (pid: 7) of binary: python\nRoot Cause (first observed failure):\n[0]:\n"
        "  time      : x\n  host      : vm\n  rank      : 2 (local_rank: 2)\n  exitcode  : -9 (pid: 7)\n"
    )
    verdict = CONTESTANTS["torchrun"].verdict(KILL, tmp_path)
    assert (verdict.rank, verdict.what) == (2, "killed")
