"""Report, page, trace, spans, metrics and status answer the same question with the same number, for any run.

Runs of both layers, a Wrapper inside the launcher, unfinished runs, torn runs, and several attempts in one folder."""

from __future__ import annotations

from typing import get_args

import msgspec
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.support import launch_streams, record_streams
from tests.support.agreement import (
    assert_agree,
    assert_one_first_interruption_for_each_incident,
    assert_same_number_of_restarts,
    assert_same_seconds,
)
from tests.support.launch_streams import launched
from tests.support.nested_streams import nested
from tests.support.record_streams import job

IN_PLACE = st.lists(st.sampled_from(get_args(record_streams.Kind)), max_size=3, unique=True)
LOST_MONITORS = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3)), max_size=3)  # cycles and ranks
BY_LAUNCHER = st.lists(st.sampled_from(["kill", "raise", "hang", "membership", "request", "exhausted"]), max_size=3)
CUT = st.integers(0, 60)
WAITED = {"waited_for", "communication", "skipped"}  # no rank has a fault of its own on record


@given(kinds=IN_PLACE, world=st.integers(4, 6), spares=st.integers(0, 1), cut=CUT, seed=st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_jobs_that_restart_in_place(
    kinds: list[record_streams.Kind], world: int, spares: int, cut: int, seed: int
) -> None:
    faults = [record_streams.Fault(kind, 1 + n, n, 10 * (n + 1)) for n, kind in enumerate(kinds)]
    records = job(faults, world=world, spares=spares, seed=seed).interleaved(seed)
    assert_agree(records)
    assert_same_number_of_restarts(records)
    if "monitor" not in kinds:  # such a fault may share an iteration with another one
        assert_one_first_interruption_for_each_incident(records, len(WAITED.intersection(kinds)))
    assert_agree(records[: len(records) - cut])


@given(
    kinds=BY_LAUNCHER,
    nodes=st.integers(1, 3),
    signs=st.booleans(),
    lost_monitors=LOST_MONITORS,
    cut=CUT,
    seed=st.integers(0, 99),
)
@settings(max_examples=40, deadline=None)
def test_jobs_that_the_launcher_restarts(
    kinds: list[launch_streams.Kind],
    nodes: int,
    signs: bool,
    lost_monitors: list[tuple[int, int]],
    cut: int,
    seed: int,
) -> None:
    faults = [launch_streams.Fault(kind, 1) for kind in kinds]
    told = launched(faults, nodes=nodes, ranks=2, signs=signs, lost_monitors=lost_monitors)
    records = told.interleaved(seed)
    assert_agree(records)
    assert_same_number_of_restarts(records)
    assert_one_first_interruption_for_each_incident(records)
    assert_agree(records[: len(records) - cut])


@given(kinds=BY_LAUNCHER, nodes=st.integers(1, 2), has_steps=st.booleans(), cut=CUT)
@settings(max_examples=30, deadline=None)
def test_jobs_with_a_wrapper_inside_the_launcher(
    kinds: list[launch_streams.Kind], nodes: int, has_steps: bool, cut: int
) -> None:
    assume("exhausted" not in kinds[:-1])
    faults = [launch_streams.Fault(kind, 1) for kind in kinds]
    records = nested(faults, nodes=nodes, has_steps=has_steps).interleaved(0)
    assert_same_seconds(records)
    assert_agree(records)
    assert_same_number_of_restarts(records)
    assert_one_first_interruption_for_each_incident(records)
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
