"""The command line as a whole: help of every command, and wrong commands."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from resilience.cli import COLLECT_EVERY, VERBS, main
from resilience.errors import ConfigurationError


@pytest.mark.parametrize("verb", VERBS)
def test_help_shows_the_options_of_a_command(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    texts = []
    for arguments in (["help", verb], [verb, "--help"]):
        with pytest.raises(SystemExit) as left:
            main(arguments)
        assert left.value.code == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]
    assert texts[0].startswith(f"usage: resilience {verb}")
    assert max(map(len, texts[0].splitlines())) <= 80


def test_help_of_run_breaks_no_option_at_a_hyphen_and_no_url_within_a_name(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        main(["help", "run"])
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert [line for line in lines if line.endswith("-")] == []
    (url,) = [number for number, line in enumerate(lines) if "https://" in line]
    assert lines[url].endswith("/") and lines[url + 1].strip().startswith("events.html")


def test_run_without_a_script_misses_only_the_script(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["run"])
    assert left.value.code == 2
    assert capsys.readouterr().err.endswith("the following arguments are required: training_script\n")


def test_help_of_run_shows_whole_numbers_of_seconds_as_the_pages_do(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["help", "run"])
    shown = " ".join(capsys.readouterr().out.split())
    assert "for a last checkpoint; default 30 " in shown
    assert "length of that window in seconds; default 3600 " in shown


def test_help_alone_lists_all_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["help"]) == 0
    shown = capsys.readouterr().out
    assert [verb for verb in VERBS if f"  {verb} " not in shown] == []


def test_help_of_a_wrong_command_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["help", "reprot"]) == 2
    assert "did you mean 'report'?" in capsys.readouterr().err


def test_python_looks_for_cycles_rarely_while_a_command_reads_and_as_before_afterwards(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    before, during = gc.get_threshold(), []

    def run(arguments: object) -> int:
        during.append(gc.get_threshold()[0])
        raise ConfigurationError("something is wrong")

    monkeypatch.setattr("resilience.cli.report.run", run)
    assert main(["report", str(tmp_path)]) == 2
    assert during == [COLLECT_EVERY] and gc.get_threshold() == before


@contextlib.contextmanager
def stdout_without_a_reader() -> Iterator[None]:
    """stdout is a pipe that nobody reads."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stdout, contextlib.redirect_stdout(stdout):
        yield


@pytest.mark.parametrize("verb", ["status", "run"])
def test_status_of_a_command_is_kept_if_only_its_last_output_is_lost(
    verb: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def write(*_: object) -> int:
        sys.stdout.write("kept in the buffer until the command has returned")
        return 1

    name = "main" if verb == "run" else "run"
    monkeypatch.setattr(importlib.import_module(f"resilience.cli.{verb}"), name, write)
    with stdout_without_a_reader():
        assert main([verb, str(tmp_path)]) == 1


def test_command_whose_reader_ended_has_the_status_of_a_broken_pipe(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def write(_: object) -> int:
        sys.stdout.write("the reader is gone")
        sys.stdout.flush()
        return 1

    monkeypatch.setattr("resilience.cli.status.run", write)
    with stdout_without_a_reader():
        assert main(["status", str(tmp_path)]) == 128 + signal.SIGPIPE


def test_value_of_a_switch_is_refused_with_what_to_write(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["report", "--json=it's"])
    assert ended.value.code == 2
    message = capsys.readouterr().err
    assert """argument --json: takes no value, got "it's": write the option alone, or leave it out""" in message


def test_help_of_a_nested_command_is_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["dashboards", "export"], ["calibrate", "diff"]):
        with pytest.raises(SystemExit) as ended:
            main(["help", *words])
        assert ended.value.code == 0
        assert capsys.readouterr().out.startswith(f"usage: resilience {' '.join(words)} ")
