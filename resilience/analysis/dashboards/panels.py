"""What is a dashboard?  Boards of rows of panels of queries, as values; Grafana's form of them is in `grafana`.

A panel that has to be empty while all is well says so in `empty`; every other one has data in every run.
The grid is calculated: panels flow from left to right, and a line is as high as its highest panel."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import msgspec

COLUMNS = 24

View = Literal["stat", "lines", "stacked", "bars", "table", "heatmap", "gauge"]
Color = Literal["green", "yellow", "orange", "red", "blue", "text"]


class Query(msgspec.Struct, frozen=True):
    """One PromQL expression. legend: a template over labels; a table shows labels as columns instead."""

    expr: str
    legend: str = ""


class Panel(msgspec.Struct, frozen=True, kw_only=True):
    """One panel. unit: Grafana's name of it. empty: why there may be no data, shown in its place; "" if there
    always is. steps: colours from a value on. runbook: an alert whose runbook says what to do about what is seen here.
    leads_to_job: each row, of any job, links to that job's overview."""

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


class Row(msgspec.Struct, frozen=True):
    """Panels under a heading."""

    title: str
    panels: tuple[Panel, ...]


class Board(msgspec.Struct, frozen=True):
    """A dashboard. name: of its file and, after `resilience-`, its uid."""

    name: str
    title: str
    description: str
    rows: tuple[Row, ...]
    is_of_one_job: bool = True

    @property
    def uid(self) -> str:
        return f"resilience-{self.name}"

    def panels(self) -> Iterator[Panel]:
        """Yield all panels, in order."""
        for row in self.rows:
            yield from row.panels


class Place(msgspec.Struct, frozen=True):
    """Where something stands in the grid."""

    x: int
    y: int
    w: int
    h: int


def places(board: Board) -> list[tuple[Place, list[Place]]]:
    """Return of each row the place of its heading and of its panels."""
    found = []
    y = 0
    for row in board.rows:
        heading = Place(0, y, COLUMNS, 1)
        y += 1
        x, line, within = 0, 0, []
        for panel in row.panels:
            if x + panel.width > COLUMNS:
                x, y, line = 0, y + line, 0
            within.append(Place(x, y, panel.width, panel.height))
            x, line = x + panel.width, max(line, panel.height)
        y += line
        found.append((heading, within))
    return found
