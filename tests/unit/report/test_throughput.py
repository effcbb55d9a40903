"""Steps per second over time: what ranks counted, on one scale, whatever stretches each of them kept."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resilience.facts.deadlines import STEP
from resilience.report.throughput import throughput_of
from resilience.run_folder.merge import clocks_of
from resilience.telemetry.durations import PERIOD, Header, Recorder
from tests.support.lines import SECOND
from tests.unit.run_folder.test_merge import met


def stepped(
    folder: Path, rank: int, began_at: float, rates: list[float], seconds: float = PERIOD, node: str = "node"
) -> None:
    """Record a rank that makes so many steps a second, for `seconds` each."""
    recorder = Recorder(folder, Header("job", node, rank, 2), at=began_at)
    at = began_at
    for rate in rates:
        for number in range(round(rate * seconds)):
            recorder.add(STEP, 1 / rate, at + number / rate)
        at += seconds
    recorder.close(at)


def test_each_stretch_has_the_steps_that_ranks_made_in_it(tmp_path: Path) -> None:
    for rank in range(3):
        stepped(tmp_path, rank, 1000.0, [4.0, 0.0, 2.0])
    rates = throughput_of(tmp_path, clocks_of(tmp_path))
    assert [rate.steps_a_second for rate in rates] == [4.0, 0.0, 2.0]
    assert [rate.begin_ns for rate in rates] == [1000 * 10**9, 1010 * 10**9, 1020 * 10**9]


def test_ranks_that_began_at_different_times_are_put_on_one_scale(tmp_path: Path) -> None:
    stepped(tmp_path, 0, 1000.0, [4.0, 4.0, 4.0])
    stepped(tmp_path, 1, 1005.0, [4.0, 4.0])
    assert [round(rate.steps_a_second, 1) for rate in throughput_of(tmp_path, clocks_of(tmp_path))] == [3.0, 4.0, 3.0]


@given(rate=st.sampled_from([0.5, 2.0, 5.0]), length=st.integers(1, 200))
@settings(max_examples=15, deadline=None)
def test_a_long_run_has_few_stretches_and_the_same_rate(
    tmp_path_factory: pytest.TempPathFactory, rate: float, length: int
) -> None:
    folder = tmp_path_factory.mktemp("run")
    stepped(folder, 0, 1000.0, [rate] * length)
    found = throughput_of(folder, clocks_of(folder))
    assert len(found) <= 64
    assert all(each.steps_a_second == pytest.approx(rate, rel=0.3) for each in found)


@pytest.mark.parametrize("wrong_at", [0.0, 1e9, 4e9])
def test_rank_whose_clock_was_wrong_at_its_start_is_left_out(wrong_at: float, tmp_path: Path) -> None:
    stepped(tmp_path, 0, wrong_at, [4.0, 4.0])
    stepped(tmp_path, 1, 1.7e9, [4.0, 4.0])
    stepped(tmp_path, 2, 1.7e9, [4.0, 4.0])
    found = throughput_of(tmp_path, clocks_of(tmp_path))
    assert [(rate.begin_ns, rate.steps_a_second) for rate in found] == [
        (1_700_000_000 * 10**9, 4.0),
        (1_700_000_010 * 10**9, 4.0),
    ]


def test_steps_are_on_the_corrected_clock(tmp_path: Path) -> None:
    """A node with a clock of its own does not draw a stall."""
    for node, rank, ahead in (("a", 0, 0), ("b", 1, 90)):
        met(tmp_path, node, rank, ahead * SECOND, (0,), (1000,))
        stepped(tmp_path, rank, 1000.0 + ahead, [4.0, 4.0], node=node)
    rates = throughput_of(tmp_path, clocks_of(tmp_path))
    assert [(rate.begin_ns, rate.steps_a_second) for rate in rates] == [(1000 * 10**9, 4.0), (1010 * 10**9, 4.0)]


def test_run_without_steps_has_none(tmp_path: Path) -> None:
    assert throughput_of(tmp_path, clocks_of(tmp_path)) == ()
