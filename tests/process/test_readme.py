"""A reader saves README's script and types README's commands, in this order."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.ranks import free_port
from tests.support.server import ROOT

SECTIONS = (ROOT / "README.md").read_text().partition("## In your own script")[2].partition("## Where to go on")[0]
SCRIPT = re.findall(r"^```python[^\n]*\n(.*?)^```", SECTIONS, flags=re.MULTILINE | re.DOTALL)
SHELL_BLOCKS = re.findall(r"^```(?:text|console)\n(.*?)^```", SECTIONS, flags=re.MULTILINE | re.DOTALL)
TOO_FEW_DATA = 4  # exit status of `resilience calibrate`
LIMIT = 120.0  # seconds for one command

pytestmark = pytest.mark.timeout(900)  # the first test also waits for all commands


def commands() -> list[tuple[str, list[str]]]:
    """Return each command, with the lines that README shows as its output."""
    found: list[tuple[str, list[str]]] = []
    for block in SHELL_BLOCKS:
        for line in block.splitlines():
            if line.startswith("$ ") or "resilience " in line:
                found.append((line.removeprefix("$ "), []))
            else:
                found[-1][1].append(line)
    return found


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, int, str]]:
    """Return command, exit status and output of all commands, typed in one folder."""
    folder = tmp_path_factory.mktemp("reader")
    (script,) = SCRIPT
    (folder / "train.py").write_text(script)
    given = {name: value for name, value in os.environ.items() if not name.startswith(("RESILIENCE_", "SLURM_"))}
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = {**given, "PATH": path, "PYTHONPATH": str(ROOT)}
    results = []
    for command, _ in commands():
        ran = subprocess.run(
            ["timeout", str(LIMIT), "bash", "-c", command],  # which ends what it started, too
            cwd=folder,
            env={**env, "PET_MASTER_PORT": str(free_port())} if command.startswith("torchrun") else env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        results.append((command, ran.returncode, ran.stdout))
    return results


def test_commands_end_as_a_reader_expects(outputs: list[tuple[str, int, str]]) -> None:
    expected = [TOO_FEW_DATA if command.startswith("resilience calibrate") else 0 for command, _ in commands()]
    assert len(expected) >= 6
    assert [(command, status) for command, status, _ in outputs] == [
        (command, status) for (command, _), status in zip(commands(), expected, strict=True)
    ], outputs


def test_commands_print_what_is_shown_below_them(outputs: list[tuple[str, int, str]]) -> None:
    shown = [(command, line) for command, lines in commands() for line in lines]
    assert len(shown) >= 2
    # torchrun runs its workers unbuffered: each writes a line and its end apart, so two lines may come to stand in one.
    printed = {
        command: output if command.startswith("torchrun") else output.splitlines() for command, _, output in outputs
    }
    assert [(command, line) for command, line in shown if line not in printed[command]] == []


def test_report_is_that_of_the_script(outputs: list[tuple[str, int, str]]) -> None:
    (report,) = [output for command, _, output in outputs if command == "resilience report"]
    assert "something broke on rank 1" in report
