"""The tree is the architecture: every module has a row, and the import contracts can fail."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from importlinter import api

from tests.support.server import ROOT

PACKAGE = ROOT / "resilience"


def lint(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from importlinter.cli import lint_imports_command as run; run()", "--no-cache"]
    env = {**os.environ, "PYTHONPATH": str(folder), "COLUMNS": "300"}
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)


def rows() -> list[str]:
    """Every module that the layers contract names."""
    contracts = api.read_configuration(str(ROOT / "pyproject.toml"))["contracts_options"]
    layers = next(contract["layers"] for contract in contracts if contract["type"] == "layers")
    return [name for layer in layers for name in re.findall(r"\w+", layer)]


def test_imports_keep_the_contracts() -> None:
    linted = lint(ROOT)
    assert linted.returncode == 0, linted.stdout[-3000:] + linted.stderr


def test_every_module_has_a_row() -> None:
    on_disk = {path.stem for path in PACKAGE.glob("*.py")} | {path.parent.name for path in PACKAGE.glob("*/*.py")}
    assert on_disk - {"__init__", PACKAGE.name} <= set(rows())


def test_no_folder_is_hidden_from_the_contracts() -> None:
    """A folder without __init__.py is no package to the linter, which then checks nothing in it."""
    folders = {path.parent for path in PACKAGE.rglob("*.py")}
    assert [str(folder.relative_to(ROOT)) for folder in folders if not (folder / "__init__.py").exists()] == []


VIOLATIONS = [
    ("core/watch.py", "import time", "The core decides", "resilience.core.watch -> time"),
    ("core/restart.py", "import resilience.system.files", "A module imports from the rows", "core.restart -> "),
    ("system/files.py", "import resilience.telemetry.emitter", "A module imports from", "system.files -> "),
    ("monitor/server.py", "import logging", "Only telemetry logs", "resilience.monitor.server -> logging"),
    ("nowhere.py", "", "A module imports from the rows", "- resilience.nowhere"),
]


@pytest.fixture(scope="module")
def violated(tmp_path_factory: pytest.TempPathFactory) -> subprocess.CompletedProcess[str]:
    """Lint a copy of the package that has all violations."""
    folder = tmp_path_factory.mktemp("violated")
    shutil.copytree(PACKAGE, folder / PACKAGE.name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    for module, line, _, _ in VIOLATIONS:
        with (folder / PACKAGE.name / module).open("a") as file:
            file.write(f"\n{line}\n")
    return lint(folder)


@pytest.mark.parametrize(("module", "line", "broken", "because"), VIOLATIONS)
def test_violation_breaks_its_contract(
    violated: subprocess.CompletedProcess[str], module: str, line: str, broken: str, because: str
) -> None:
    assert violated.returncode == 1
    assert re.search(rf"^{broken}.* BROKEN", violated.stdout, flags=re.MULTILINE)
    assert because in violated.stdout
