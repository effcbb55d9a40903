"""The memory of live views does not grow with the number of restarts in place."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest

from resilience.attribution import first_and_cascade
from resilience.facts.records import Record, to_line
from resilience.status.state import Watcher
from resilience.telemetry.metrics import MetricView
from resilience.telemetry.spans import SpanView
from tests.support.containers import size
from tests.support.record_streams import Fault, job

FEW, MANY = 40, 120  # restarts; the views keep something of the last few


def sizes(view: object, take: Callable[[list[Record]], object]) -> list[int]:
    """Return the sizes of a view after FEW and after MANY restarts. take: adds records to it."""
    found = []
    records = job([Fault("everywhere", 0, iteration) for iteration in range(MANY)], world=2).interleaved(0)
    for iteration, group in itertools.groupby(records, key=lambda record: record.origin.iteration):
        if iteration in (FEW, MANY):
            found.append(size(view, set()))
        take(list(group))
    return found


def test_metrics_do_not_grow_with_restarts_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_and_cascade, "KEPT", 8)
    view = MetricView()

    def take(records: list[Record]) -> None:
        for record in records:
            view.take(record)
        view.samples()

    few, many = sizes(view, take)
    assert few == many


def test_spans_do_not_grow_with_restarts_in_place() -> None:
    view = SpanView()
    few, many = sizes(view, lambda records: [view.take(record) for record in records])
    assert few == many


def test_status_does_not_grow_with_restarts_in_place(tmp_path: Path) -> None:
    (tmp_path / "records").mkdir()
    watcher = Watcher(tmp_path, clock=lambda: 1.7e9)

    def take(records: list[Record]) -> None:
        for record in records:
            with (tmp_path / "records" / f"node-{record.origin.initial_rank}.jsonl").open("ab") as file:
                file.write(to_line(record))
        watcher.look()

    few, many = sizes(watcher, take)
    assert few == many
