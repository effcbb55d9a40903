"""`resilience calibrate`: what it prints, writes, refuses, and how it ends."""

from __future__ import annotations

import gzip
import json
import math
import os
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal
from xml.etree import ElementTree

import msgspec
import pytest

from resilience.calibrate import timings
from resilience.calibration.fitting import MONTH
from resilience.calibration.limits_file import SCHEMA, Deadline, RankGroupLimit, Timeouts
from resilience.cli import calibrate, main
from resilience.errors import ConfigurationError
from resilience.facts.configuration import Configuration
from resilience.system import timeouts_file
from resilience.telemetry.durations import Header, Recorder
from tests.support import record_streams

ONE = Configuration("train.py", world_size=1)


def table(path: Path, n: int = 25_000, runs: int = 2, seed: int = 1, scale: float = 1.0) -> Path:
    """Write steps of 0.25 s and a checkpoint of 5 s every 100 steps."""
    chance = random.Random(seed)
    lines = ["run,section,rank,i,seconds"]
    for run in range(runs):
        for i in range(n // runs):
            warm = 8.0 if i == 0 else 1.0
            lines.append(f"{run},step,0,{i},{0.25 * scale * warm * math.exp(chance.gauss(0, 0.02)):.6f}")
            if i % 100 == 99:
                lines.append(f"{run},checkpoint,0,{i // 100},{5 * scale * math.exp(chance.gauss(0, 0.02)):.6f}")
    text = ("\n".join(lines) + "\n").encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path


def recorded(
    folder: Path, name: str, median: float, *, n: int = 12_000, runs: int = 2, configuration: Configuration = ONE
) -> list[str]:
    """Write what the monitors of these runs would have recorded of one deadline; return the run folders."""
    chance = random.Random(name)
    folders = []
    for run in range(runs):
        for rank in range(configuration.world_size):
            header = Header(f"{name}{run}", "host", rank, configuration.world_size, configuration, f"{name}{run}")
            recorder = Recorder(folder / header.run, header, at=0.0)
            recorder.started("cold", 0.0)
            for i in range(n):
                recorder.add(name, median * chance.lognormvariate(0.0, 0.02), i * median)
            recorder.close(n * median)
        folders.append(str(folder / f"{name}{run}"))
    return folders


@pytest.mark.parametrize(("horizon", "words"), [("10m", "10 min 00 s"), ("12h", "12 h 00 min"), ("30d", "30 days")])
def test_horizon_is_shown_in_a_unit_that_fits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], horizon: str, words: str
) -> None:
    main(["calibrate", str(table(tmp_path / "t.csv.gz")), "--horizon", horizon])
    first = capsys.readouterr().out.splitlines()[0]
    assert first.startswith(f"target: at most 1 false alarm per {words} in the whole job")


def test_table_gives_limits_on_the_terminal_in_a_file_and_in_a_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    out, picture = tmp_path / "timeouts.yaml", tmp_path / "plot.svg"
    path = str(table(tmp_path / "t.csv.gz"))
    status = main(["calibrate", path, "--out", str(out), "--plot", str(picture), "--min-timeout", "0.01"])
    shown = capsys.readouterr().out
    assert status == 3  # checkpoint is provisional
    assert max(map(len, shown.splitlines())) <= 80
    found = timeouts_file.read(out)
    assert found.deadlines["step"].status == "ok"
    assert 0.3 < (found.deadlines["step"].timeout_s or 0.0) < 0.8
    assert found.deadlines["checkpoint"].status == "provisional"
    assert found.deadlines["step.first"].timeout_s == pytest.approx(5 * found.deadlines["step.first"].max_s, rel=1e-4)
    assert len(found.sources[0].sha256) == 64
    titles = [element.text for element in ElementTree.parse(picture).iter() if element.tag.endswith("title")]
    assert any(text and text.startswith("limit: ") for text in titles)


def test_json_is_the_same_in_other_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = table(tmp_path / "t.csv")
    assert main(["calibrate", str(path), "--json", "--section", "step"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert set(made["deadlines"]) == {"step", "step.first"}
    alarms = made["deadlines"]["step"]["expected_false_alarms_per_month"]
    assert alarms["model_upper"] < 0.5 < alarms["distribution_free_upper"]
    each = made["deadlines"]["step"]["false_alarms_per_occurrence"]
    assert each["model_upper"] == pytest.approx(alarms["model_upper"] * 0.25 / (30 * 86400), rel=0.05)
    assert main(["calibrate", str(path), "--section", "step"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "an occurrence exceeds the limit with probability" in shown
    assert "No method covers a kind of pause that did not occur in these runs" in shown
    assert "2 runs do not exclude that 78% of later runs have one" in shown


def test_section_that_no_run_has_is_named_and_the_exit_status_is_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = table(tmp_path / "t.csv", 100)
    assert main(["calibrate", str(path), "--section", "step", "--section", "nosuch"]) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert "no run has a section 'nosuch'" in said.err


def test_only_an_ok_fit_lowers_an_old_limit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "timeouts.yaml"
    main(["calibrate", str(table(tmp_path / "t.csv", scale=4.0)), "--out", str(out)])
    before = timeouts_file.read(out)
    main(["calibrate", str(table(tmp_path / "t.csv")), "--out", str(out)])
    after = timeouts_file.read(out)
    assert (after.deadlines["step"].timeout_s or 0) < (before.deadlines["step"].timeout_s or 0)
    assert after.deadlines["checkpoint"].timeout_s == before.deadlines["checkpoint"].timeout_s
    assert "kept at" in after.deadlines["checkpoint"].reason
    assert "(-" in capsys.readouterr().out


def test_only_an_ok_fit_lowers_an_old_limit_outside_known_phases(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The usual limit follows the evaluations, which stay as long as they were."""
    path, out = tmp_path / "t.csv", tmp_path / "timeouts.yaml"
    outside = []
    for usual, options in ((0.5, []), (0.25, []), (0.25, ["--target-false-alarms", "1000000"])):
        phased(path, 2, 2500, (1000, 2000), usual)
        main(["calibrate", str(path), "--min-timeout", "0.01", "--out", str(out), *options])
        outside.append(timeouts_file.read(out).deadlines["step"].outside)
    shown = " ".join(capsys.readouterr().out.split())
    before, kept, lowered = outside
    assert before is not None and kept is not None and lowered is not None
    assert (kept.status, kept.timeout_s) == ("short", before.timeout_s)
    assert "outside phases: kept at 1.0" in shown and "only an `ok` fit may lower a limit" in shown
    assert lowered.status == "ok" and lowered.timeout_s < before.timeout_s


def test_limits_file_of_other_runs_is_refused_and_stays_as_it_was(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "timeouts.yaml"
    one, other = (str(table(tmp_path / name, n=1000)) for name in ("one.csv", "other.csv"))
    main(["calibrate", one, "--out", str(out)])
    before = out.read_text()
    capsys.readouterr()
    assert main(["calibrate", other, "--out", str(out)]) == 2
    message = capsys.readouterr().err
    assert "table 'one.csv' before, 'other.csv' now" in message and "another --out file" in message
    assert out.read_text() == before
    assert main(["calibrate", other, "--out", str(out), "--pool"]) == 4  # written, with too few checkpoints


def phased(path: Path, runs: int, n: int, slow: tuple[int, ...] = (), usual: float = 0.25) -> Path:
    """Write steps of 0.25 s that take 4 s at some positions of every run."""
    chance = random.Random(2)
    rows = [
        f"{run},step,0,{i},{4.0 if i in slow else usual * math.exp(chance.gauss(0, 0.02)):.6f}"
        for run in range(runs)
        for i in range(n)
    ]
    path.write_text("\n".join(["run,section,rank,i,seconds", *rows]) + "\n")
    return path


def test_limit_outside_known_phases_is_printed_with_its_reach(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tables = {"a": phased(tmp_path / "a.csv", 2, 2500, (1000, 2000)), "b": phased(tmp_path / "b.csv", 3, 40)}
    shown = {}
    for name, path in tables.items():
        main(["calibrate", str(path), "--min-timeout", "0.01", "--out", str(tmp_path / f"{name}.yaml")])
        shown[name] = " ".join(capsys.readouterr().out.split())
    short = timeouts_file.read(tmp_path / "a.yaml").deadlines["step"].outside
    assert short is not None
    assert f"outside 2 known phases the limit is {short.timeout_s * 1000:.0f} ms" in shown["a"]
    assert "(short), up to occurrence 2500 after a cold start" in shown["a"]
    assert "no run was slow anywhere, so the limit is" in shown["b"]
    assert "(short), up to occurrence 40 after a cold start" in shown["b"]
    main(["calibrate", "diff", str(tmp_path / "a.yaml"), str(tmp_path / "b.yaml")])
    assert "step outside phases" in capsys.readouterr().out


def test_occurrences_ended_by_a_limit_outside_phases_are_reported_and_raise_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = phased(tmp_path / "t.csv", 3, 2500, (1000, 2000)), tmp_path / "timeouts.yaml"
    header, *rows = path.read_text().splitlines()
    limits = []
    for number in (0, 10):  # the last ones of the last run
        ended = [f"{row.rsplit(',', 1)[0]},0.8,killed" for row in rows[len(rows) - number :]]
        healthy = [f"{row},ok" for row in rows[: len(rows) - number]]
        path.write_text("\n".join([f"{header},end", *healthy, *ended]) + "\n")
        main(["calibrate", str(path), "--min-timeout", "0.01", "--out", str(out)])
        outside = timeouts_file.read(out).deadlines["step"].outside
        assert outside is not None
        limits.append(outside.timeout_s)
        out.unlink()
    shown = " ".join(capsys.readouterr().out.split())
    assert limits[0] < 0.8 < limits[1] == pytest.approx(1.5 * 0.8)
    assert "outside phases: a limit ended 10 occurrences, the longest after 0.8 s" in shown


def test_limits_are_written_to_their_file_though_stdout_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = table(tmp_path / "a.csv", n=2000)
    monkeypatch.setattr("sys.stdout", None)
    status = main(["calibrate", str(source), "--out", str(tmp_path / "a.yaml")])
    assert status == calibrate.status(timeouts_file.read(tmp_path / "a.yaml"))


def test_diff_has_a_row_for_each_group_of_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["calibrate", str(table(tmp_path / "a.csv")), "--out", str(tmp_path / "plain.yaml")])
    limits = timeouts_file.read(tmp_path / "plain.yaml")
    for name, groups in (("a", {"0-3": 30.0, "4-7": 20.0}), ("b", {"4-7": 2.0, "8": 5.0})):
        of_groups = tuple(RankGroupLimit(ranks, limit, "ok", "") for ranks, limit in groups.items())
        step = msgspec.structs.replace(limits.deadlines["step"], groups=of_groups)
        of_file = msgspec.structs.replace(limits, deadlines={"step": step})
        timeouts_file.write(tmp_path / f"{name}.yaml", of_file)
    capsys.readouterr()
    assert main(["calibrate", "diff", str(tmp_path / "a.yaml"), str(tmp_path / "b.yaml")]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if "ranks" in line]
    assert [row[2:] for row in rows] == [
        ["0-3", "30", "s", "-", "-", "ok", "→", "-"],
        ["4-7", "20", "s", "2", "s", "-90.0%", "ok"],
        ["8", "-", "5", "s", "-", "-", "→", "ok"],
    ]


def test_diff_tells_two_files_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, scale in (("a", 1.0), ("b", 2.0)):
        main(["calibrate", str(table(tmp_path / f"{name}.csv", scale=scale)), "--out", str(tmp_path / f"{name}.yaml")])
    capsys.readouterr()
    assert main(["calibrate", "diff", str(tmp_path / "a.yaml"), str(tmp_path / "b.yaml")]) == 0
    shown = capsys.readouterr().out
    assert "+100" in shown or "+99" in shown
    assert "configurations differ (serious): table 'a.csv' before, 'b.csv' now" in " ".join(shown.split())


def test_diff_of_two_files_whose_scripts_had_other_arguments_is_harmless(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old, new = tmp_path / "old.yaml", tmp_path / "new.yaml"
    assert main(["calibrate", *recorded(tmp_path / "runs", "work", 2.0), "--out", str(old)]) == 0
    limits = timeouts_file.read(old)
    work = limits.deadlines["work"]
    grown = msgspec.structs.replace(work, timeout_s=2 * (work.timeout_s or 0.0))
    configuration = msgspec.structs.replace(limits.configuration, arguments=("--resume", "X"))
    timeouts_file.write(
        new, msgspec.structs.replace(limits, configuration=configuration, deadlines={**limits.deadlines, "work": grown})
    )
    capsys.readouterr()
    assert main(["calibrate", "diff", str(old), str(new)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "configurations differ (harmless): arguments '' before, '--resume X' now" in shown
    assert "+100.0%" in shown and "serious" not in shown
    assert main(["calibrate", "diff", str(old), str(new), "--json"]) == 0
    (difference,) = json.loads(capsys.readouterr().out)["configuration"]
    assert difference == {"what": "arguments", "before": "", "now": "--resume X", "why": ""}


def test_backtest_of_too_little_data_says_so_and_exits_with_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(table(tmp_path / "t.csv", n=40))
    assert main(["calibrate", path, "--backtest"]) == 1
    shown = " ".join(capsys.readouterr().out.split())
    assert "0 of 38 recorded durations were tested" in shown
    assert "step was not tested: the other runs have fewer than 30 durations" in shown
    assert main(["calibrate", path, "--backtest", "--json"]) == 1
    (summary,) = json.loads(capsys.readouterr().out)["summaries"]
    assert (summary["exposure"], summary["recorded"], summary["worse"]) == (0, 38, 0)


@pytest.mark.parametrize(
    ("rows", "tested", "status"),
    [
        ((20, 1000), 19, 1),
        ((1000, 1000), 1998, 0),
        ((30, 1000), 29, 1),
        ((24, 80), 23, 0),  # the limit claims nothing
    ],
)
def test_backtest_of_less_than_three_tenths_of_the_durations_exits_with_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], rows: tuple[int, int], tested: int, status: int
) -> None:
    """A run of fewer than 30 durations supports no limit, so the other run is not tested. The first occurrence of each
    run is left out."""
    path = tmp_path / "t.csv"
    lines = [f"{run},a,0,{i},0.25" for run, n in enumerate(rows) for i in range(n)]
    path.write_text("\n".join(["run,section,rank,i,seconds", *lines]) + "\n")
    assert main(["calibrate", str(path), "--backtest", "--json"]) == status
    (summary,) = json.loads(capsys.readouterr().out)["summaries"]
    assert (summary["exposure"], summary["recorded"]) == (tested, sum(rows) - 2)
    assert (summary["exceeded"], summary["worse"], summary["outside_worse"]) == (0, 0, 0)
    assert main(["calibrate", str(path), "--backtest"]) == status
    shown = " ".join(capsys.readouterr().out.split())
    assert f"{tested} of {sum(rows) - 2} recorded durations were tested" in shown
    assert ("tested: too few for a result" in shown) == bool(status)


@pytest.mark.parametrize(("evals", "too_little"), [(6000, {"eval": [0, 5998]}), (60, {}), (10, {})])
def test_backtest_judges_each_deadline_by_the_share_of_its_own_durations(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], evals: int, too_little: dict[str, list[int]]
) -> None:
    """One run has all evaluations but one, so there is no test. The limit of 60 claims nothing, and 10 support none."""
    path = tmp_path / "t.csv"
    lines = [f"{run},step,0,{i},0.25" for run in range(2) for i in range(2000)]
    lines += [f"0,eval,0,{i},4.0" for i in range(evals - 1)] + ["1,eval,0,0,4.0"]
    path.write_text("\n".join(["run,section,rank,i,seconds", *lines]) + "\n")
    assert main(["calibrate", str(path), "--backtest", "--json"]) == bool(too_little)
    (summary,) = json.loads(capsys.readouterr().out)["summaries"]
    assert summary["too_little"] == too_little
    main(["calibrate", str(path), "--backtest"])
    shown = " ".join(capsys.readouterr().out.split())
    reason = "the other runs have fewer than 30 durations"
    told = f"eval: 0 of 5998 recorded durations were tested: too few for a result ({reason})"
    assert (told in shown) == bool(too_little)
    assert (f"eval was not tested: {reason}" in shown) == (not too_little)


def test_backtest_counts_what_was_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = table(tmp_path / "t.csv", n=60_000, runs=3)
    assert main(["calibrate", str(path), "--backtest", "--json", "--n", "100,20000", "--min-timeout", "0.01"]) == 0
    small, large = json.loads(capsys.readouterr().out)["summaries"]
    assert (small["n"], small["rated"]) == (100, 0)
    assert large["rated"] >= 3
    assert large["rated_exceeded"] == 0
    assert large["rated_ratio"] < 0.5


def test_backtest_that_could_test_nothing_fails_and_says_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = recorded(tmp_path, "work", 0.25, n=6000)
    assert main(["calibrate", *runs, "--backtest", "--n", "100"]) == 1
    assert "a run folder keeps only a sample" in " ".join(capsys.readouterr().out.split())


def test_number_of_durations_that_no_limit_can_be_fitted_on_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["calibrate", str(table(tmp_path / "t.csv", 100)), "--backtest", "--n", "29,100"])
    assert ended.value.code == 2
    assert "expected numbers from 30, such as 100,1000,20000" in capsys.readouterr().err


def test_backtest_fits_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["calibrate", str(table(tmp_path / "t.csv", 2000)), "--backtest"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert max(map(len, shown)) <= 80


def test_backtest_fails_if_an_answer_is_worse_than_stated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = ["run,section,rank,i,seconds"]
    for run in range(3):
        slow = 3.0 if run == 2 else 1.0
        lines += [f"{run},step,0,{i},{0.25 * (slow if i % 50 == 0 and i else 1.0)}" for i in range(12_000)]
    (tmp_path / "t.csv").write_text("\n".join(lines) + "\n")
    assert main(["calibrate", str(tmp_path / "t.csv"), "--backtest", "--min-timeout", "0.01"]) == 1
    assert "worse than stated" in capsys.readouterr().out


def test_backtest_of_two_runs_says_that_no_run_tests_their_phases(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for runs, is_tested in ((2, False), (3, True)):
        path = phased(tmp_path / f"{runs}.csv", runs, 2500, (1000, 2000))
        assert main(["calibrate", str(path), "--min-timeout", "0.01", "--json"]) in (0, 3)
        outside = json.loads(capsys.readouterr().out)["deadlines"]["step"]["outside"]
        assert any("give a third run" in warning for warning in outside.get("warnings", ())) is not is_tested
        main(["calibrate", str(path), "--min-timeout", "0.01", "--backtest"])
        shown = " ".join(capsys.readouterr().out.split())
        assert ("step outside known phases was not tested: both runs are needed" in shown) is not is_tested


@pytest.mark.parametrize(("slow", "worse"), [((), 0), (range(50, 2500, 50), 1), (range(50, 1000, 50), 0)])
def test_backtest_fails_if_a_limit_outside_known_phases_is_worse_than_claimed(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    slow: Sequence[int],
    worse: int,
) -> None:
    """The last run is slow elsewhere too, which the usual limit allows. That one holds until the first phase."""
    monkeypatch.setenv("COLUMNS", "80")
    path = phased(tmp_path / "t.csv", 2, 2500, (1000, 2000))
    later = phased(tmp_path / "later.csv", 1, 2500, (1000, 2000, *slow)).read_text().splitlines()[1:]
    with path.open("a") as file:
        file.writelines(f"2{line.removeprefix('0')}\n" for line in later)
    options = [str(path), "--backtest", "--min-timeout", "0.01"]
    assert main(["calibrate", *options, "--json"]) == worse
    (summary,) = json.loads(capsys.readouterr().out)["summaries"]
    assert (summary["worse"], summary["outside_worse"]) == (0, worse)
    assert bool(summary["outside_exceeded"]) == bool(worse) and 1400 < summary["outside_exposure"] <= 4500
    assert main(["calibrate", *options]) == worse
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 80
    (row,) = [line.split() for line in shown.splitlines() if line.split()[:1] == ["outside"] and "/" in line]
    assert row[-6:-4] == [str(summary["outside_exposure"]), str(summary["outside_exceeded"])]
    told = f"outside known phases {summary['outside_exceeded']} of {summary['outside_exposure']} durations exceeded the"
    assert f"{told} shorter limit, {worse} limit" in " ".join(shown.split())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--backtest", "--out", "o.yaml"], "--backtest tests limits and writes none; leave out --out"),
        (["--backtest", "--plot", "o.svg", "--format", "nvrx"], "leave out --plot, --format"),
        (["--n", "100"], "add --backtest"),
    ],
)
def test_option_that_a_backtest_would_ignore_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], words: str
) -> None:
    assert main(["calibrate", str(table(tmp_path / "t.csv", 100)), *options]) == 2
    assert words in " ".join(capsys.readouterr().err.split())


def test_flags_for_other_launchers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["calibrate", str(table(tmp_path / "t.csv")), "--format", "nvrx"])
    assert "--ft-rank_section_timeouts=checkpoint:" in capsys.readouterr().out


def test_limits_for_ft_launcher_cover_the_first_occurrences_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It has no limits of their own for them."""
    out, path = tmp_path / "timeouts.yaml", tmp_path / "t.csv"
    lines = [f"{run},forward,0,{i},{40.0 if i == 0 else 0.5}" for run in range(2) for i in range(600)]
    lines += [f"{run},eval,0,{i},{1.0 if i == 0 else 9.0}" for run in range(2) for i in range(10)]
    path.write_text("\n".join(["run,section,rank,i,seconds", *lines]) + "\n")
    main(["calibrate", str(path), "--out", str(out), "--format", "nvrx"])
    assert capsys.readouterr().out.strip() == "--ft-rank_section_timeouts=forward:200"
    limits = timeouts_file.read(out).deadlines
    assert (limits["forward"].timeout_s, limits["eval"].timeout_s) == (1.0, None)


def test_torchelastic_gets_no_value_from_sections_that_it_does_not_watch(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "timeouts.yaml"
    status = main(["calibrate", str(table(tmp_path / "t.csv")), "--format", "torchelastic", "--out", str(out)])
    said = capsys.readouterr()
    assert said.out == ""
    assert "watches neither sections nor steps nor heartbeats" in said.err
    assert not any(character.isdecimal() for character in said.err)
    assert status == 3 and timeouts_file.read(out).deadlines["step"].timeout_s  # the limits are written all the same


def test_timings_of_a_run_are_lined_up_over_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for job in ("one", "two"):
        for rank in range(2):
            chance = random.Random(f"{job}{rank}")
            header = Header(run=job, node="host", rank=rank, world_size=2)
            recorder = Recorder(tmp_path / job, header, at=0.0)
            recorder.started("cold", 0.0)
            for i in range(12_000):
                recorder.add("step", 0.25 * math.exp(chance.gauss(0, 0.02)), i * 0.3)
            recorder.close(3600.0)
    assert main(["calibrate", str(tmp_path / "one"), str(tmp_path / "two"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["deadlines"]["step"]
    assert found["status"] == "ok"
    assert found["n"] == pytest.approx(24_000, rel=0.01)  # occurrences, not durations of ranks
    assert found["ranks"] == 2
    assert found["median_s"] == pytest.approx(0.25, rel=0.02)


def test_run_is_named_by_its_job_as_for_the_other_commands(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RESILIENCE_RUN_DIR", str(tmp_path / "runs"))
    for run in ("job6", "job7", "job7@1"):  # the newest attempt is meant
        folder = tmp_path / "runs" / run
        recorder = Recorder(folder, Header(run=run, node="host", rank=0, world_size=1), at=0.0)
        recorder.started("cold", 0.0)
        for i in range(50 if run != "job7" else 5):
            recorder.add("step", 0.25, i * 0.3)
        recorder.close(20.0)
        (folder / "records").mkdir()
    main(["calibrate", "job6", "job7", "--json"])
    assert (
        json.loads(capsys.readouterr().out)["deadlines"]["step"]["n"] == 2 * 49
    )  # the first one is a deadline of its own
    with pytest.raises(ConfigurationError, match="job8 does not exist; a run folder, a table or a timings file"):
        timings.read([Path("job8")])
    assert main(["calibrate", "job8"]) == 2


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("run,section,rank,i,seconds\n0,step,0,0,nan\n", "t.csv:2: seconds is 'nan'"),
        ("run,section,rank,i,seconds\n0,step,0,0,1\n0,step,0,1,NaN\n", "t.csv:3: seconds is 'NaN'"),
        ("run,section,rank,i,seconds\n0,step,0,0,inf\n", "t.csv:2: seconds is 'inf'"),
        ("run,section,rank,i,seconds\n0,step,0,nan,1\n", "t.csv:2: i is 'nan'"),
        (f"run,section,rank,i,seconds\n0,step,0,{'9' * 5000},1\n", "t.csv:2: i is '9999"),
        ("\ufeffrun,section,rank,i,seconds\n0,step,0,0,1\n", "t.csv:1: starts with a byte order mark"),
        ("run,section,rank,i,seconds\n0,step,0,0,1\n0,,0,1,1\n", "t.csv:3: the section name is empty"),
        ("run,section,rank,i,seconds\n0,  ,0,0,1\n", "t.csv:2: the section name is empty"),
        ("run,section,rank,i,seconds\n0,step,0,0,1\n0,step,0,1,-1\n", "t.csv:3: seconds is '-1'"),
        ("run,section,rank,i,seconds\n0,step,0\n", "t.csv:2: 3 fields, expected 5"),
        ("run,name,rank,i,seconds\n", "t.csv:1: the columns are run,name"),
        ("run,section,rank,i,seconds,end\n0,step,0,0,1,gone\n", "t.csv:2: end is 'gone'"),
        ("run,section,rank,i,seconds\n", "contains no durations"),
        ("run,section,rank,i,seconds\n0,a,0,0,1\n0,a,0,0,2\n", "t.csv:3: run '0', section 'a', rank '0' has i=0 twice"),
        ("run,section,rank,i,seconds\n0,a,0,0,1e308\n", "t.csv:2: seconds is '1e308', expected a number from 0"),
    ],
)
def test_bad_table_is_named_with_its_line_and_nothing_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str, told: str
) -> None:
    path, out = tmp_path / "t.csv", tmp_path / "out.yaml"
    path.write_text(content, encoding="utf-8")
    assert main(["calibrate", str(path), "--out", str(out)]) == 2
    assert told in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.parametrize("value", ["nan", "inf", "0", "-1", "1e-322"])
def test_target_that_is_no_number_of_false_alarms_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], value: str
) -> None:
    path = table(tmp_path / "t.csv", 100)
    assert main(["calibrate", str(path), f"--target-false-alarms={value}"]) == 2
    assert "--target-false-alarms is" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--horizon", "--min-timeout", "--max-timeout"])
def test_duration_beyond_any_job_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["calibrate", str(table(tmp_path / "t.csv", 100)), option, "9" * 400])
    assert "is not a duration above 0 and below 30 years" in capsys.readouterr().err


def test_tables_that_are_copies_count_once_and_their_order_on_the_command_line_changes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "f").mkdir()
    one = table(tmp_path / "f" / "t.csv", 6000, runs=1)
    copy = tmp_path / "copy.csv"
    copy.write_bytes(one.read_bytes())
    printed = []
    for paths in ([one], [tmp_path / "f", one], [one, copy], [copy, one], [tmp_path / "f", copy]):
        main(["calibrate", *map(str, paths), "--json", "--pool"])
        out, err = capsys.readouterr()
        printed.append({name: each["n"] for name, each in json.loads(out)["deadlines"].items()})
        assert ("counts once" in err) == (len(paths) > 1)
    assert all(each == printed[0] for each in printed)
    slow = [str(table(tmp_path / f"{name}.csv", 6000, runs=1, seed=n)) for n, name in enumerate("abce")]
    for path in slow[2:]:
        lines = Path(path).read_text().splitlines()
        lines[400:420] = [f"{line.rsplit(',', 1)[0]},3.0" for line in lines[400:420]]
        Path(path).write_text("\n".join(lines) + "\n")
    answers = []
    for order in (slow, slow[2:] + slow[:2]):
        main(["calibrate", *order, "--json", "--pool"])
        answers.append(json.loads(capsys.readouterr().out)["deadlines"])
    assert answers[0] == answers[1]


def test_truncated_archive_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = table(tmp_path / "t.csv.gz")
    path.write_bytes(path.read_bytes()[:-2000])
    assert main(["calibrate", str(path)]) == 2
    assert "damaged after line" in capsys.readouterr().err


def test_different_configurations_are_pooled_only_on_demand(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [str(table(tmp_path / name, seed=seed)) for seed, name in enumerate(("a.csv", "b.csv"))]
    assert main(["calibrate", *paths]) == 2
    assert "--pool" in capsys.readouterr().err
    assert main(["calibrate", *paths, "--pool"]) == 3


def test_missing_run_and_run_without_timings_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["calibrate", str(tmp_path / "none")]) == 2
    assert "does not exist" in capsys.readouterr().err
    assert main(["calibrate", str(tmp_path)]) == 2
    assert "contains no timings" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("age", "end", "words"),
    [
        (0.0, "", "contains no timings yet: the run has just begun"),
        (0.0, '{"event":"monitor.ended"}\n', "did the run use any of them?"),
        (7200.0, "", "did the run use any of them?"),
    ],
    ids=["just begun", "over", "old"],
)
def test_run_without_timings_may_have_just_begun(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    age: float,
    end: str,
    words: str,
) -> None:
    monkeypatch.setattr(timings, "FRESH", 3600.0)
    (tmp_path / "records").mkdir()
    (tmp_path / "timings").mkdir()  # single values are appended before the histograms are written
    (tmp_path / "timings" / "host-0.jsonl").touch()
    (tmp_path / "records" / "host-0.jsonl").write_text(f'{{"event":"monitor.started"}}\n{end}')
    (tmp_path / "job.json").write_text("{}")
    now = time.time()
    os.utime(tmp_path / "job.json", (now - age, now - age))
    assert main(["calibrate", str(tmp_path)]) == 2
    assert words in " ".join(capsys.readouterr().err.split())


def test_old_limits_that_are_none_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    out = tmp_path / "out.yaml"
    out.write_text("schema: 99\n")
    with pytest.raises(ConfigurationError, match="schema 99"):
        timeouts_file.read(out)
    assert main(["calibrate", str(table(tmp_path / "t.csv", n=1000)), "--out", str(out)]) == 2
    assert out.read_text() == "schema: 99\n"


def test_earlier_limit_that_the_longest_limit_shortens_changes_the_exit_status(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "out.yaml")
    folder = recorded(tmp_path / "runs", "work", 2.0), recorded(tmp_path / "other", "data", 0.1)
    assert main(["calibrate", *folder[0], "--out", out]) == 0
    assert main(["calibrate", *folder[1], "--out", out]) == 0  # the limit of `work` is kept
    assert main(["calibrate", *folder[1], "--out", out, "--max-timeout", "1.5s"]) == 3
    kept = timeouts_file.read(Path(out)).deadlines["work"]
    assert (kept.timeout_s, kept.status) == (1.5, "provisional")
    assert "which is above the limit" in capsys.readouterr().out


def test_picture_shows_what_was_observed_and_leaves_out_limits_of_earlier_runs(tmp_path: Path) -> None:
    out, picture = tmp_path / "out.yaml", tmp_path / "plot.svg"
    main(["calibrate", *recorded(tmp_path / "runs", "work", 2.0, n=100), "--out", str(out)])
    later = recorded(tmp_path / "other", "data", 0.1, n=100)
    assert main(["calibrate", *later, "--out", str(out), "--plot", str(picture)]) == 3
    assert {"work", "data"} <= timeouts_file.read(out).deadlines.keys()
    texts = [element.text for element in ElementTree.parse(picture).iter() if element.tag.endswith("text")]
    assert "data" in texts and "work" not in texts


def test_limits_are_written_even_if_the_picture_cannot_be(tmp_path: Path) -> None:
    out = tmp_path / "out.yaml"
    (tmp_path / "file").touch()
    runs = recorded(tmp_path, "work", 2.0, n=100)
    assert main(["calibrate", *runs, "--out", str(out), "--plot", str(tmp_path / "file" / "plot.svg")]) == 2
    assert timeouts_file.read(out).deadlines["work"].timeout_s


@pytest.mark.parametrize("other", ["--out", "the input"])
def test_picture_replaces_neither_the_limits_nor_an_input(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], other: str
) -> None:
    path, out = table(tmp_path / "t.csv", 100), tmp_path / "out.yaml"
    before = path.read_bytes()
    plot = tmp_path / "." / "out.yaml" if other == "--out" else path
    assert main(["calibrate", str(path), "--out", str(out), "--plot", str(plot)]) == 2
    assert f"--plot {plot} is " in capsys.readouterr().err
    assert path.read_bytes() == before
    assert not out.exists()


@pytest.mark.parametrize("name", ["/dev/null", "pipe", "x" * 300], ids=["device", "pipe", "name too long"])
def test_out_that_is_no_file_is_refused_without_waiting_for_it(tmp_path: Path, name: str) -> None:
    path, out = table(tmp_path / "t.csv", 100), tmp_path / name
    if name == "pipe":
        os.mkfifo(out)
    command = [sys.executable, "-m", "resilience.cli", "calibrate", str(path), "--out", str(out)]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert (result.returncode, result.stdout) == (2, "")
    assert f"resilience calibrate: --out {out} " in result.stderr
    assert result.stderr.count("\n") == 1


def test_help_names_the_comparison_of_two_files(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["calibrate", "--help"])
    assert "resilience calibrate diff OLD NEW" in " ".join(capsys.readouterr().out.split())


def test_file_without_limits_is_not_called_one_of_another_version(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(table(tmp_path / "t.csv", 100))
    assert main(["calibrate", "diff", path, path]) == 2
    shown = capsys.readouterr().err
    assert f"{path} is no file of limits; expected a file written by `resilience calibrate`" in shown


@pytest.mark.parametrize(("healthy", "limit_s"), [(20, 15.0), (10, 15.0), (0, 10.0)])
def test_occurrences_ended_by_a_limit_are_reported_and_raise_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], healthy: int, limit_s: float
) -> None:
    """Otherwise a limit that is too short for rare occurrences, such as evaluations, would confirm itself."""
    out, path = tmp_path / "timeouts.yaml", tmp_path / "t.csv"
    lines = ["run,section,rank,i,seconds,end", *(f"0,step,0,{i},0.5,ok" for i in range(600))]
    lines += [f"0,eval,0,{i},4.0,ok" for i in range(healthy)]
    lines += [f"0,eval,0,{healthy + i},10.0,killed" for i in range(5)]
    path.write_text("\n".join(lines) + "\n")
    earlier = {"eval": Deadline(10.0, "short", "fitted earlier", 1e-4)}
    configuration = Configuration(table="t.csv")
    timeouts_file.write(out, Timeouts(SCHEMA, configuration, "", 1.0, MONTH, 1, earlier))
    assert main(["calibrate", str(path), "--out", str(out)]) == 4
    assert "a limit ended 5 occurrences, the longest after 10 s" in " ".join(capsys.readouterr().out.split())
    assert timeouts_file.read(out).deadlines["eval"].timeout_s == limit_s


PACES = (0.1, 0.105, 0.4)  # seconds of the three ranks; the first two are a group
RANKS = Configuration("train.py", world_size=len(PACES))


def ended_in(
    folder: Path, kind: record_streams.Kind | None, pace: Sequence[float], end: Literal["killed", "cut"] = "killed"
) -> str:
    """Write a run of 2,000 occurrences a rank. With a kind of fault, rank 1 ended in the next one after 0.3 s, and the
    records say why. Return the run folder."""
    faults = [] if kind is None else [record_streams.Fault(kind, 1, 0)]
    record_streams.job(faults, world=len(pace)).write(folder)
    for rank, seconds in enumerate(pace):
        chance = random.Random(f"{folder.name}{rank}")
        recorder = Recorder(folder, Header(folder.name, "node", rank, len(pace), RANKS, folder.name), at=1000.0)
        recorder.started("cold", 1000.0)
        for i in range(2000):
            recorder.add("train", seconds * chance.lognormvariate(0.0, 0.02), 1000.0 + i)
        if kind is not None and rank == 1:
            recorder.add("train", 0.3, 3000.0, end)
        recorder.close(3001.0)
    return str(folder)


@pytest.mark.parametrize("pace", [(0.1, 0.1, 0.1), PACES], ids=["like ranks", "groups of ranks"])
@pytest.mark.parametrize(
    ("kind", "end", "is_raised"),
    [("busy", "killed", True), ("stopped", "killed", False), ("exception", "cut", True), ("stopped", "cut", False)],
)
def test_end_of_a_rank_that_may_have_been_healthy_raises_the_limit_learned_from_run_folders(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    kind: record_streams.Kind,
    end: Literal["killed", "cut"],
    is_raised: bool,
    pace: tuple[float, ...],
) -> None:
    """If ranks differ, it raises the limit of its group. A busy rank may be healthy, a stopped one hangs."""
    options = ["--target-false-alarms", "200", "--horizon", "10m", "--min-timeout", "0.01", "--json"]

    def learned(*runs: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        assert main(["calibrate", *runs, *options]) == 0
        known = json.loads(capsys.readouterr().out)["deadlines"]["train"]
        groups = known.get("groups", [])
        assert [group["ranks"] for group in groups] == (["0-1", "2"] if pace == PACES else [])
        return known, groups or [known]

    quiet = [ended_in(tmp_path / name, None, pace) for name in ("one", "two")]
    _, (before, *others_before) = learned(*quiet)
    whole, (after, *others) = learned(*quiet, ended_in(tmp_path / "ended", kind, pace, end))
    assert before["timeout_s"] < 0.3  # otherwise no limit would have ended that occurrence
    assert after["timeout_s"] == pytest.approx(1.5 * 0.3 if is_raised else before["timeout_s"], rel=0.02)
    is_usual = end == "cut" and pace == PACES  # among all ranks; it is long among those of its group only
    assert whole.get("excluded_hangs", []) == ([] if is_raised or is_usual else [0.3])
    warning = whole["warnings"][-1]
    assert "1 occurrence after 0.3 s" in warning
    assert ("not known whether" in warning) is is_raised
    assert ("a limit ended" in warning) is (is_raised and end == "killed")
    assert ("it raises the limit" in warning) is (is_raised and pace != PACES)
    assert warning.startswith("ranks 0-1: ") is (pace == PACES and (is_raised or is_usual))
    for group, group_before in zip(others, others_before, strict=True):
        assert group["timeout_s"] == pytest.approx(group_before["timeout_s"], rel=0.02)


@pytest.mark.parametrize("seconds", [10.0, 0.0])
def test_table_in_which_a_limit_ended_every_occurrence_of_every_section_is_insufficient(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], seconds: float
) -> None:
    path = tmp_path / "t.csv"
    lines = [f"0,eval,0,{i},{seconds},killed" for i in range(2)]
    path.write_text("\n".join(["run,section,rank,i,seconds,end", *lines]) + "\n")
    assert main(["calibrate", str(path)]) == 4
    assert "a limit ended 2 occurrences" in " ".join(capsys.readouterr().out.split())


def test_table_without_an_occurrence_that_says_anything_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "t.csv"
    path.write_text("run,section,rank,i,seconds,end\n0,eval,0,0,10.0,cut\n")
    assert main(["calibrate", str(path)]) == 2
    assert "contains no durations" in capsys.readouterr().err
