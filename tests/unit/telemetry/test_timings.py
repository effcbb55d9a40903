"""Histograms of durations: fine, sparse, exact in count, sum and maximum, and added up without loss."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilience.telemetry.timings import LARGEST_BUCKET, RATIO, SMALLEST, Histogram, Timings, upper_bound
from tests.support.rank_timings import add_durations

DURATIONS = st.floats(1e-6, 1e6)


@given(DURATIONS)
def test_duration_lies_within_one_percent_below_its_buckets_bound(duration: float) -> None:
    histogram = Histogram()
    histogram.add(duration)
    ((number, count),) = histogram.buckets.items()
    assert count == 1
    assert upper_bound(number) / RATIO * (1 - 1e-9) <= duration <= upper_bound(number) * (1 + 1e-9)


@pytest.mark.parametrize(("duration", "number"), [(0.0, 0), (SMALLEST, 0), (1e300, LARGEST_BUCKET)])
def test_durations_off_the_scale_fall_into_the_outer_buckets(duration: float, number: int) -> None:
    histogram = Histogram()
    histogram.add(duration)
    assert histogram.buckets == {number: 1}


@given(st.lists(DURATIONS), st.lists(DURATIONS))
def test_merging_is_the_same_as_adding_all(first: list[float], second: list[float]) -> None:
    merged, other, together = Timings(), Timings(), Timings()
    add_durations(merged, (("data", value) for value in first))
    add_durations(other, (("data", value) for value in second))
    merged.merge(other)
    add_durations(together, (("data", value) for value in first + second))
    assert merged.sections.keys() == together.sections.keys()
    for name, found in merged.sections.items():
        expected = together.sections[name]
        assert (found.buckets, found.count, found.max) == (expected.buckets, expected.count, expected.max)
        assert found.sum == pytest.approx(expected.sum)
