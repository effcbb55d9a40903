"""Pages that are made from the code say what the code says."""

from __future__ import annotations

import pytest

from tests.generate_docs import DOCS, PAGES


@pytest.mark.parametrize("name", PAGES)
def test_page_is_what_the_code_makes(name: str) -> None:
    assert (DOCS / name).read_text() == PAGES[name](), "stale: run `poe docs`"
