"""Report, page, trace, spans, metrics and status answer the same question with the same number, for any run.

Runs of both layers, a Wrapper inside the launcher, unfinished runs, torn runs, and several attempts in one folder."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import get_args

import msgspec
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from resilience.analysis.load import load
from resilience.analysis.report import Report, report
from resilience.analysis.status import Now, Watcher
from resilience.analysis.waterfall import waterfall
from resilience.attribution.incidents import incidents_of
from resilience.core.records import Record, to_line
from resilience.history.history import History
from resilience.history.phases import seconds_of
from resilience.telemetry.metrics import MetricView
from resilience.telemetry.spans import SpanView
from tests.support import launch_streams, record_streams
from tests.support.launch_streams import launched
from tests.support.nested_streams import nested
from tests.support.record_streams import job

PHASES = "resilience_restart_phase_duration_seconds_sum"
IN_PLACE = st.lists(st.sampled_from(get_args(record_streams.Kind)), max_size=3, unique=True)
BY_LAUNCHER = st.lists(st.sampled_from(["kill", "raise", "hang", "membership", "request", "exhausted"]), max_size=3)
CUT = st.integers(0, 60)


def written(records: Iterable[Record], folder: Path) -> Path:
    """Write the run folder of these records, a file for each rank and agent."""
    (folder / "records").mkdir(parents=True)
    for record in records:
        rank = record.origin.initial_rank
        name = f"{record.origin.node}-{'agent' if rank is None else rank}.jsonl"
        with (folder / "records" / name).open("ab") as file:
            file.write(to_line(record))
    return folder


def counted(records: list[Record]) -> Counter[tuple[str, ...]]:
    """What the nodes' metrics say, added up over the nodes: name and labels."""
    found: Counter[tuple[str, ...]] = Counter()
    for node in {record.origin.node for record in records}:
        view = MetricView()
        for record in records:
            if record.origin.node == node:
                view.take(record)
        for (name, labels), value in view.samples().items():
            found[(name, *labels)] += value  # type: ignore[assignment]
    return found


def lengths(records: list[Record]) -> dict[str, float]:
    """How long all spans of a name took together."""
    found: Counter[str] = Counter()
    view = SpanView(is_launched=any(record.origin.role == "agent" for record in records))
    for record in records:
        for span in view.take(record):
            if span.attributes.get("resilience.outcome", "completed") != "lost":
                found[span.name] += (span.end_ns - span.start_ns) / 1e9  # type: ignore[assignment]
    return dict(found)


def assert_agree(records: list[Record]) -> None:
    history = History().take_all(records)
    metrics, spans = counted(records), lengths(records)
    for layer in ("inprocess", "launcher"):
        whole: Counter[str] = Counter()
        places = history.iterations if layer == "inprocess" else history.cycles.places
        for place in places:
            for name, seconds in seconds_of(history.restart_phases(place)).items():
                whole[name] += sum(seconds.values())  # type: ignore[assignment]
        for name, seconds_in_all in whole.items():
            if layer == "launcher" and name not in ("stop", "import"):
                continue  # a start is no restart; nodes that join or leave have only a part of it
            assert metrics[PHASES, layer, name] <= seconds_in_all + 1e-6, name
            if layer == "inprocess":
                assert metrics[PHASES, layer, name] == pytest.approx(seconds_in_all, abs=1e-6), name
                assert spans.get(name, 0.0) >= seconds_in_all - 1e-6, name
    for incident in incidents_of(history):
        drawn = waterfall(history, incident)
        rows = {} if drawn is None else {row.name: (row.median_s, row.max_s) for row in drawn.rows}
        assert {phase.name: (phase.took.median_s, phase.took.max_s) for phase in incident.phases} == rows
        if drawn is not None:
            assert sum(step.seconds for step in drawn.path) == pytest.approx(drawn.seconds, abs=1e-6)
    with tempfile.TemporaryDirectory() as temporary:
        folder = written(records, Path(temporary) / "run")
        told, now = report(load(folder)), Watcher(folder, lambda: 0.0).look()
    if now is not None:
        assert_same_header(told, now, metrics)


def assert_same_header(told: Report, now: Now, metrics: Counter[tuple[str, ...]]) -> None:
    assert now.attempt == told.attempt
    if told.launched is not None and told.attempts == 1:
        assert now.cycle is not None and now.cycle + 1 == told.launched.cycles
        assert now.restarts == told.launched.restarts_used
        assert now.world_size is not None and told.world_size is not None and now.world_size <= told.world_size
        if now.phase == "ended":
            assert now.outcome == told.launched.outcome
    elif told.launched is None and told.calls:
        assert now.world_size == told.world_size


@given(kinds=IN_PLACE, world=st.integers(4, 6), spares=st.integers(0, 1), cut=CUT, seed=st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_jobs_that_restart_in_place(
    kinds: list[record_streams.Kind], world: int, spares: int, cut: int, seed: int
) -> None:
    faults = [record_streams.Fault(kind, 1 + n, n, 10 * (n + 1)) for n, kind in enumerate(kinds)]
    records = job(faults, world=world, spares=spares, seed=seed).interleaved(seed)
    assert_agree(records)
    assert_agree(records[: len(records) - cut])


@given(kinds=BY_LAUNCHER, nodes=st.integers(1, 3), signs=st.booleans(), cut=CUT, seed=st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_jobs_that_the_launcher_restarts(
    kinds: list[launch_streams.Kind], nodes: int, signs: bool, cut: int, seed: int
) -> None:
    told = launched([launch_streams.Fault(kind, 1) for kind in kinds], nodes=nodes, ranks=2, signs=signs)
    records = told.interleaved(seed)
    assert_agree(records)
    assert_agree(records[: len(records) - cut])


@given(kinds=BY_LAUNCHER, nodes=st.integers(1, 2), cut=CUT)
@settings(max_examples=30, deadline=None)
def test_jobs_with_a_wrapper_inside_the_launcher(kinds: list[launch_streams.Kind], nodes: int, cut: int) -> None:
    assume("exhausted" not in kinds[:-1])
    records = nested([launch_streams.Fault(kind, 1) for kind in kinds], nodes=nodes).interleaved(0)
    assert_agree(records)
    assert_agree(records[: len(records) - cut])


@given(lost=st.sets(st.integers(0, 400), max_size=20), kind=st.sampled_from(get_args(record_streams.Kind)))
@settings(max_examples=30, deadline=None)
def test_jobs_of_which_records_are_lost(lost: set[int], kind: record_streams.Kind) -> None:
    records = job([record_streams.Fault(kind, 1, 0), record_streams.Fault("exception", 2, 1, 20)]).interleaved(0)
    assert_agree([record for number, record in enumerate(records) if number not in lost])


def test_two_attempts_in_one_folder() -> None:
    first = launched([launch_streams.Fault("exhausted", 1)]).records
    second = [
        msgspec.structs.replace(record, origin=msgspec.structs.replace(record.origin, attempt=1))
        for record in launched([launch_streams.Fault("hang", 0)]).records
    ]
    assert_agree([*first, *second])
