"""The table of live jobs has a row for each case of the matrix, and no other."""

from __future__ import annotations

from tests.live_limits.__main__ import BEGIN, END, MATRIX
from tests.support.server import ROOT


def test_table_of_live_jobs_has_the_cases_of_the_matrix() -> None:
    table = (ROOT / "docs" / "calibration.md").read_text().partition(BEGIN)[2].partition(END)[0]
    _head, _line, *rows = table.strip().splitlines()
    assert [row.split(" | ")[0].removeprefix("| ") for row in rows] == list(MATRIX)
