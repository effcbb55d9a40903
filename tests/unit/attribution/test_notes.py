"""Which events the report has a note for."""

from __future__ import annotations

import ast
import inspect

import pytest

from resilience.attribution import notes
from resilience.facts import events


def test_every_event_with_a_text_is_looked_up_and_no_other() -> None:
    cases = [node for node in ast.walk(ast.parse(inspect.getsource(notes.note))) if isinstance(node, ast.MatchClass)]
    assert {ast.unparse(case.cls).removeprefix("events.") for case in cases} == {kind.__name__ for kind in notes.NOTES}


@pytest.mark.parametrize(
    ("store", "where"),
    [("", "/train.py:9 load"), ("the user's FileStore", "/train.py:9 load, at the user's FileStore")],
)
def test_note_on_a_rank_that_was_kept_says_what_it_waited_for(store: str, where: str) -> None:
    text = notes.note(events.AbortDelayed(2.0, "/train.py:9 load", store))
    assert text == f"a rank had not left the function 2 s after the abort; it had until hard_timeout to leave {where}"


def test_notes_on_the_limits_of_a_wrapper_and_of_its_launcher_are_told_apart() -> None:
    launchers, wrappers = (notes.note(events.HangsWatched({}, 600.0, 60.0, where)) for where in (False, True))
    assert launchers is not None and launchers.startswith("hang detection: once a rank")
    assert wrappers is not None and wrappers.startswith("hang detection in the wrapped function: once")
