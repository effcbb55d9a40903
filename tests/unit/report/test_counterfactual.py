"""What else the time could have been: arithmetic on what is on record, with its numbers told."""

from __future__ import annotations

import msgspec
import pytest

from resilience.attribution.cost import Times
from resilience.attribution.incident import Cost, Incident, Phase, Spread
from resilience.attribution.symptoms import Class
from resilience.attribution.verdict import Verdict
from resilience.report.counterfactual import WhatIf, least_change_last, saved_more_often, sooner, what_ifs, with_spares

TIMES = Times(
    total_s=1500.0, productive_s=600.0, startup_s=10.0, restart_s=140.0, hang_s=150.0, rework_s=200.0, idle_s=400.0
)
SECOND = 10**9


def incident(
    number: int = 1,
    hang_s: float | None = None,
    rework_s: float | None = None,
    what: Class = "killed",
    at_s: int = 0,
    ranks: tuple[int, int] | None = None,
    waited_s: float | None = None,
) -> Incident:
    return Incident(
        number=number,
        attempt=0,
        cycle=0,
        call=0,
        iteration=number - 1,
        status="restarted",
        kind="terminated",
        verdict=Verdict(what=what, category="unknown"),
        detected_wall_ns=at_s * SECOND,
        active_world_size=None if ranks is None else ranks[0],
        next_active_world_size=None if ranks is None else ranks[1],
        phases=() if waited_s is None else (Phase("rendezvous", Spread(waited_s, waited_s, 0, 4)),),
        cost=Cost(lost_steps=None if rework_s is None else 10, hang_s=hang_s, rework_s=rework_s),
    )


def test_a_shorter_limit_saves_what_lies_beyond_it() -> None:
    answer = sooner(TIMES, [incident(1, hang_s=120.0), incident(2, hang_s=30.0), incident(3)], 20.0)
    assert answer.saved_s == pytest.approx(100.0 + 10.0)
    assert answer.ettr == pytest.approx(710 / 1500)
    assert "silences of 2 min 00 s, 30 s;" in answer.inputs


def test_a_silence_that_half_of_the_ranks_waited_for_costs_the_job_half_of_it() -> None:
    times = msgspec.structs.replace(TIMES, hang_s=50.0)
    assert sooner(times, [incident(1, hang_s=100.0)], 60.0).saved_s == 20.0
    times = msgspec.structs.replace(TIMES, rework_s=50.0)
    assert saved_more_often(times, [incident(1, rework_s=100.0)], 60.0, None).saved_s == (100.0 - 30.0) / 2


def test_of_answers_that_save_the_same_the_least_change_comes_last() -> None:
    def answer(kind: str, value: float, saved: float) -> WhatIf:
        return WhatIf(kind, value, saved, 0.5, "", "", "")

    spares = [answer("spares", 2, 10.0), answer("spares", 1, 10.0), answer("spares", 3, 4.0)]
    assert max(spares, key=least_change_last).value == 1
    assert max([answer("limit", 5.0, 10.0), answer("limit", 30.0, 10.0)], key=least_change_last).value == 30.0


def test_a_longer_limit_saves_nothing() -> None:
    assert sooner(TIMES, [incident(1, hang_s=12.0)], 20.0).saved_s == 0.0


def test_checkpoints_leave_half_of_their_distance_undone() -> None:
    found = [incident(1, rework_s=150.0), incident(2, rework_s=50.0)]
    answer = saved_more_often(TIMES, found, 60.0, None)
    assert answer.saved_s == 200.0 - 2 * 30.0
    assert "not recorded" in answer.inputs


def test_writing_checkpoints_costs_what_it_takes() -> None:
    found = [incident(1, rework_s=150.0), incident(2, rework_s=50.0)]
    answer = saved_more_often(TIMES, found, 60.0, 3.0)
    assert answer.saved_s == 140.0 - 3.0 * 600.0 / 60.0
    assert "42.4 s would be best" in answer.inputs  # sqrt(2 * 3 * 600 / 2)


def test_checkpoints_further_apart_than_the_whole_work_save_nothing() -> None:
    """Three faults repeated nearly all of 5 s of work: one checkpoint every 5 min would have changed nothing."""
    short = msgspec.structs.replace(TIMES, total_s=15.0, productive_s=5.0, rework_s=9.0)
    found = [incident(number, rework_s=3.0) for number in (1, 2, 3)]
    assert not [answer for answer in what_ifs(short, found) if answer.kind == "checkpoints"]
    longer = msgspec.structs.replace(short, productive_s=12.0)
    assert [answer.value for answer in what_ifs(longer, found) if answer.kind == "checkpoints"] == []  # 3 * 5 > 9
    saved = what_ifs(msgspec.structs.replace(longer, rework_s=18.0), [incident(1, rework_s=18.0)])
    assert [(answer.value, answer.saved_s) for answer in saved] == [(10.0, 18.0 - 5.0)]


def test_a_spare_does_the_work_of_a_rank_that_went() -> None:
    found = [incident(1, at_s=100, ranks=(4, 3)), incident(2, at_s=300, ranks=(3, 2))]
    until = 700 * SECOND
    assert with_spares(TIMES, found, 1, until).saved_s == 200 / 4 + 400 / 4
    assert with_spares(TIMES, found, 2, until).saved_s == 200 / 4 + 2 * 400 / 4
    assert "16 min 40 s of missing ranks in total" in with_spares(TIMES, found, 1, until).inputs


def test_a_spare_node_is_there_when_one_is_lost() -> None:
    found = [incident(1, what="node_lost", waited_s=90.0), incident(2, what="killed", waited_s=5.0)]
    assert with_spares(TIMES, found, 1, None).saved_s == 90.0


def test_what_was_not_there_is_not_asked() -> None:
    assert what_ifs(TIMES, []) == ()
    assert what_ifs(TIMES, [incident(1)]) == ()
    found = [incident(1, hang_s=9.0, rework_s=100.0), incident(2, at_s=100, ranks=(4, 3))]
    answers = what_ifs(TIMES, found, 700 * SECOND)
    assert {answer.kind for answer in answers} == {"limit", "checkpoints", "spares"}
    assert all(answer.saved_s > 0.0 and answer.assumes for answer in answers)


def test_nothing_saves_more_than_was_lost() -> None:
    assert 0.0 < sooner(TIMES, [incident(1, hang_s=9000.0)], 1.0).saved_s < TIMES.hang_s
    assert 0.0 < saved_more_often(TIMES, [incident(1, rework_s=9000.0)], 1.0, None).saved_s < TIMES.rework_s
    found = [incident(1, at_s=100, ranks=(4, 1), what="node_lost", waited_s=9000.0)]
    assert with_spares(TIMES, found, 4, 90_000 * SECOND).saved_s == TIMES.idle_s + TIMES.restart_s
