"""The page that compares the launchers names tests that are there."""

from __future__ import annotations

import re

from tests.support.server import ROOT

PAGE = (ROOT / "docs" / "side-by-side.md").read_text()
FILES = {path.name: path.read_text() for path in (ROOT / "tests").rglob("test_*.py")}
BOTH = ("test_side_by_side.py", "test_like_torchrun.py", "test_output.py")  # files with tests that run both launchers


def test_every_row_names_a_test_that_is_where_it_says() -> None:
    rows = [line for line in PAGE.splitlines() if line.startswith("|")][2:]
    assert len(rows) > 10
    for row in rows:
        (file,) = re.findall(r"` in `(test_\w+\.py)`", row)
        names = re.findall(r"`(test_\w+)`", row)
        assert names and all(f"def {name}(" in FILES[file] for name in names), row
        assert "| ours: " in row or file in BOTH, row
