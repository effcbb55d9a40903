"""What a monitor sees of its rank becomes durations, each under the name of the limit that it is compared with."""

from __future__ import annotations

import threading
import time
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest

from resilience.core.observation import Doing
from resilience.core.watch import Finding
from resilience.facts.configuration import Configuration
from resilience.facts.deadlines import HEARTBEAT, OUT_OF_SECTION
from resilience.facts.identity import Job, Origin
from resilience.facts.limits import Learned
from resilience.facts.phases import Phases
from resilience.monitor.duration_recorder import DurationRecorder
from resilience.monitor.page import Closed, MonitorSide, OpenEntry, Page, PageView
from resilience.system import background
from resilience.system.background import WRITER
from resilience.telemetry import durations, single_durations
from resilience.telemetry.durations import Started, Value
from resilience.telemetry.recording import write_job

ORIGIN = Origin("job", "n", "monitor", 1, initial_rank=0, rank=0, world_size=1)
VIEW = MonitorSide(Page.create()).read()


@pytest.fixture(autouse=True)
def _host_that_has_been_up_for_hours(monkeypatch: pytest.MonkeyPatch) -> None:
    """These tests write down times of long ago. A host that has just started has no such times."""
    assert WRITER.flush(60.0)  # a write of the test before would seem to take hours
    real = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: real() + 36_000.0)


@pytest.fixture
def keeper(tmp_path: Path) -> DurationRecorder:
    made = DurationRecorder(tmp_path, ORIGIN)
    made.process_started(cycle=0)
    return made


def view(**changes: object) -> PageView:
    seen: PageView = msgspec.structs.replace(VIEW, **changes)
    return seen


def section(name: str, at: float, seconds: float) -> Closed:
    return Closed(name, seconds, at)


def beat(at: float, gap: float) -> Closed:
    return Closed("", gap, at)


def beginning(at: float, iteration: int) -> Closed:
    return Closed("", 0.0, at, begins=iteration)


def step(at: float, gap: float, rise: int = 1) -> Closed:
    return Closed("", gap, at, is_step=True, rise=rise)


def away(at: float, seconds: float | None = None) -> Closed:
    """The end of the function; or its next beginning, after some seconds that are left out."""
    return Closed("", seconds or 0.0, at, away="begins" if seconds is None else "ends")


def kept(keeper: DurationRecorder, folder: Path) -> list[tuple[str, float, str]]:
    """Return (deadline, seconds, end) of each occurrence, and the kinds of starts."""
    keeper.close()
    lines = [line for _, line in single_durations.read_values(folder / "timings" / "n-0.jsonl")]
    return [
        (line.section, round(line.s, 6), line.end) if isinstance(line, Value) else (line.how, line.cycle, "start")
        for line in lines
        if isinstance(line, Value | Started)
    ]


def test_each_kind_of_duration_has_its_name(keeper: DurationRecorder, tmp_path: Path) -> None:
    first = [step(1.0, 0.0), section("data", 1.0, 0.5), beat(2.0, 0.75)]
    keeper.take([*first, step(3.0, 2.0), section("data", 4.0, 1.0)], [])
    assert kept(keeper, tmp_path) == [
        ("cold", 0, "start"),
        ("data", 0.5, "ok"),
        ("heartbeat", 0.75, "ok"),
        ("step", 2.0, "ok"),
        ("data", 1.0, "ok"),
        ("out_of_section", 2.5, "ok"),
    ]


def test_what_another_monitor_records_is_counted_and_not_recorded_again(
    keeper: DurationRecorder, tmp_path: Path
) -> None:
    entries = [section("data", 1.0, 1.0), section("data", 3.0, 1.0), beat(5.0, 0.5), section("load", 6.0, 1.0)]
    keeper.take([msgspec.structs.replace(entry, is_copy=entry.name != "load") for entry in entries], [])
    assert (keeper.occurrences("data"), keeper.occurrences(HEARTBEAT)) == (2, 1)
    now = time.monotonic()
    keeper.cut(view(open_sections=(OpenEntry("data", now - 1.0, is_copy=True),)), None, 0.0)
    recorded = [(name, seconds) for name, seconds, _ in kept(keeper, tmp_path) if seconds]
    assert recorded == [("load", 1.0), (OUT_OF_SECTION, 2.0)]


def test_time_outside_sections_leaves_out_the_wait_in_it(keeper: DurationRecorder, tmp_path: Path) -> None:
    keeper.take([section("data", 1.0, 1.0), away(5.0), away(105.0, 100.0), section("data", 107.0, 1.0)], [])
    assert (OUT_OF_SECTION, 5.0, "ok") in kept(keeper, tmp_path)


def test_time_outside_sections_ends_with_the_function_if_a_hook_opens_the_next_one(
    keeper: DurationRecorder, tmp_path: Path
) -> None:
    keeper.take([section("data", 1.0, 1.0), away(5.0), section("save", 100.0, 1.0)], [], away_since=5.0)
    keeper.take([away(110.0, 105.0), section("data", 111.0, 1.0)], [])
    recorded = [seconds for name, seconds, _ in kept(keeper, tmp_path) if name == OUT_OF_SECTION]
    assert recorded == [3.0, 1.0]


def test_gap_within_a_section_over_a_wait_is_no_time_outside(keeper: DurationRecorder, tmp_path: Path) -> None:
    gaps = [section("data", 2.0, 1.0), section("data", 4.0, 1.0), away(10.0)]
    keeper.take(gaps, [OpenEntry("epoch", 1.0)], away_since=10.0)
    keeper.take([], [OpenEntry("epoch", 101.0)])  # the page shows the end of the wait a moment before the ring
    keeper.take([away(110.0, 100.0)], [OpenEntry("epoch", 101.0)])
    keeper.take([section("epoch", 101.0, 20.0)], [])
    assert OUT_OF_SECTION not in [name for name, *_ in kept(keeper, tmp_path)]


def test_last_gaps_of_a_function_that_ended_well_end_with_it(keeper: DurationRecorder, tmp_path: Path) -> None:
    keeper.take([step(1.0, 0.0)], [])
    keeper.ended_well(view(doing=Doing.OUTSIDE, since=100.0, away_since=3.0, step_at=1.0, heartbeat_at=2.0))
    assert {("step", 2.0, "ok"), (HEARTBEAT, 1.0, "ok")} <= set(kept(keeper, tmp_path))


def test_gaps_within_a_section_over_an_interruption_are_no_time_outside(
    keeper: DurationRecorder, tmp_path: Path
) -> None:
    interrupted = Closed("", 0.0, 10.0, away="interrupted")
    gaps = [section("data", 2.0, 1.0), section("data", 4.0, 1.0), interrupted, away(10.0)]
    keeper.take(gaps, [OpenEntry("epoch", 1.0)], away_since=10.0)
    keeper.take([away(110.0, 100.0)], [OpenEntry("epoch", 110.0)])  # it began anew
    assert [name for name, _, _ in kept(keeper, tmp_path) if name == "out_of_section"] == []


def test_section_of_a_rank_that_dies_in_a_wait_was_cut_at_its_beginning(
    keeper: DurationRecorder, tmp_path: Path
) -> None:
    now = time.monotonic()
    keeper.cut(view(open_sections=(OpenEntry("epoch", now - 100.0),), away_since=now - 90.0), None, 0.0)
    assert ("epoch", 10.0, "cut") in kept(keeper, tmp_path)


@pytest.mark.parametrize("is_beating_on", [False, True])
def test_first_heartbeat_is_timed_from_its_announcement_as_it_is_enforced(
    keeper: DurationRecorder, tmp_path: Path, is_beating_on: bool
) -> None:
    keeper.take([], [], announced=10.0, heartbeat_at=None)
    keeper.take([beat(17.0, 1.0)] if is_beating_on else [], [], announced=10.0, heartbeat_at=16.0)
    keeper.take([beat(18.0, 1.0)], [], announced=10.0, heartbeat_at=18.0)
    found = [row for row in kept(keeper, tmp_path) if row[0] == "initial_heartbeat"]
    assert found == [("initial_heartbeat", 6.0, "ok")]


def test_heartbeat_before_the_announcement_is_not_the_first_one(keeper: DurationRecorder, tmp_path: Path) -> None:
    keeper.take([], [], announced=10.0, heartbeat_at=2.0)
    keeper.take([beat(16.0, 14.0)], [], announced=10.0, heartbeat_at=16.0)
    keeper.take([beat(17.0, 1.0)], [], announced=10.0, heartbeat_at=17.0)
    found = [row for row in kept(keeper, tmp_path) if row[0] == "initial_heartbeat"]
    assert found == [("initial_heartbeat", 6.0, "ok")]


def test_sections_before_the_first_heartbeat_begin_its_time_anew(keeper: DurationRecorder, tmp_path: Path) -> None:
    keeper.take([section("load", 11.0, 3.0)], [OpenEntry("compile", 15.0)], announced=10.0, heartbeat_at=None)
    keeper.take([section("compile", 15.0, 5.0)], [], announced=10.0, heartbeat_at=17.0)
    assert ("initial_heartbeat", 2.0, "ok") in kept(keeper, tmp_path)


def test_occurrences_are_counted_from_the_start_that_they_belong_to(keeper: DurationRecorder, tmp_path: Path) -> None:
    keeper.take([section("data", 1.0, 0.5), section("data", 2.0, 0.5)], [])
    assert keeper.occurrences("data") == 2
    keeper.take([section("data", 3.0, 0.25), beginning(10.0, iteration=1)], [])
    assert (keeper.how, keeper.occurrences("data")) == ("iteration", 0)
    keeper.take([section("data", 11.0, 0.75)], [])
    assert keeper.occurrences("data") == 1
    rows = [row for row in kept(keeper, tmp_path) if row[0] != "out_of_section"]
    assert rows[-3:] == [("data", 0.25, "ok"), ("iteration", 0, "start"), ("data", 0.75, "ok")]


def gaps(keeper: DurationRecorder, folder: Path) -> list[float]:
    return [seconds for name, seconds, _ in kept(keeper, folder) if name == "out_of_section"]


@pytest.mark.parametrize("looks", [1, 4])
def test_time_outside_sections_ends_where_the_outermost_one_begins(
    keeper: DurationRecorder, tmp_path: Path, looks: int
) -> None:
    batches = [
        ([section("load", 0.0, 1.0)], []),
        ([section("inner", 8.0, 1.0)], [OpenEntry("epoch", 2.0)]),
        ([section("inner", 9.5, 0.25)], [OpenEntry("epoch", 2.0)]),
        ([section("epoch", 2.0, 8.0), section("save", 11.0, 1.0)], []),
    ]
    if looks == 1:
        batches = [([entry for closed, _ in batches for entry in closed], [])]
    for closed, still_open in batches:
        keeper.take(closed, still_open)
    assert gaps(keeper, tmp_path) == [1.0, 1.0]


@pytest.mark.parametrize("iteration", [-1, 0, 1])
def test_time_between_two_iterations_is_not_outside_sections(
    keeper: DurationRecorder, tmp_path: Path, iteration: int
) -> None:
    """A Wrapper's call, or a restart in place, lies between them. -1: the rank is back from a Wrapper's call."""
    keeper.take([section("data", 1.0, 0.5), beginning(60.0, iteration), section("data", 61.0, 0.5)], [])
    keeper.take([section("data", 62.0, 0.5)], [])
    rows = kept(keeper, tmp_path)
    assert [seconds for name, seconds, _ in rows if name == "out_of_section"] == [0.5]
    assert ("iteration", 0, "start") in rows[2:] or iteration < 1


def test_start_of_a_rank_is_cold_once_and_whenever_a_node_is_new(tmp_path: Path) -> None:
    for cycle, is_cold, how in ((0, None, "cold"), (1, None, "warm"), (2, True, "cold"), (3, False, "warm")):
        keeper = DurationRecorder(tmp_path, ORIGIN)
        keeper.process_started(cycle, is_cold)
        keeper.take([section("data", 1.0, 0.5)], [])
        assert keeper.how == how
        keeper.close()


def test_kill_is_kept_with_the_time_until_its_limit_fired(keeper: DurationRecorder, tmp_path: Path) -> None:
    now = time.monotonic()
    keeper.take([section("data", now - 100.0, 0.5)], [])
    left_open = view(open_sections=(OpenEntry("data", now - 30.0), OpenEntry("outer", now - 60.0)))
    keeper.cut(left_open, Finding("section:data", "hard", 2.0, 2.5), now - 20.0)
    *_, data, outer = kept(keeper, tmp_path)
    assert data == ("data", 2.5, "killed")
    assert (outer[0], outer[2]) == ("outer", "cut")


def test_section_in_which_a_silence_ended_the_rank_is_kept_from_its_beginning(
    keeper: DurationRecorder, tmp_path: Path
) -> None:
    now = time.monotonic()
    left_open = view(open_sections=(OpenEntry("train", now - 60.0),), step_at=now - 20.0)
    keeper.cut(left_open, Finding("silence:train", "hard", 15.0, 15.0), now - 5.0)
    assert kept(keeper, tmp_path)[1:] == [("train", 55.0, "killed")]


@pytest.mark.parametrize("limit", ["silence:load", "section:load"])
def test_section_that_was_entered_after_the_limit_fired_is_not_killed_but_cut(
    keeper: DurationRecorder, tmp_path: Path, limit: str
) -> None:
    """The program handles SIGTERM: its slow section ended well, and it entered the next one within the grace."""
    now = time.monotonic()
    keeper.take([section("load", now - 607.0, 605.0)], [])
    keeper.cut(view(open_sections=(OpenEntry("load", now - 2.0),)), Finding(limit, "hard", 600.0, 600.1), now - 5.0)
    (_, slow, (name, seconds, end)) = kept(keeper, tmp_path)
    assert slow == ("load", 605.0, "ok")
    assert (name, end) == ("load", "cut") and 2.0 <= float(seconds) < 600.0


def test_no_duration_is_negative(keeper: DurationRecorder, tmp_path: Path) -> None:
    keeper.cut(view(open_sections=(OpenEntry("load", time.monotonic() + 3600.0),)), None, 0.0)
    assert kept(keeper, tmp_path)[1:] == [("load", 0.0, "cut")]


@pytest.mark.parametrize("deadline", ["heartbeat", "step", "out_of_section", "initial_heartbeat"])
def test_kill_by_any_limit_is_kept_unless_the_rank_went_on(
    keeper: DurationRecorder, tmp_path: Path, deadline: str
) -> None:
    signs = {"heartbeat": "heartbeat_at", "step": "step_at", "out_of_section": "section_left_at"}
    at = {signs[deadline]: 98.0} if deadline in signs else {}
    keeper.cut(view(**at), Finding(deadline, "hard", 2.0, 2.0), 100.0)
    assert kept(keeper, tmp_path)[-1] == (deadline, 2.0, "killed")
    again = DurationRecorder(tmp_path, ORIGIN)
    again.process_started(cycle=1)
    went_on = {signs.get(deadline, "heartbeat_at"): 100.5}
    again.cut(view(**went_on), Finding(deadline, "hard", 2.0, 2.0), 100.0)
    assert len(kept(again, tmp_path)) == 2


def test_time_from_the_last_sign_to_the_end_of_a_program_that_ended_well_counts(
    keeper: DurationRecorder, tmp_path: Path
) -> None:
    keeper.ended_well(view(doing=Doing.ENDING, since=50.0, step_at=48.0, heartbeat_at=49.0, section_left_at=47.5))
    assert kept(keeper, tmp_path)[1:] == [
        ("step", 2.0, "ok"),
        ("heartbeat", 1.0, "ok"),
        ("out_of_section", 2.5, "ok"),
    ]


def test_section_left_open_at_the_end_is_not_outside_sections(keeper: DurationRecorder, tmp_path: Path) -> None:
    sections = (OpenEntry("train", 40.0),)
    keeper.ended_well(view(doing=Doing.ENDING, since=50.0, step_at=49.0, section_left_at=47.5, open_sections=sections))
    assert kept(keeper, tmp_path)[1:] == [("step", 1.0, "ok")]


def test_time_in_which_the_whole_node_stood_still_is_no_duration(keeper: DurationRecorder, tmp_path: Path) -> None:
    keeper.expect({"data": Learned(timeout_s=1.0, median_s=0.1, p99_s=0.2)}, {})
    keeper.take([section("data", 1.0, 0.1)], [])
    keeper.stood_still(10.0, 7210.0)
    keeper.take([section("data", 9.5, 7200.75), section("data", 7210.25, 0.1)], [])
    assert keeper.occurrences("data") == 3
    assert keeper.stale() == []
    rows = [row for row in kept(keeper, tmp_path) if row[0] == "data"]
    assert rows == [("data", 0.1, "ok"), ("data", 0.5, "cut"), ("data", 0.1, "ok")]
    recorded = durations.read_histograms(tmp_path / "timings" / "n-0.hist")
    assert recorded.deadlines["data"].total.max == 0.1


def test_what_a_rank_did_while_only_its_monitor_stood_still_counts(keeper: DurationRecorder, tmp_path: Path) -> None:
    keeper.stood_still(10.0, 70.0)
    keeper.take([step(5.0, 0.0), *(step(5.0 + 20.0 * n, 20.0) for n in range(1, 5))], [])
    assert [row for row in kept(keeper, tmp_path) if row[0] == "step"] == [("step", 20.0, "ok")] * 4


def test_short_standstill_cuts_off_only_what_lasted_for_most_of_it(keeper: DurationRecorder, tmp_path: Path) -> None:
    keeper.stood_still(10.0, 13.0)
    keeper.take([section("save", 5.0, 10.0), section("data", 9.875, 3.25)], [])
    assert kept(keeper, tmp_path)[1:] == [("save", 10.0, "ok"), ("data", 0.125, "cut")]


def test_section_of_a_rank_that_died_after_a_standstill_is_cut_off_there(
    keeper: DurationRecorder, tmp_path: Path
) -> None:
    now = time.monotonic()
    keeper.stood_still(now - 7200.0, now - 1.0)
    keeper.cut(view(open_sections=(OpenEntry("data", now - 7210.0),)), None, 0.0)
    assert kept(keeper, tmp_path)[1:] == [("data", 10.0, "cut")]


def test_occurrences_that_another_monitor_records_make_no_limit_stale(keeper: DurationRecorder) -> None:
    """It has their median, and judges."""
    keeper.expect({"data": Learned(timeout_s=1.0, median_s=0.1, p99_s=0.2)}, {})
    keeper.take([msgspec.structs.replace(section("data", 0.1 * n, 0.1), is_copy=True) for n in range(40)], [])
    assert keeper.stale() == []


def test_slow_first_occurrence_makes_no_limit_stale(keeper: DurationRecorder) -> None:
    keeper.expect({"data": Learned(timeout_s=1.0, median_s=0.1, p99_s=0.2, first=1)}, {})
    keeper.take([section("data", 1.0, 30.0), section("data", 40.0, 0.1)], [])
    assert keeper.stale() == []
    keeper.take([section("data", 41.0, 0.9)], [])
    ((name, _, fallback),) = keeper.stale()
    assert (name, fallback) == ("data", pytest.approx(4.5))


@pytest.mark.parametrize(
    ("numbers", "is_known"),
    [
        ((0, 1, 2, 3, 4), True),
        ((1, 2, 3, 4, 5), True),
        ((0, 10, 20, 30, 40), True),
        ((0, 10, 20, 23, 33), True),
        ((1, 10, 20, 30, 40), True),
        ((400, 401, 402, 403, 404), False),
        ((0, 5000, 5001, 5002, 5003), False),
        ((), False),
    ],
    ids=[
        "from 0",
        "from 1",
        "in tens",
        "ends of epochs",
        "1 and tens",
        "resumed",
        "resumed after a first sign",
        "no steps",
    ],
)
@pytest.mark.parametrize("looks", [1, 5])
def test_positions_without_a_phase_are_believed_if_the_steps_begin_at_the_beginning(
    keeper: DurationRecorder, tmp_path: Path, numbers: tuple[int, ...], is_known: bool, looks: int
) -> None:
    keeper.expect({"data": Learned(timeout_s=9.0, median_s=0.1, p99_s=0.2)}, {"data": Phases((), 50)})
    rises = [after - before for before, after in pairwise((-1, *numbers))]
    steps = [step(1.0 + n, float(n > 0), rise) for n, rise in enumerate(rises)]
    for n in range(looks):
        size = 5 // looks
        last = numbers[(n + 1) * size - 1] if numbers else None
        keeper.take([*steps[n * size : (n + 1) * size], section("data", 1.0 + n, 0.1)], [], step=last)
    assert keeper.aligned == (frozenset({"data"}) if is_known else frozenset())
    keeper.process_started(cycle=1)
    keeper.take([section("data", 9.0, 0.1)], [])
    assert keeper.aligned == frozenset()
    keeper.take([step(9.0, 0.0)], [], step=7000)  # after a warm start
    keeper.close()
    recorded = durations.read_histograms(tmp_path / "timings" / "n-0.hist").first_step
    assert recorded == (4999 if 5000 in numbers else next(iter(numbers), None))


def test_last_durations_wait_for_a_disk_that_is_slow_now(
    keeper: DurationRecorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_job(Job("job", configuration=Configuration(script="train.py")), tmp_path)
    keeper.take([section("data", 1.0, 0.5)], [])
    goes_on = threading.Event()
    with monkeypatch.context() as slow:
        slow.setattr(background, "STALL", 0.01)
        assert WRITER.submit(lambda: goes_on.wait(60.0))
        while not WRITER.is_stalled:
            time.sleep(0.01)
        threading.Timer(0.2, goes_on.set).start()
        keeper.close()
    recorded = durations.read_histograms(tmp_path / "timings" / "n-0.hist")
    assert recorded.deadlines["data"].total.count == 1
    assert recorded.header.configuration.script == "train.py"


def test_occurrence_near_the_limit_outside_phases_makes_it_stale(keeper: DurationRecorder) -> None:
    known = Learned(timeout_s=9.0, median_s=0.1, p99_s=0.2, outside_s=1.0)
    keeper.expect({"data": known}, {"data": Phases((), 2)})
    keeper.take([step(1.0, 0.0), section("data", 1.0, 0.6)], [], step=0)
    assert keeper.stale() == []
    keeper.take([section("data", 2.0, 0.7)], [], step=0)
    ((name, reason, fallback),) = keeper.stale()
    assert (name, fallback) == ("data", 9.0)
    assert reason == "a healthy occurrence took 0.7 s, 70% of the limit of 1 s outside known phases"


@pytest.mark.parametrize("positions", [(3,), ()])
def test_lost_occurrences_end_the_alignment_until_the_next_start(
    keeper: DurationRecorder, positions: tuple[int, ...]
) -> None:
    keeper.expect({"data": Learned(10.0, 0.1, 0.2)}, {"data": Phases(positions, 100)})
    keeper.process_started(0, is_cold=True)
    keeper.take([step(1.0, 0.0), *(section("data", 1.0 + i, 5.0 if i == 3 else 0.1) for i in range(10))], [], step=0)
    assert keeper.aligned == {"data"}
    keeper.entries_lost()
    keeper.take([section("data", 20.0 + i, 5.0 if i == 3 else 0.1) for i in range(10)], [], step=10)
    assert keeper.aligned == frozenset()
    keeper.process_started(1, is_cold=True)
    keeper.take([step(60.0, 0.0), *(section("data", 60.0 + i, 5.0 if i == 3 else 0.1) for i in range(10))], [], step=0)
    assert keeper.aligned == {"data"}


def test_stale_limit_is_raised_again_by_an_occurrence_near_it(keeper: DurationRecorder) -> None:
    keeper.expect({"data": Learned(timeout_s=1.0, median_s=0.1, p99_s=0.11)}, {})
    keeper.take([section("data", float(at), 0.13) for at in range(40)], [])
    ((_, reason, fallback),) = keeper.stale()
    assert (reason.split(" moved")[0], fallback) == ("the median", 1.0)
    raised = []
    for number, seconds in enumerate((0.6, 0.9, 0.9, 3.0, 3.5)):
        keeper.take([section("data", 50.0 + 10.0 * number, seconds)], [])
        raised.append([fallback for _, _, fallback in keeper.stale()])
    assert raised == [[], [4.5], [], [], [17.5]]


def test_occurrence_beyond_the_reach_of_a_short_limit_does_not_make_it_stale(keeper: DurationRecorder) -> None:
    known = Learned(timeout_s=9.0, median_s=0.1, p99_s=0.2, outside_s=1.0)
    keeper.expect({"data": known}, {"data": Phases((), 2)})
    keeper.take([step(1.0, 0.0), section("data", 1.0, 0.1), section("data", 2.0, 0.1)], [], step=0)
    keeper.take([section("data", 3.0, 0.7)], [], step=0)
    assert keeper.stale() == []


def test_phases_are_believed_while_each_comes_where_it_is_expected(keeper: DurationRecorder) -> None:
    keeper.expect({"data": Learned(timeout_s=9.0, median_s=0.1, p99_s=0.2)}, {"data": Phases((2, 4, 6), 50)})

    def take(*seconds: float) -> frozenset[str]:
        for each in seconds:
            keeper.take([section("data", 1.0, each)], [])
        return keeper.aligned

    assert take(0.1, 0.1) == frozenset()  # none has come yet
    assert take(0.9) == {"data"}
    assert take(0.1, 0.9) == {"data"}
    assert take(0.1, 0.1) == frozenset()  # one did not come: the job is elsewhere
    keeper.process_started(cycle=1)
    assert take(0.1, 0.1, 0.9) == {"data"}
    assert take(*[0.1] * 2) == frozenset()


@pytest.mark.parametrize(
    ("first", "rise", "is_known"),
    [(0, 1, True), (1, 1, True), (10, 10, True), (1000, 1, False), (1000, 10, False)],
    ids=["from 0", "from 1", "in tens", "resumed", "resumed in tens"],
)
def test_phases_are_not_believed_if_the_job_continues_from_a_checkpoint(
    keeper: DurationRecorder, first: int, rise: int, is_known: bool
) -> None:
    """Its evaluations are where they are expected, because it saved between two of them. Its other phases are not."""
    keeper.expect({"step": Learned(timeout_s=9.0, median_s=0.1, p99_s=0.2)}, {"step": Phases((2, 4, 6), 50)})
    keeper.take([step(1.0, 0.0)], [], step=first)
    for n, seconds in enumerate((0.1, 0.1, 0.9, 0.1, 0.9), 1):
        keeper.take([step(1.0 + n, seconds, rise)], [], step=first + n * rise)
    assert keeper.aligned == (frozenset({"step"}) if is_known else frozenset())
