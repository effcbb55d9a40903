"""What else the time could have been: arithmetic on what is on record, with its numbers told."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from resilience.attribution.cost import Times, times
from resilience.attribution.incident import Cost, Incident
from resilience.attribution.incidents import incidents_of
from resilience.attribution.symptoms import Class
from resilience.attribution.verdict import Verdict
from resilience.facts.records import Record
from resilience.history.history import History
from resilience.report.counterfactual import (
    Vacancies,
    WhatIf,
    least_change_last,
    saved_more_often,
    sooner,
    vacancies,
    what_ifs,
    with_spares,
)
from tests.support import launch_streams, record_streams

TIMES = Times(
    total_s=1500.0, productive_s=600.0, startup_s=10.0, restart_s=140.0, hang_s=150.0, rework_s=200.0, idle_s=400.0
)


def incident(
    number: int = 1,
    hang_s: float | None = None,
    rework_s: float | None = None,
    what: Class = "killed",
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


def test_lost_monitors_are_no_faults_after_which_steps_are_repeated() -> None:
    found = [incident(1, rework_s=150.0), incident(2, rework_s=50.0)]
    lost = msgspec.structs.replace(
        incident(3, rework_s=0.0), verdict=Verdict("monitor_lost", "host"), status="continued"
    )
    assert saved_more_often(TIMES, [*found, lost, lost], 60.0, 3.0) == saved_more_often(TIMES, found, 60.0, 3.0)
    assert [answer for answer in what_ifs(TIMES, [lost]) if answer.kind == "checkpoints"] == []


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
    vacant = Vacancies(places=(150.0, 100.0))
    assert with_spares(TIMES, vacant, 1).saved_s == 150.0
    assert with_spares(TIMES, vacant, 2).saved_s == 250.0
    assert "places of 2 lost ranks were idle for 4 min 10 s of the job" in with_spares(TIMES, vacant, 1).inputs


def test_a_spare_node_is_there_when_one_is_lost() -> None:
    assert with_spares(TIMES, Vacancies(waited=(90.0,)), 1).saved_s == 90.0


def test_more_spares_than_lost_ranks_are_no_answer() -> None:
    answers = what_ifs(TIMES, [incident(1)], Vacancies(places=(150.0,)))
    assert [answer.value for answer in answers if answer.kind == "spares"] == [1]


@given(
    kinds=st.lists(st.sampled_from(("kill", "stopped", "exception", "hang")), min_size=1, max_size=3),
    world=st.integers(4, 6),
    spares=st.integers(0, 2),
)
@settings(max_examples=40, deadline=None)
def test_no_answer_saves_more_than_a_run_with_lost_ranks_has_lost(
    kinds: list[record_streams.Kind], world: int, spares: int
) -> None:
    faults = [record_streams.Fault(kind, 1 + n, n, 10 * (n + 1)) for n, kind in enumerate(kinds)]
    assert_saves_no_more_than_was_lost(record_streams.job(faults, world=world, spares=spares).records)


@given(kinds=st.lists(st.sampled_from(("node", "kill", "hang")), min_size=1, max_size=3), nodes=st.integers(2, 4))
@settings(max_examples=30, deadline=None)
def test_no_answer_saves_more_than_a_run_with_lost_nodes_has_lost(kinds: list[launch_streams.Kind], nodes: int) -> None:
    assume(kinds.count("node") < nodes)
    faults = [launch_streams.Fault(kind, 1) for kind in kinds]
    assert_saves_no_more_than_was_lost(launch_streams.launched(faults, nodes=nodes).records)


def assert_saves_no_more_than_was_lost(records: list[Record]) -> None:
    history = History().take_all(records)
    incidents, spent = incidents_of(history), times(history)
    vacant = vacancies(history, incidents, spent.ranks)
    assert sum(vacant.places) <= spent.idle_s + 1e-9
    assert sum(vacant.waited) <= spent.restart_s + 1e-9
    assert spent.hang_s <= sum(each.cost.hang_s or 0.0 for each in incidents) + 1e-6
    for answer in what_ifs(spent, incidents, vacant):
        causes = {"limit": spent.hang_s, "checkpoints": spent.rework_s or 0.0, "spares": spent.idle_s + spent.restart_s}
        assert answer.saved_s <= causes[answer.kind] + 1e-9


def test_place_that_a_spare_took_is_not_vacant() -> None:
    for spares, lost in ((0, 1), (1, 0)):
        told = record_streams.job([record_streams.Fault("kill", 1, 0)], world=4, spares=spares)
        history = History().take_all(told.records)
        places = vacancies(history, incidents_of(history), 4 + spares).places
        assert len(places) == lost
        assert all(seconds > 0 for seconds in places)


def test_a_lost_spare_leaves_no_place_that_another_spare_could_take() -> None:
    lost_spare, lost_rank = record_streams.Fault("kill", 5, 0), record_streams.Fault("kill", 1, 1)
    for faults in ([lost_spare], [lost_spare, lost_rank]):
        history = History().take_all(record_streams.job(faults, world=3, spares=3).records)
        assert vacancies(history, incidents_of(history), 6).places == ()


def test_a_spare_lost_together_with_a_replaced_rank_leaves_no_vacant_place() -> None:
    fault = record_streams.Fault("kill", 1, 0)
    history = History().take_all(record_streams.job([fault], world=3, spares=2).records)
    (replaced,) = incidents_of(history)
    both = msgspec.structs.replace(replaced, excluded=(1, 4))
    assert replaced.stepped_in == (3,)
    assert vacancies(history, [both], 5).places == ()


def test_what_was_not_there_is_not_asked() -> None:
    assert what_ifs(TIMES, []) == ()
    assert what_ifs(TIMES, [incident(1)]) == ()
    answers = what_ifs(TIMES, [incident(1, hang_s=9.0, rework_s=100.0)], Vacancies(places=(150.0,)))
    assert {answer.kind for answer in answers} == {"limit", "checkpoints", "spares"}
    assert all(answer.saved_s > 0.0 and answer.assumes for answer in answers)


def test_nothing_saves_more_than_was_lost() -> None:
    assert 0.0 < sooner(TIMES, [incident(1, hang_s=9000.0)], 1.0).saved_s < TIMES.hang_s
    assert 0.0 < saved_more_often(TIMES, [incident(1, rework_s=9000.0)], 1.0, None).saved_s < TIMES.rework_s
