"""No name that docs/compatibility.md promises to keep disappears unnoticed."""

from __future__ import annotations

from tests.generate_docs import DOCS, STABLE_NAMES, stable_names


def test_no_stable_name_is_gone() -> None:
    listed = set((DOCS / STABLE_NAMES).read_text().splitlines())
    gone = sorted(listed - stable_names())
    assert gone == [], "users rely on these names; if they must go, delete their lines and add a `removed` fragment"


def test_list_of_stable_names_covers_every_kind() -> None:
    kinds = {name.partition(" ")[0] for name in stable_names()}
    assert kinds == {"command", "config", "event", "file", "metric", "option", "python", "variable"}
