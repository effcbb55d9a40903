"""The benchmark page prints what the raw results say."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.campaign import drawing, scoring
from tests.campaign.__main__ import load

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("raw", ["results.jsonl", "wide.jsonl", "handlers.jsonl"])
def test_tables_are_those_of_the_raw_results(raw: str) -> None:
    outcomes = list(load(ROOT / "tests" / "campaign" / raw))
    assert outcomes
    assert scoring.page(outcomes) in (ROOT / "docs" / "benchmark.md").read_text()


def test_pictures_are_those_of_the_raw_results() -> None:
    raw = [list(load(ROOT / "tests" / "campaign" / f"{name}.jsonl")) for name in ("results", "wide", "handlers")]
    pictures = ROOT / "docs" / "pictures"
    every = [outcome for outcomes in raw for outcome in outcomes]
    assert (pictures / "benchmark-confidence.svg").read_text() == drawing.reliability(every)
    assert (pictures / "benchmark-contestants.svg").read_text() == drawing.contestants(raw[0])


SERIES = {"results": {5000, 7000, 20000}, "wide": {11000}, "handlers": {30000}}
"""The first seeds of the published cases, which the page names. Rules were changed after cases with other ones."""


@pytest.mark.parametrize("name", SERIES)
def test_published_seeds_are_not_those_that_rules_were_tuned_on(name: str) -> None:
    outcomes = list(load(ROOT / "tests" / "campaign" / f"{name}.jsonl"))
    assert {outcome.case.seed - outcome.case.number for outcome in outcomes} == SERIES[name]
