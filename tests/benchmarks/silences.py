"""How often would the limits that nobody has set end a healthy job, and how soon do they find a hang?

    python -m tests.benchmarks.silences DATA

DATA: a folder of tables `run,section,rank,i,seconds` (.csv.gz) of real runs. Each run is played to the rule on a
virtual clock, in three ways: every series by itself, as a script that tells a step before each duration; every series
as sections; and the whole run, with its steps inside its blocks and epochs. A hang is then put at 20 places of each
run. A line for each data set; exits with 1 if a healthy run was ended. Takes about 2 minutes."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

from tests.support.real_runs import Play, Run, as_sections, as_steps, runs_of, whole
from tests.support.silent_jobs import SilentJob

PLACES = 20


def tell(name: str, runs: list[Run]) -> int:
    """Print a line; answers how many healthy silences ended a rank."""
    kills, suspicions, learned, places = 0, 0, 0, 0
    delays: list[float] = []
    for run in runs:
        for play in (as_steps, as_sections, whole):
            job = SilentJob()
            count = sum(1 for _ in play(job, run))
            kills, suspicions = kills + len(job.kills), suspicions + len(job.suspicions)
            learned += job.is_learned
            places += 1
            delays += hangs(play, run, count)
    ordered = sorted(delays)
    ends = f"{_at(ordered, 0.5):7.0f} {_at(ordered, 0.9):7.0f} {_at(ordered, 1.0):7.0f}" if ordered else ""
    print(f"{name[:32]:32} {len(runs):4} {kills:5} {suspicions:6} {learned:4}/{places:<4} {len(delays):6} {ends}")
    return kills


def hangs(play: Play, run: Run, count: int) -> Iterable[float]:
    """Return after how many seconds hangs are found, put at PLACES places of a run, beyond its first round."""
    wanted = {max(2, count * place // PLACES) for place in range(PLACES)} if count > 2 else set()
    job = SilentJob()
    found = []
    for number, _ in enumerate(play(job, run)):
        if number in wanted and (silence := job.silence) is not None:
            assert job.hang() <= max(600.0, 10 * silence.longest) + 1.0 or job.now == silence.since
            found.append(job.hang())
    return found


def _at(ordered: list[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def main(arguments: list[str]) -> int:
    (folder,) = arguments
    print(f"{'data set':32} runs kills suspic. learned  hangs     p50     p90     max (seconds until a hang is found)")
    return (
        1
        if sum([tell(path.name.split(".")[0], runs_of(path)) for path in sorted(Path(folder).glob("*.csv.gz"))])
        else 0
    )


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
