"""`resilience logs`: one timeline of a run, chosen, folded and helpful where it cannot do what was asked."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
from pathlib import Path

import pytest

from resilience.cli import main
from resilience.cli.logs import since_ns
from resilience.errors import ConfigurationError
from resilience.facts import events
from resilience.run_folder.rank_ranges import ranks_of
from resilience.system import files
from tests.fixtures.jobs import unpacked
from tests.support.lines import AT, SECOND, log_line, record_line, write
from tests.support.record_streams import Fault, job


@pytest.fixture(autouse=True)
def terminal(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("RESILIENCE_RUN_DIR", str(tmp_path / "runs"))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of 8 ranks in which rank 3 says something else, with a line that nobody can read."""
    folder = tmp_path / "runs" / "job"
    for rank in range(8):
        loss = "loss is nan" if rank == 3 else "loss is fine"
        ready = log_line("ready", AT + rank * 1000, rank, node=f"n{rank // 4}", shard=rank, iteration=1)
        write(folder, f"logs/n{rank // 4}-{rank}.jsonl", ready, log_line(loss, AT + SECOND, rank, node=f"n{rank // 4}"))
    write(folder, "output/0/3.err", b"2023-11-14T22:13:22Z ERROR gave up\n", b"torn")
    write(folder, "records/n0-agent.jsonl", record_line(events.CycleStarted("first", 0, 3), AT, "n0"), b"{torn\n")
    return folder


def call(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    assert main(["logs", *arguments]) == 0
    return capsys.readouterr().out.splitlines()


def test_ranks_that_say_the_same_are_reported_once_and_the_other_stands_out(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(capsys) == [
        "2023-11-14 UTC",
        "22:13:20.000   info   agent n0      cycle.started  why=first restarts_used=0 max_restarts=3",
        "22:13:20.000~  warn   n0            {torn",
        "22:13:20.000   info   ranks 0-7     ready  shard=0…7",
        "22:13:21.000   info   ranks 0-2,4-7  loss is fine",
        "22:13:21.000 ! info   rank 3        loss is nan",
        "22:13:22.000 ! error  rank 3        2023-11-14T22:13:22Z ERROR gave up",
        "22:13:22.000~! info   rank 3        torn",
    ]


def test_what_was_not_understood_is_counted(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["logs", str(run)]) == 0
    said = capsys.readouterr().err
    assert "1 line could not be parsed, shown unchanged: records/n0-agent.jsonl (1)" in said
    assert "nothing is known of the clock of n1" not in said  # one node has records


def test_each_line_is_reported_where_folding_is_off(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = call(capsys, str(run), "--no-fold")
    assert len(lines) == 1 + 16 + 2 + 2
    assert lines[3] == "22:13:20.000   info   rank 0        ready  shard=0"


def test_json_has_every_line_with_its_place(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    entries = [json.loads(line) for line in call(capsys, str(run), "--json")]
    assert len(entries) == 20
    assert entries[2]["shard"] == 0 and entries[2]["file"] == "logs/n0-0.jsonl" and entries[2]["line"] == 1
    (torn,) = [entry for entry in entries if entry["event"] == "torn"]
    assert torn["kind"] == "text" and torn["ts_is_estimate"] is True and torn["initial_rank"] == 3


def test_json_of_folded_lines_names_the_ranks(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    entries = [json.loads(line) for line in call(capsys, str(run), "--json", "--fold", "--grep", "loss")]
    assert [(entry["text"], entry["ranks"], entry["stands_out"]) for entry in entries] == [
        ("loss is fine", [0, 1, 2, 4, 5, 6, 7], False),
        ("loss is nan", [3], True),
    ]


@pytest.mark.parametrize(
    ("arguments", "count"),
    [
        (["--rank", "0-1,3"], 8),
        (["--level", "error"], 1),
        (["--event", "cycle.*"], 1),
        (["--event", "loss*"], 8),
        (["--iteration", "1"], 8),
        (["--cycle", "0", "--level", "error"], 1),
        (["--grep", "shard=[23]"], 2),
        (["--since", "2023-11-14T22:13:21"], 10),
        (["--since", "22:13:22Z"], 2),
        (["--since", "3600s"], 20),
    ],
)
def test_filters(run: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], count: int) -> None:
    assert len(call(capsys, str(run), "--json", *arguments)) == count


def test_columns_are_those_asked_for(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = call(capsys, str(run), "--columns", "rank,file,shard", "--event", "ready", "--rank", "5")
    assert lines == ["   5  logs/n1-5.jsonl:1  5"]


def test_a_column_that_no_line_has_is_named_and_the_exit_status_is_1(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["logs", str(run), "--columns", "rank,nosuch,shard,tiem", "--event", "ready", "--rank", "5"]) == 1
    said = capsys.readouterr()
    assert said.out.splitlines() == ["   5  -  5  -"]
    assert "no line shown has the field nosuch, tiem; columns are time, date, level" in said.err
    assert main(["logs", str(run), "--columns", "shard", "--no-fold"]) == 0  # some lines have it


def test_around_an_incident_shows_its_moment_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = job([Fault("kill", 1, 0)]).write(tmp_path / "run")
    write(folder, "logs/node-0.jsonl", log_line("long before", AT - 100 * SECOND), log_line("long after", AT * 2))
    shown = "\n".join(call(capsys, str(folder), "--around", "1"))
    assert "rank.interrupted" in shown and "restart.ended" in shown
    assert "long before" not in shown
    assert main(["logs", str(folder), "--around", "7"]) == 2
    assert "has one incident, number 1" in capsys.readouterr().err


def test_diff_tells_only_what_the_other_run_did_not_say(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "runs" / "good", "records/n0-agent.jsonl", b"{torn\n")
    for rank in range(2):
        write(tmp_path / "runs" / "good", f"logs/n0-{rank}.jsonl", log_line("ready", AT, rank, shard=rank))
        write(tmp_path / "runs" / "good", f"logs/n1-{rank}.jsonl", log_line("loss is fine", AT, rank))
    lines = call(capsys, str(run), "--diff", "good")
    assert [line.split("  ")[-1] for line in lines if "loss" in line or "ready" in line] == ["loss is nan"]
    assert not any("torn" in line and "{" in line for line in lines)


def test_order_between_nodes_is_reported_with_its_uncertainty(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for node, ahead in (("a", 0), ("b", 7 * SECOND)):
        began = record_line(events.CyclePhaseStarted("rendezvous"), AT + ahead, node)
        ended = record_line(events.CyclePhaseEnded("rendezvous", "completed", 1e-6), AT + SECOND // 10 + ahead, node)
        led_to = record_line(events.CycleStarted("first", 0, 3), AT + SECOND // 10 + ahead, node)
        write(tmp_path, f"records/{node}-agent.jsonl", began, ended, led_to)
    assert main(["logs", str(tmp_path), "--json"]) == 0
    said = capsys.readouterr()
    assert "the clock of b was 7 s ± 100 ms ahead; corrected" in said.err
    assert "2 nodes: their clocks agree to within 100 ms, by 1 barrier of all ranks" in said.err
    of_b = [entry for entry in map(json.loads, said.out.splitlines()) if entry["node"] == "b"]
    assert {(entry["clock_offset_s"], entry["clock_uncertainty_s"]) for entry in of_b} == {(7.0, 0.1)}
    assert of_b[0]["ts"] == "2023-11-14T22:13:20.000000Z"


def test_only_nodes_whose_clocks_were_compared_are_said_to_agree(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for node in "abc":
        began = record_line(events.CyclePhaseStarted("rendezvous"), AT, node)
        ended = record_line(events.CyclePhaseEnded("rendezvous", "completed", 1e-6), AT + SECOND // 10, node)
        led_to = record_line(events.CycleStarted("first", 0, 3), AT + SECOND // 10, node)
        write(tmp_path, f"records/{node}-agent.jsonl", began, ended, led_to)
    write(tmp_path, "records/z-2.jsonl", record_line(events.MonitorStarted(5), AT, "z", 2))
    assert main(["logs", str(tmp_path)]) == 0
    notes = capsys.readouterr().err
    assert "3 of 4 nodes: their clocks agree to within 200 ms" in notes  # b and c may err in opposite directions
    assert "the clock of z cannot be compared" in notes


def test_lines_wrap_on_a_terminal_of_80_columns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    folder = job([Fault("kill", 1, 0)], world=40).write(tmp_path / "run")
    write(folder, "logs/node-0.jsonl", log_line("a" * 300 + " " + "b" * 30, AT))
    write(folder, "output/0/0.out", b"\x1b[31m10 %\r20 %\t\x1b[2Jdone\x1b[0m\n")
    out = Terminal()
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr("sys.stdout", out)
    assert main(["logs", str(folder)]) == 0
    assert max(map(len, out.getvalue().splitlines())) <= 80
    assert "".join(out.getvalue().split()).count("a" * 300) == 1
    assert "20 %    \\x1b[2Jdone" in out.getvalue()
    assert "\x1b" not in out.getvalue()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--rank", "7-1"], "write ranks as 0-7,12"),
        (["--rank", "x"], "write ranks as 0-7,12"),
        (["--since", "tomorrow"], "write 2026-01-31T12:00:00"),
        (["--since", "0001-01-01T00:00:00+01:00"], "not a time"),
        (["--since", "9999-12-31T23:59:59-01:00"], "not a time"),
        (["--grep", "("], "not a regular expression"),
        (["--around", "1"], "has no incidents"),
        (["--diff", "nowhere"], "does not exist"),
        (["--columns", "rank", "--json"], "--columns cannot be combined with --json"),
        (["--columns", "rank", "--fold"], "--columns cannot be combined with --fold"),
        (["--columns", ","], "--columns names no column; write some of time, date, level"),
    ],
)
def test_wrong_use_is_reported(run: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str) -> None:
    assert main(["logs", str(run), *arguments]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    "options",
    [
        ["--event", "nosuch"],
        ["--rank", "9"],
        ["--level", "critical"],
        ["--iteration", "77"],
        ["--cycle", "5"],
        ["--since", "2030-01-01T00:00:00"],
        ["--grep", "nowhere"],
        ["--rank", "1", "--grep", "nan"],
        ["--event", "nosuch", "--json"],
        ["--diff", "job"],
        ["--since", "9999-12-31T23:59:59.999999"],
    ],
)
def test_options_that_match_nothing_are_named_and_the_exit_status_is_1(
    run: Path, capsys: pytest.CaptureFixture[str], options: list[str]
) -> None:
    assert main(["logs", str(run), *options]) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert f"no line of {run} matches {options[0]} {options[1]}" in said.err


def test_lines_keep_their_times_in_a_copy_whose_files_are_newer(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Plain text has no times of its own; the launcher has noted when it was read."""
    path = write(run, "output/0/5.err", b"loading\nno such shard\n")
    files.times_of(path).write_bytes(b"0 %d\n8 %d\n" % (AT + SECOND // 2, AT + 3 * SECOND))
    told = call(capsys, str(run))
    assert any(line.startswith("22:13:23.000") and line.endswith("no such shard") for line in told)
    for file in run.rglob("*"):
        os.utime(file, ns=(AT + 10**14, AT + 10**14))
    assert call(capsys, str(run)) == told


def test_since_counts_back_from_the_last_line_also_in_a_copy(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(run / "logs", copy / "logs", copy_function=shutil.copyfile)  # its files are as new as can be
    (copy / "records").mkdir()
    lines = call(capsys, str(copy), "--since", "0.5s")
    assert [line.split("  ")[-1] for line in lines[1:]] == ["loss is fine", "loss is nan"]


def test_ranks_and_times_are_read_as_people_write_them() -> None:
    assert ranks_of("0-2, 5,007") == {0, 1, 2, 5, 7}
    assert since_ns("10m", AT) == AT - 600 * SECOND
    assert since_ns("2023-11-14T23:13:20+01:00", AT) == AT
    assert since_ns("20:13:20-02:00", AT) == AT
    with pytest.raises(ConfigurationError):
        since_ns("5 fortnights", AT)


def test_time_without_a_date_is_the_last_one_before_the_last_line() -> None:
    """The last line is of 22:13:20 UTC; the run may have begun on the day before."""
    assert since_ns("22:13:20", AT) == AT
    assert since_ns("22:15", AT) == since_ns("2023-11-13T22:15", AT) == AT - (86400 - 100) * SECOND
    assert since_ns("2023-11-14T22:15", AT) == AT + 100 * SECOND
    assert since_ns("07:13:20+09:00", AT) == AT


def test_time_after_the_window_around_an_incident_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = job([Fault("kill", 1, 0)]).write(tmp_path / "run")
    write(folder, "logs/node-0.jsonl", log_line("long after", AT + 100 * SECOND))
    assert main(["logs", str(folder), "--around", "1", "--since", "5s"]) == 2
    error = capsys.readouterr().err
    assert "--around 1 ends at 2023-11-14T22:13:2" in error and "before --since 5s (2023-11-14T22:14:55" in error
    assert main(["logs", str(folder), "--around", "1", "--since", "98s"]) == 0


@pytest.mark.parametrize("ago", ["99999999d", "9" * 400 + "s"])
def test_since_longer_ago_than_any_line_selects_all(run: Path, capsys: pytest.CaptureFixture[str], ago: str) -> None:
    assert call(capsys, str(run), "--since", ago) == call(capsys, str(run))
    assert main(["logs", str(run), "--since", ago, "--level", "critical"]) == 1
    assert f"matches --level critical, --since {ago} (from 1970-01-01T" in capsys.readouterr().err


@pytest.mark.parametrize("text", [str(2**20 + 1), "0-999999999", "9" * 5000])
def test_ranks_above_the_largest_world_are_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match=f"at most {2**20}"):
        ranks_of(text)
    assert ranks_of(str(2**20)) == {2**20}


@pytest.mark.parametrize("text", ["", "3-", "-3", "a", "1,,2", "3-1"])
def test_what_is_no_list_of_ranks_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match="write ranks as 0-7,12"):
        ranks_of(text)


def test_following_tells_what_comes_and_ends_by_ctrl_c(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    waits = 0

    def sleep(_: float) -> None:
        nonlocal waits
        waits += 1
        if waits == 1:
            with (run / "logs" / "n0-0.jsonl").open("ab") as file:
                file.write(log_line("came later", AT + 9 * SECOND))
        elif waits > 20:
            raise KeyboardInterrupt

    monkeypatch.setattr("resilience.cli.logs.time.sleep", sleep)
    lines = call(capsys, str(run), "--follow")
    assert lines[-1].endswith("rank 0        came later")
    assert lines[3].endswith("ranks 0-7     ready  shard=0…7")


def test_columns_have_the_fields_of_an_interruption(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = unpacked("wrapper-in-launcher", tmp_path)
    arguments = ["logs", str(folder), "--event", "rank.interrupted", "--grep", "step=13\\b", "--columns", "step,event"]
    assert main(arguments) == 0
    lines = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert lines
    assert set(lines) == {"13"}


def test_time_of_a_selection_is_named_at_its_option(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["logs", str(run), "--since", "1s", "--grep", "no such text"]) == 1
    assert re.search(r"--since 1s \(from [^)]*\), --grep no such text", capsys.readouterr().err)


@pytest.mark.parametrize("text", ["^disk full$", "k f"])
def test_grep_searches_the_text_without_colours(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str) -> None:
    write(tmp_path, "output/0/3.err", b"\x1b[31mdisk\x1b[0m full\n")
    (tmp_path / "records").mkdir()
    write(tmp_path, "logs/node-4.jsonl", log_line("\x1b[31mdisk\x1b[0m full", AT, 4))
    lines = call(capsys, str(tmp_path), "--grep", text, "--columns", "rank,text")
    assert [line.split(maxsplit=1) for line in lines] == [["4", "disk full"], ["3", "disk full"]]
    assert main(["logs", str(tmp_path), "--grep", "31m"]) == 1


def test_a_field_has_no_colours(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "records").mkdir()
    write(tmp_path, "logs/node-4.jsonl", log_line("\x1b[31mdisk\x1b[0m full", AT, 4, mood="\x1b[32mfine\x1b[0m"))
    assert call(capsys, str(tmp_path), "--columns", "event,mood,rank") == ["disk full  fine     4"]
