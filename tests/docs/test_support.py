"""The page on support names the versions that the project file asks for and the one that is pinned."""

from __future__ import annotations

import re

from tests.support.server import ROOT

PAGE = (ROOT / "docs" / "support.md").read_text()
PROJECT = (ROOT / "pyproject.toml").read_text()


def test_supported_versions_begin_with_those_that_are_required() -> None:
    (python,) = re.findall(r'requires-python = ">=([\d.]+)"', PROJECT)
    (torch,) = re.findall(r'"torch>=([\d.]+)"', PROJECT)
    assert f"Supported: Python {python} to" in PAGE
    assert f"with torch {torch} to" in PAGE


def test_pinned_torch_has_a_row() -> None:
    (pinned,) = re.findall(r"^torch==(\S+)$", (ROOT / ".ci" / "constraints.txt").read_text(), flags=re.MULTILINE)
    assert re.search(rf"^\| [\d.]+ \| {re.escape(pinned)},", PAGE, flags=re.MULTILINE)


def test_what_was_run_has_a_day() -> None:
    table = PAGE.partition("| Python | torch |")[2].partition("\n\n")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[2:]]
    ran = [row for row in rows if row[2] != "nothing"]
    assert [row for row in ran if not re.fullmatch(r"20\d\d-\d\d-\d\d|not noted", row[3])] == []
    assert all("passed" in row[4] for row in ran)
