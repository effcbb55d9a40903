"""A test's name is a claim that is read at once, so it is short."""

from __future__ import annotations

import re

from tests.support.server import ROOT

LONGEST = 90  # characters
DEFINED = re.compile(r"^[ \t]*(?:async )?def (test_\w+)", re.MULTILINE)


def test_name_of_a_test_has_at_most_90_characters() -> None:
    names = {name for path in (ROOT / "tests").rglob("test_*.py") for name in DEFINED.findall(path.read_text())}
    assert len(names) > 3000
    assert [name for name in sorted(names) if len(name) > LONGEST] == [], "say less, or test less at once"


def test_names_of_methods_and_of_async_functions_are_found() -> None:
    text = "def test_a(): ...\nasync def test_b(): ...\nclass C:\n    def test_c(self): ...\ndef other(): ...\n"
    assert DEFINED.findall(text) == ["test_a", "test_b", "test_c"]
