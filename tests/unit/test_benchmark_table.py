"""Rows of the benchmark's table are judged by what they ask for."""

from __future__ import annotations

import pytest

from tests.benchmarks.table import Row, cells


@pytest.mark.parametrize(
    ("budget", "factor", "ours", "wanted", "verdict"),
    [
        (None, None, 2.0, "-", "-"),
        (1.5, None, 2.0, "≤ 1.5 s", "no: over by 500 ms"),
        (2.5, 1, 2.0, "≤ 2.5 s, ≥ 1 ×", "no: 0.95 ×, not 1 ×"),
        (None, 1, 2.0, "≥ 1 ×", "no: 0.95 ×, not 1 ×"),
        (None, 1, 1.9, "≥ 1 ×", "yes"),
    ],
)
def test_row_is_judged_by_its_budget_and_by_its_factor_over_the_peer(
    budget: float | None, factor: float | None, ours: float, wanted: str, verdict: str
) -> None:
    _, asked, *_, judged = cells(Row(what="", unit="s", budget=budget, factor=factor, ours=[ours], peer=[1.9]))
    assert (asked, judged) == (wanted, verdict)
