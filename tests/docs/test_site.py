"""The site's navigation has every page once."""

from __future__ import annotations

from tests.build_site import ROOT, WITH_ALL_PAGES, navigation

IN_LISTS_OF_THEIR_OWN = {ROOT / page for page in WITH_ALL_PAGES}


def test_every_page_is_in_the_navigation_once() -> None:
    listed = [ROOT / page for pages in navigation().values() for page in pages]
    pages = {*(ROOT / "docs").glob("*.md"), *ROOT.glob("*.md")} - {ROOT / "README.md"}
    assert len(listed) == len(set(listed))
    assert sorted(pages - set(listed)) == []
    assert set(listed) >= IN_LISTS_OF_THEIR_OWN


def test_navigation_begins_with_the_start() -> None:
    assert list(navigation())[:2] == ["Start", "Where jobs run"]
    assert navigation()["Start"][:3] == ["docs/index.md", "docs/quickstart.md", "docs/installation.md"]
