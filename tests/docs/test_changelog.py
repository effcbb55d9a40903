"""CHANGELOG.md holds every fragment of docs/changes."""

from __future__ import annotations

import pytest

from tests.generate_docs import ROOT, changelog, changes_in


def test_changelog_is_what_the_fragments_make() -> None:
    assert (ROOT / "CHANGELOG.md").read_text() == changelog(), "stale: run `poe docs`"


def test_fragment_may_hold_several_changes() -> None:
    fragment = "fixed: one\nthing.\n\nIts [reason](../usage.md).\n\nadded: another one.\n"
    assert changes_in("two.md", fragment) == [
        ("fixed", "- One\n  thing.\n\n  Its [reason](docs/usage.md).\n"),
        ("added", "- Another one.\n"),
    ]


def test_fragment_without_a_kind_is_refused() -> None:
    with pytest.raises(ValueError, match=r"odd\.md: begins with 'something new', expected one of"):
        changes_in("odd.md", "something new\n")
