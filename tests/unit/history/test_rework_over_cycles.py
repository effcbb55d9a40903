"""Steps of a wrapped function that a restart by the launcher repeats, in cycles with a restart in place.

The report, the metrics and a script that shares no code with the package count the same seconds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from resilience.attribution.cost import times
from resilience.attribution.incidents import incidents_of
from resilience.facts import events
from resilience.facts.interruptions import Interruption, InterruptionRecord
from resilience.facts.records import Record
from resilience.history.history import History
from tests.fixtures.count import count
from tests.support import launch_streams
from tests.support.agreement import assert_agree, assert_same_seconds
from tests.support.launch_streams import LAST_STEP, Launched
from tests.support.nested_streams import AWAY_S, BEFORE_STEP_S, IN_PLACE_S, REPEATED, nested, restart_in_place

REACHED = 20  # before the restart in place
STEP_S = (IN_PLACE_S - BEFORE_STEP_S) / REACHED
LATER_S = launch_streams.LAST_STEP * launch_streams.STEP_S - 1.5 - IN_PLACE_S - AWAY_S  # at work after it


def interrupted(
    resumed: int | None, dead: int | None = None, kind: launch_streams.Kind = "kill", cycle: int = 0
) -> Launched:
    """A restart in place after which the ranks go on with step `resumed`, in a job whose first cycle fails."""
    told = nested([launch_streams.Fault(kind, 1)], has_steps=True)
    restart_in_place(told, cycle, REACHED, resumed, dead)
    return told


def change(told: Launched, changed: Callable[[Record], Record | None]) -> None:
    """Replace each record, or leave it out."""
    for key, records in told.files.items():
        told.files[key] = [after for record in records if (after := changed(record)) is not None]


def going_on_with(step: int) -> Callable[[Record], Record | None]:
    """Let the second cycle begin with a step."""

    def changed(record: Record) -> Record | None:
        if isinstance(record.event, events.FirstStepReported) and record.origin.cycle == 1:
            return msgspec.structs.replace(record, event=events.FirstStepReported(step, BEFORE_STEP_S))
        return record

    return changed


def without_first_step(cycle: int) -> Callable[[Record], Record | None]:
    return lambda record: (
        None if isinstance(record.event, events.FirstStepReported) and record.origin.cycle == cycle else record
    )


def without_last_step(record: Record) -> Record | None:
    """Let the ranks be stopped before their first step after the restart in place."""
    if isinstance(record.event, events.RankInterrupted) and record.origin.iteration == 1:
        return msgspec.structs.replace(
            record, event=events.RankInterrupted(msgspec.structs.replace(record.event.record, step=None))
        )
    return record


def rework_s(told: Launched, folder: Path) -> list[float]:
    """Return the rework of each rank, on which all views agree, in seconds."""
    history = History().take_all(told.records)
    assert_same_seconds(told.records)
    assert_agree(told.records)
    spent = times(history)
    assert (spent.rework_s or 0.0) * spent.ranks == pytest.approx(
        count(told.write(folder / "run"))["spent"]["rework"], abs=1e-6
    )
    return [of_rank.rework / 1e9 for _, of_rank in sorted(history.spent().items())]


def test_restarts_in_place_and_by_the_launcher_repeat_steps_at_the_speed_before_each(tmp_path: Path) -> None:
    told = interrupted(resumed=15)
    again_in_place = 5 * STEP_S
    again = REPEATED * LATER_S / (LAST_STEP - 15)
    assert rework_s(told, tmp_path) == pytest.approx([again_in_place + again] * 2, rel=1e-3)
    in_place, by_launcher = incidents_of(History().take_all(told.records))
    assert (in_place.cost.lost_steps, by_launcher.cost.lost_steps) == (5, REPEATED)
    assert in_place.cost.rework_s == pytest.approx(again_in_place, rel=1e-3)
    assert by_launcher.cost.rework_s == pytest.approx(again, rel=0.05)


def test_rank_that_died_in_place_repeats_the_steps_until_its_death(tmp_path: Path) -> None:
    """The next cycle goes on with step 10."""
    told = interrupted(resumed=15, dead=0)
    change(told, going_on_with(10))
    others = 5 * STEP_S + (LAST_STEP - 10) * LATER_S / (LAST_STEP - 15)
    assert rework_s(told, tmp_path) == pytest.approx([10 * STEP_S, others], rel=1e-3)


def test_launcher_that_restarts_before_a_step_repeats_the_steps_before_the_restart_in_place(tmp_path: Path) -> None:
    """After that restart the ranks enter a section, and no step has begun when the launcher takes over."""
    told = interrupted(resumed=None)
    change(told, without_last_step)
    change(told, going_on_with(10))
    assert rework_s(told, tmp_path) == pytest.approx([10 * STEP_S] * 2, rel=1e-3)
    by_launcher = incidents_of(History().take_all(told.records))[-1]
    assert by_launcher.cost.lost_steps == 10
    assert by_launcher.cost.rework_s == pytest.approx(10 * STEP_S, rel=1e-3)


def test_steps_after_a_restart_in_place_of_unknown_step_are_repeated_at_the_speed_before_it(tmp_path: Path) -> None:
    told = interrupted(resumed=None)
    assert rework_s(told, tmp_path) == pytest.approx([REPEATED * STEP_S] * 2, rel=1e-3)
    assert incidents_of(History().take_all(told.records))[-1].cost.rework_s == pytest.approx(REPEATED * STEP_S)


def test_steps_repeated_in_place_at_unknown_speed_count_once_the_launcher_restarts(tmp_path: Path) -> None:
    """Records of an earlier version do not have the first step."""
    told = interrupted(resumed=15)
    change(told, without_first_step(0))
    assert rework_s(told, tmp_path) == pytest.approx([(5 + REPEATED) * LATER_S / (LAST_STEP - 15)] * 2, rel=1e-3)


def test_first_restart_in_place_of_a_cycle_does_not_say_with_which_step_the_cycle_began(tmp_path: Path) -> None:
    """Records of an earlier version do not have the first step."""
    told = interrupted(resumed=REACHED, cycle=1)
    change(told, without_first_step(1))
    assert rework_s(told, tmp_path) == [0.0, 0.0]
    by_launcher, _ = sorted(incidents_of(History().take_all(told.records)), key=lambda incident: incident.cycle)
    assert by_launcher.layer == "launcher" and by_launcher.has_unknown_rework


@pytest.mark.parametrize("kind", ["kill", "hang"])
def test_a_cycle_repeats_at_most_the_work_of_the_cycle_before(kind: launch_streams.Kind) -> None:
    """All steps are repeated. The last ones of the cycle took longer than the first ones."""
    told = interrupted(resumed=15, kind=kind)
    change(told, going_on_with(0))
    alone = Launched({key: [record for record in told.files[key] if record.origin.cycle == 0] for key in told.files})
    before, spent = (History().take_all(each.records).spent()[0] for each in (alone, told))
    assert spent.rework + spent.hang == before.work


def test_incident_of_a_lost_node_has_the_rework_of_the_ranks_that_stayed() -> None:
    """The launcher has stopped them. Those of the lost node repeat nothing: no rank has their place."""
    history = History().take_all(nested([launch_streams.Fault("node", 0)], nodes=2, has_steps=True).records)
    (incident,) = incidents_of(history)
    spent = times(history)
    assert incident.cost.lost_steps == REPEATED
    assert incident.cost.rework_s is not None and spent.rework_s is not None
    assert incident.cost.rework_s * 2 == pytest.approx(spent.rework_s * spent.ranks, rel=0.05)


def test_record_of_another_rank_does_not_say_how_far_a_rank_had_come(tmp_path: Path) -> None:
    """The monitor of rank 0 records that rank 1 had died, in step 12 of its function."""
    told = interrupted(resumed=15)
    expected = rework_s(told, tmp_path)
    own = [
        number
        for number, record in enumerate(told.files["node0", 0])
        if isinstance(record.event, events.RankInterrupted) and record.origin.cycle == 0
    ][-1]
    of_other = InterruptionRecord(1, Interruption.TERMINATED, iteration=1, node="node0", step=12)
    last = told.files["node0", 0][own]
    told.files["node0", 0].insert(own + 1, msgspec.structs.replace(last, event=events.RankInterrupted(of_other)))
    assert [of_rank.rework / 1e9 for of_rank in History().take_all(told.records).spent().values()] == expected
