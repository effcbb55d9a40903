"""README's figures are those of the published results of the benchmark."""

from __future__ import annotations

import json
import re
from pathlib import Path
from statistics import median

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = {row["what"]: row for row in json.loads((ROOT / "tests/benchmarks/results.json").read_text())["rows"]}
UNITS = {"s": 1.0, "ms": 1e-3, "µs": 1e-6}
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
}


@pytest.mark.parametrize("text", FIGURES)
def test_figures_of_the_readme_are_those_of_the_results(text: str) -> None:
    (line,) = [line for line in (ROOT / "README.md").read_text().splitlines() if line.startswith("|") and text in line]
    ours, peers = line.split("|")[2:4]
    rows = [RESULTS[what] for what in FIGURES[text]]
    assert is_rounded(median(rows[0]["ours"]), *figures(ours))
    if "not within" in peers:
        assert rows[0]["peer"] == [] and is_rounded(rows[0]["peer_at_least"], *figures(peers))
    else:
        for row, figure in zip(rows, figures(peers), strict=True):
            assert is_rounded(median(row["peer"]), figure)


def figures(cell: str) -> list[tuple[str, str]]:
    """Return the figures of a cell, each with its unit."""
    return re.findall(r"([0-9.]+) (s|ms|µs)\b", cell)


def is_rounded(value: float, figure: tuple[str, str]) -> bool:
    """Return True if the figure is this value in seconds, rounded to the digits that it has."""
    number, unit = figure
    decimals = len(number.partition(".")[2])
    return f"{value / UNITS[unit]:.{decimals}f}" == number
