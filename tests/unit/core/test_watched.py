"""One line says what is watched for hangs, or that nothing is."""

from __future__ import annotations

import msgspec
import pytest

from resilience.core.watched import (
    MOST,
    suspicion_in_words,
    watched,
    watched_in_words,
)
from resilience.facts.deadlines import exceeded_in_words, silence_in_words
from resilience.facts.events import HangSuspected, HangsWatched
from resilience.facts.limits import Learned, Limit, Limits, Rule


def test_no_limit_and_no_rule_is_said_plainly() -> None:
    line = watched_in_words(watched(Limits()))
    assert line == "hang detection: off; no limit is set"


def test_limits_are_named_by_what_they_hold_for() -> None:
    limits = Limits(step=Limit(hard=30.0), sections={"data": Limit(5.0, 9.0), "save": Limit()})
    assert watched(limits).limits == {"step": 30.0, "section data": 5.0}


def test_limit_of_steps_is_named_with_the_steps_that_have_more_time() -> None:
    limits = Limits(step=Limit(hard=30.0), warmup_occurrences=5)
    assert watched_in_words(watched(limits)).endswith("in force: step 30 s (after the first 5 steps)")
    long = msgspec.structs.replace(limits, step=Limit(hard=7200.0))
    assert watched_in_words(watched(long)).endswith("in force: step 7200 s")
    learned = msgspec.structs.replace(limits, learned={"step": Learned(30.0, 1.0, 2.0)})
    assert watched_in_words(watched(learned)).endswith("in force: step 30 s")


def test_rule_is_named_with_its_limits() -> None:
    event = watched(Limits(rule=Rule(first=300.0, least=30.0)))
    assert (event.first_s, event.least_s) == (300.0, 30.0)
    line = watched_in_words(event)
    assert line == (
        "hang detection: once a rank has reported progress, 300 s without another report end it (1800 s before the "
        "second report); once its usual pauses are known, 10 × the longest, at least 30 s"
    )


def test_record_without_the_smallest_limit_is_a_line_without_it() -> None:
    """Each of the two is optional in a record."""
    assert watched_in_words(HangsWatched({}, 300.0)).endswith("once its usual pauses are known, 10 × the longest")
    assert watched_in_words(HangsWatched({}, None, 30.0)) == "hang detection: off; no limit is set"


def test_default_limits_are_not_named_as_set() -> None:
    by_default = ("heartbeat", "initial_heartbeat")
    limits = Limits(heartbeat=Limit(hard=2700.0), initial_heartbeat=Limit(hard=3600.0), defaults=by_default)
    assert watched(limits).limits == {}
    learned = {"heartbeat": Learned(2700.0, 1.0, 2.0)}
    assert watched(msgspec.structs.replace(limits, learned=learned)).limits == {"heartbeat": 2700.0}
    assert watched(msgspec.structs.replace(limits, defaults=())).limits.keys() == {"heartbeat", "first heartbeat"}


def test_line_of_a_launch_without_options_has_three_lines_of_80_columns() -> None:
    by_default = ("heartbeat", "initial_heartbeat")
    limits = Limits(
        rule=Rule(), heartbeat=Limit(hard=2700.0), initial_heartbeat=Limit(hard=3600.0), defaults=by_default
    )
    assert len("resilience run: " + watched_in_words(watched(limits))) <= 3 * 80


def test_line_names_a_few_limits_and_counts_the_others() -> None:
    limits = Limits(sections={f"s{number}": Limit(hard=1.0) for number in range(MOST + 4)})
    assert watched_in_words(watched(limits)).count("section ") == MOST
    assert "and 4 more" in watched_in_words(watched(limits))


def test_suspicion_without_a_stack_says_who_and_for_how_long() -> None:
    line = suspicion_in_words(3, HangSuspected("", 75.2, 0.5, 600.0, False))
    assert line.startswith("rank 3 has been silent for 1 min 15 s, the longest silence before was 500 ms; it is")


@pytest.mark.parametrize(
    ("limit", "words"),
    [
        ("step", "no new step within the 3 s limit"),
        ("heartbeat", "no new heartbeat within the 3 s limit"),
        ("initial_heartbeat", "no first heartbeat within the 3 s limit"),
        ("out_of_section", "no section opened within the 3 s limit"),
        ("section:data", "section 'data' not left within the 3 s limit"),
        ("hook:initialize", "hook initialize not over within the 3 s limit"),
        ("silence", "no sign of progress within the 3 s limit"),
        ("silence:data", "no sign of progress in section 'data' within the 3 s limit"),
        ("watchdog", "no Python code run by the main thread within the 3 s limit"),
        ("leave", "no sign of life (leave) within the 3 s limit"),
    ],
)
def test_exceeded_limit_is_worded_as_what_did_not_happen(limit: str, words: str) -> None:
    assert exceeded_in_words(limit, 3.0) == words
    assert silence_in_words(limit, 3.01, 3.0) == words.replace("within the 3 s limit", "for 3.01 s, limit 3 s")
    assert silence_in_words(limit, 3.01, None) == words.replace("within the 3 s limit", "for 3.01 s")
