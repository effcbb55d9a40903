"""What a call takes from its Wrapper's options."""

from __future__ import annotations

from datetime import timedelta

import pytest

from resilience.inprocess import CallWrapper, Wrapper


@pytest.mark.parametrize(("soft", "interval"), [(60, 1), (4, 1), (1.5, 0.5)])
def test_rank_that_waits_answers_its_watchdog_twice_within_the_soft_timeout(soft: float, interval: float) -> None:
    wrapper = Wrapper(
        soft_timeout=timedelta(seconds=soft),
        progress_watchdog_interval=timedelta(seconds=interval),
        monitor_thread_interval=timedelta(seconds=0.5),
    )
    assert CallWrapper(wrapper)._chunk == (soft - interval) / 2
