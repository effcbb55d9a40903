"""Each enforced duration has one name, in recording, fit, file and watch."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest

from resilience.core import deadlines, watch
from resilience.core.deadlines import DEFINITIONS, Start, first_of, of_limit, of_section, section_of, split
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
    assert split(deadline) == (deadline, None)
    assert of_limit(f"section:{section}") == deadline


@pytest.mark.parametrize("start", get_args(Start))
@pytest.mark.parametrize("section", NAMES)
def test_first_occurrences_are_told_apart_by_their_start(section: str, start: Start) -> None:
    for deadline in (of_section(section), "step", "heartbeat", "initial_heartbeat", "out_of_section"):
        assert split(first_of(deadline, start)) == (deadline, start)


def test_limits_that_the_watch_enforces_have_the_names_of_deadlines() -> None:
    both = watch.Limit(1.0, 2.0)
    limits = watch.Limits(
        step=both, heartbeat=both, initial_heartbeat=both, out_of_section=both, sections={"train": both}
    )
    running = watch.Observation(doing=watch.Doing.FUNCTION)
    told = set()
    for signs in (
        {"step_at": 0.0, "heartbeat_at": 0.0, "section_left_at": 0.0},
        {"heartbeats_from": 0.0, "open_sections": (watch.Sign("train", 0.0),)},
    ):
        seen = watch.msgspec.structs.replace(running, **signs)  # type: ignore[attr-defined]
        told |= {finding.limit for finding in watch.exceeded(limits, seen, 10.0)}
    assert {of_limit(limit) for limit in told} == {
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
