"""A command whose output cannot be written says so in one line, with exit status 1."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.record_streams import Fault, job


@pytest.mark.parametrize(
    ("redirection", "reason"), [(">&-", "it is closed"), (">/dev/full", "No space left on device")]
)
@pytest.mark.parametrize("arguments", ["report RUN", "help"])
def test_output_that_cannot_be_written_is_one_line_on_stderr(
    redirection: str, reason: str, arguments: str, tmp_path: Path
) -> None:
    folder = job([Fault("kill", 1, 0)]).write(tmp_path / "run")
    arguments = arguments.replace("RUN", str(folder))
    command = f"'{sys.executable}' -m resilience.cli {arguments} {redirection}"
    result = subprocess.run(command, shell=True, stderr=subprocess.PIPE, text=True, check=False)
    assert result.returncode == 1
    assert f"cannot write to stdout: {reason}" in result.stderr
    assert result.stderr.count("\n") == 1
