"""CHANGELOG.md holds the fragments of docs/changes; of the first release, those that add something."""

from __future__ import annotations

import pytest

from tests.generate_docs import FIRST_RELEASE, ROOT, changelog, changes_in

FRAGMENTS = {
    "one.md": "added: a thing.\n\nIts details.\n",
    "two.md": "fixed: a fault of [one](../usage.md).\nchanged: a default.\n",
}


def test_changelog_is_what_the_fragments_make() -> None:
    assert (ROOT / "CHANGELOG.md").read_text() == changelog(), "stale: run `poe docs`"


def test_first_release_has_a_summary_and_what_was_added() -> None:
    page = changelog(FIRST_RELEASE, FRAGMENTS)
    assert "](docs/changes)" in page and "\n### Added\n\n- A thing.\n" in page
    assert "Its details" not in page and "A fault" not in page and "A default" not in page


def test_later_release_has_all_fragments() -> None:
    page = changelog("0.2.0", FRAGMENTS)
    assert "](docs/changes)" not in page
    assert "### Added\n\n- A thing.\n\n  Its details.\n" in page
    assert "### Changed\n\n- A default.\n" in page
    assert "### Fixed\n\n- A fault of [one](docs/usage.md).\n" in page


def test_fragment_may_hold_several_changes() -> None:
    fragment = "fixed: one\nthing.\n\nIts [reason](../usage.md).\n\nadded: another one.\nadded: and a third.\n"
    assert changes_in("two.md", fragment) == [
        ("fixed", "- One\n  thing.\n\n  Its [reason](docs/usage.md).\n"),
        ("added", "- Another one.\n"),
        ("added", "- And a third.\n"),
    ]


def test_link_to_the_root_leads_there() -> None:
    assert changes_in("map.md", "added: [the map](../../ARCHITECTURE.md).") == [
        ("added", "- [the map](ARCHITECTURE.md).\n")
    ]


def test_fragment_without_a_kind_is_refused() -> None:
    with pytest.raises(ValueError, match=r"odd\.md: begins with 'something new', expected one of"):
        changes_in("odd.md", "something new\n")
