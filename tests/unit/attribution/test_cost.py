"""Each second of a job is productive or lost by one cause."""

from __future__ import annotations

from typing import get_args

import pytest

from resilience.attribution.cost import Times, times
from resilience.facts.records import Record
from resilience.history.history import History
from tests.support import record_streams
from tests.support.launch_streams import LAST_STEP, LEG_S, STEP_S, Fault, Kind, launched

AWAY = sum(LEG_S.values()) + 0.4


def times_of(records: list[Record]) -> Times:
    return times(History().take_all(records))


@pytest.mark.parametrize("kind", get_args(Kind))
def test_causes_add_up_to_the_whole(kind: Kind) -> None:
    spent = times_of(launched([Fault(kind, 1)], nodes=2).records)
    parts = [spent.productive_s, spent.startup_s, spent.restart_s, spent.hang_s, spent.rework_s, spent.idle_s]
    assert sum(parts) == pytest.approx(spent.total_s)
    assert spent.ettr is not None and 0.0 < spent.ettr < 1.0


def test_hang_is_silence_restart_and_rework() -> None:
    spent = times_of(launched([Fault("hang", 1)]).records)
    assert spent.startup_s == pytest.approx(AWAY - LEG_S["stop"], abs=0.001)
    assert (spent.hang_s, spent.rework_s) == (2.01, pytest.approx(10 * STEP_S, rel=0.01))
    assert spent.restart_s == pytest.approx(AWAY + 0.01, abs=0.001)
    # The first cycle's steps but those done again, the second one's two seconds.
    assert spent.productive_s == pytest.approx(LAST_STEP * STEP_S - 10 * STEP_S + 2.0, abs=0.02)


def test_cycle_that_somebody_asked_for_costs_a_restart() -> None:
    assert times_of(launched([Fault("membership")]).records).restart_s == pytest.approx(AWAY, abs=0.001)


def test_program_that_shows_nothing_is_productive_from_its_start() -> None:
    spent = times_of(launched(signs=False).records)
    assert spent.startup_s == pytest.approx(AWAY - LEG_S["stop"] - 0.4, abs=0.001)


def test_restarts_in_place_count_too() -> None:
    spent = times_of(record_streams.job([record_streams.Fault("hang", 1, 0)]).records)
    assert spent.hang_s == 3.01 and spent.restart_s > 0.0


def test_hang_is_lost_by_all_ranks_that_wait_and_not_by_a_spare() -> None:
    spent = times_of(record_streams.job([record_streams.Fault("hang", 1, 0)], world=7, spares=1).records)
    assert spent.ranks == 8
    assert spent.hang_s == pytest.approx(3.01 * 7 / 8)
    assert spent.idle_s == pytest.approx(spent.total_s / 8, rel=0.01)


def test_nothing_on_record_is_no_time() -> None:
    assert times_of([]).ettr is None
