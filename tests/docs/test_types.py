"""The Python examples pass a strict type checker, as users with `py.typed` run it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.test_blocks import BLOCKS
from tests.support.server import ROOT

LIMIT = 850.0  # without a cache
CONFIG = """\
[mypy]
strict = True
python_version = 3.10
[mypy-torch.*]
follow_imports = skip
ignore_missing_imports = True
[mypy-numpy.*]
follow_imports = skip
"""
PYRIGHT_CONFIG = {"typeCheckingMode": "standard", "extraPaths": [str(ROOT)]}  # as plain pyright checks
CHECKED = ("README.md", "quickstart.md", "usage.md")


def examples(folder: Path) -> list[Path]:
    """Write the Python blocks of the first pages that users read as files, and return these."""
    blocks = [block for block in BLOCKS if block.kind == "python" and block.page.name in CHECKED]
    paths = [folder / f"{block.page.stem.lower()}_{block.line}.py" for block in blocks]
    for path, block in zip(paths, blocks, strict=True):
        path.write_text(block.code)
    return paths


@pytest.mark.timeout(900)
def test_examples_pass_mypy(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    paths = examples(tmp_path)
    assert len(paths) >= len(CHECKED)
    (tmp_path / "mypy.ini").write_text(CONFIG)
    command = [sys.executable, "-m", "mypy", "--config-file", "mypy.ini", *(path.name for path in paths)]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}  # as an installed package: its own errors are not the examples'
    checked = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=LIMIT, check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr


@pytest.mark.timeout(900)
def test_examples_pass_pyright(tmp_path: Path) -> None:
    """By basedpyright, which brings its own Node; pyright from the index downloads one."""
    pytest.importorskip("basedpyright", reason="basedpyright is not installed")
    names = [path.name for path in examples(tmp_path)]
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(PYRIGHT_CONFIG))
    command = [sys.executable, "-m", "basedpyright", "--outputjson", "--pythonpath", sys.executable]
    checked = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT, check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert json.loads(checked.stdout)["summary"]["filesAnalyzed"] == len(names), checked.stdout
