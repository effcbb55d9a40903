"""Durations of real training runs, and how a job with these durations looks to its monitor.

A run is the durations of one rank by section, in order. Each function below plays a run to a job on a virtual clock
and yields before each silence."""

from __future__ import annotations

import csv
import gzip
from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import cycle
from pathlib import Path

from tests.support.silent_jobs import SilentJob

Run = dict[str, list[float]]  # seconds by section
Play = Callable[[SilentJob, Run], Iterator[None]]
AROUND = ("block", "epoch")  # sections that hold steps
STEPS = ("step", "heartbeat", "heartbeat10", "heartbeat20")
START_UP = "startup_skew"  # when each rank of a job entered `init`, after the first one


def runs_of(path: Path) -> list[Run]:
    """Return the runs of a table `run,section,rank,i,seconds` (.csv.gz), of rank 0 each."""
    runs: defaultdict[str, defaultdict[str, list[tuple[int, float]]]] = defaultdict(lambda: defaultdict(list))
    with gzip.open(path, "rt") as lines:
        for row in csv.DictReader(lines):
            runs[row["run"]][row["section"]].append((int(row["i"]), float(row["seconds"])))
    return [{name: [seconds for _, seconds in sorted(rows)] for name, rows in run.items()} for run in runs.values()]


def as_steps(job: SilentJob, run: Run) -> Iterator[None]:
    """Play each series by itself, as a script that reports a step before each duration."""
    for name, durations in run.items():
        if name in AROUND or name == START_UP:
            continue  # they hold signs of life, or are no durations of one rank
        job.start_again()
        for seconds in durations:
            job.step()
            yield
            job.pass_time(seconds)


def as_sections(job: SilentJob, run: Run) -> Iterator[None]:
    """Play each series by itself, as a script that has a section for each duration."""
    for name, durations in run.items():
        if name in AROUND or name == START_UP:
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


def start_up(job: SilentJob, run: Run) -> Iterator[None]:
    """Play the start of each rank: it waits in `init` until the last one has entered it."""
    arrivals = run.get(START_UP, [])
    last = max(arrivals, default=0.0)
    for arrival in arrivals:
        job.start_again()
        with job.section("init"):
            yield
            job.pass_time(last - arrival)
