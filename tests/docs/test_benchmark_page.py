"""The benchmark page prints what the raw results say."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest

from tests.campaign import __main__ as main
from tests.campaign import drawing, scoring
from tests.campaign.__main__ import load
from tests.campaign.cases import Case

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


@pytest.mark.parametrize(("name", "schedule"), [("results", "single"), ("wide", "wide"), ("handlers", "handlers")])
def test_published_cases_are_those_that_the_commands_of_the_page_give_today(
    name: str, schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A generator that gives other cases for the same seeds would make the figures impossible to repeat."""
    given: dict[str, set[Case]] = {}
    for line in (ROOT / "docs" / "benchmark.md").read_text().splitlines():
        if line.startswith("python -m tests.campaign ") and "--first-seed" in line:
            monkeypatch.setattr(sys, "argv", shlex.split(line, comments=True)[2:])
            options = main._options()
            if options.set == schedule:
                given.setdefault(options.contestant, set()).update(main._chosen(options))
    outcomes = list(load(ROOT / "tests" / "campaign" / f"{name}.jsonl"))
    assert {outcome.contestant for outcome in outcomes} == given.keys()
    changed = [outcome.case.name for outcome in outcomes if outcome.case not in given[outcome.contestant]]
    assert not changed
