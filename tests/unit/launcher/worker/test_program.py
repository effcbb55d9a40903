"""What the agent does about a program whose files cannot be read in time."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from resilience.launcher.worker import fork_safety, program, script_variables


@pytest.fixture
def hanging(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """The file server of the program does not answer before this is set."""
    answers = threading.Event()

    def wait(*arguments: object) -> str:
        answers.wait()
        return "it cannot start"

    monkeypatch.setattr(program, "LIMIT", 0.01)
    monkeypatch.setattr(program, "_why_script_cannot_start", wait)
    monkeypatch.setattr(program, "_find", wait)
    monkeypatch.setattr(script_variables, "why_not", wait)
    yield answers
    answers.set()


@pytest.mark.parametrize("arguments", [["-u", "train.py"], ["-u", "-m", "train"]])
def test_whether_a_program_can_start_is_unknown_if_its_files_do_not_answer(
    hanging: threading.Event, arguments: list[str]
) -> None:
    assert program.why_not(sys.executable, arguments) == ""


@pytest.mark.parametrize("is_module", [False, True])
def test_program_whose_files_do_not_answer_starts_cold(
    hanging: threading.Event, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_module: bool
) -> None:
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "resilience.launcher"])
    script = tmp_path / "train.py"
    script.write_text("")
    arguments = ["-u", "-m", "train"] if is_module else ["-u", str(script)]
    reason = fork_safety.why_not([(arguments, fork_safety.AT_START)])
    assert reason == "the program's files cannot be read: the disk does not answer"


def test_error_while_a_programs_files_are_judged_costs_a_cold_start_and_no_launch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object) -> str:
        raise RecursionError("too deep")

    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "resilience.launcher"])
    monkeypatch.setattr(script_variables, "why_not", fail)
    monkeypatch.setattr(program, "_why_script_cannot_start", fail)
    script = tmp_path / "train.py"
    script.write_text("")
    reason = fork_safety.why_not([(["-u", str(script)], fork_safety.AT_START)])
    assert reason == "the program's files cannot be judged: RecursionError: too deep"
    assert program.why_not(sys.executable, ["-u", str(script)]) == ""


def test_error_that_is_in_no_line_of_the_source_is_told_without_a_line(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("# coding: no-such-encoding\n")
    reason = program.why_not(sys.executable, ["-u", str(script)])
    assert reason == f"{script}: SyntaxError: unknown encoding: no-such-encoding"
