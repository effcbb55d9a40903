"""Each enforced duration has one name, in recording, fit, file and watch."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilience.core import observation, watch
from resilience.facts import deadlines
from resilience.facts.deadlines import (
    DEFINITIONS,
    HEARTBEAT,
    STEP,
    LimitKind,
    Start,
    deadline_of_limit,
    first_name,
    limit_name,
    of_section,
    parse_limit,
    parse_name,
    section_of,
)
from resilience.facts.limits import Limit, Limits
from tests.support.server import ROOT

NAMES = (
    "train",
    "step",
    "heartbeat",
    "initial_heartbeat",
    "out_of_section",
    "a.first",
    "section:x",
    "NAME",
    "\u00e9 \n",
)


@pytest.mark.parametrize("section", NAMES)
def test_section_of_any_name_is_a_deadline_of_its_own(section: str) -> None:
    deadline = of_section(section)
    assert section_of(deadline) == section
    assert deadline not in DEFINITIONS
    assert parse_name(deadline) == (deadline, None)
    assert deadline_of_limit(f"section:{section}") == deadline


@pytest.mark.parametrize("start", get_args(Start))
@pytest.mark.parametrize("section", NAMES)
def test_first_occurrences_are_told_apart_by_their_start(section: str, start: Start) -> None:
    for deadline in (of_section(section), "step", "heartbeat", "initial_heartbeat", "out_of_section"):
        assert parse_name(first_name(deadline, start)) == (deadline, start)


def test_limits_that_the_watch_enforces_have_the_names_of_deadlines() -> None:
    both = Limit(1.0, 2.0)
    limits = Limits(step=both, heartbeat=both, initial_heartbeat=both, out_of_section=both, sections={"train": both})
    running = observation.Observation(doing=observation.Doing.FUNCTION)
    told = set()
    for signs in (
        {"step_at": 0.0, "heartbeat_at": 0.0, "section_left_at": 0.0},
        {"heartbeats_from": 0.0, "open_sections": (observation.Sign("train", 0.0),)},
    ):
        seen = watch.msgspec.structs.replace(running, **signs)  # type: ignore[attr-defined]
        told |= {finding.limit for finding in watch.exceeded(limits, seen, 10.0)}
    assert {deadline_of_limit(limit) for limit in told} == {
        deadlines.STEP,
        deadlines.HEARTBEAT,
        deadlines.INITIAL_HEARTBEAT,
        deadlines.OUT_OF_SECTION,
        "train",
    }


def test_page_of_the_docs_has_every_definition() -> None:
    page = " ".join(Path(ROOT / "docs" / "calibration.md").read_text().split())
    for name, definition in DEFINITIONS.items():
        assert f"| `{name}` | {definition} |" in page


@given(st.sampled_from(get_args(LimitKind)), st.text())
def test_name_of_a_limit_says_what_it_holds_for_whatever_the_user_calls_it(kind: LimitKind, name: str) -> None:
    """A section may be called `silence:data`: its limit holds for that section, not for one called `data`."""
    found = parse_limit(limit_name(kind, name))
    assert found == (kind, name)
    assert found.section == ("" if kind == "hook" else name)


@pytest.mark.parametrize("limit", [STEP, HEARTBEAT, "watchdog", "leave", "silence"])
def test_limit_that_holds_for_nothing_with_a_name_is_its_own_kind(limit: str) -> None:
    assert parse_limit(limit) == (limit, "")
