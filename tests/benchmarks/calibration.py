"""Does calibration keep its word?  Every number of its acceptance beside the bar it has to meet.

    python -m tests.benchmarks.calibration DATA [--json FILE] [--page docs/calibration.md] [--only cost]

DATA: a folder of tables `run,section,rank,i,seconds` (.csv.gz) of real runs and, if runs of one table are
of several configurations, a PROVENANCE.tsv with the columns dataset, run, repository, path: runs of one
folder are one configuration. The first 5 calls of each run are left out for both rules. --page writes the tables into
that page. Takes 10 minutes on a quiet machine, and an hour on a busy one."""

from __future__ import annotations

import argparse
import contextlib
import csv
import gzip
import io
import json
import math
import os
import random
import resource
import statistics
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from datetime import date
from pathlib import Path
from typing import Any

import msgspec

from resilience.calibrate import timings
from resilience.calibrate.held_out import at_least, geometric_mean, nvrx_rule, upper_rate
from resilience.calibrate.limits import DEFAULT, calibrate
from resilience.calibration.fitting import FACTOR, MONTH, fit
from resilience.calibration.recurring_phases import SLOW
from resilience.calibration.unended import Cut
from resilience.cli import main as resilience
from resilience.telemetry.durations import Header, Recorder
from tests.benchmarks import few_durations
from tests.support.stalled_runs import SEVERITIES, Outcome, Stalls, outcomes

WARM_UP = 5
TARGET = 0.25  # false alarms a section and month
SIZES = (None, 20_000, 1000, 100)
SOON = 15.0  # seconds
FAST = 0.25  # seconds: the least limit costs most in series with a shorter median
SLEEPS, SLEEPERS = 20_000, 20  # sleeps of 20 ms, and processes that share them
GROUPS = ("cost", "real", "synthetic", "stated", "clusters", "censoring")
DISTINCT = 4  # ranks that are recorded; the others are copies of them


class Bar:
    """A number and what it has to be."""

    def __init__(self, what: str, value: float | None, bar: float, at_most: bool = True) -> None:
        self.what, self.value, self.bar, self.at_most = what, value, bar, at_most

    @property
    def is_met(self) -> bool:
        if self.value is None:
            return True
        return self.value <= self.bar if self.at_most else self.value >= self.bar

    def line(self) -> str:
        value = "nothing to count" if self.value is None else f"{self.value:.4g}"
        sign = "<=" if self.at_most else ">="
        return f"{'met ' if self.is_met else 'NOT '} {self.what}: {value} {sign} {self.bar:g}"


# -- real runs -------------------------------------------------------------------------------------


def real(data: Path, tables: Tables) -> Iterator[Bar]:
    """Leave-run-out by configuration, through the command line."""
    with tempfile.TemporaryDirectory() as folder:
        sets = split(data, Path(folder))
        yield from few([path for path, _ in sets], tables)
        answers: dict[int | None, list[dict[str, Any]]] = defaultdict(list)
        for path, sections in sets:
            made = backtest(path, 2 * TARGET * sections)  # half of a target is kept for first occurrences
            for size, found in zip(SIZES, made["answers"], strict=True):
                answers[size] += found
        yield from floor([path for path, _ in sets], answers[None], tables)
    fits = [OfSize.of(size, answers[size]) for size in SIZES]
    for fitted in fits:
        yield from fitted.bars()
    yield from goals(answers[None], tables)
    header = (
        "fitted on",
        "deadlines / answers",
        "rated",
        "rated / 5 × max",
        "all / 5 × max",
        "rated: over the limit",
        "rated: over 5 × max",
        "all: over the limit",
        "all: over 5 × max",
    )
    tables["real"] = _table(header, [fitted.row() for fitted in fits])


class Exceeded(msgspec.Struct):
    """How many of the durations left out are over the limits, and over five times the maximum."""

    exposure: int
    limit: int
    five: int

    @classmethod
    def by(cls, found: Sequence[dict[str, Any]]) -> Exceeded:
        return cls(*(sum(each[what] for each in found) for what in ("exposure", "exceeded", "nvrx_exceeded")))

    @property
    def beyond(self) -> float:
        return float(max(0, self.limit - self.five))


class OfSize(msgspec.Struct):
    """The answers from so many durations (None: all). share: of deadlines with a rate. rated_ratio, ratio: limits over
    five times the maximum, geometric means."""

    size: int | None
    answers: int
    deadlines: int
    share: float
    rated_ratio: float | None
    ratio: float | None
    rated: Exceeded
    all: Exceeded

    @classmethod
    def of(cls, size: int | None, found: Sequence[dict[str, Any]]) -> OfSize:
        by_deadline: dict[tuple[str, str], list[bool]] = defaultdict(list)
        for each in found:
            by_deadline[each["configuration"], each["deadline"]].append(_rated(each))
        rated = [each for each in found if _rated(each)]
        return cls(
            size,
            len(found),
            len(by_deadline),
            sum(sum(each) / len(each) for each in by_deadline.values()) / len(by_deadline),
            geometric_mean([each["timeout_s"] / each["nvrx_s"] for each in rated]),
            geometric_mean([each["timeout_s"] / each["nvrx_s"] for each in found]),
            Exceeded.by(rated),
            Exceeded.by(found),
        )

    @property
    def name(self) -> str:
        return "all data" if self.size is None else f"n = {self.size}"

    def bars(self) -> Iterator[Bar]:
        rated = self.rated
        if self.size is None:
            yield Bar("rated, exceedances per 1e6", 1e6 * rated.limit / rated.exposure if rated.exposure else None, 1.0)
            yield Bar("rated, exceedances beyond those of 5 x max", rated.beyond, 0.0)
            yield Bar("all limits, exceedances beyond those of 5 x max", self.all.beyond, 0.0)
        bars = {None: (0.60, 0.90, 0.33), 20_000: (0.70, None, 0.60), 1000: (None, 1.10, 0.10), 100: (None, None, 0.0)}
        rated_bar, all_bar, share_bar = bars[self.size]
        if rated_bar is not None:
            yield Bar(f"{self.name}: rated limits / (5 x max), geometric mean", self.rated_ratio, rated_bar)
        if all_bar is not None:
            yield Bar(f"{self.name}: all limits / (5 x max), geometric mean", self.ratio, all_bar)
        what = f"{self.name}: share of deadlines with a rate"
        yield Bar(what, self.share, share_bar, at_most=self.size in (1000, 100))

    def row(self) -> tuple[str, ...]:
        """Return the row of the table."""
        ratios = ("-" if ratio is None else f"{ratio:.2f}" for ratio in (self.rated_ratio, self.ratio))
        over = ((f"{of.limit} of {of.exposure:,}", str(of.five)) for of in (self.rated, self.all))
        deadlines = f"{self.deadlines} / {self.answers}"
        return self.name, deadlines, f"{self.share:.0%}", *ratios, *(cell for pair in over for cell in pair)


def few(sets: Sequence[Path], tables: Tables) -> Iterator[Bar]:
    """How far above a few durations later ones lie."""
    found = list(few_durations.draws(sets))
    tables["few"] = _table(few_durations.HEADER, few_durations.rows(found))
    tables["few-stalls"] = _table(few_durations.STALLS_HEADER, list(few_durations.stalled_rows()))
    what = "few durations of 3 runs or more: draws of which a run exceeds three times the longest within their reach"
    yield Bar(what, float(few_durations.exceeded(found)), 0.0)


def goals(answers: Sequence[dict[str, Any]], tables: Tables) -> Iterator[Bar]:
    """How short limits are outside known phases, and for how many series that is so; without a least limit."""
    phased = [each for each in answers if each["outside_s"] is not None]
    exceeded = sum(each["outside_exceeded"] for each in phased)
    exposure = sum(each["outside_exposure"] for each in phased)
    for each in answers:
        each["shortest"] = each["outside_s"] or each["timeout_s"]
        each["limit"] = _mean_limit(each)
        each["healthy_max"] = each["outside_max_s"] or each["max_s"]
    known = [each for each in answers if each["status"] in RATED or each["outside_status"] in RATED]
    tame = [each for each in answers if each["healthy_max"] <= 5 * each["median_s"]]
    counted = [each for each in tame if each["status"] in RATED or each["outside_s"] is not None]
    near = [each for each in counted if each["shortest"] <= 5 * each["median_s"]]
    soon = [each for each in answers if _is_soon(each)]
    rated = [each for each in answers if _rated(each)]
    suspected, unseen = (sum(each[what] for each in answers) for what in ("suspected", "exposure"))
    of_all = _ratio(answers, "limit", "nvrx_s")
    in_phases = _ratio(phased, "shortest", "nvrx_s")
    to_median = f"{_ratio(known, 'limit', 'median_s'):.1f}"
    rows = (
        ("limit / (5 × max), all", f"{of_all:.2f}", "100%"),
        ("limit / (5 × max), outside known phases", f"{in_phases:.2f}", _share(phased, answers)),
        ("limit / median, a rate or counting claimed", to_median, _share(known, answers)),
        ("healthy maximum outside phases ≤ 5 × median", "-", _share(tame, answers)),
        (
            "… and a limit with a rate, with counting or outside phases ≤ 5 × median",
            f"{_share(near, tame)} of these",
            _share(near, answers),
        ),
        ("hang found within 15 s or 5 × median, p90: by the limits, none is injected", "-", _share(soon, answers)),
        ("… false alarms of these limits", _false_alarms(soon), _share(soon, answers)),
        ("false alarms a month that a limit with a rate allows its deadline", f"≤ {TARGET:g}", _share(rated, answers)),
        (
            "unseen durations late enough for a suspicion: the most that early kills may end",
            f"{suspected} of {unseen:,}",
            "100%",
        ),
        ("unseen durations over a limit outside phases", f"{exceeded} of {exposure:,}", _share(phased, answers)),
    )
    tables["goals"] = f"Measured on {date.today()}.\n\n" + _table(("", "value", "share of the series"), rows)
    yield Bar("outside known phases: unseen durations over the limit", float(exceeded), 0.0)
    yield Bar("all limits, shorter outside phases / (5 x max)", of_all, 0.75)


def _mean_limit(answer: dict[str, Any]) -> float:
    """Return the geometric mean of the limits that hold for the occurrences of a series: the shorter one outside phases
    only where it is in force."""
    if answer["outside_s"] is None or not answer["exposure"]:
        return float(answer["timeout_s"])
    share = answer["outside_exposure"] / answer["exposure"]
    return float(answer["timeout_s"] * (answer["outside_s"] / answer["timeout_s"]) ** share)


def _false_alarms(answers: Sequence[dict[str, Any]]) -> str:
    """Return how many of the durations left out exceed these limits, and the rate that this shows."""
    number = sum(each["exceeded"] + each["outside_exceeded"] for each in answers)
    months = sum(each["exposure"] * each["median_s"] for each in answers) / MONTH
    return f"{number} in {months * 720:.0f} h, so ≤ {upper_rate(number, 1) / months:.2g} a month (95 %)"


def floor(sets: Sequence[Path], answers: Sequence[dict[str, Any]], tables: Tables) -> Iterator[Bar]:
    """What the least limit of the command protects from, and what it costs."""
    found = [
        (sum(map(len, runs)), excess)
        for path in sets
        for runs in few_durations.series(path)
        if (excess := _excess(runs)) is not None
    ]
    least = DEFAULT.min_timeout
    floored = [each | {"floored": max(each["timeout_s"], least)} for each in answers]
    is_bound = [each for each in answers if each["timeout_s"] < least]
    rows = (
        ("series with a median below 0.25 s; their durations", f"{len(found)}; {sum(n for n, _ in found):,}"),
        *(
            (
                f"… with healthy durations {more:g} s above the median: anywhere; outside the phases of the other runs",
                "; ".join(f"{sum(excess[where] >= more for _, excess in found)} of {len(found)}" for where in (0, 1)),
            )
            for more in (0.3, least)
        ),
        (f"{SLEEPS:,} sleeps of 20 ms, the latest end: {_machine()}", f"{_latest():.2f} s too late"),
        ("all limits / (5 × max), without a least limit", f"{_ratio(answers, 'timeout_s', 'nvrx_s'):.2f}"),
        (f"all limits / (5 × max), at least {least:g} s", f"{_ratio(floored, 'floored', 'nvrx_s'):.2f}"),
        ("share of the series whose limit that lengthens", _share(is_bound, answers)),
    )
    tables["floor"] = _table(("", "value"), rows)
    far = sum(anywhere >= least for _, (anywhere, _) in found)
    yield Bar("fast series with healthy durations a least limit above the median", float(far), 1.0, at_most=False)


def _excess(runs: Sequence[Sequence[float]]) -> tuple[float, float] | None:
    """Return by how much durations exceeded the median of their run: anywhere, and outside the phases on which all
    other runs agree. None for a single run, and for a series of another speed."""
    medians = [statistics.median(run) for run in runs]
    if len(runs) < 2 or statistics.median(medians) >= FAST:
        return None
    slow = [
        {i: value for i, value in enumerate(run) if value >= SLOW * usual}
        for run, usual in zip(runs, medians, strict=True)
    ]
    anywhere = outside = 0.0
    for number, usual in enumerate(medians):
        others = [each for each in range(len(runs)) if each != number]
        reach = max(len(runs[other]) for other in others)
        reached = Counter(i for other in others for i in slow[other])
        phases = {i for i, count in reached.items() if count == sum(len(runs[other]) > i for other in others)}
        for i, value in slow[number].items():
            anywhere = max(anywhere, value - usual)
            if i < reach and phases.isdisjoint((i - 1, i, i + 1)):
                outside = max(outside, value - usual)
    return anywhere, outside


def _machine() -> str:
    """Return what else the machine was doing."""
    nice = os.nice(0)
    return f"{os.cpu_count()} cores at a load of {os.getloadavg()[0]:.0f}" + (f", nice {nice}" if nice else "")


def _latest() -> float:
    """Return how much too late the latest of many sleeps ended, in seconds."""
    with ProcessPoolExecutor(SLEEPERS) as pool:
        return max(pool.map(_sleep, [SLEEPS // SLEEPERS] * SLEEPERS))


def _sleep(number: int) -> float:
    latest = 0.0
    for _ in range(number):
        began = time.monotonic()
        time.sleep(0.02)
        latest = max(latest, time.monotonic() - began - 0.02)
    return latest


def _ratio(answers: Sequence[dict[str, Any]], what: str, of: str) -> float:
    return geometric_mean([each[what] / each[of] for each in answers]) or math.nan


def _is_soon(answer: dict[str, Any]) -> bool:
    """Return True if a hang in nine of ten occurrences is found within 15 s or 5 times the median, whichever is later:
    a hang is found when the limit of its occurrence is over."""
    allowed = max(SOON, 5 * answer["median_s"])
    if answer["outside_s"] is not None and answer["outside_s"] <= allowed < answer["timeout_s"]:
        return bool(answer["outside_exposure"] >= 0.9 * answer["exposure"])
    return bool(answer["timeout_s"] <= allowed)


RATED = ("ok", "tentative", "short")


def _share(some: Sequence[object], of: Sequence[object]) -> str:
    return f"{len(some) / len(of):.0%}" if of else "-"


def _rated(answer: dict[str, Any]) -> bool:
    return answer["status"] in ("ok", "tentative")


def split(data: Path, folder: Path) -> list[tuple[Path, int]]:
    """Write a table for each configuration; answers it and its number of sections."""
    places: dict[tuple[str, str], str] = {}
    with contextlib.suppress(OSError):
        for line in (data / "PROVENANCE.tsv").read_text().splitlines()[1:]:
            name, run, _, path = line.split("\t")
            places[name, run] = os.path.dirname(path)
    rows: dict[tuple[str, str], list[list[str]]] = defaultdict(list)
    for table in sorted(data.glob("*.csv.gz")):
        name = table.name.removesuffix(".csv.gz")
        if "startup" in name:
            continue  # one value a rank, no occurrences
        with gzip.open(table, "rt") as file:
            for row in csv.reader(file):
                if row[0] != "run" and (number := int(row[3]) - WARM_UP) >= 0:
                    row[3] = str(number)  # a table that begins later looks like that of a resumed run
                    rows[name, places.get((name, row[0]), "")].append(row)
    made = []
    for number, (key, found) in enumerate(sorted(rows.items())):
        if len({row[0] for row in found}) < 2:
            continue  # nothing can be left out
        path = folder / f"{number:03d}-{key[0]}.csv"
        with path.open("w") as file:
            file.write("run,section,rank,i,seconds\n")
            file.writelines(",".join(row) + "\n" for row in found)
        made.append((path, len({row[1] for row in found})))
    return made


def backtest(path: Path, target: float) -> dict[str, Any]:
    """Run the command line, answer what it prints."""
    shown = io.TextIOWrapper(io.BytesIO())
    with contextlib.redirect_stdout(shown):
        sizes = ",".join(str(size) for size in SIZES[1:])
        flags = ["--backtest", "--json", "--min-timeout", "0.000001", "--target-false-alarms", f"{target:g}"]
        resilience(["calibrate", str(path), *flags])
        whole = json.loads(shown.buffer.getvalue())  # type: ignore[attr-defined]
        shown.seek(0)
        shown.truncate()
        resilience(["calibrate", str(path), *flags, "--n", sizes])
        parts = json.loads(shown.buffer.getvalue())  # type: ignore[attr-defined]
    return {"answers": whole["answers"] + parts["answers"]}


# -- synthetic truth -------------------------------------------------------------------------------

Draw = Callable[[random.Random], float]


def _mixed(parts: Sequence[tuple[float, Draw]]) -> Draw:
    def draw(chance: random.Random) -> float:
        at = chance.random()
        for weight, part in parts:
            at -= weight
            if at < 0:
                return part(chance)
        return parts[-1][1](chance)

    return draw


def _lognormal(spread: float, scale: float = 1.0) -> Draw:
    return lambda chance: scale * chance.lognormvariate(0.0, spread)


LAWS: dict[str, Draw] = {
    "lognormal 2 %": _lognormal(0.02),
    "lognormal 30 %": _lognormal(0.3),
    "gamma": lambda chance: chance.gammavariate(20.0, 0.05),
    "2 modes": _mixed([(0.99, _lognormal(0.02)), (0.01, _lognormal(0.05, 10.0))]),
    "3 modes": _mixed([(0.9, _lognormal(0.02)), (0.09, _lognormal(0.05, 4.0)), (0.01, _lognormal(0.05, 30.0))]),
    "a mode of 1e-4": _mixed([(0.9999, _lognormal(0.02)), (0.0001, _lognormal(0.02, 20.0))]),
    "Pareto 4": lambda chance: chance.paretovariate(4.0),
    "Pareto 2.5": lambda chance: chance.paretovariate(2.5),
    "Pareto 1.5": lambda chance: chance.paretovariate(1.5),
    "drift 20 %": _lognormal(0.02),
}


def synthetic(trials: int) -> Iterator[Bar]:
    """How often a rated limit covers the true quantile, over laws that are known."""
    for p, n, bar in ((1e-5, 20_000, 0.95), (1e-3, 1000, 0.90)):
        covered: dict[str, list[bool]] = defaultdict(list)
        ratios = []
        for name, draw in LAWS.items():
            truth = _quantile(draw, p) * (1.2 if name.startswith("drift") else 1.0)
            for seed in range(trials):
                chance = random.Random(f"{name}{seed}{n}")
                runs = [[draw(chance) for _ in range(n // 2)] for _ in range(2)]
                if name.startswith("drift"):
                    runs = [[value * (1 + 0.2 * i / len(run)) for i, value in enumerate(run)] for run in runs]
                answer = fit(runs, p, min_timeout=0.0)
                if answer.timeout_s is not None and answer.status in ("ok", "tentative"):
                    covered[answer.status].append(answer.timeout_s >= truth)
                    ratios.append(answer.timeout_s / nvrx_rule(runs))
        for status, least in (("ok", bar), ("tentative", 0.75)):
            hits = covered[status]
            what = f"synthetic, p = {p:g}, n = {n}: `{status}` answers that cover ({len(hits)})"
            yield Bar(what, sum(hits) / len(hits) if hits else None, least, at_most=False)
        yield Bar(f"synthetic, p = {p:g}, n = {n}: rated limits / (5 x max)", geometric_mean(ratios), 0.55)


def _quantile(draw: Draw, p: float) -> float:
    """The true quantile, from far more draws than any fit sees."""
    chance = random.Random(1)
    n = int(30 / p)
    if n <= 3_000_000:
        values = sorted((draw(chance) for _ in range(n)), reverse=True)
        return values[int(n * p)]
    # Draw in parts, and keep the top only.
    top: list[float] = []
    for _ in range(10):
        top = sorted([*top, *(draw(chance) for _ in range(300_000))], reverse=True)[:200]
    return top[int(3_000_000 * p)]


def stated(trials: int) -> Iterator[Bar]:
    """Stated against achieved rates, n = 5000."""
    for p in (1e-2, 1e-3, 1e-4):
        worse = rated = 0
        for name in ("lognormal 2 %", "lognormal 30 %", "gamma", "2 modes", "Pareto 4"):
            draw = LAWS[name]
            for seed in range(trials):
                chance = random.Random(f"stated{name}{seed}{p}")
                answer = fit([[draw(chance) for _ in range(2500)] for _ in range(2)], p, min_timeout=0.0)
                if answer.status == "ok" and answer.timeout_s is not None:
                    rated += 1
                    exposure = int(20 / p)
                    over = sum(draw(chance) > answer.timeout_s for _ in range(exposure))
                    worse += over > 0 and at_least(over, exposure, p) < 0.05
        yield Bar(
            f"stated p = {p:g}, n = 5000: `ok` answers that are worse ({rated})", worse / rated if rated else None, 0.05
        )


STALLS: dict[str, list[Stalls]] = {
    "1e-3 of occurrences, episodes of 5": [Stalls(1e-3, 5, severity, n=20_000) for severity in SEVERITIES],
    "1e-3, episodes of 20": [Stalls(1e-3, 20, severity, n=20_000) for severity in SEVERITIES],
    "1e-3, episodes of 50": [Stalls(1e-3, 50, severity, n=20_000) for severity in SEVERITIES],
    "1e-2, episodes of 5": [Stalls(1e-2, 5, severity, n=20_000) for severity in SEVERITIES],
    "1e-2, episodes of 20": [Stalls(1e-2, 20, severity, n=20_000) for severity in SEVERITIES],
    "1e-2, episodes of 50": [Stalls(1e-2, 50, severity, n=20_000) for severity in SEVERITIES],
    "1e-2, episodes of 20, in 1 of 5 runs": [
        Stalls(1e-2, 20, severity, runs=5, stalling=1, n=25_000) for severity in SEVERITIES
    ],
    "no stalls, speeds of 2, 3, 5 runs differ by 20 %": [
        Stalls(share=0.0, run_spread=0.2, runs=runs, stalling=0, n=20_000) for runs in (2, 3, 5)
    ],
    "1e-2, episodes of 5, speeds of 2, 3, 5 runs differ by 20 %": [
        Stalls(1e-2, 5, "5 x", run_spread=0.2, runs=runs, stalling=runs, n=20_000) for runs in (2, 3, 5)
    ],
}
PROBABILITIES = (1e-6, 1e-4, 1e-3)


def clusters(trials: int, tables: Tables) -> Iterator[Bar]:
    """How often a rated limit holds where stalls come in episodes, and where runs differ."""
    rows = []
    of_stalls: list[tuple[float, Outcome]] = []
    of_runs: list[tuple[float, Outcome]] = []
    for what, cases in STALLS.items():
        tested = [
            (p, found)
            for case in cases
            for seed in range(trials)
            for p, found in zip(PROBABILITIES, outcomes(case, PROBABILITIES, seed), strict=True)
        ]
        known = [each for each in tested if each[1].is_seen or not cases[0].share]
        unknown = [each for each in tested if each[1].is_seen is False and cases[0].share]
        rows.append((what, *_cells(known), *_cells(unknown)))
        (of_stalls if cases[0].run_spread == 0.0 else of_runs).extend(known)
    yield Bar("stalls in episodes: rated answers that hold in later runs", _kept(of_stalls), 0.95, at_most=False)
    yield Bar("runs that differ by 20 %: later runs in which rated answers hold", _kept(of_runs), 0.95, at_most=False)
    header = ("stalls", "answers, with a stall in the data", "rated", "hold", "answers, without one", "rated", "hold")
    tables["coverage"] = _table(header, rows)


def _kept(tested: Sequence[tuple[float, Outcome]]) -> float | None:
    """Return the share of later runs in which rated answers hold."""
    kept = [exceeded <= p for p, found in tested if found.is_rated for exceeded in found.exceeded]
    return sum(kept) / len(kept) if kept else None


def _cells(tested: Sequence[tuple[float, Outcome]]) -> tuple[str, str, str]:
    kept = _kept(tested)
    return str(len(tested)), str(sum(found.is_rated for _, found in tested)), "-" if kept is None else f"{kept:.0%}"


Tables = dict[str, str]


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (header, ["---"] * len(header), *rows))


def write(page: Path, tables: Tables) -> None:
    """Put the tables between their marks in a page."""
    text = page.read_text()
    for name, table in tables.items():
        begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
        before, rest = text.split(begin)
        text = f"{before}{begin}\n{table}\n{end}{rest.split(end)[1]}"
    page.write_text(text)


def censoring() -> Iterator[Bar]:
    """What cut-offs and hangs change."""
    chance = random.Random(3)
    runs = [[chance.lognormvariate(0.0, 0.05) for _ in range(15_000)] for _ in range(2)]
    plain = fit(runs, 1e-6)
    cuts = [Cut(chance.uniform(0.1, 1.0), "cut") for _ in range(900)]
    hangs = [Cut(600.0, "hang"), Cut(1800.0, "hang")]
    assert plain.timeout_s is not None
    mixed = fit([run[:-450] for run in runs], 1e-6, censored=[*cuts, *hangs])
    assert mixed.timeout_s is not None
    yield Bar("3 % cut off and hangs mixed in, limit / limit without (above)", mixed.timeout_s / plain.timeout_s, 1.15)
    yield Bar("  … (below)", mixed.timeout_s / plain.timeout_s, 0.9, at_most=False)
    unknown = fit([run[:-450] for run in runs], 1e-6, censored=[*cuts, *hangs, Cut(1800.0, "cut")])
    assert unknown.timeout_s is not None
    what = "the same and one cut of unknown health after 30 min, limit / (5 x max)"
    yield Bar(what, unknown.timeout_s / (FACTOR * unknown.max_s), 1.0)
    yield Bar(
        "  … limit / limit without: it raises the limit", unknown.timeout_s / plain.timeout_s, 1.15, at_most=False
    )


def cost(tables: Tables) -> Iterator[Bar]:
    """Merging and fitting 1024 ranks x 8 sections with full files; what recording leaves on disk."""
    with tempfile.TemporaryDirectory() as folder:
        files = Path(folder) / "timings"
        for rank in range(DISTINCT):
            chance = random.Random(rank)
            recorder = Recorder(Path(folder), Header(run="big", node="n", rank=rank, world_size=1024), 0.0)
            recorder.started("cold", 0.0)
            for i in range(120_000):
                for section in range(8):
                    recorder.add(f"s{section}", chance.lognormvariate(0.0, 0.1), float(i))
            recorder.close(120_000.0)
        for rank in range(DISTINCT, 1024):
            for suffix in ("hist", "jsonl"):
                text = (files / f"n-{rank % DISTINCT}.{suffix}").read_bytes()
                own = text.replace(b'"rank":%d' % (rank % DISTINCT), b'"rank":%d' % rank, 1)
                (files / f"n-{rank}.{suffix}").write_bytes(own)
        size = max(path.stat().st_size for path in files.iterdir())
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        began = time.process_time()
        answers = calibrate(timings.read([Path(folder)])).deadlines
        seconds = time.process_time() - began
        assert len(answers) >= 8
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    rows = ((f"{seconds:.1f} s", f"{grown:.0f} MB", f"{size / 2**20:.2f} MiB", f"{date.today()}, {_machine()}"),)
    tables["cost"] = _table(("CPU", "memory", "largest file of a rank", "measured"), rows)
    yield Bar("merge and fit of 1024 ranks x 8 sections with full files, s of CPU", seconds, 10.0)
    yield Bar("  … memory above what was used before, MB", grown, 500.0)
    yield Bar("largest file of a rank, MiB", size / 2**20, 1.0)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; answers 1 if a bar is not met."""
    parser = argparse.ArgumentParser(prog="tests.benchmarks.calibration")
    parser.add_argument("data", type=Path)
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--page", type=Path, help="write the tables here, between their marks")
    parser.add_argument("--only", action="append", choices=GROUPS, help="measure only this; repeatable")
    read = parser.parse_args(arguments)
    bars: list[Bar] = []
    tables: Tables = {}
    groups = {
        "cost": cost(tables),  # first, for the memory of a process is measured by its peak
        "real": real(read.data, tables),
        "synthetic": synthetic(read.trials),
        "stated": stated(read.trials),
        "clusters": clusters(read.trials, tables),
        "censoring": censoring(),
    }
    for group in (groups[name] for name in read.only or GROUPS):
        for bar in group:
            print(bar.line(), flush=True)
            bars.append(bar)
    if read.json is not None:
        made = [{"what": bar.what, "value": bar.value, "bar": bar.bar, "met": bar.is_met} for bar in bars]
        read.json.write_text(json.dumps(made, indent=1) + "\n")
    if read.page is not None:
        write(read.page, tables)
    missed = sum(not bar.is_met for bar in bars)
    print(f"{len(bars)} bars, {missed} not met")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
