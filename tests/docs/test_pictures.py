"""The pictures of the dashboards are what their stored answers draw, in the words of today's dashboards."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("grafana_foundation_sdk", reason="dashboards are built with it; it needs Python 3.11")

from tests.draw_dashboards import BOARDS, PICTURES, draw


@pytest.mark.parametrize("name", [board.name for board in BOARDS])
def test_picture_is_what_its_answers_draw(name: str) -> None:
    (board,) = (board for board in BOARDS if board.name == name)
    answers = json.loads((PICTURES / f"{name}.json").read_text())
    assert (PICTURES / f"{name}.svg").read_text() == draw(board, answers), "python -m tests.draw_dashboards"
