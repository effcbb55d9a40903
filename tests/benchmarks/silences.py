"""How often would the limits that nobody has set end a healthy job, and how soon do they find a hang?

    python -m tests.benchmarks.silences DATA

DATA: a folder of tables `run,section,rank,i,seconds` (.csv.gz) of real runs. Each run is played to the rule on a
virtual clock, in three ways: every series by itself, as a script that tells a step before each duration; every series
as sections; and the whole run, with its steps inside its blocks and epochs. A hang is then put at 20 places of each
run. A line for each data set; exits with 1 if a healthy run was ended. Takes about 2 minutes."""

from __future__ import annotations

import csv
import gzip
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from itertools import cycle
from pathlib import Path

from tests.support.silent_jobs import SilentJob

Run = dict[str, list[float]]  # seconds by section
AROUND = ("block", "epoch")  # sections that hold steps
STEPS = ("step", "heartbeat", "heartbeat10", "heartbeat20")
PLACES = 20
Play = Callable[[SilentJob, Run], Iterator[None]]  # yields where a hang could begin


def runs_of(path: Path) -> list[Run]:
    """Return the runs of a table, of rank 0 each."""
    runs: defaultdict[str, defaultdict[str, list[tuple[int, float]]]] = defaultdict(lambda: defaultdict(list))
    with gzip.open(path, "rt") as lines:
        for row in csv.DictReader(lines):
            runs[row["run"]][row["section"]].append((int(row["i"]), float(row["seconds"])))
    return [{name: [seconds for _, seconds in sorted(rows)] for name, rows in run.items()} for run in runs.values()]


def as_steps(job: SilentJob, run: Run) -> Iterator[None]:
    for name, durations in run.items():
        if name in AROUND or name == "startup_skew":
            continue  # they hold signs of life, or are no durations of one rank
        job.start_again()
        for seconds in durations:
            job.step()
            yield
            job.pass_time(seconds)


def as_sections(job: SilentJob, run: Run) -> Iterator[None]:
    for name, durations in run.items():
        if name in AROUND or name == "startup_skew":
            continue
        job.start_again()
        for seconds in durations:
            job.step()
            with job.section(name):
                yield
                job.pass_time(seconds)


def whole(job: SilentJob, run: Run) -> Iterator[None]:
    """Play `init`, then blocks or epochs full of steps, each followed by an evaluation."""
    steps = next((run[name] for name in STEPS if name in run), None)
    around = next((name for name in AROUND if name in run), None)
    if steps is None:
        return
    job.start_again()
    for seconds in run.get("init", ()):
        with job.section("init"):
            job.pass_time(seconds)
    evaluations = iter(run.get("eval", ()))
    if around is None:
        for seconds in steps:
            job.step()
            yield
            job.pass_time(seconds)
        return
    further = cycle(steps)
    for length in run[around]:
        with job.section(around):
            until = job.now + length
            while job.now < until:
                job.step()
                yield
                job.pass_time(min(next(further), until - job.now))
        with job.section("eval"):
            yield
            job.pass_time(next(evaluations, 0.0))


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
