"""How far above the longest of a few durations do later ones lie, at the same positions of other runs and beyond?

Draws a few runs of a real data set, keeps the first durations of each, and compares them with all durations that were
not drawn. Only draws that `calibration.fitting` finds no flaw in count: the others keep five times the maximum."""

from __future__ import annotations

import csv
import math
import random
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import msgspec

from resilience.calibration.fitting import FEW_FLOOR, FEWEST, MONTH, fit_pool
from resilience.calibration.pool import pooled
from resilience.calibration.recurring_phases import ENOUGH_RUNS
from tests.support.stalled_runs import SEVERITIES, Stalls, run

Run = Sequence[float]

RUNS = (2, 3, 5, 9)
SIZES = (30, 60, 100, 200, 400)
DRAWS = 10  # of each number of runs and durations, from each series
FACTORS = (1.25, 1.5, 2.0, FEW_FLOOR, 5.0)
BEYOND = (FEW_FLOOR, 5.0)
HEADER = (
    "runs",
    "draws",
    *(f"within reach, over {factor:g} ×" for factor in FACTORS),
    *(f"beyond, over {factor:g} ×" for factor in BEYOND),
)

REACH, TRIALS, LATER = 100, 150, 10  # occurrences of a generated run, sets of three runs, later runs of each set
LAWS = {"1e-3 of occurrences": (1e-3, 1), "1e-2, episodes of 5": (1e-2, 5)}
STALLS_HEADER = ("stalls", "severity", "answers", *(f"over {factor:g} ×" for factor in (2.0, FEW_FLOOR, 5.0)))


class Draw(msgspec.Struct, frozen=True):
    """A draw. within, beyond: the longest durations not drawn, as multiples of the longest one drawn: at positions that
    the second longest run of the draw reached, and later; 0 if there are none."""

    runs: int
    within: float
    beyond: float


def series(table: Path) -> Iterator[list[Run]]:
    """Yield the runs of each section: durations of the slowest rank, in order."""
    slowest: dict[tuple[str, str], dict[int, float]] = defaultdict(lambda: defaultdict(float))
    with table.open() as file:
        for row in csv.DictReader(file):
            values = slowest[row["section"], row["run"]]
            values[int(row["i"])] = max(values[int(row["i"])], float(row["seconds"]))
    sections: dict[str, list[Run]] = defaultdict(list)
    for (section, _), by_position in slowest.items():
        sections[section].append([by_position[i] for i in sorted(by_position)])
    yield from sections.values()


def draws(tables: Iterable[Path]) -> Iterator[Draw]:
    """Yield the draws without a flaw."""
    chance = random.Random(6)
    for table in tables:
        for runs in series(table):
            for number in RUNS:
                for size in SIZES if number < len(runs) else ():
                    for _ in range(DRAWS):
                        chosen = chance.sample(range(len(runs)), number)
                        if (draw := _draw(runs, chosen, math.ceil(size / number))) is not None:
                            yield draw


def _draw(runs: Sequence[Run], chosen: Sequence[int], most: int) -> Draw | None:
    drawn = [runs[number][:most] for number in chosen]
    if sum(map(len, drawn)) < FEWEST or _flawed(drawn):
        return None
    longest, reach = max(map(max, drawn)), sorted(map(len, drawn))[-2]
    others = [run for number, run in enumerate(runs) if number not in chosen]
    later = [*(run[reach:] for run in others), *(runs[number][most:] for number in chosen)]
    within = max((max(run[:reach]) for run in others), default=0.0)
    return Draw(len(chosen), within / longest, max((max(run) for run in later if run), default=0.0) / longest)


def _flawed(drawn: Sequence[Run]) -> bool:
    """Return True if the longest of these durations do not predict later ones."""
    return fit_pool(pooled(drawn), 1.0 / MONTH, fewest_short=FEWEST).status != "short"


def rows(found: Sequence[Draw]) -> list[tuple[str, ...]]:
    """Return a row of the table for each number of runs: how many draws were exceeded."""
    made = []
    for number in RUNS:
        of_runs = [draw for draw in found if draw.runs == number]
        within = [str(sum(draw.within > factor for draw in of_runs)) for factor in FACTORS]
        beyond = [str(sum(draw.beyond > factor for draw in of_runs)) for factor in BEYOND]
        made.append((str(number), f"{len(of_runs):,}", *within, *beyond))
    return made


def exceeded(found: Sequence[Draw]) -> int:
    """Return how many draws of enough runs were exceeded where a short limit would have applied."""
    return sum(draw.within > FEW_FLOOR for draw in found if draw.runs >= ENOUGH_RUNS)


# -- generated runs --------------------------------------------------------------------------------


def stalled_rows() -> Iterator[tuple[str, ...]]:
    """Yield for each law the share of later runs that exceed multiples of the longest duration of three runs."""
    for law, (share, length) in LAWS.items():
        for severity in SEVERITIES:
            worst = list(_worst(Stalls(share, length, severity)))
            of_later = [f"{sum(each > factor for each in worst) / len(worst):.1%}" for factor in (2.0, FEW_FLOOR, 5.0)]
            yield law, severity, f"{len(worst) // LATER} of {TRIALS}", *of_later


def _worst(stalls: Stalls) -> Iterator[float]:
    """Yield the longest duration of later runs, as multiples of the longest one of three runs without a flaw."""
    for seed in range(TRIALS):
        chance = random.Random(f"{stalls}{seed}")
        drawn = [run(chance, REACH, stalls) for _ in range(ENOUGH_RUNS)]
        if not _flawed(drawn):
            yield from (max(run(chance, REACH, stalls)) / max(map(max, drawn)) for _ in range(LATER))
