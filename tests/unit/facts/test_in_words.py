"""Durations and numbers of things are written for a person, wherever they appear."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilience.attribution.notes import note
from resilience.core.watched import suspicion_in_words
from resilience.facts import events
from resilience.facts.deadlines import silence_in_words
from resilience.facts.in_words import count, seconds
from resilience.facts.interruptions import Detector, Exit, Interruption, InterruptionRecord, OpenSection
from resilience.report.rank_lanes import _in_words, _silent_stretches

HOURS, TEXT = 9720.0, "2 h 42 min"


@given(st.floats(0, 1e9))
def test_no_duration_has_an_exponent(value: float) -> None:
    assert "e" not in seconds(value)
    assert "min" in seconds(value) or value < 60


def test_message_about_a_silent_rank_has_hours_and_minutes() -> None:
    assert silence_in_words("section:data", HOURS, 7200.0) == f"section 'data' not left for {TEXT}, limit 2 h 00 min"


@pytest.mark.parametrize(
    "event",
    [
        events.NodeFellSilent("node3", 5.0, HOURS),
        events.RankSuspected("section:train", HOURS, HOURS, 90_000.0),
        events.TimeoutsShadowAlarm("step", HOURS, HOURS),
        events.HangSuspected("save", HOURS, 3.0, HOURS, False),
    ],
)
def test_notes_have_hours_and_minutes(event: events.Event) -> None:
    text = note(event)
    assert text is not None
    assert TEXT in text


@pytest.mark.parametrize(
    ("others", "waited"), [((2,), "while the other rank of its node"), ((1, 2), "while all 2 others of its node")]
)
def test_note_on_a_suspect_counts_the_others(others: tuple[int, ...], waited: str) -> None:
    assert waited in str(note(events.RankSuspicionCompared("step", others, is_confirmed=True)))


def test_suspicion_has_hours_and_minutes() -> None:
    assert suspicion_in_words(1, events.HangSuspected("", HOURS, HOURS, HOURS, False)).count(TEXT) == 3


@pytest.mark.parametrize("sections", [(), (OpenSection("data", HOURS, HOURS),)])
def test_labels_of_a_lane_have_hours_and_minutes(sections: tuple[OpenSection, ...]) -> None:
    record = InterruptionRecord(1, Interruption.HARD_TIMEOUT, silent_for_s=HOURS, open_sections=sections)
    (stretch,) = _silent_stretches(record, 0)
    assert TEXT in stretch.label


@pytest.mark.parametrize(("stage", "who"), [("ending", "program"), ("run", "process")])
def test_mark_of_a_lane_says_whether_the_process_or_only_its_program_ended(stage: str, who: str) -> None:
    end, look = Exit(code=3), Detector("look")
    record = InterruptionRecord(1, Interruption.UNRESPONSIVE, exit=end, detector=look, stage=stage)
    assert _in_words(record) == f"its {who} ended: exit code 3"


@pytest.mark.parametrize(
    ("number", "plural", "text"),
    [(0, "", "0 ranks"), (1, "", "1 rank"), (2, "", "2 ranks"), (1, "rankes", "1 rank"), (2, "rankes", "2 rankes")],
)
def test_noun_has_the_form_of_its_number(number: int, plural: str, text: str) -> None:
    assert count(number, "rank", plural) == text
