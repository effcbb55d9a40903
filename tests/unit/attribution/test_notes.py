"""Which events the report has a note for."""

from __future__ import annotations

import ast
import inspect

from resilience.attribution import notes


def test_every_event_with_a_text_is_looked_up_and_no_other() -> None:
    cases = [node for node in ast.walk(ast.parse(inspect.getsource(notes.note))) if isinstance(node, ast.MatchClass)]
    assert {ast.unparse(case.cls).removeprefix("events.") for case in cases} == {kind.__name__ for kind in notes.NOTES}
