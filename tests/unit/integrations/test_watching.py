"""What callbacks share: sections, when limits are calculated, what is kept, the finished flag."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from resilience.errors import ConfigurationError
from resilience.facts.limits import Limits
from resilience.integrations.stored_limits import FILE
from resilience.integrations.watching import CHECKPOINT, FEWEST_STEPS, SETUP, STEP, VALIDATION, Watching
from resilience.monitor import connect, messages
from resilience.monitor.page import MonitorSide, Page, RankSide
from resilience.monitor.rank_client import RankMonitorClient
from resilience.system import rank_reductions
from resilience.system.background import Writer
from resilience.system.channel import pair
from tests.unit.integrations.faking import FakeClient, no_answer_in_time


def made(folder: Path, *, autoresume: bool = False, calculate: bool = True) -> Watching:
    return Watching(autoresume, calculate, None, folder, "test")


def begun(folder: Path, **options: bool) -> Watching:
    one = made(folder, **options)
    one.begin(folder, rank=0, world_size=1)
    one.close(SETUP)
    return one


def steps(one: Watching, count: int = FEWEST_STEPS + 1, first: int = 0) -> None:
    for number in range(first, first + count):
        one.begin_step(number)
        one.end_step(number + 1)


def calculated() -> list[tuple[tuple[str, ...], bool]]:
    return FakeClient.made[-1].calculated


# -- sections -----------------------------------------------------------------------------------------


def test_training_begins_with_its_setup_and_leaves_nothing_open(told: list[str], tmp_path: Path) -> None:
    one = made(tmp_path)
    assert not one.is_initialized
    one.begin(tmp_path, 0, 1)
    assert one.is_initialized and one.has_begun
    one.begin_step(3)
    one.open(CHECKPOINT)
    one.end()
    assert told == ["init", "+setup", "-setup", "step 3", "+step", "+checkpoint", "!step", "!checkpoint", "shutdown"]
    one.end()
    assert told[-1] == "shutdown" and told.count("shutdown") == 1


def test_section_that_an_exception_leaves_gives_no_limit(told: list[str], tmp_path: Path) -> None:
    one = begun(tmp_path)
    with pytest.raises(OSError, match="disk"), one.section(CHECKPOINT):
        raise OSError("disk full")
    assert told[-3:] == ["+checkpoint", "!checkpoint", "beat"]
    steps(one)
    assert calculated() == [((STEP,), False)]


def test_section_that_is_called_off_gives_no_limit(told: list[str], tmp_path: Path) -> None:
    one = begun(tmp_path)
    one.discard(CHECKPOINT)  # it is not open
    one.open(CHECKPOINT)
    one.discard(CHECKPOINT)
    assert told[-2:] == ["+checkpoint", "!checkpoint"]
    steps(one)
    assert calculated() == [((STEP,), False)]


def test_discarded_section_is_in_the_page_as_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page, (ours, theirs) = Page.create(), pair()
    client = RankMonitorClient()
    client._link = connect.WorkerLink(RankSide(page), ours, messages.Welcome(rank=0, world_size=1, limits=Limits()))
    one = made(tmp_path)
    monkeypatch.setattr(one, "_client", client)
    one.open(STEP)
    one.close(STEP)
    with pytest.raises(OSError, match="disk"), one.section(CHECKPOINT):
        raise OSError("disk full")
    assert client._link.page.longest.keys() == {STEP}
    left, _ = MonitorSide(page).drain()
    assert [(entry.name, entry.failed) for entry in left if entry.name] == [(STEP, False), (CHECKPOINT, True)]
    ours.close()
    theirs.close()


def test_short_checkpoints_give_no_limit_to_whole_ones(told: list[str], tmp_path: Path) -> None:
    one = made(tmp_path)
    one.begin(tmp_path, 0, 1)
    with one.section(CHECKPOINT):  # such as the one that a search for the learning rate saves
        pass
    assert told == ["init", "+setup", "beat"]
    one.close(SETUP)
    with one.section(CHECKPOINT, is_whole=False):
        pass
    assert told[-3:] == ["+checkpoint", "-checkpoint", "beat"]
    steps(one)
    assert calculated() == [((STEP,), False)]


def test_name_that_the_program_uses_itself_does_not_stop_training(
    told: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    one = begun(tmp_path)
    FakeClient.refuses.add(CHECKPOINT)
    with one.section(CHECKPOINT):
        pass
    assert "+checkpoint" not in told and "-checkpoint" not in told
    assert "'checkpoint' is not watched" in caplog.text


def test_training_goes_on_unwatched_once_the_program_has_ended_the_monitoring(told: list[str], tmp_path: Path) -> None:
    one = begun(tmp_path)
    steps(one, 1)
    told.clear()
    FakeClient.made[-1].is_initialized = False  # by another client
    with one.section(CHECKPOINT):
        steps(one)
    assert not one.is_initialized
    assert [line for line in told if not line.startswith("step")] == []
    one.complete()


def test_limits_that_cannot_be_set_do_not_stop_training(
    told: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    one = begun(tmp_path)
    FakeClient.refuses.add("limits")
    steps(one)
    assert "calculated limits are not in force: the new limits have 70000 bytes" in caplog.text
    assert calculated() == [] and told[-1] == "beat"


def test_training_begun_again_is_a_new_one(told: list[str], tmp_path: Path) -> None:
    one = begun(tmp_path)
    one.begin_step(0)
    one.begin(tmp_path, 0, 1)
    assert told[-4:] == ["!step", "shutdown", "init", "+setup"]


def test_training_that_begins_while_another_one_is_set_up_has_the_monitor_to_itself(
    told: list[str], tmp_path: Path
) -> None:
    """Else the first one's setup would last, and end at its limit, while the second one trains."""
    first, second = made(tmp_path), made(tmp_path)
    first.begin(tmp_path, 0, 1)
    second.begin(tmp_path, 0, 1)
    assert told == ["init", "+setup", "!setup", "shutdown", "init", "+setup"]
    assert (first.has_begun, second.has_begun) == (False, True)
    first.begin(tmp_path, 0, 1)
    steps(first)
    first.complete()
    assert told[-1] == "shutdown"
    assert not second.has_begun


def test_training_that_loses_its_monitor_to_another_one_says_so(
    told: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = begun(tmp_path), made(tmp_path)
    steps(first, 1)
    second.begin(tmp_path, 0, 1)
    assert "this training is no longer watched: another one of its process has begun" in caplog.text
    assert not first.is_initialized and second.is_initialized


def test_training_that_lost_its_monitor_to_another_one_meets_the_other_ranks_at_its_end(
    told: list[str], tmp_path: Path, shared: list[dict[str, float]]
) -> None:
    """Only rank 0 may have begun another one, for an evaluation; the other ranks would wait for it."""
    first = begun(tmp_path)
    steps(first)
    made(tmp_path).begin(tmp_path, 0, 1)
    shared.clear()
    first.complete()
    assert [values["unwatched"] for values in shared] == [1.0]


def launched(monkeypatch: pytest.MonkeyPatch, folder: Path, rank: int, world_size: int) -> None:
    variables = {"RUN_FOLDER": folder, "JOB_ID": "job", "ATTEMPT": 0, "CYCLE": 0, "NODE": "host"}
    for name, value in variables.items():
        monkeypatch.setenv(f"RESILIENCE_{name}", str(value))
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("WORLD_SIZE", str(world_size))


def test_rank_0_says_once_that_the_launched_ranks_do_not_train_together(
    told: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Without a GPU, Lightning uses one device per process unless `devices` is set. To it, each rank is rank 0."""
    for rank in range(2):
        launched(monkeypatch, tmp_path, rank, 2)
        made(tmp_path).begin(tmp_path, rank=0, world_size=1)
    (warning,) = [each.getMessage() for each in caplog.records]
    assert "this training has 1 of the 2 ranks that the launcher started" in warning
    assert "docs/frameworks.md" in warning


def test_training_of_all_launched_ranks_gives_no_warning(
    told: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    launched(monkeypatch, tmp_path, 0, 2)
    made(tmp_path).begin(tmp_path, rank=0, world_size=2)
    assert not caplog.records


def test_without_launcher_nothing_is_watched_and_nothing_fails(
    told: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("RESILIENCE_MONITOR_SOCKET")
    one = begun(tmp_path)
    steps(one, 2)
    one.complete()
    made(tmp_path).begin(tmp_path, rank=1, world_size=2)
    assert told == ["step 0", "step 1", "step 2"]  # for a Wrapper
    assert not list(tmp_path.iterdir())
    (record,) = caplog.records  # of rank 0 alone, and shown by default
    assert record.levelno == logging.WARNING and "hangs are not detected" in record.message


def test_wrapper_without_a_launcher_is_shown_heartbeats_and_sections(
    told: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Under torchrun: its monitor detects hangs, so the callback does not warn that none does."""
    monkeypatch.delenv("RESILIENCE_MONITOR_SOCKET")
    page = Page.create()
    monkeypatch.setattr(connect, "wrapper_page", RankSide(page))
    monitor = MonitorSide(page)
    one = begun(tmp_path, calculate=False)
    with one.section(VALIDATION):
        one.beat()
        assert [section.name for section in monitor.read().open_sections] == [VALIDATION]
        assert monitor.read().heartbeat_at is not None
    with pytest.raises(OSError, match="disk"), one.section(CHECKPOINT):
        raise OSError("disk full")
    steps(one, 1)
    one.end()
    entries = [(entry.name, entry.failed) for entry in monitor.drain()[0] if entry.name]
    assert entries == [(SETUP, False), (VALIDATION, False), (CHECKPOINT, True), (STEP, False)]
    assert not one.is_initialized and not caplog.records
    begun(tmp_path)
    (record,) = caplog.records
    assert "no limits are calculated" in record.message


def test_section_that_the_program_has_opened_in_a_wrapper_does_not_stop_training(
    told: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("RESILIENCE_MONITOR_SOCKET")
    page = RankSide(Page.create())
    monkeypatch.setattr(connect, "wrapper_page", page)
    one = begun(tmp_path)
    page.enter(CHECKPOINT)
    with one.section(CHECKPOINT):
        pass
    assert "'checkpoint' is not watched" in caplog.text and page.open_sections == (CHECKPOINT,)


# -- limits -------------------------------------------------------------------------------------------


def test_steps_are_calculated_first_and_what_came_since_later(told: list[str], tmp_path: Path) -> None:
    one = begun(tmp_path)
    steps(one, FEWEST_STEPS)
    assert calculated() == []
    steps(one, 1, FEWEST_STEPS)
    assert calculated() == [((STEP,), False)]
    steps(one, 10, 11)
    assert len(calculated()) == 1  # nothing new was seen
    with one.section(CHECKPOINT):
        pass
    steps(one, 20, 21)
    assert calculated()[1:] == [((CHECKPOINT, STEP), False)]


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, float]]:
    """What the rank tells the other ranks; they have seen a checkpoint in a start that was resumed."""
    told_to_others: list[dict[str, float]] = []

    def over_ranks(values: dict[str, float]) -> dict[str, float]:
        told_to_others.append(values)
        others = {"new": 1.0, "resumed": 1.0, f"closed {CHECKPOINT}": 1.0, f"closed {SETUP}": 1.0}
        return {name: max(value, others.get(name, 0.0)) for name, value in values.items()}

    monkeypatch.setattr(rank_reductions, "over_ranks", over_ranks)
    return told_to_others


def test_ranks_meet_at_equal_steps_whatever_each_has_seen(
    told: list[str], tmp_path: Path, shared: list[dict[str, float]]
) -> None:
    """A save of rank 0 alone may not lead to a collective that the other ranks do not call."""
    at_steps: list[list[int]] = []
    for saves in (False, True):
        one, met = begun(tmp_path), list[int]()
        for number in range(4000):
            before = len(shared)
            steps(one, 1, number)
            met += [number] * (len(shared) - before)
            if saves and number % 3 == 0:
                with one.section(CHECKPOINT):
                    pass
        one.complete()
        at_steps.append(met)
    assert at_steps[0] == at_steps[1] == [10, 20, 40, 80, 160, 320, 640, 1280, 2280, 3280]
    assert len(shared) == 2 * 11
    assert {tuple(values) for values in shared} == {tuple(shared[0])}  # names that differ cost a broadcast


def test_rank_calculates_what_any_rank_has_seen(
    told: list[str], tmp_path: Path, shared: list[dict[str, float]]
) -> None:
    one = begun(tmp_path)
    steps(one)
    assert calculated() == [((CHECKPOINT, SETUP, STEP), False)]
    assert FakeClient.made[-1].calculated_heartbeats == 1


def test_parts_of_a_step_do_not_count_as_steps(told: list[str], tmp_path: Path) -> None:
    one = begun(tmp_path)
    for part in range(5 * FEWEST_STEPS):  # five parts accumulated into each
        one.begin_step(part // 5)
        one.end_step((part + 1) // 5)
    assert calculated() == []


def test_setup_and_heartbeats_are_calculated_in_a_training_that_was_resumed(told: list[str], tmp_path: Path) -> None:
    one = made(tmp_path)
    for is_resumed in (False, True):
        one.begin(tmp_path, 0, 1)
        one.is_resumed = is_resumed
        one.close(SETUP)
        steps(one)
        assert FakeClient.made[-1].calculated_heartbeats == 0  # no checkpoint was seen
        with one.section(CHECKPOINT):
            pass
        steps(one, 1, 20)
        assert (SETUP in calculated()[-1][0]) is is_resumed
        assert FakeClient.made[-1].calculated_heartbeats == is_resumed


@pytest.mark.parametrize("validates", [True, False])
def test_time_between_sections_is_calculated_once_an_epoch_has_turned(
    told: list[str], tmp_path: Path, validates: bool
) -> None:
    one = begun(tmp_path)
    one.validates = validates
    one.begin_epoch()
    with one.section(CHECKPOINT):
        pass
    steps(one)
    assert calculated() == [((CHECKPOINT, STEP), False)]
    one.begin_epoch()
    with one.section(CHECKPOINT):
        pass
    steps(one, 1, 20)
    assert calculated()[1:] == [((CHECKPOINT, STEP), not validates)]
    with one.section(VALIDATION):
        pass
    steps(one, 20, 21)
    assert calculated()[2:] == [((CHECKPOINT, STEP, VALIDATION), True)]


def test_limits_outside_of_sections_need_a_framework_that_reports_its_end(told: list[str], tmp_path: Path) -> None:
    one = Watching(False, True, None, tmp_path, "test", reports_its_end=False)
    one.begin(tmp_path, rank=0, world_size=1)
    one.is_resumed = True
    for _ in range(2):
        one.begin_epoch()
    one.close(SETUP)
    with one.section(CHECKPOINT):
        pass
    steps(one)
    one.complete()
    assert calculated() == [((CHECKPOINT, SETUP, STEP), False)] * 2
    assert FakeClient.made[-1].calculated_heartbeats == 0


def test_end_calculates_what_only_the_end_shows_and_leaves(told: list[str], tmp_path: Path) -> None:
    one = begun(tmp_path)
    one.begin_epoch()
    with one.section(CHECKPOINT):
        pass
    one.complete()
    assert calculated() == [((CHECKPOINT,), True)]
    assert told[-1] == "shutdown"
    assert json.loads((tmp_path / FILE).read_text())["limits"] == {"calculated": 1, "sections": [CHECKPOINT]}


def test_kept_limits_are_taken_up_by_the_next_start(told: list[str], tmp_path: Path) -> None:
    steps(begun(tmp_path))
    assert FakeClient.made[-1].loaded is None
    begun(tmp_path)
    assert FakeClient.made[-1].loaded == {"calculated": 1, "sections": [STEP]}


@pytest.fixture
def cycle(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Let the launcher start the workers again."""
    monkeypatch.setenv("RESILIENCE_JOB_ID", "job")
    return lambda number: monkeypatch.setenv("RESILIENCE_CYCLE", str(number))


def is_used() -> bool:
    return FakeClient.made[-1].loaded is not None


def start_with_limits(folder: Path) -> None:
    """Let a start calculate limits of a step and a checkpoint, and store them."""
    one = begun(folder)
    with one.section(CHECKPOINT):
        pass
    steps(one)
    assert not is_used() and calculated() == [((CHECKPOINT, STEP), False)]


def test_limits_that_may_have_ended_a_start_are_not_used_again(
    told: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture, cycle: Callable[[int], None]
) -> None:
    cycle(0)
    start_with_limits(tmp_path)
    cycle(1)
    one = begun(tmp_path)
    assert is_used()
    steps(one)  # and is ended in its first checkpoint
    late = made(tmp_path)
    late.begin(tmp_path, rank=1, world_size=1)  # it reads what rank 0 has noted
    assert is_used()
    cycle(2)
    for rank in (0, 1):
        made(tmp_path).begin(tmp_path, rank, world_size=1)
        assert not is_used()
    assert caplog.text.count("so they may be too short") == 1  # rank 0 says so
    steps(begun(tmp_path))  # calculates them again
    cycle(3)
    begun(tmp_path)
    assert is_used()


@pytest.mark.parametrize("is_finished", [True, False])
def test_limits_under_which_each_section_has_ended_are_used_again(
    told: list[str], tmp_path: Path, cycle: Callable[[int], None], is_finished: bool
) -> None:
    cycle(0)
    start_with_limits(tmp_path)
    cycle(1)
    one = begun(tmp_path)
    steps(one, 1)
    if is_finished:
        one.complete()
    else:
        with one.section(CHECKPOINT):
            pass
        steps(one)  # the ranks meet
    cycle(2)
    begun(tmp_path)
    assert is_used()


def test_limits_that_another_rank_has_not_lived_through_stay_on_trial(
    told: list[str], tmp_path: Path, cycle: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    cycle(0)
    start_with_limits(tmp_path)
    cycle(1)
    one = begun(tmp_path)
    with one.section(CHECKPOINT):
        pass
    monkeypatch.setattr(rank_reductions, "over_ranks", lambda values: {**values, "on trial": 1.0})
    steps(one)
    cycle(2)
    begun(tmp_path)
    assert not is_used()


def test_trial_of_limits_is_noted_before_they_apply_however_slow_the_disk_is(
    told: list[str], tmp_path: Path, cycle: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    cycle(0)
    start_with_limits(tmp_path)
    cycle(1)
    monkeypatch.setattr(Writer, "ask", no_answer_in_time)
    begun(tmp_path)
    assert is_used()
    cycle(2)
    begun(tmp_path)
    assert not is_used()


def test_limits_of_another_run_in_the_same_folder_are_not_used(
    told: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    start_with_limits(tmp_path)
    made(tmp_path).begin(tmp_path, rank=0, world_size=2)
    assert not is_used()
    assert "they are those of another run: world size '1' before, '2' now" in caplog.text
    monkeypatch.setenv("RESILIENCE_CALIBRATION_KEY", "other")
    begun(tmp_path)
    assert not is_used()
    monkeypatch.delenv("RESILIENCE_CALIBRATION_KEY")
    monkeypatch.setattr("sys.argv", [sys.argv[0], "--password", "mine"])
    begun(tmp_path)
    assert is_used()
    assert "mine" not in (tmp_path / FILE).read_text()


def test_limits_are_neither_calculated_nor_taken_up_unless_asked_for(told: list[str], tmp_path: Path) -> None:
    (tmp_path / FILE).write_text("{}")
    one = begun(tmp_path, calculate=False)
    steps(one)
    one.complete()
    assert calculated() == [] and FakeClient.made[-1].loaded is None


def test_broken_file_of_limits_is_reported_and_left_alone(
    told: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / FILE).write_text("{")
    assert begun(tmp_path).is_initialized
    assert "stored limits are not used" in caplog.text


def test_folder_that_cannot_be_read_does_not_end_the_training(
    told: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    one = begun(tmp_path / ("x" * 300))
    assert one.is_initialized and "stored limits are not used" in caplog.text
    steps(one)
    assert "not stored" in caplog.text


def test_folder_in_an_object_store_keeps_nothing(
    told: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    one = Watching(False, True, None, None, "test")
    one.begin("s3://bucket/run", 0, 1)
    steps(one)
    assert "not stored" in caplog.text and not list(tmp_path.iterdir())


def test_limits_are_in_the_default_folder_of_each_training(told: list[str], tmp_path: Path) -> None:
    one = Watching(False, True, None, None, "test")
    for folder in (tmp_path / "first", tmp_path / "second"):
        one.begin(folder, 0, 1)
        one.close(SETUP)
        assert not is_used()
        steps(one)
        one.complete()
        assert (folder / FILE).exists()


def test_only_rank_0_keeps(told: list[str], tmp_path: Path) -> None:
    one = made(tmp_path)
    one.begin(tmp_path, rank=1, world_size=2)
    steps(one)
    assert calculated() and not list(tmp_path.iterdir())


@pytest.mark.parametrize("is_here", [True, False])
def test_no_rank_calculates_while_one_is_not_watched(
    told: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_here: bool
) -> None:
    """All ranks take part in asking, or those that are watched would wait for the others."""
    asked: list[float] = []

    def over_ranks(values: dict[str, float]) -> dict[str, float]:
        asked.append(values["unwatched"])
        return {"unwatched": 1.0}

    monkeypatch.setattr(rank_reductions, "over_ranks", over_ranks)
    if is_here:
        FakeClient.refuses.add("attach")
    one = begun(tmp_path)
    assert one.is_initialized is not is_here
    steps(one)
    with one.section(CHECKPOINT):
        pass
    steps(one, 1, 20)
    one.complete()
    assert asked == [float(is_here)] * 3
    assert all(not each.calculated for each in FakeClient.made)


# -- the finished flag --------------------------------------------------------------------------------


def test_flag_is_written_by_rank_0_alone(told: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flag = tmp_path / "folder" / "finished"
    monkeypatch.setenv("FAULT_TOL_FINISHED_FLAG_FILE", str(flag))
    for rank in (1, 0):
        one = made(tmp_path, autoresume=True)
        one.begin(tmp_path, rank, 2)
        one.complete()
        one.write_finished_flag(ends_early=True)
        assert flag.exists() is (rank == 0)


@pytest.mark.usefixtures("told", "stop_requested")
@pytest.mark.parametrize("ends_early", [True, False])
def test_training_that_a_stop_of_the_job_ended_early_is_not_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends_early: bool
) -> None:
    flag = tmp_path / "finished"
    monkeypatch.setenv("FAULT_TOL_FINISHED_FLAG_FILE", str(flag))
    one = begun(tmp_path, autoresume=True)
    one.complete()
    monkeypatch.undo()  # after its end, the rank has no page
    monkeypatch.setenv("FAULT_TOL_FINISHED_FLAG_FILE", str(flag))
    one.write_finished_flag(ends_early)
    assert flag.exists() is not ends_early


@pytest.mark.usefixtures("told", "stop_requested")
def test_training_that_lost_its_monitor_and_stops_with_its_job_is_not_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flag = tmp_path / "finished"
    monkeypatch.setenv("FAULT_TOL_FINISHED_FLAG_FILE", str(flag))
    first = begun(tmp_path, autoresume=True)
    steps(first, 1)
    begun(tmp_path).end()  # an evaluation
    first.complete()
    first.write_finished_flag(ends_early=True)
    assert not flag.exists()


def test_flag_is_not_written_without_autoresume(
    told: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAULT_TOL_FINISHED_FLAG_FILE", str(tmp_path / "finished"))
    begun(tmp_path).write_finished_flag(ends_early=False)
    assert not list(tmp_path.iterdir())


def test_autoresume_without_a_place_for_the_flag_is_reported_at_once(told: list[str], tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="FAULT_TOL_FINISHED_FLAG_FILE is not set"):
        made(tmp_path, autoresume=True).begin(tmp_path, 0, 1)
    assert told == []


def test_callback_can_be_copied_before_it_is_used(tmp_path: Path) -> None:
    import pickle

    assert not pickle.loads(pickle.dumps(made(tmp_path))).has_begun


def test_what_it_does_is_logged_under_the_name_it_was_given(
    told: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "test"):
        steps(begun(tmp_path))
    assert {record.name for record in caplog.records} == {"test"}
    assert FILE not in caplog.text and "limits: " in caplog.text
