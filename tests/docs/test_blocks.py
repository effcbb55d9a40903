"""Every code block in the docs and in the pages of the repository's root runs.

    python               as a script, on one rank; `ranks=2`: on as many
    python continues     after the page's earlier python blocks, in the same script
    python needs=NAME    skipped where this module is not installed
    console              its `$ ` lines, by bash, in a folder with a finished run `resilience-runs/demo`;
                         exit status 0 expected, or the one in `status=1`; `slow`: only in `poe test-slow`
    text json yaml toml diff prometheus     are shown, not run

No other kind is allowed, so that nothing escapes; the README's two `bash` lines are run by CI."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

from tests.support.ranks import Job, started
from tests.support.server import ROOT, ForkServer

PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
SHOWN = {"text", "json", "yaml", "toml", "diff", "prometheus"}


@dataclass(frozen=True)
class Block:
    page: Path
    line: int
    kind: str
    words: tuple[str, ...]
    code: str
    before: str = field(default="", repr=False)  # the page's earlier python blocks

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    def word(self, name: str, default: int) -> int:
        values = [word.partition("=")[2] for word in self.words if word.startswith(f"{name}=")]
        return int(values[0]) if values else default


def blocks() -> Iterator[Block]:
    parser = MarkdownIt().disable("inline")  # most of the time, and not needed for blocks
    for page in PAGES:
        before = ""
        for token in parser.parse(page.read_text()):
            if token.type not in ("fence", "code_block"):
                continue
            assert token.map is not None
            kind, *words = token.info.split() or [""]
            yield Block(page, token.map[0] + 1, kind, tuple(words), token.content, before)
            if kind == "python":
                before += token.content


BLOCKS = list(blocks())


def of_kind(kind: str) -> pytest.MarkDecorator:
    found = [
        pytest.param(block, marks=[pytest.mark.slow] if "slow" in block.words else [])
        for block in BLOCKS
        if block.kind == kind
    ]
    return pytest.mark.parametrize("block", found, ids=str)


def test_no_block_escapes() -> None:
    unknown = [str(block) for block in BLOCKS if block.kind not in SHOWN | {"python", "console", "bash"}]
    assert unknown == []
    assert {block.page.name for block in BLOCKS if block.kind == "bash"} == {"README.md"}


@of_kind("python")
def test_python_block_runs(start: Callable[..., Job], tmp_path: Path, block: Block) -> None:
    for word in block.words:
        if word.startswith("needs="):
            pytest.importorskip(word.removeprefix("needs="), reason=f"{word.removeprefix('needs=')} is not installed")
    script = tmp_path / "script.py"
    script.write_text((block.before if "continues" in block.words else "") + block.code)
    job = start(block.word("ranks", 1), "tests.support.scripts:run", path=str(script))
    assert [rank.code for rank in job.wait_ranks()] == [0] * block.word("ranks", 1), job.output()


@pytest.fixture(scope="session")
def finished_run(fork_server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of runs with a finished run `demo` in it, in which one rank failed once."""
    folder = tmp_path_factory.mktemp("docs")
    faults = [{"rank": 1, "iteration": 0, "step": 5, "kind": "exception"}]
    with started(
        fork_server, folder, 2, "tests.process.jobs:train", {"faults": faults}, {"RESILIENCE_JOB_ID": "demo"}
    ) as job:
        job.wait()
    return folder / "runs"


@of_kind("console")
def test_console_block_runs(finished_run: Path, tmp_path: Path, block: Block) -> None:
    shutil.copytree(finished_run, tmp_path / "resilience-runs")
    commands = [line.removeprefix("$ ") for line in block.code.splitlines() if line.startswith("$ ")]
    assert commands, "a console block without a line that begins with `$ `"
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "COLUMNS": "100"}
    limit = 1700 if "slow" in block.words else 280
    for command in commands:
        ran = subprocess.run(
            ["bash", "-c", command], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=limit, check=False
        )
        assert ran.returncode == block.word("status", 0), f"$ {command}\n{ran.stdout[-2000:]}{ran.stderr[-2000:]}"
