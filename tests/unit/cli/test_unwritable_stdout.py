"""A command whose output cannot be written says so in one line, with exit status 1."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.record_streams import Fault, job


@pytest.mark.parametrize(
    ("redirection", "reason"), [(">&-", "it is closed"), (">/dev/full", "No space left on device")]
)
@pytest.mark.parametrize("unbuffered", ["", "1"], ids=["buffered", "unbuffered"])
@pytest.mark.parametrize("arguments", ["report RUN", "help", "help report", "calibrate diff --help"])
def test_output_that_cannot_be_written_is_one_line_on_stderr(
    redirection: str, reason: str, arguments: str, unbuffered: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONUNBUFFERED", unbuffered)
    folder = job([Fault("kill", 1, 0)]).write(tmp_path / "run")
    arguments = arguments.replace("RUN", str(folder))
    command = f"'{sys.executable}' -m resilience.cli {arguments} {redirection}"
    result = subprocess.run(command, shell=True, stderr=subprocess.PIPE, text=True, check=False)
    assert result.returncode == 1
    assert f"cannot write to stdout: {reason}" in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("command", ["resilience.cli run", "resilience.launcher"])
def test_help_of_run_that_cannot_be_written_is_one_line_on_stderr(command: str) -> None:
    command = f"'{sys.executable}' -m {command} --help >/dev/full"
    result = subprocess.run(command, shell=True, stderr=subprocess.PIPE, text=True, check=False)
    assert result.returncode == 1
    assert "resilience run: cannot write to stdout: No space left on device" in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("arguments", ["--help", "run --help", "logs --help", "status RUN", "completion bash"])
def test_command_whose_reader_has_closed_the_pipe_prints_no_error(arguments: str, tmp_path: Path) -> None:
    folder = job([Fault("kill", 1, 0)]).write(tmp_path / "run")
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "resilience.cli", *arguments.replace("RUN", str(folder)).split()]
    result = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writing)
    assert (result.returncode, result.stderr) == (128 + signal.SIGPIPE, "")


@pytest.mark.parametrize("arguments", ["report nosuch --json", "nosuch", "calibrate nosuch --json"])
def test_error_is_not_written_into_the_result_if_stderr_is_closed(arguments: str, tmp_path: Path) -> None:
    command = f"'{sys.executable}' -m resilience.cli {arguments} 2>&-"
    result = subprocess.run(command, shell=True, stdout=subprocess.PIPE, check=False, cwd=tmp_path)
    assert (result.returncode, result.stdout) == (2, b"")


def test_status_needs_no_stdin(tmp_path: Path) -> None:
    folder = job([Fault("kill", 1, 0)]).write(tmp_path / "run")
    command = f"'{sys.executable}' -m resilience.cli status --watch '{folder}' <&-"
    result = subprocess.run(command, shell=True, capture_output=True, text=True, check=False, timeout=60)
    assert "Traceback" not in result.stderr and result.stdout


@pytest.mark.parametrize("arguments", ["report RUN --html FILE", "trace RUN -o FILE"])
def test_result_is_written_to_its_file_though_stdout_is_closed(arguments: str, tmp_path: Path) -> None:
    folder, file = job([Fault("kill", 1, 0)]).write(tmp_path / "run"), tmp_path / "result"
    arguments = arguments.replace("RUN", str(folder)).replace("FILE", str(file))
    command = f"'{sys.executable}' -m resilience.cli {arguments} >&-"
    assert subprocess.run(command, shell=True, check=False).returncode == 0
    assert file.stat().st_size > 100


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ("trace RUN -o /dev/full", "--output /dev/full: cannot be written: No space left on device"),
        ("report RUN --html /dev/full", "cannot write /dev/full: it is not a file; "),
    ],
)
def test_file_that_cannot_be_written_is_named(arguments: str, reason: str, tmp_path: Path) -> None:
    folder = job([Fault("kill", 1, 0)]).write(tmp_path / "run")
    command = [sys.executable, "-m", "resilience.cli", *arguments.replace("RUN", str(folder)).split()]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (2, "")
    assert reason in result.stderr
    assert Path("/dev/full").is_char_device()  # it was replaced by a file once
