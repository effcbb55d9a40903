"""The benchmark page prints what the raw results say."""

from __future__ import annotations

import re
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


CHANGED = re.compile(r"rules were changed after (?:the |\d+ )?cases with the seeds? ([^;,]*)")
"""Where the page says on which cases rules were changed."""


def test_published_cases_are_none_of_those_after_which_the_page_says_rules_were_changed() -> None:
    """A campaign that names no seed has the first one by default, and rules were changed after these cases."""
    text = " ".join((ROOT / "docs" / "benchmark.md").read_text().split())
    said = CHANGED.findall(text)
    assert len(said) == text.count("rules were changed after"), "a sentence about seeds has another form"
    series = {int(number) for sentence in said for number in re.findall(r"from (\d+) on", sentence)}
    ranges = [(int(low), int(high)) for sentence in said for low, high in re.findall(r"(\d+) to (\d+)", sentence)]
    assert series and ranges
    published = [outcome.case for path in (ROOT / "tests" / "campaign").glob("*.jsonl") for outcome in load(path)]
    tuned_on = [
        case.name
        for case in published
        if case.seed - case.number in series or any(low <= case.seed <= high for low, high in ranges)
    ]
    assert published and not tuned_on


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
