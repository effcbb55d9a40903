"""README's figures are those of the published results of the benchmark."""

from __future__ import annotations

import json
import re
from pathlib import Path
from statistics import median

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = {row["what"]: row for row in json.loads((ROOT / "tests/benchmarks/results.json").read_text())["rows"]}
UNITS = {"s": 1.0, "ms": 1e-3, "µs": 1e-6, "MiB": 2.0**20}
LAUNCHED = "SIGKILL of a worker → first all_reduce of all 4 new ones; peer is"
# A row of README, and the rows of the results in the order of its peers.
FIGURES = {
    "until all 4 new ones have made a step": [
        "SIGKILL of a worker → first optimizer step of a DDP model on all 4 new ones; peer is torchrun"
    ],
    "until all run the function again": ["exception → all 8 re-entered, first restart of a job"],
    "until the others run it again": ["SIGKILL → 7 survivors re-entered"],
    "with gloo's timeout left at 30 minutes": ["SIGKILL, gloo's timeout left at 30 min, 8 ranks"],
    "until all 4 new ones compute together": [f"{LAUNCHED} ft_launcher", f"{LAUNCHED} torchrun"],
    "entering and leaving a section": ["section, enter and leave"],
    "the first call of a wrapped function": ["call of a wrapped function → its first line, first call of a process"],
    "private memory of a rank's monitor": ["monitor: private memory, the largest of a job (a hosted store included)"],
    "in each step of 100 ms": ["step of 100 ms with 10 sections, `Wrapper`, records only: in the rank"],
}
DDP = RESULTS["SIGKILL of a worker → first optimizer step of a DDP model on all 4 new ones; peer is torchrun"]
BUDGET = "in each step of 100 ms"  # the row that exceeds its budget names it


@pytest.mark.parametrize("text", FIGURES)
def test_figures_of_the_readme_are_those_of_the_results(text: str) -> None:
    ours, peers = row_of_the_readme(text).split("|")[2:4]
    rows = [RESULTS[what] for what in FIGURES[text]]
    assert is_rounded(median(rows[0]["ours"]), *figures(ours))
    if "not within" in peers:
        assert rows[0]["peer"] == [] and is_rounded(rows[0]["peer_at_least"], *figures(peers))
    elif "does not record" in peers:
        assert rows[0]["peer"] == []
    else:
        for row, figure in zip(rows, figures(peers), strict=True):
            assert is_rounded(median(row["peer"]), figure)


def test_row_that_exceeds_its_budget_says_so() -> None:
    (row,) = [RESULTS[what] for what in FIGURES[BUDGET]]
    assert median(row["ours"]) > row["budget"]
    (budget,) = figures(row_of_the_readme(BUDGET).partition("budget")[2].partition("|")[0])
    assert is_rounded(row["budget"], budget)


@pytest.mark.parametrize(
    ("page", "start"), [("README.md", "## What it costs"), ("docs/performance.md", "<!-- measured: begin -->")]
)
def test_first_step_of_a_ddp_model_after_a_kill_is_the_first_row_of_each_table(page: str, start: str) -> None:
    """What users of `resilience run` get, and no faster row, is what a reader sees first."""
    _, found, measured = (ROOT / page).read_text().partition(start)
    assert found
    _, rule, first, *_ = [line for line in measured.splitlines() if line.startswith("|")]
    assert set(rule) <= set("|- :")
    assert "worker" in first and "kill" in first.lower() and ("DDP" in first or "DistributedDataParallel" in first)
    assert "all 4 new ones" in first and "step" in first
    cells = first.split("|")
    ours, peer = cells[2:4] if page == "README.md" else cells[3:5]
    assert "torchrun" in first
    for side, cell in (("ours", ours), ("peer", peer)):
        assert is_rounded(median(DDP[side]), figures(cell)[0])


def row_of_the_readme(text: str) -> str:
    """Return the only row of README's tables that holds this text."""
    lines = (ROOT / "README.md").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith("|") and text in line]
    return line


def figures(cell: str) -> list[tuple[str, str]]:
    """Return the figures of a cell, each with its unit."""
    return re.findall(r"([0-9.]+) (s|ms|µs|MiB)\b", cell)


def is_rounded(value: float, figure: tuple[str, str]) -> bool:
    """Return True if the figure is this value in seconds or bytes, rounded to the digits that it has."""
    number, unit = figure
    decimals = len(number.partition(".")[2])
    return f"{value / UNITS[unit]:.{decimals}f}" == number
