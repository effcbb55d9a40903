"""A file of limits is read whole, or refused with what is wrong in it."""

from __future__ import annotations

import math
import os
from pathlib import Path

import msgspec
import pytest

from resilience.calibration.fitting import MONTH
from resilience.calibration.limits_file import SCHEMA, Deadline, OutsideLimit, RankGroupLimit, Timeouts, of_rank
from resilience.errors import ConfigurationError
from resilience.facts.configuration import Configuration
from resilience.facts.limits import Limit, Limits
from resilience.facts.phases import Phases
from resilience.system import timeouts_file


def written(
    folder: Path,
    *,
    limit: float | None = 5.0,
    group: float | None = 4.0,
    ranks: str = "0,2-3",
    outside: float = 2.0,
    alarms: float = 1.0,
    horizon: float = 1.0,
) -> Path:
    """Write a file with one deadline; return its path."""
    work = Deadline(
        limit,
        "short",
        "",
        1e-6,
        groups=(RankGroupLimit("1", 3.0, "short", ""), RankGroupLimit(ranks, group, "short", "")),
        outside=OutsideLimit(outside, "short", "", Phases((10,), 20)),
    )
    path = folder / timeouts_file.NAME
    configuration = Configuration("train.py", world_size=4)
    timeouts_file.write(path, Timeouts(SCHEMA, configuration, "", alarms, horizon, 4, {"work": work}))
    return path


def test_limits_of_ranks_and_phases_are_read(tmp_path: Path) -> None:
    known = timeouts_file.read(written(tmp_path, group=None)).deadlines["work"]
    assert known.outside is not None
    assert ([group.timeout_s for group in known.groups], known.outside.timeout_s) == ([3.0, None], 2.0)


@pytest.mark.parametrize("value", [-5.0, 0.0, math.nan, math.inf])
@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ("limit", "the limit of 'work' is {}"),
        ("group", "the limit of 'work' for ranks '0,2-3' is {}"),
        ("outside", "the limit of 'work' outside known phases is {}"),
    ],
)
def test_limit_that_is_no_duration_is_named(tmp_path: Path, entry: str, words: str, value: float) -> None:
    path = written(tmp_path, **{entry: value})
    with pytest.raises(ConfigurationError) as refused:
        timeouts_file.read(path)
    assert str(path) in str(refused.value)
    assert f"{words.format(repr(value))}, expected seconds above 0 and finite" in str(refused.value)


@pytest.mark.parametrize("ranks", ["1-3x", "", "1,", "-1", "1--3", "a"])
def test_ranks_that_are_none_are_named(tmp_path: Path, ranks: str) -> None:
    path = written(tmp_path, ranks=ranks)
    with pytest.raises(ConfigurationError, match=r"ranks of a group of 'work' are .*, expected text such as '0,4-7'"):
        timeouts_file.read(path)


def test_larger_job_is_refused_with_the_option_that_helps(tmp_path: Path) -> None:
    path = written(tmp_path)
    with pytest.raises(ConfigurationError, match="limits hold for 4 ranks; calibrate with --ranks 8"):
        timeouts_file.learned(str(path), tmp_path, Limits(), Configuration("train.py", world_size=8), False)


def test_limits_on_trial_do_not_hold_in_a_cycle_of_another_size_either(tmp_path: Path) -> None:
    configuration = Configuration("train.py", world_size=8)
    deadlines = {"work": Deadline(2.0, "ok", "", 1e-6, groups=(RankGroupLimit("0", 1.0, "ok", ""),))}
    path = tmp_path / timeouts_file.NAME
    timeouts_file.write(path, Timeouts(SCHEMA, configuration, "", 1.0, MONTH, 8, deadlines))
    limits, _ = timeouts_file.learned(str(path), tmp_path, Limits(), configuration, is_shadow=True)
    on_trial = [of_rank(limits, 0, world).shadow for world in (8, 4)]  # rank 0 has the limit of its group
    assert [shadow and shadow.sections for shadow in on_trial] == [{"work": Limit(hard=1.0)}, {}]


TWO_FOR_FOUR = Timeouts(
    SCHEMA,
    Configuration("train.py", world_size=2, arguments=("--fast",)),
    "",
    1.0,
    MONTH,
    4,
    {"work": Deadline(5.0, "ok", "", 1e-6, outside=OutsideLimit(2.0, "ok", "", Phases((10,), 20)))},
)


def test_limit_outside_known_phases_ends_with_other_arguments_and_another_number_of_ranks(tmp_path: Path) -> None:
    path = tmp_path / timeouts_file.NAME
    timeouts_file.write(path, TWO_FOR_FOUR)
    observed = TWO_FOR_FOUR.configuration
    outside = []
    for configuration in (
        observed,
        Configuration("train.py", world_size=2),
        Configuration("train.py", world_size=4, arguments=("--fast",)),
    ):
        limits, event = timeouts_file.learned(str(path), tmp_path, Limits(), configuration, False)
        assert event.is_same_configuration and limits.sections == {"work": Limit(hard=5.0)}
        outside.append(sorted(limits.outside))
    assert outside == [["work"], [], []]


@pytest.mark.parametrize("newest", ["current", "runs", "runs/monday"])
def test_auto_takes_the_newest_file_of_current_folder_run_directory_and_run_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, newest: str
) -> None:
    folders = ["current", "runs", "runs/monday"]
    for folder in (*folders, "elsewhere"):
        (tmp_path / folder).mkdir()
        path = tmp_path / folder / timeouts_file.NAME
        timeouts_file.write(path, TWO_FOR_FOUR)
        os.utime(
            path, (1e9, 1e9 + (100.0 if folder == newest else folders.index(folder) if folder in folders else 999))
        )
    monkeypatch.chdir(tmp_path / "current")
    configuration = Configuration("train.py", world_size=2)
    _, event = timeouts_file.learned(timeouts_file.AUTO, tmp_path / "runs", Limits(), configuration, False)
    assert event.source == str(tmp_path / newest / timeouts_file.NAME)


@pytest.mark.parametrize(
    ("script", "key", "is_named"),
    [("train.py", "", False), ("small/train.py", "", True), ("small/train.py", "large", False)],
)
def test_auto_names_the_script_of_a_file_that_was_learned_in_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, key: str, is_named: bool
) -> None:
    """The folder of the script does not decide, unless the user gives keys, but it may be another workload."""
    path = tmp_path / timeouts_file.NAME
    before = Configuration(script, key, world_size=2)
    timeouts_file.write(path, msgspec.structs.replace(TWO_FOR_FOUR, configuration=before))
    monkeypatch.chdir(tmp_path)
    now = Configuration("train.py", key, world_size=2)
    _, event = timeouts_file.learned(timeouts_file.AUTO, tmp_path / "runs", Limits(), now, False)
    assert event.source == str(path)
    assert ("learned from the script small/train.py, this run is of train.py" in event.note) is is_named
    assert ("--calibration-key" in event.note) is is_named


def test_limits_from_a_table_hold_only_if_the_user_names_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / timeouts_file.NAME
    timeouts_file.write(path, msgspec.structs.replace(TWO_FOR_FOUR, configuration=Configuration(table="small.csv")))
    monkeypatch.chdir(tmp_path)
    job = Configuration("other.py", world_size=512)
    limits, event = timeouts_file.learned(timeouts_file.AUTO, tmp_path / "runs", Limits(), job, False)
    assert (limits, event.deadlines) == (Limits(), 0)
    assert "learned from table small.csv; a table does not say what was run: name the file to use it" in event.note
    limits, event = timeouts_file.learned(str(path), tmp_path, Limits(), job, False)
    assert (limits.sections, limits.outside) == ({"work": Limit(hard=5.0)}, {})
    assert not event.is_same_configuration and "a table does not say what was run" in event.note


@pytest.mark.parametrize("value", [-5.0, 0.0, math.nan, math.inf])
@pytest.mark.parametrize(("entry", "what"), [("alarms", "target_false_alarms"), ("horizon", "horizon_s")])
def test_target_that_is_no_number_above_0_is_named(tmp_path: Path, entry: str, what: str, value: float) -> None:
    """Limits are fitted again for another target: the quotient of both is divided by."""
    path = written(tmp_path, **{entry: value})
    with pytest.raises(ConfigurationError) as refused:
        timeouts_file.read(path)
    assert str(refused.value) == f"{path}: {what} is {value!r}, expected a finite number above 0"


BASE = Limits()


@pytest.mark.parametrize(
    ("limit", "base", "why"),
    [
        (None, BASE, "it holds no limit; configured or default limits apply; work: 13 durations, at least 30 are need"),
        (5.0, msgspec.structs.replace(BASE, sections={"work": Limit(9.0, 9.0)}), "its limits are also set by hand; "),
        (5.0, BASE, ""),
    ],
)
def test_file_without_a_limit_that_holds_is_said_to_have_none(
    tmp_path: Path, limit: float | None, base: Limits, why: str
) -> None:
    path = tmp_path / timeouts_file.NAME
    configuration = Configuration("train.py", world_size=4)
    work = Deadline(limit, "insufficient", "13 durations, at least 30 are needed", 1e-6)
    start = Deadline(1.0, "provisional", "1 start observed", 1e-6)  # holds only together with the limit of later ones
    known = {"work": work, "work.first": start}
    timeouts_file.write(path, Timeouts(SCHEMA, configuration, "", 1.0, 1.0, 4, known))
    _, event = timeouts_file.learned(str(path), tmp_path, base, configuration, is_shadow=False)
    assert event.deadlines == (not why)
    assert event.note.startswith(why) and bool(event.note) == bool(why)
