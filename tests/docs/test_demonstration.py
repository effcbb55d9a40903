"""The recorded demonstration is a small page that names no place of the machine it was recorded on."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.record_demonstration import MOST_BYTES, PAGE

PLACES = ("/home/me", "/usr/lib/python", "/__w/pytorch/")  # the last one is in messages of torch's own build


@pytest.mark.parametrize("path", MOST_BYTES, ids=lambda path: path.name)
def test_file_is_small_enough_to_be_committed(path: Path) -> None:
    assert 10_000 < path.stat().st_size <= MOST_BYTES[path]


def test_page_names_no_place_of_the_machine() -> None:
    text = PAGE.read_text()
    paths = re.findall(r"(?<![\w.<:/])/(?:\w[\w.-]*/)+\w[\w.-]*", text)
    assert paths
    assert [path for path in paths if not path.startswith(PLACES)] == []
    assert set(re.findall(r"\d+ ranks on ([a-z][\w.-]*)", text)) == {"node0"}


def test_page_needs_no_other_file() -> None:
    sources = re.findall(r"<(?:script|link|img)[^>]+(?:src|href)=['\"]?([^'\"\s>]+)", PAGE.read_text())
    assert [source for source in sources if not source.startswith("data:")] == []
    assert "<title>" in PAGE.read_text()
