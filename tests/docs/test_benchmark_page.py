"""The benchmark page prints what the raw results say."""

from __future__ import annotations

from pathlib import Path

from tests.campaign import scoring
from tests.campaign.__main__ import load

ROOT = Path(__file__).parents[2]


def test_tables_are_those_of_the_raw_results() -> None:
    outcomes = list(load(ROOT / "tests" / "campaign" / "results.jsonl"))
    assert outcomes
    assert scoring.page(outcomes) in (ROOT / "docs" / "benchmark.md").read_text()


def test_published_seeds_are_not_those_that_rules_were_tuned_on() -> None:
    outcomes = load(ROOT / "tests" / "campaign" / "results.jsonl")
    assert min(outcome.case.seed for outcome in outcomes) >= 5000
