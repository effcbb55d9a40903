"""What is a dashboard?  Boards contain rows, rows contain panels, panels contain queries; `grafana` converts them.

A panel that is empty in a healthy run has a text for that in `empty`; every other panel has data in every run. The grid
is calculated: panels flow from left to right, and a line is as high as its highest panel."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import msgspec

COLUMNS = 24

View = Literal["stat", "lines", "stacked", "bars", "table", "heatmap", "gauge"]
Color = Literal["green", "yellow", "orange", "red", "blue", "text"]


class Query(msgspec.Struct, frozen=True):
    """One PromQL expression. legend: a template with labels; a table shows labels as columns instead."""

    expr: str
    legend: str = ""


class Panel(msgspec.Struct, frozen=True, kw_only=True):
    """One panel. unit: Grafana's name of the unit. empty: text shown without data, "" if there always are data. steps:
    thresholds and their colours. runbook: an alert whose runbook explains what to do. leads_to_job: each row links to
    the overview of its job."""

    title: str
    description: str
    unit: str
    queries: tuple[Query, ...]
    view: View = "lines"
    width: int = 12
    height: int = 8
    empty: str = ""
    steps: tuple[tuple[float | None, Color], ...] = ()
    runbook: str = ""
    has_exemplars: bool = False
    maximum: float | None = None
    leads_to_job: bool = False


class PanelRow(msgspec.Struct, frozen=True):
    """Panels under a heading."""

    title: str
    panels: tuple[Panel, ...]


class Board(msgspec.Struct, frozen=True):
    """A dashboard. name: its file name; the uid is `resilience-` and the name."""

    name: str
    title: str
    description: str
    rows: tuple[PanelRow, ...]
    is_of_one_job: bool = True

    @property
    def uid(self) -> str:
        return f"resilience-{self.name}"

    def panels(self) -> Iterator[Panel]:
        """Yield all panels, in order."""
        for row in self.rows:
            yield from row.panels


class GridPlace(msgspec.Struct, frozen=True):
    """A rectangle in the grid."""

    x: int
    y: int
    w: int
    h: int


def places(board: Board) -> list[tuple[GridPlace, list[GridPlace]]]:
    """Return the rectangles of each row's heading and of its panels."""
    rows = []
    y = 0
    for row in board.rows:
        heading = GridPlace(0, y, COLUMNS, 1)
        y += 1
        x, line_height, panel_places = 0, 0, []
        for panel in row.panels:
            if x + panel.width > COLUMNS:
                x, y, line_height = 0, y + line_height, 0
            panel_places.append(GridPlace(x, y, panel.width, panel.height))
            x, line_height = x + panel.width, max(line_height, panel.height)
        y += line_height
        rows.append((heading, panel_places))
    return rows
