"""What was recorded in run folders, and in tables, becomes the same limits. No duration is lost on the way."""

from __future__ import annotations

import math
import random
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec
import pytest

from resilience.calibrate import timings
from resilience.calibrate.held_out import backtest
from resilience.calibrate.limits import Target, calibrate
from resilience.calibrate.observed import pool_of
from resilience.calibration.limits_file import (
    Deadline,
    RankGroupLimit,
    SeenInJob,
    Timeouts,
    in_force,
    of_rank,
    staleness,
)
from resilience.errors import ConfigurationError
from resilience.facts.configuration import Configuration
from resilience.facts.deadlines import Start, first_name
from resilience.facts.limits import Limits
from resilience.system.background import WRITER
from resilience.telemetry import durations
from resilience.telemetry.durations import End, Header, Recorder
from resilience.telemetry.timings import RATIO

SOON = Target(false_alarms=200.0, horizon_s=600.0, min_timeout=0.001)
MONTHLY = Target(min_timeout=0.001)
CONFIGURATION = Configuration("train.py", world_size=1)


def record(
    folder: Path,
    starts: Iterable[tuple[Start, Sequence[float]]],
    *,
    rank: int = 0,
    node: str = "n",
    name: str = "train",
    launch: str = "",
    began: float = 1000.0,
    world: int = 1,
    first_step: int | None = None,
    cut: tuple[float, End] | None = None,
) -> Path:
    """Write what a monitor would have kept of these starts, one occurrence after the other; return the run folder. cut:
    seconds and end of a last occurrence that did not end by itself."""
    configuration = msgspec.structs.replace(CONFIGURATION, world_size=world)
    header = Header(folder.name, node, rank, world, configuration, launch or folder.name)
    recorder = Recorder(folder, header, began)
    at = began
    for cycle, (how, values) in enumerate(starts):
        recorder.started(how, at, cycle=cycle)
        for seconds in values:
            recorder.add(name, seconds, at)
            at += seconds
    if cut is not None:
        recorder.add(name, cut[0], at, cut[1])
    recorder.state.first_step = first_step
    recorder.close(at)
    return folder


def steps(n: int, seed: int, seconds: float = 0.1) -> list[float]:
    chance = random.Random(seed)
    return [seconds * math.exp(chance.gauss(0.0, 0.02)) for _ in range(n)]


def limits(*folders: Path, target: Target = SOON) -> Timeouts:
    return calibrate(timings.read(folders), target)


def test_evaluation_soon_after_the_start_is_not_dropped(tmp_path: Path) -> None:
    folders = []
    for seed in range(2):
        values = steps(400, seed)
        values[10] = 10.7
        folders.append(record(tmp_path / f"run{seed}", [("cold", values)]))
    found = limits(*folders).deadlines["train"]
    assert found.max_s == pytest.approx(10.7)
    assert found.timeout_s is not None and found.timeout_s > 10.7
    assert found.status == "provisional" and "twice only" in found.reason


def test_values_that_the_file_has_no_room_for_are_taken_from_the_histogram_and_it_says_so(tmp_path: Path) -> None:
    rising = [0.1 * 1.0005**i for i in range(12_000)]  # each one is larger than all before, and worth keeping
    folder = record(tmp_path / "run", [("cold", [*rising, 32.0])])
    state = durations.read_histograms(folder / "timings" / "n-0.hist")
    assert state.left_out > 0
    (observed,) = (run.deadlines["train"] for run in timings.read([folder]).runs)
    assert sum(observed.counts(0).values()) == pytest.approx(12_001, rel=0.001)
    assert max(observed.counts(0)) >= max(32.0, rising[-1]) * 0.999
    found = limits(folder).deadlines["train"]
    assert found.timeout_s is not None and found.timeout_s > found.max_s >= 32.0
    assert any("only from the histogram" in warning for warning in found.warnings)


def test_run_whose_files_lack_starts_or_occurrences_that_a_limit_ended_says_so(tmp_path: Path) -> None:
    notes = []
    for number in (3000, 7000):
        recorder = Recorder(tmp_path / f"{number}", Header(f"{number}", "n", 0, 1, CONFIGURATION, f"{number}"), 1000.0)
        recorder.started("cold", 1000.0)
        for i in range(number):
            recorder.add("a", 0.1, 1000.0 + i)
            recorder.add("a", 1.0, 1000.0 + i, "killed")
        recorder.close(9000.0)
        notes.append([note for note in timings.read([tmp_path / f"{number}"]).notes if "are full" in note])
    words = "files of single values are full, so 1034 later starts, or occurrences that did not end by themselves, are"
    assert notes == [[], [f"{tmp_path}/7000: {words} unknown"]]


def test_file_that_is_not_full_is_not_called_full(tmp_path: Path) -> None:
    values = steps(2000, 1)
    values[10] = values[20] = 10.0  # longer than 99 % of the first ones
    values[130:145] = [5.0] * 15  # not large at that time, but in the end
    folder = record(tmp_path / "run", [("cold", values)])
    (observed,) = (run.deadlines["train"] for run in timings.read([folder]).runs)
    assert sum(observed.missing.values()) == 15
    assert limits(folder).deadlines["train"].warnings == ()


def test_no_recorded_duration_is_lost_or_lies_above_its_limit(tmp_path: Path) -> None:
    chance = random.Random(7)
    usual_limits = 0
    for case in range(30):
        values = steps(chance.randint(40, 600), case)
        for _ in range(chance.randint(0, 5)):
            values[chance.randrange(len(values))] = chance.uniform(0.1, 50.0)
        cut = chance.randint(1, len(values))
        made = limits(record(tmp_path / f"run{case}", [("cold", values[:cut]), ("warm", values[cut:])])).deadlines
        longest = max(known.max_s for known in made.values())
        assert max(values) * (1.0 - 1e-8) <= longest <= max(values) * RATIO, f"case {case}"
        for known in made.values():
            assert known.timeout_s is None or known.max_s <= known.timeout_s, f"case {case}"
        usual_limits += made["train"].timeout_s is not None
    assert usual_limits >= 25


def test_first_occurrences_are_fitted_apart_by_their_start_and_never_shorter_than_usual(tmp_path: Path) -> None:
    folders = []
    for seed in range(2):
        usual = [4.0 if i % 7 == 0 else seconds for i, seconds in enumerate(steps(300, seed), 1)]
        starts: list[tuple[Start, list[float]]] = [("cold", [30.0, *usual]), ("warm", [0.5, *usual])]
        starts.append(("iteration", [0.15, *usual]))
        folders.append(record(tmp_path / f"run{seed}", starts))
    made = limits(*folders).deadlines
    assert made["train.first"].timeout_s == pytest.approx(150.0)
    usual_s = made["train"].timeout_s
    assert usual_s is not None and usual_s > 4.0
    for name in ("train.first.warm", "train.first.iteration"):
        assert usual_s <= (made[name].timeout_s or 0.0) < 30.0


@pytest.mark.parametrize("speeds", [(0.1,), (0.1, 0.1), (0.1, 0.2)], ids=["one rank", "like ranks", "unlike ranks"])
def test_slow_first_occurrences_do_not_lengthen_the_usual_limit_of_a_short_run_with_a_restart(
    tmp_path: Path, speeds: tuple[float, ...]
) -> None:
    """The longest of a hundred durations is one per cent of them, so only the histogram tells the large ones."""
    folders = [tmp_path / "run0", tmp_path / "run1"]
    for seed, folder in enumerate(folders):
        for rank, speed in enumerate(speeds):
            begun: list[tuple[Start, list[float]]] = [
                ("cold", [30.0, *steps(24, seed, speed)]),
                ("warm", [2.0, *steps(64, seed + 10, speed)]),
            ]
            record(folder, begun, rank=rank, world=len(speeds))
    assert not any(run.deadlines["train"].is_whole for run in timings.read(folders).runs)
    made = limits(*folders).deadlines
    assert made["train"].max_s < 0.25
    assert (made["train"].timeout_s or math.inf) < 1.25
    assert made["train.first"].timeout_s == pytest.approx(150.0)
    assert made["train.first.warm"].timeout_s == pytest.approx(10.0)


@pytest.mark.parametrize("again", ["cold", "warm"])
def test_slow_first_occurrence_after_one_that_did_not_end_by_itself_raises_the_limit(
    tmp_path: Path, again: Start
) -> None:
    """An exception left the second section of a start, and the program continued."""
    folders = [record(tmp_path / f"run{seed}", [("cold", [9.0, 8.0, 7.0, *steps(600, seed)])]) for seed in range(2)]
    folder = tmp_path / "ended"
    recorder = Recorder(folder, Header("ended", "n", 0, 1, CONFIGURATION, "ended"), 1000.0)
    for how in dict.fromkeys(("cold", again)):
        recorder.started(how, 1000.0, cycle=int(how == "warm"))
        recorder.add("train", 9.0, 1000.0)
        recorder.add("train", 0.05, 1009.0, "cut")
        for i, seconds in enumerate([300.0 if how == again else 7.0, *steps(600, 9)]):
            recorder.add("train", seconds, 1010.0 + i)
    recorder.close(3000.0)
    made = limits(*folders, folder).deadlines
    name = first_name("train", again)
    assert made["train"].max_s < 1.0
    assert made[name].max_s == 300.0 and made[name].timeout_s == pytest.approx(1500.0)


def test_slow_occurrence_of_the_warm_up_of_which_no_neighbour_was_kept_raises_the_limit(tmp_path: Path) -> None:
    """After a restart the first 16 are kept, and then only large ones. The warm-up of a cold start is longer here."""
    usual = steps(600, 1)
    warm = steps(600, 2)
    warm[18] = 300.0
    begun: list[tuple[Start, list[float]]] = [("cold", [*[5.0] * 20, *usual]), ("warm", warm)]
    made = limits(*(record(tmp_path / f"run{number}", begun) for number in range(2))).deadlines
    assert made["train.first"].occurrences == 20
    assert made["train.first.warm"].max_s == 300.0


def with_many_restarts(folder: Path, restarts: int, *, ranks: int = 1, last_s: float = 5.0) -> Path:
    """Write a run whose file of single values is full long before its end: four sections in turn, whose first
    occurrence after each start is slow. last_s: seconds of the first occurrences after the last start."""
    chance = random.Random(folder.name)
    for rank in range(ranks):
        recorder = Recorder(folder, Header(folder.name, "n", rank, ranks, CONFIGURATION, folder.name), 1000.0)
        at = 1000.0
        for cycle in range(restarts):
            recorder.started("warm" if cycle else "cold", at, cycle=cycle)
            first_s = last_s if cycle == restarts - 1 else 5.0
            for number in range(24):
                for section in "abcd":
                    seconds = (0.1 if number else first_s) * math.exp(chance.gauss(0.0, 0.02))
                    recorder.add(section, seconds, at)
                    at += seconds
            assert WRITER.flush(60.0)  # a full queue refuses values
        recorder.state.first_step = 0
        recorder.close(at)
    return folder


@pytest.mark.parametrize(("restarts", "ranks"), [(90, 1), (270, 1), (90, 2)])
def test_slow_first_occurrences_do_not_count_as_usual_if_the_value_file_is_full(
    tmp_path: Path, restarts: int, ranks: int
) -> None:
    made = limits(with_many_restarts(tmp_path / "run", restarts, ranks=ranks)).deadlines
    for section in "abcd":
        usual = made[section]
        assert usual.max_s < 0.13 and (usual.timeout_s or math.inf) < 0.5, section
        assert usual.n > 8 * (restarts - 1)  # all but the first 16 of each start, at least
        assert any("count neither as first nor as usual ones" in warning for warning in usual.warnings)
        assert made[f"{section}.first.warm"].max_s > 4.0
        assert usual.every_s == pytest.approx(made["a"].every_s, rel=0.1)
    seconds = sum(5.0 + 23 * 0.1 for _ in "abcd") * restarts
    assert made["a"].every_s == pytest.approx(seconds / (24 * restarts), rel=0.2)  # of all occurrences


def test_slow_early_occurrence_missing_from_a_full_file_raises_first_and_usual_limit(
    tmp_path: Path,
) -> None:
    """Its number is unknown: it may be a first occurrence or a usual one."""
    usual, slow = (
        limits(with_many_restarts(tmp_path / name, 90, last_s=last_s)).deadlines
        for name, last_s in (("usual", 5.0), ("slow", 500.0))
    )
    assert (usual["a"].timeout_s or math.inf) < 0.5 and not any("unknown" in each.reason for each in usual.values())
    for name in ("a", "a.first.warm"):
        assert (slow[name].timeout_s or 0.0) >= 1.5 * 450.0, name
        assert slow[name].status == "provisional"
        assert slow[name].expected_false_alarms_per_month.model_upper is None
    assert "whose number is unknown, took 5" in slow["a"].reason
    bounded = Target(max_timeout=300.0)
    made = limits(with_many_restarts(tmp_path / "bounded", 90, last_s=500.0), target=bounded).deadlines["a"]
    assert made.timeout_s == 300.0 and made.status == "provisional"
    assert any("which is above the limit" in warning for warning in made.warnings)


def test_slow_occurrence_whose_number_is_unknown_leaves_no_limit_outside_known_phases(tmp_path: Path) -> None:
    """It may have been outside them. The three runs began at the beginning and agree that there are no phases."""
    folders = [with_many_restarts(tmp_path / name, 90) for name in ("first", "second")]
    folders.append(with_many_restarts(tmp_path / "slow", 90, last_s=500.0))
    made = limits(*folders).deadlines["a"]
    assert "whose number is unknown" in made.reason and made.outside is None


def test_each_section_has_a_warm_up_of_its_own_length(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    record(folder, [("cold", [9.0, 8.0, 7.0, *steps(200, 1)])])
    record(folder, [("cold", [9.0, *steps(200, 2)])], name="other", rank=1)
    made = limits(folder).deadlines
    assert (made["train.first"].occurrences, made["other.first"].occurrences) == (3, 1)


def test_initial_heartbeat_has_a_limit_from_its_own_durations(tmp_path: Path) -> None:
    made = limits(record(tmp_path / "run", [("cold", [6.0]), ("warm", [2.0])], name="initial_heartbeat")).deadlines
    assert {name: known.timeout_s for name, known in made.items()} == {
        "initial_heartbeat": 30.0,
        "initial_heartbeat.warm": 10.0,
    }


def test_unlike_ranks_have_limits_of_their_own_and_none_is_stale_at_once(tmp_path: Path) -> None:
    folders = []
    for run in range(2):
        folder = tmp_path / f"run{run}"
        for rank, seconds in enumerate((0.1, 0.105, 0.4, 0.41)):
            record(folder, [("cold", steps(2000, 10 * run + rank, seconds))], rank=rank, world=4)
        folders.append(folder)
    found = limits(*folders)
    known = found.deadlines["train"]
    assert [group.ranks for group in known.groups] == ["0-1", "2-3"]
    fast, slow = (group.timeout_s or math.inf for group in known.groups)
    assert fast < 0.4 < slow <= (known.timeout_s or 0.0)
    enforced = in_force(found, Limits())
    for rank, median in enumerate((0.1, 0.105, 0.4, 0.41)):
        own = of_rank(enforced, rank, 4)
        assert own.sections["train"].hard == (fast, slow)[rank // 2]
        assert staleness(own.learned["train"], SeenInJob(2000, median, median, 0, 2000)) == ""
    assert of_rank(enforced, 0, None).sections["train"].hard == known.timeout_s
    assert of_rank(enforced, 0, 8).sections == {}
    assert calibrate(timings.read(folders), msgspec.structs.replace(SOON, ranks=8)).deadlines["train"].groups == ()


def test_only_an_ok_fit_lowers_the_limit_of_a_group_of_ranks(tmp_path: Path) -> None:
    def of_fast_ranks(name: str, fast: float, previous: Timeouts | None, target: Target = MONTHLY) -> Timeouts:
        folders = [tmp_path / f"{name}{run}" for run in range(2)]
        for run, folder in enumerate(folders):
            for rank, seconds in enumerate((fast, fast, 0.4)):
                record(folder, [("cold", steps(2000, 10 * run + rank, seconds))], rank=rank, world=3)
        return calibrate(timings.read(folders), target, previous)

    before = of_fast_ranks("before", 0.1, None)
    kept = of_fast_ranks("kept", 0.05, before)
    lowered = of_fast_ranks("lowered", 0.05, kept, SOON)
    (first, _), (second, _), (third, _) = (found.deadlines["train"].groups for found in (before, kept, lowered))
    assert (first.ranks, first.status, second.status, third.status) == ("0-1", "short", "short", "ok")
    assert first.timeout_s is not None and third.timeout_s is not None
    assert second.timeout_s == first.timeout_s > third.timeout_s
    (warning,) = kept.deadlines["train"].warnings
    assert warning.startswith("ranks 0-1: kept at 0.2") and "only an `ok` fit may lower a limit" in warning


@pytest.mark.parametrize(("killed", "seconds"), [(1, 0.2), (1, 30.0), (3, 0.8), (3, 30.0)])
def test_occurrence_of_one_group_that_a_limit_ended_raises_the_limit_of_that_group_only(
    tmp_path: Path, killed: int, seconds: float
) -> None:
    """The limit of its group rises to 1.5 times that time, and to five times its own longest healthy one at most."""
    paces = (0.1, 0.105, 0.4, 0.41)

    def of_groups(name: str, cut: tuple[float, End] | None) -> tuple[RankGroupLimit, ...]:
        folders = [tmp_path / f"{name}{run}" for run in range(2)]
        for run, folder in enumerate(folders):
            for rank, pace in enumerate(paces):
                of_rank = cut if (run, rank) == (1, killed) else None
                values = steps(2000, 10 * run + rank, pace)
                record(folder, [("cold", values)], rank=rank, world=len(paces), cut=of_rank)
        return limits(*folders).deadlines["train"].groups

    before, after = of_groups("plain", None), of_groups("killed", (seconds, "killed"))
    assert [group.ranks for group in after] == [group.ranks for group in before] == ["0-1", "2-3"]
    of_killed, of_others = killed // 2, 1 - killed // 2
    assert after[of_others] == before[of_others]
    raised = after[of_killed]
    assert raised.timeout_s == pytest.approx(min(1.5 * seconds, 5 * raised.max_s))
    assert (raised.timeout_s or 0.0) > 1.1 * (before[of_killed].timeout_s or math.inf)


def test_rank_with_few_durations_in_one_run_has_the_limit_of_all_ranks(tmp_path: Path) -> None:
    folders = [tmp_path / "run0", tmp_path / "run1"]
    for run, folder in enumerate(folders):
        for rank, seconds in enumerate((0.1, 0.4, 0.1)):
            n = 20 if (run, rank) == (1, 2) else 2000
            record(folder, [("cold", steps(n, 10 * run + rank, seconds))], rank=rank, world=3)
    found = limits(*folders)
    known = found.deadlines["train"]
    assert [group.ranks for group in known.groups] == ["0", "1"]
    enforced = in_force(found, Limits())
    own = [of_rank(enforced, rank, 3).sections["train"].hard for rank in range(3)]
    assert own == [*(group.timeout_s for group in known.groups), known.timeout_s]
    assert own[0] != known.timeout_s


@pytest.mark.parametrize("fast", [1, 3])
def test_durations_of_unlike_ranks_are_those_of_the_slowest(tmp_path: Path, fast: int) -> None:
    folders = []
    for run in range(2):
        folder = tmp_path / f"run{run}"
        for rank, seconds in enumerate((*[0.1] * fast, 0.4)):
            n = 600 + 20 * (run if rank < fast else 0)  # ranks end at different steps
            record(folder, [("cold", steps(n, 10 * run + rank, seconds))], rank=rank, world=fast + 1)
        folders.append(folder)
    known = limits(*folders).deadlines["train"]
    assert known.median_s == pytest.approx(0.4, rel=0.05)
    assert known.status == "ok" and [group.status for group in known.groups] == ["ok", "ok"]


@pytest.mark.parametrize("source", ["run", "t.csv"])
def test_like_ranks_whose_slowest_differs_each_time_are_not_stale(tmp_path: Path, source: str) -> None:
    chance = random.Random(3)
    rows = ["run,section,rank,i,seconds"]
    for rank in range(8):
        values = [0.1 * chance.lognormvariate(0.0, 0.3) for _ in range(2000)]
        record(tmp_path / "run", [("cold", values)], rank=rank, world=8)
        rows += [f"0,train,{rank},{i},{seconds!r}" for i, seconds in enumerate(values)]
    (tmp_path / "t.csv").write_text("\n".join(rows) + "\n")
    found = limits(tmp_path / source)
    assert found.deadlines["train"].groups == ()
    known = of_rank(in_force(found, Limits()), 0, 8).learned["train"]
    assert staleness(known, SeenInJob(2000, 0.2, 0.1, 0, 2000)) == ""


def with_evaluations(seed: int, n: int = 3000, at: Sequence[int] = (1000, 2000)) -> list[float]:
    values = steps(n, seed)
    for position in at:
        values[position] = 8.0
    return values


def test_evaluation_at_the_same_steps_of_all_runs_leaves_a_short_limit_elsewhere(tmp_path: Path) -> None:
    folders = [record(tmp_path / f"run{seed}", [("cold", with_evaluations(seed))]) for seed in range(3)]
    known = limits(*folders).deadlines["train"]
    assert known.outside is not None
    assert known.outside.phases.positions == (1000, 2000)
    assert known.outside.timeout_s < 0.5 < 8.0 < (known.timeout_s or 0.0)
    enforced = in_force(limits(*folders), Limits())
    assert enforced.outside["train"].limit.hard == known.outside.timeout_s
    assert in_force(limits(*folders), Limits(), is_equal=False).outside == {}


@pytest.mark.parametrize("n", [40, 140])
def test_three_short_runs_without_a_slow_position_leave_a_short_limit_as_far_as_they_came(
    tmp_path: Path, n: int
) -> None:
    folders = [
        record(tmp_path / f"run{seed}", [("cold", steps(n + seed, seed))], first_step=seed % 2) for seed in range(4)
    ]
    known = limits(*folders[:3], target=MONTHLY).deadlines["train"]
    assert (known.status, known.timeout_s) == ("provisional", pytest.approx(5 * known.max_s))
    assert known.outside is not None
    assert (known.outside.status, known.outside.phases.positions) == ("short", ())
    assert known.outside.phases.until == n + 1
    assert known.outside.timeout_s == pytest.approx(3 * known.outside.max_s)
    assert limits(*folders[:2], target=MONTHLY).deadlines["train"].outside is None
    (answer, *_) = [each for each in backtest(timings.read(folders).runs, MONTHLY).answers if each.deadline == "train"]
    assert answer.outside_s is not None and answer.outside_exposure >= n - 1 and answer.outside_exceeded == 0


def test_short_runs_of_which_one_was_slow_somewhere_leave_one_limit(tmp_path: Path) -> None:
    runs = [steps(40, seed) for seed in range(3)]
    runs[2][20] = 8.0
    folders = [
        record(tmp_path / f"run{number}", [("cold", values)], first_step=0) for number, values in enumerate(runs)
    ]
    assert limits(*folders, target=MONTHLY).deadlines["train"].outside is None


@pytest.mark.parametrize("first_step", [None, 400], ids=["no steps", "resumed"])
def test_short_runs_that_did_not_begin_at_the_beginning_leave_one_limit(tmp_path: Path, first_step: int | None) -> None:
    folders = [record(tmp_path / f"run{seed}", [("cold", steps(40, seed))], first_step=first_step) for seed in range(3)]
    assert limits(*folders, target=MONTHLY).deadlines["train"].outside is None


def test_evaluations_at_other_steps_of_each_run_leave_one_limit(tmp_path: Path) -> None:
    runs = [with_evaluations(seed, at=(900 + 37 * seed, 1800 + 53 * seed)) for seed in range(3)]
    folders = [record(tmp_path / f"run{number}", [("cold", values)]) for number, values in enumerate(runs)]
    assert limits(*folders).deadlines["train"].outside is None


def test_short_limit_that_a_run_does_not_bear_out_is_none(tmp_path: Path) -> None:
    runs = [with_evaluations(seed) for seed in range(3)]
    runs[2][1500] = 8.0
    folders = [record(tmp_path / f"run{number}", [("cold", values)]) for number, values in enumerate(runs)]
    assert limits(*folders).deadlines["train"].outside is None


def test_positions_of_a_table_and_of_folders_are_the_same(tmp_path: Path) -> None:
    runs = [[8.0, *with_evaluations(seed)] for seed in range(2)]
    folders = [record(tmp_path / f"run{number}", [("cold", values)]) for number, values in enumerate(runs)]
    of_folders = limits(*folders).deadlines["train"].outside
    of_table = limits(table(tmp_path / "t.csv", runs)).deadlines["train"].outside
    assert of_folders is not None and of_table is not None
    assert of_folders.phases.positions == of_table.phases.positions == (1001, 2001)
    assert of_folders.timeout_s == pytest.approx(of_table.timeout_s, rel=0.05)


@pytest.mark.parametrize("end", ["cut", "killed", "hang"])
def test_occurrences_of_a_table_that_did_not_end_by_themselves_leave_phases_where_they_are(
    tmp_path: Path, end: str
) -> None:
    runs = [[8.0, *with_evaluations(seed)] for seed in range(2)]
    whole = limits(table(tmp_path / "t.csv", runs)).deadlines["train"].outside
    ended = limits(table(tmp_path / "t.csv", runs, {(1, 300): end, (1, 700): end})).deadlines["train"].outside
    assert whole is not None and ended is not None
    assert ended.phases == whole.phases
    assert (whole.phases.positions, whole.phases.until) == ((1001, 2001), 3001)


def test_table_whose_numbers_are_those_of_every_tenth_step_has_the_same_limits(tmp_path: Path) -> None:
    path = table(tmp_path / "t.csv", [[8.0, *with_evaluations(seed)] for seed in range(2)])
    each = limits(path).deadlines
    path.write_text(re.sub(r"(?m)^([0-9]+,train,0,[0-9]+),", r"\g<1>0,", path.read_text()))
    assert limits(path).deadlines == each


def test_occurrences_that_did_not_end_by_themselves_count_alike_in_a_table_and_in_folders(tmp_path: Path) -> None:
    runs = [[9.0, 8.0, 7.0, *with_evaluations(seed)] for seed in range(3)]
    ended = {(1, 1): "cut", (2, 500): "cut"}
    of_table = limits(table(tmp_path / "t.csv", runs, ended)).deadlines
    folders = [tmp_path / f"run{number}" for number in range(3)]
    for number, (folder, values) in enumerate(zip(folders, runs, strict=True)):
        recorder, at = Recorder(folder, Header(folder.name, "n", 0, 1, CONFIGURATION, folder.name), 1000.0), 1000.0
        recorder.started("cold", at)
        for i, seconds in enumerate(values):
            recorder.add("train", seconds, at, "cut" if (number, i) in ended else "ok")
            at += seconds
        recorder.close(at)
    of_folders = limits(*folders).deadlines
    for name in ("train", "train.first"):
        assert of_table[name].n == of_folders[name].n
        assert of_table[name].timeout_s == pytest.approx(of_folders[name].timeout_s, rel=0.05)
    short, other = of_table["train"].outside, of_folders["train"].outside
    assert short is not None and other is not None
    assert short.phases.positions == other.phases.positions == (1003, 2003)


def test_folders_of_one_run_are_one_run(tmp_path: Path) -> None:
    first = record(tmp_path / "a" / "job", [("cold", steps(300, 1))], node="a", launch="one")
    second = record(tmp_path / "b" / "job", [("cold", steps(300, 2))], node="b", rank=1, launch="one")
    given = timings.read([first, second])
    assert [(run.name, run.ranks) for run in given.runs] == [("job", 2)]
    copy = tmp_path / "copy" / "job"
    shutil.copytree(first, copy)
    given = timings.read([first, copy, first])
    assert len(given.runs) == 1
    assert any("counts once" in note for note in given.notes)
    assert any("given twice" in note for note in given.notes)
    other = record(tmp_path / "c" / "job", [("cold", steps(300, 3))], launch="two")
    assert len(timings.read([first, other]).runs) == 2


def test_period_whose_median_is_lost_says_nothing_about_the_drift(tmp_path: Path) -> None:
    folder = record(tmp_path / "run", [("cold", steps(3000, 1))])
    (file,) = folder.glob("timings/*.hist")
    file.write_text(file.read_text().replace('"median"', '"lost"', 1))
    (run,) = timings.read([folder]).runs
    assert math.isfinite(run.deadlines["train"].drift)


@pytest.mark.parametrize("seconds", ["0.0", "-1.0"])
def test_file_without_an_observed_time_is_refused_by_its_name(tmp_path: Path, seconds: str) -> None:
    folder = record(tmp_path / "run", [("cold", steps(300, 1))])
    (file,) = folder.glob("timings/*.hist")
    file.write_text(re.sub(r'"seconds":[0-9.]+', f'"seconds":{seconds}', file.read_text()))
    with pytest.raises(ConfigurationError, match=f"{file}: damaged"):
        limits(folder)


def table(path: Path, runs: Sequence[Sequence[float]], ended: Mapping[tuple[int, int], str] = {}) -> Path:
    """Write these durations of one rank. ended: how single ones ended, by run and number; the others by themselves."""
    rows = [
        f"{run},train,0,{i},{seconds!r},{ended.get((run, i), 'ok')}"
        for run, values in enumerate(runs)
        for i, seconds in enumerate(values)
    ]
    path.write_text("\n".join(["run,section,rank,i,seconds,end", *rows]) + "\n")
    return path


@pytest.mark.parametrize(
    "runs",
    [
        [[8.0, *steps(3000, seed)] for seed in range(2)],
        [[8.0, *steps(3000, 5)], [8.0, *[1.2 * seconds for seconds in steps(3000, 6)]]],
        [[8.0, *(seconds * (1 + 0.3 * i / 3000) for i, seconds in enumerate(steps(3000, seed)))] for seed in range(2)],
        [[8.0, *steps(2990, 1), *[3.0] * 10]],
        [[8.0, *steps(3000, 2)], [8.0, *steps(2990, 3), *[3.0] * 10]],
        [[8.0, *steps(2000, seed), *[3.0] * 5, *steps(900, seed + 9), *[3.0] * 5] for seed in range(3)],
    ],
    ids=["alike", "runs differ", "drift", "rises at the end", "rises in the second run", "late phases in each run"],
)
def test_folder_and_table_give_the_same_answer_for_the_same_data(tmp_path: Path, runs: list[list[float]]) -> None:
    folders = [record(tmp_path / f"run{i}", [("cold", values)]) for i, values in enumerate(runs)]
    target = Target(false_alarms=200.0, horizon_s=6000.0, min_timeout=0.001)

    def answer(*paths: Path) -> Deadline:
        return limits(*paths, target=target).deadlines["train"]

    of_folder, of_table = answer(*folders), answer(table(tmp_path / "t.csv", runs))
    assert of_folder.status == of_table.status
    assert of_folder.reason.split(":")[0] == of_table.reason.split(":")[0]
    assert of_folder.timeout_s == pytest.approx(of_table.timeout_s, rel=0.05)


def test_folder_of_two_ranks_gives_no_shorter_limit_than_a_table_of_the_same_run(tmp_path: Path) -> None:
    """A table has the slowest rank of each occurrence, a folder all ranks' durations except for large ones."""
    folders, rows = [], ["run,section,rank,i,seconds"]
    for run in range(2):
        folder = tmp_path / f"run{run}"
        for rank in range(2):
            chance = random.Random(10 * run + rank)
            values = [8.0, *(0.1 * chance.lognormvariate(0.0, 0.3) for _ in range(3000))]
            record(folder, [("cold", values)], rank=rank, world=2)
            rows += [f"{run},train,{rank},{i},{seconds!r}" for i, seconds in enumerate(values)]
        folders.append(folder)
    path = tmp_path / "t.csv"
    path.write_text("\n".join(rows) + "\n")
    target = Target(false_alarms=200.0, horizon_s=86_400.0, min_timeout=0.001)
    of_folder, of_table = (limits(*paths, target=target).deadlines["train"] for paths in (folders, [path]))
    assert of_folder.n == of_table.n == 6000
    assert of_folder.status == of_table.status == "ok"
    assert of_folder.median_s < of_table.median_s
    assert of_folder.timeout_s is not None and of_table.timeout_s is not None
    assert 0.999 * of_table.timeout_s < of_folder.timeout_s < 1.2 * of_table.timeout_s


@pytest.mark.parametrize("first", [0, 5000])
def test_table_that_begins_late_has_no_short_limit_from_the_beginning(tmp_path: Path, first: int) -> None:
    path = tmp_path / "t.csv"
    rows = [f"{run},train,0,{first + i},{s!r}" for run in range(3) for i, s in enumerate(steps(120, run, 2.0))]
    path.write_text("\n".join(["run,section,rank,i,seconds", *rows]) + "\n")
    assert (limits(path, target=MONTHLY).deadlines["train"].outside is not None) == (first == 0)


def test_files_of_single_values_that_are_lost_are_noted_and_give_no_rate(tmp_path: Path) -> None:
    folders = []
    for seed in range(2):
        values = steps(8000, seed)
        values[3000:3020] = [0.5] * 20
        folders.append(record(tmp_path / f"run{seed}", [("cold", values)]))
        for file in (tmp_path / f"run{seed}" / "timings").glob("*.jsonl"):
            file.unlink()
    observed = timings.read(folders)
    assert sum(note.endswith("are unknown") for note in observed.notes) == 2
    assert calibrate(observed, SOON).deadlines["train"].status == "provisional"


def test_ranks_without_timings_are_noted_and_the_rate_is_that_of_all_ranks(tmp_path: Path) -> None:
    some = tmp_path / "some"
    for rank in range(2):
        record(some, [("cold", steps(5000, rank))], rank=rank, world=4)
    (some / "timings" / "n-2.hist.unreadable").write_text("{")
    observed = timings.read([some])
    assert any("2 of 4 ranks have timings" in note for note in observed.notes)
    assert any("n-2.hist.unreadable was damaged" in note for note in observed.notes)
    (run,) = observed.runs
    found = calibrate(observed, SOON)
    assert (run.ranks, found.ranks, found.observed_world) == (2, 4, 4)
    assert in_force(found, Limits()).worlds == (4, 4)  # 2 ranks may need twice as long for the same batch


def test_table_beside_timings_files_is_named_as_not_read(tmp_path: Path) -> None:
    folder = record(tmp_path / "run", [("cold", steps(300, 1))])
    table(folder / "timings" / "t.csv", [steps(300, 2)])
    assert any("t.csv is not read" in note for note in timings.read([folder]).notes)


def test_clock_that_was_set_back_costs_no_run(tmp_path: Path) -> None:
    header = Header("run", "n", 0, 1, CONFIGURATION, "run")
    recorder = Recorder(tmp_path / "run", header, 10_000.0)
    recorder.started("cold", 10_000.0)
    for seconds in steps(3000, 1):
        recorder.add("train", seconds, 3000.0)
    recorder.close(3000.0)
    (run,) = timings.read([tmp_path / "run"]).runs
    assert run.seconds == pytest.approx(300.0, rel=0.05)


def test_short_limit_that_is_capped_is_provisional(tmp_path: Path) -> None:
    folders = [record(tmp_path / f"run{seed}", [("cold", steps(700, seed))]) for seed in range(2)]
    assert limits(*folders, target=MONTHLY).deadlines["train"].status == "short"
    capped = limits(*folders, target=msgspec.structs.replace(MONTHLY, max_timeout=0.15)).deadlines["train"]
    assert capped.status == "provisional"


def test_one_episode_of_stalls_in_a_recorded_run_is_one_event(tmp_path: Path) -> None:
    folders = []
    for seed in range(2):
        values = steps(8000, seed)
        if seed == 0:
            values[3000:3020] = [0.5] * 20
        folders.append(record(tmp_path / f"run{seed}", [("cold", values)]))
    found = limits(*folders).deadlines["train"]
    assert found.status == "provisional"
    assert "seen once only, 20 occurrences in a row" in found.reason


def test_backtest_tests_everything_that_was_recorded(tmp_path: Path) -> None:
    folders = [record(tmp_path / f"run{seed}", [("cold", steps(5000, seed))]) for seed in range(2)]
    test = backtest(timings.read(folders).runs, SOON)
    assert test.tested == test.recorded == pytest.approx(10_000, rel=0.001)
    assert [each.exceeded for each in test.answers] == [0, 0]
    alone = backtest(timings.read(folders[:1]).runs, SOON)
    assert (alone.tested, alone.answers) == (0, [])
    assert "give a second run" in alone.untested["train"]


def moved(folder: Path, starts: Iterable[tuple[str, Sequence[float]]], rank: int = 0) -> Path:
    """Write the occurrences of a rank that starts on this node in each cycle; return the run folder."""
    configuration = msgspec.structs.replace(CONFIGURATION, world_size=2)
    at, began = 1000.0, 0
    for cycle, (node, values) in enumerate(starts):
        recorder = Recorder(folder, Header(folder.name, node, rank, 2, configuration, "one launch"), at)
        recorder.started("warm" if cycle else "cold", at, cycle=cycle)
        if recorder.state.first_step is None:
            recorder.state.first_step = began
        for seconds in values:
            recorder.add("train", seconds, at)
            at += seconds
        began += len(values)
        recorder.close(at)
    return folder


def test_rank_that_moves_between_nodes_has_all_its_occurrences(tmp_path: Path) -> None:
    kept = moved(tmp_path / "few", [(node, steps(60, number)) for number, node in enumerate(("n0", "n1", "n2"))])
    (run,) = timings.read([kept]).runs
    assert run.deadlines["train"].n == 180 and run.deadlines["train"].is_whole  # each node keeps that many
    folder = moved(tmp_path / "run", [(node, steps(150, number)) for number, node in enumerate(("n0", "n1", "n2"))])
    (run,) = timings.read([folder]).runs
    known = run.deadlines["train"]
    assert known.n == 450 and not known.is_whole
    assert sum(known.counts(0).values()) == pytest.approx(450, rel=0.01)
    assert (run.ranks, run.world_size) == (1, 2)


def test_rank_that_moves_away_and_back_is_observed_for_as_long_as_the_run(tmp_path: Path) -> None:
    for rank in range(2):
        starts = [(node, [0.1] * 100) for node in ("n0", "n1", "n0")]
        moved(tmp_path / "run", starts if rank else [("n9", [0.1] * 300)], rank)
    (run,) = timings.read([tmp_path / "run"]).runs
    assert run.seconds == pytest.approx(30.0)
    assert (run.deadlines["train"].n, run.ranks) == (300, 2)


def test_rank_that_moves_between_nodes_stays_in_its_group(tmp_path: Path) -> None:
    for run in range(2):
        for rank, seconds in enumerate((0.1, 0.4)):
            values = steps(2000, 10 * run + rank, seconds)
            moved(tmp_path / f"run{run}", [("n0", values[:1000]), (f"n{run}", values[1000:])], rank)
    given = timings.read([tmp_path / "run0", tmp_path / "run1"])
    assert [sorted(run.groups["train"]) for run in given.runs] == [["0", "1"], ["0", "1"]]
    assert [group.n for run in given.runs for group in run.groups["train"].values()] == [2000] * 4


def killed_at(folder: Path, starts: Sequence[Start], values: Sequence[float], seconds: float) -> Path:
    """Write a run of which a limit ended the next occurrence after the last of these starts."""
    recorder = Recorder(folder, Header(folder.name, "n", 0, 1, CONFIGURATION, folder.name), 1000.0)
    for cycle, how in enumerate(starts):
        recorder.started(how, 1000.0, cycle=cycle)
        for number, value in enumerate(values if cycle < len(starts) - 1 else ()):
            recorder.add("train", value, 1000.0 + number)
    recorder.add("train", seconds, 2000.0, "killed")
    recorder.close(2000.0 + seconds)
    return folder


@pytest.mark.parametrize(("starts", "name"), [(["cold"], "train.first"), (["cold", "warm"], "train.first.warm")])
def test_first_occurrence_that_a_limit_ended_leaves_the_usual_limit_alone(
    tmp_path: Path, starts: list[Start], name: str
) -> None:
    values = [0.3, *steps(600, 1)]
    folders = [record(tmp_path / f"run{i}", [("cold", values), ("warm", values)]) for i in range(2)]
    before = limits(*folders, target=MONTHLY).deadlines
    killed = killed_at(tmp_path / "killed", starts, values, 1.2)
    after = limits(*folders, killed, target=MONTHLY).deadlines
    assert (after["train"].warnings, after["train"].timeout_s) == ((), before["train"].timeout_s)
    assert [key for key, known in after.items() if known.warnings] == [name]
    assert "a limit ended 1 occurrence after " in after[name].warnings[0]


def test_occurrence_ended_by_a_limit_outside_phases_raises_it_within_a_bound(
    tmp_path: Path,
) -> None:
    """Otherwise a limit outside phases that is too short would confirm itself."""
    folders = [record(tmp_path / f"run{seed}", [("cold", with_evaluations(seed))]) for seed in range(3)]
    short = limits(*folders).deadlines["train"].outside
    assert short is not None and short.timeout_s < 0.45 and short.warnings == ()
    for name, seconds in (("near", 0.32), ("far", 30.0)):
        folder = record(tmp_path / name, [("cold", steps(500, 7))], cut=(seconds, "killed"))
        raised = limits(*folders, folder).deadlines["train"].outside
        assert raised is not None and raised.phases.positions == (1000, 2000)
        assert raised.timeout_s == pytest.approx(min(1.5 * seconds, 5 * raised.max_s))
        assert raised.timeout_s > short.timeout_s
        assert f"1 occurrence after {seconds:g} s" in raised.warnings[0]
        assert "it raises the limit" in raised.warnings[0]


@pytest.mark.parametrize(
    ("starts", "n", "end"),
    [
        (["cold"], 1001, "killed"),
        (["cold", "warm"], 500, "killed"),
        (["cold"], 3500, "killed"),
        (["cold"], 500, "hang"),
    ],
    ids=["in a phase", "after a warm start", "beyond the reach", "a hang"],
)
def test_occurrence_that_ended_where_the_limit_outside_phases_does_not_hold_leaves_it_alone(
    tmp_path: Path, starts: list[Start], n: int, end: End
) -> None:
    folders = [record(tmp_path / f"run{seed}", [("cold", with_evaluations(seed))]) for seed in range(3)]
    values = with_evaluations(7, 3500)[:n]
    before, after = (
        limits(*folders, record(tmp_path / name, [(how, values) for how in starts], cut=cut)).deadlines["train"].outside
        for name, cut in (("plain", None), ("cut", (30.0, end)))
    )
    assert before is not None and after is not None
    assert msgspec.structs.replace(after, warnings=()) == before
    assert bool(after.warnings) == (end == "hang")  # that it is left out


@pytest.mark.parametrize("ranks", [1, 40])
def test_occurrence_that_a_restart_cut_off_counts_once_for_all_ranks(tmp_path: Path, ranks: int) -> None:
    lines = ["run,section,rank,i,seconds,end"]
    for run in range(2):
        durations_of_run = steps(400, run)
        lines += [f"{run},train,0,{i},{seconds},ok" for i, seconds in enumerate(durations_of_run)]
        for cut in range(400, 440):
            lines += [f"{run},train,{rank},{cut},{0.05 + rank / 1000},cut" for rank in range(ranks)]
        lines += [f"{run},train,{rank},3,0.01,cut" for rank in range(1, ranks)]  # rank 0 ended this one
    (tmp_path / "t.csv").write_text("\n".join(lines) + "\n")
    made = limits(tmp_path / "t.csv").deadlines["train"]
    assert (made.n, made.censored) == (2 * 399 + 80, 80)
    folders = [tmp_path / f"run{run}" for run in range(2)]
    for run, folder in enumerate(folders):
        for rank in range(ranks):
            starts = [("cold" if number == 0 else "warm", steps(10, 40 * run + number)) for number in range(40)]
            record(folder, starts, rank=rank, world=ranks, cut=(0.05, "cut"))  # type: ignore[arg-type]
    recorded = limits(*folders).deadlines["train"]
    assert recorded.censored == 2 and recorded.n <= 2 * (40 * 10 + 1)


@pytest.mark.parametrize(("end", "seconds"), [("killed", 60.0), ("cut", 60.0), ("hang", 600.0)])
def test_first_occurrence_that_never_ended_by_itself_is_not_held_to_the_usual_limit(
    tmp_path: Path, end: str, seconds: float
) -> None:
    lines = ["run,section,rank,i,seconds,end"]
    for run in range(2):
        lines.append(f"{run},step,0,0,{seconds},{end}")
        lines += [f"{run},step,0,{i},{value},ok" for i, value in enumerate(steps(3000, run), 1)]
    (tmp_path / "t.csv").write_text("\n".join(lines) + "\n")
    made = limits(tmp_path / "t.csv")
    usual, first = made.deadlines["step"], made.deadlines["step.first"]
    assert usual.timeout_s is not None and usual.timeout_s < 1.0
    assert (first.timeout_s, first.status) == ((90.0, "provisional") if end == "killed" else (None, "insufficient"))
    enforced = in_force(made, Limits())
    assert enforced.first["step"].occurrences == 1
    assert {limit.hard for limit in enforced.first["step"].limits.values()} == {first.timeout_s}
    assert ("a limit ended 2 occurrences, the longest after 60 s" in " ".join(first.warnings)) == (end == "killed")
    earlier = Timeouts(made.schema, made.configuration, "", 1.0, 1e6, 1, {"step.first": msgspec.structs.replace(first)})
    kept = calibrate(timings.read([tmp_path / "t.csv"]), SOON, earlier).deadlines["step.first"]
    assert kept.timeout_s == first.timeout_s


def test_cold_start_that_a_limit_ended_has_a_longer_limit_than_the_warm_one_after_it(tmp_path: Path) -> None:
    folders = []
    for run in range(2):
        folder = tmp_path / f"run{run}"
        recorder = Recorder(folder, Header(folder.name, "n", 0, 1, CONFIGURATION, folder.name), 1000.0)
        recorder.started("cold", 1000.0)
        recorder.add("step", 50.0, 1000.0, "killed")
        recorder.started("warm", 1060.0, cycle=1)
        for i, seconds in enumerate([3.0, *steps(3000, run)]):
            recorder.add("step", seconds, 1060.0 + i)
        recorder.close(5000.0)
        folders.append(folder)
    enforced = in_force(limits(*folders), Limits()).first["step"].limits
    assert [enforced[how].hard for how in ("cold", "warm")] == [75.0, pytest.approx(15.0)]


@pytest.mark.parametrize(("lasted", "limit"), [(0.5, 15.0), (20.0, None)])
def test_start_that_was_cut_has_the_longest_limit_of_other_starts_unless_it_lasted_longer(
    tmp_path: Path, lasted: float, limit: float | None
) -> None:
    folder = tmp_path / "run"
    recorder = Recorder(folder, Header("run", "n", 0, 1, CONFIGURATION, "run"), 1000.0)
    recorder.started("cold", 1000.0)
    for i, seconds in enumerate([3.0, *steps(3000, 1)]):
        recorder.add("step", seconds, 1000.0 + i)
    recorder.started("warm", 5000.0, cycle=1)
    recorder.add("step", lasted, 5000.0, "cut")
    recorder.close(6000.0)
    made = limits(folder)
    assert ("step.first.warm" in made.deadlines) == (limit is None)
    enforced = in_force(made, Limits()).first["step"].limits
    assert enforced["cold"].hard == pytest.approx(15.0)
    assert enforced["warm"].hard == (None if limit is None else pytest.approx(limit))


def test_section_of_a_table_may_have_any_name(tmp_path: Path) -> None:
    lines = ["run,section,rank,i,seconds"]
    lines += [f"0,{name},0,{i},0.5" for name in ("NAME", "step.first", "section:x:", "step") for i in range(40)]
    (tmp_path / "t.csv").write_text("\n".join(lines) + "\n")
    made = limits(tmp_path / "t.csv")
    enforced = in_force(made, Limits())
    assert enforced.sections.keys() == {"NAME", "step.first", "x"} and enforced.step.hard is not None


def test_first_occurrence_of_a_table_that_a_limit_ended_is_one_of_the_first(tmp_path: Path) -> None:
    rows = [f"{run},train,0,{i},{s!r},ok" for run in range(2) for i, s in enumerate([0.3, *steps(600, run)])]
    for number, name in ((0, "train.first"), (300, "train")):
        path = tmp_path / "t.csv"
        path.write_text("\n".join(["run,section,rank,i,seconds,end", f"2,train,0,{number},1.2,killed", *rows]) + "\n")
        rows_of_third = [f"2,train,0,{i},{s!r},ok" for i, s in enumerate(steps(300, 9), 1) if i != number]
        path.write_text(path.read_text() + "\n".join(rows_of_third) + "\n")
        made = limits(path, target=MONTHLY).deadlines
        assert [key for key, known in made.items() if known.warnings] == [name]


def test_second_call_of_a_wrapped_function_is_another_start(tmp_path: Path) -> None:
    """Its iterations are counted from 0 again."""
    recorder, at = Recorder(tmp_path, Header("job", "node", 0, 1), at=1e9), 1e9
    for call in range(2):
        recorder.started("warm" if call else "cold", at, 0, 0)
        for step in range(2000):
            seconds = 0.1 if step % 40 else 5.1 + call / 10_000 + step / 1000
            recorder.add("step", seconds, at)
            at += seconds
    recorder.close(at)
    (observed,) = timings.read([tmp_path]).runs[0].deadlines.values()
    assert ([start.how for start in observed.starts], observed.n) == (["cold", "warm"], 4000)
    long_ones = sum(count for seconds, count in pool_of([observed], 5).descending if seconds > 5.0)
    assert long_ones == 100 - 2  # without the first one of each call


@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_no_occurrence_is_lost_or_counted_twice_with_any_number_of_ranks(tmp_path: Path, world: int) -> None:
    chance = random.Random(world)
    for rank in range(world):
        values = [2.0 * chance.lognormvariate(0.0, 0.5) for _ in range(600)]
        record(tmp_path / "run", [("cold", values)], rank=rank, world=world)
    (run,) = timings.read([tmp_path / "run"]).runs
    assert [run.deadlines["train"].counts(first).total() for first in (0, 1, 50)] == [600, 599, 550]


def test_large_durations_that_no_file_kept_count_on_each_node_of_a_rank(tmp_path: Path) -> None:
    values = [*steps(2000, 1), *[0.5] * 15]
    folder = moved(tmp_path / "run", [("n0", values), ("n1", values)])
    for path in (folder / "timings").glob("*.jsonl"):
        path.write_text("".join(line for line in path.read_text().splitlines(True) if '"s":0.5' not in line))
    (run,) = timings.read([folder]).runs
    assert sum(count for seconds, count in run.deadlines["train"].missing.items() if seconds > 0.4) == 30


def test_line_that_a_full_disk_cut_off_is_noted_and_costs_no_duration(tmp_path: Path) -> None:
    folder = record(tmp_path / "run", [("cold", [*steps(2000, 1), 7.0])])
    path = folder / "timings" / "n-0.jsonl"
    *lines, last = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines, last[:30], "\n"]))
    read = timings.read([folder])
    assert read.runs[0].deadlines["train"].max_s == 7.0
    assert list(read.runs[0].deadlines["train"].missing.values()) == [1]
    assert [note for note in read.notes if "cut off" in note] == [
        f"{path}: 1 line was cut off, as by a full disk; the histogram has these durations"
    ]


def test_halves_and_drift_of_a_rank_that_moves_are_those_of_its_whole_course(tmp_path: Path) -> None:
    values = [0.001 * i + 1.0 for i in range(900)]
    stayed = moved(tmp_path / "a", [("n0", values[:300]), ("n0", values[300:600]), ("n0", values[600:])])
    went = moved(tmp_path / "b", [("n0", values[:300]), ("n1", values[300:600]), ("n2", values[600:])])
    one, other = (timings.read([folder]).runs[0].deadlines["train"] for folder in (stayed, went))
    assert other.half_at == pytest.approx(one.half_at, abs=40.0)
    assert other.drift == pytest.approx(one.drift, rel=0.1)
    assert other.settled_max == pytest.approx(one.settled_max, rel=0.05)
    assert other.is_from_beginning
