"""One command for all budgets: `python -m tests.benchmarks.run [--quick] [--only restart,hang] [--publish]`.

Prints the table, writes every measurement as JSON. Jobs of the two libraries take turns. Needs a quiet
machine with 2 cores and 12 GiB; a full run takes about half an hour, `--quick` about 7 minutes."""

from __future__ import annotations

import argparse
import math
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from statistics import median
from types import FrameType
from typing import TYPE_CHECKING, TypeVar

import msgspec

from tests.benchmarks import launching, table
from tests.benchmarks.table import Row

if TYPE_CHECKING:
    from tests.benchmarks import hangs
    from tests.benchmarks.implementations import Implementation, Side
    from tests.benchmarks.restarts import Kind, Outcome

T = TypeVar("T")
SINGLE = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}  # importing torch then starts no thread
RESULTS = Path(__file__).parent / "results.json"
PAGE = Path(__file__).parents[2] / "docs" / "performance.md"
GIB = 2**30
ENTRIES = 5  # calls of a wrapped function in one process

# The peer leaves a rank that is blocked in a collective to gloo's timeout. One second is what favours it
# most (shorter ones end groups while they are being built); both sides get it, except in the rows that
# say otherwise.
SHORT = timedelta(seconds=1)
PEER_LIMIT = 150.0  # seconds the peer is given where gloo's timeout is left at 30 minutes
QUIET = 1.0  # load of a machine whose figures may be published


class Bench:
    """The sides under test, how often to repeat, and where jobs put their files."""

    def __init__(self, sides: Sequence[Implementation], quick: bool, folder: Path) -> None:
        self.sides = list(sides)
        self.quick = quick
        self._folder = folder
        self._jobs = 0
        self.problems: list[str] = []

    def repeat(self, quick: int, full: int) -> int:
        return quick if self.quick else full

    def job_folder(self) -> Path:
        self._jobs += 1
        return self._folder / f"{self._jobs:04d}"

    def interleave(
        self,
        count: int,
        measure: Callable[[Implementation, int, Path], T],
        only: Side | None = None,
    ) -> dict[Side, list[T]]:
        """Run `measure(side, number, folder)` `count` times a side, taking turns; a failure is noted.

        only: one side alone."""
        sides = [side for side in self.sides if only in (None, side.side)]
        results: dict[Side, list[T]] = {side.side: [] for side in sides}
        for number in range(count):
            for side in sides if number % 2 == 0 else sides[::-1]:
                folder = self.job_folder()
                try:
                    results[side.side].append(measure(side, number, folder))
                except Exception as error:  # one failed job must not end the run
                    traceback.print_exc()
                    self.problems.append(f"{side.name}: {type(error).__name__}: {str(error)[:300]}")
                else:
                    shutil.rmtree(folder, ignore_errors=True)
        return results


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, write. Answers 0 if every measured budget is met, 1 if not, 2 if a row is missing."""
    options = _parse(arguments)
    if options.source is None and any(os.environ.get(name) != value for name, value in SINGLE.items()):
        os.environ.update(SINGLE)
        os.execv(sys.executable, [sys.executable, "-m", "tests.benchmarks.run", *sys.argv[1:]])
    if options.publish:
        table.split(PAGE)  # an unfit page is found before the measurements, not after
    report = _measured(options) if options.source is None else _read(options.source)
    print(table.text(report.rows))
    for problem in report.problems:
        print(f"not measured: {problem}")
    output = RESULTS if options.publish else options.json
    output.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n")
    print(f"\n{report.seconds:.0f} s; every measurement is in {output}")
    if options.publish:
        table.publish(report, PAGE)
        print(f"the table is in {PAGE}")
    if any(not row.ours for row in report.rows):
        return 2
    return int(any(row.verdict.startswith("no") for row in report.rows))


def _measured(options: argparse.Namespace) -> table.Report:
    signal.signal(signal.SIGTERM, _leave)
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="benchmark-") as temporary:
        report = _measure(options, Path(temporary))
    report.seconds = time.monotonic() - started
    return report


def _read(source: Path) -> table.Report:
    return msgspec.json.decode(source.read_bytes(), type=table.Report)


def _measure(options: argparse.Namespace, folder: Path) -> table.Report:
    machine = table.this_machine()  # its load before ours: nothing has been imported yet
    from tests.benchmarks import implementations, processes

    sides = [side for side in implementations.available() if options.side in ("both", side.side)]
    bench = Bench(sides, options.quick, folder)
    report = table.Report(table.today(), machine, {}, options.quick, [])
    selected = options.only.split(",") if options.only else list(GROUPS)
    for side in sides:
        side.load()
    processes.prepare()
    import torch

    commit = table.commit()
    report.versions = {side.name: side.version for side in sides} | {
        **({"commit": commit} if commit else {}),
        "torch": str(torch.__version__),
        "Python": sys.version.split()[0],
    }
    try:
        for name in selected:
            print(f"{time.strftime('%H:%M:%S')} {name} …", flush=True)
            for row in GROUPS[name](bench):
                report.rows.append(row)
                print("  " + " | ".join(table.cells(row)), flush=True)
            report.problems += bench.problems
            bench.problems.clear()
    finally:
        left = processes.sweep()
        if left:
            print(f"{left} processes had to be ended", flush=True)
    return report


# -- groups of rows ----------------------------------------------------------------------------


def restart_rows(bench: Bench) -> Iterator[Row]:
    """Exception and SIGKILL, at 8, 4 and 2 ranks."""
    short = f"gloo timeout {SHORT.total_seconds():g} s on both sides, which favours the peer most"
    for world_size in (8, 4, 2):
        jobs = bench.repeat(1, 5 if world_size == 8 else 3)
        faults = bench.repeat(2, 4)
        outcomes = _restarts(bench, "exception", world_size, faults, jobs, SHORT)
        for what, pick in (("first restart", slice(0, 1)), ("later restarts", slice(1, None))):
            yield _restart_row(
                f"exception → all {world_size} re-entered, {what} of a job",
                outcomes,
                pick,
                budget=0.08,
                factor=30 if world_size == 8 else None,
                notes=[short],
            )
        yield _restart_row(f"… → first all_reduce of all {world_size}", outcomes, slice(None), attribute="reduced")
    for world_size in (8, 4, 2):
        outcomes = _restarts(bench, "kill", world_size, 1, bench.repeat(2, 8 if world_size == 8 else 4), SHORT)
        yield _restart_row(
            f"SIGKILL → {world_size - 1} survivor{'s' if world_size > 2 else ''} re-entered",
            outcomes,
            slice(None),
            budget=0.12,
            factor=15 if world_size == 8 else None,
            notes=[short],
        )
        if world_size == 8:
            noticed = [value for outcome in outcomes[0] for value in outcome.noticed]
            yield Row(
                what="SIGKILL → the rank's monitor has recorded it",
                unit="s",
                budget=0.01,
                ours=noticed,
                notes=["the peer writes no record to read it from"],
            )


def rank_zero_rows(bench: Bench) -> Iterator[Row]:
    """SIGKILL of rank 0, which hosts the peer's store."""
    from tests.benchmarks import restarts

    outcomes: dict[Side, list[Outcome]] = bench.interleave(
        bench.repeat(1, 3),
        lambda side, number, folder: restarts.measure(
            side, 8, [restarts.Fault("kill", 0, 7 + number)], folder, group_timeout=SHORT, limit=20.0
        ),
    )
    yield _restart_row("SIGKILL of rank 0 → 7 survivors re-entered", _both(outcomes), slice(None), budget=0.12)


def resident_rows(bench: Bench) -> Iterator[Row]:
    """SIGKILL of a rank with 4 GiB resident."""
    available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    if available < 8 * GIB:
        bench.problems.append(f"4 GiB resident: only {available / GIB:.1f} GiB are free, skipped")
        return
    outcomes = _restarts(bench, "kill", 8, 1, bench.repeat(1, 4), SHORT, resident_bytes=4 * GIB)
    yield _restart_row(
        "SIGKILL with 4 GiB resident → 7 survivors re-entered", outcomes, slice(None), budget=0.12, factor=15
    )


def long_timeout_rows(bench: Bench) -> Iterator[Row]:
    """The same faults with gloo's timeout where torch leaves it, every rank blocked in an all_reduce."""
    kinds: tuple[tuple[Kind, str, float], ...] = (("exception", "exception", 0.08), ("kill", "SIGKILL", 0.12))
    for world_size in (8, 4, 2):
        for kind, word, budget in kinds:
            faults = bench.repeat(2, 4) if kind == "exception" else 1
            mine, _ = _restarts(bench, kind, world_size, faults, bench.repeat(1, 4), None, only="ours")
            peer: list[Outcome] = []
            if world_size == 8 and not bench.quick:
                _, peer = _restarts(bench, kind, 8, 1, 1, None, limit=PEER_LIMIT, only="peer")
            yield _restart_row(
                f"{word}, gloo's timeout left at 30 min, {world_size} ranks",
                (mine, peer),
                slice(None),
                budget=budget,
                notes=[] if peer else ["the peer, which takes minutes here, was not run in this row"],
            )


def hang_rows(bench: Bench) -> Iterator[Row]:
    """From a limit to its consequence."""
    from tests.benchmarks import hangs

    kinds: tuple[tuple[hangs.HangKind, str, float], ...] = (
        ("free", "hang, GIL free: abort begins after the soft limit by", 0.05),
        ("held", "hang, GIL held: abort of the others begins after the soft limit by", 0.15),
    )
    for kind, what, budget in kinds:
        results = bench.interleave(bench.repeat(1, 4), partial(_hang, kind))
        mine, peer = _both(results)
        yield Row(
            what=what,
            unit="s",
            budget=budget,
            ours=[hang.abort_after_soft for hang in mine if hang.abort_after_soft is not None],
            peer=[hang.abort_after_soft for hang in peer if hang.abort_after_soft is not None],
            notes=sorted(
                {
                    f"{side}: {hang.problem}"
                    for side, found in (("ours", mine), ("peer", peer))
                    for hang in found
                    if hang.problem
                }
            ),
        )
        if kind == "held":
            yield Row(
                what=f"hang, GIL held: the rank is gone after the hard limit by (grace {hangs.GRACE:g} s)",
                unit="s",
                budget=0.15 + hangs.GRACE,
                ours=[hang.gone_after_hard for hang in mine if hang.gone_after_hard is not None],
                peer=[hang.gone_after_hard for hang in peer if hang.gone_after_hard is not None],
            )


def _hang(kind: hangs.HangKind, side: Implementation, number: int, folder: Path) -> hangs.Hang:
    from tests.benchmarks import hangs

    return hangs.measure(side, kind, folder)


def building_rows(bench: Bench) -> Iterator[Row]:
    """How often a fault inside group building needs the ladder."""
    from tests.benchmarks import building

    chance = random.Random(7)
    tallies: dict[Side, building.Tally] = {}
    for side in bench.sides:
        tally = building.Tally()
        wanted = bench.repeat(40, 200) if side.side == "ours" else bench.repeat(1, 3)
        for _ in range(wanted):  # a job ends early where it is stranded
            faults = min(10, wanted - tally.faults)
            found = building.measure(side, faults, chance.randrange(2**32), bench.job_folder())
            tally += found
            if not found.faults or tally.faults >= wanted:
                break
        tallies[side.side] = tally
    shares = {side: [tally.share] for side, tally in tallies.items() if tally.faults}
    yield Row(
        what="faults inside group building that need the ladder (a process replaced)",
        unit="share",
        budget=0.05,
        ours=shares.get("ours", []),
        peer=shares.get("peer", []),
        notes=[
            f"{side}: {tally.replaced} of {tally.faults} faults replaced a process, {tally.stranded} "
            f"stranded the job; slowest restart {table.show(tally.slowest, 's')}"
            for side, tally in tallies.items()
        ],
    )


def ddp_rows(bench: Bench) -> Iterator[Row]:
    """A crashed worker of a job that trains with DistributedDataParallel."""
    found = _launched(bench, 4, ("resilience run", "torchrun"), "ddp step")
    yield Row(
        what="SIGKILL of a worker → first optimizer step of a DDP model on all 4 new ones; peer is torchrun",
        unit="s",
        budget=0.5,
        factor=10,
        ours=found["resilience run"],
        peer=found["torchrun"],
    )


def launch_rows(bench: Bench) -> Iterator[Row]:
    """A crashed worker under the launchers."""
    for workers in (4, 2):
        found = _launched(bench, workers, launching.LAUNCHERS, "all_reduce")
        ours = found["resilience run"]
        cold = found["resilience run --cold"]
        notes = [f"ours with --cold: {table.show(median(cold), 's')}"] if cold else []
        peers: tuple[tuple[launching.Launcher, float | None], ...] = (("torchrun", 8.0), ("ft_launcher", None))
        for peer, factor in peers:
            yield Row(
                what=f"SIGKILL of a worker → first all_reduce of all {workers} new ones; peer is {peer}",
                unit="s",
                budget=0.6 if workers == 4 else None,
                factor=factor if workers == 4 else None,
                ours=ours,
                peer=found[peer],
                notes=notes,
            )


def orphan_rows(bench: Bench) -> Iterator[Row]:
    """Workers whose launcher is killed, with all its processes, at once."""
    names: tuple[launching.Launcher, ...] = ("resilience run", "resilience run --cold", "torchrun")
    found: dict[launching.Launcher, list[float]] = {name: [] for name in names}
    for number in range(bench.repeat(1, 5)):
        for name in names if number % 2 == 0 else names[::-1]:
            try:
                found[name].append(launching.seconds_orphaned(name, 4, bench.job_folder()))
            except RuntimeError as error:
                bench.problems.append(str(error)[:300])
    left = sum(map(math.isinf, found["torchrun"]))
    for name in names[:2]:
        yield Row(
            what=f"SIGKILL of all processes of `{name}` at once → its last of 4 workers, deaf to signals, has ended; "
            "peer is torchrun",
            unit="s",
            budget=2.0,
            ours=[min(seconds, launching.ORPHANED) for seconds in found[name]],
            peer=[seconds for seconds in found["torchrun"] if math.isfinite(seconds)],
            peer_at_least=launching.ORPHANED if left else None,
            notes=[f"torchrun: workers of {left} of {len(found['torchrun'])} jobs lived on"] if left else [],
        )


def _launched(
    bench: Bench, workers: int, names: Sequence[launching.Launcher], work: launching.Work
) -> dict[launching.Launcher, list[float]]:
    """Return the seconds of restarts under each of these launchers, their jobs taking turns."""
    found: dict[launching.Launcher, list[float]] = {name: [] for name in names}
    for number in range(bench.repeat(1, 4)):
        for name in names if number % 2 == 0 else names[::-1]:
            try:
                found[name] += launching.measure(name, workers, 3, bench.job_folder(), work)
            except (RuntimeError, ValueError) as error:
                bench.problems.append(str(error)[:300])
    return found


def call_rows(bench: Bench) -> Iterator[Row]:
    """Signs of life."""
    from tests.benchmarks import costs

    results = bench.interleave(bench.repeat(1, 3), lambda side, _, folder: costs.call_costs(side, folder))
    mine, peer = _both(results)
    for attribute, what, budget in (
        ("ping", "`ping()`", 1.0e-6),
        ("ping_cpu", "CPU of rank and monitor behind one `ping()`", None),
        ("heartbeat", "heartbeat", 1.0e-6),
        ("section", "section, enter and leave", 2.5e-6),
    ):
        yield Row(
            what=what,
            unit="s",
            budget=budget,
            ours=[getattr(cost, attribute) for cost in mine],
            peer=[getattr(cost, attribute) for cost in peer],
        )


def entry_rows(bench: Bench) -> Iterator[Row]:
    """The way into a wrapped function."""
    from tests.benchmarks import costs

    results = bench.interleave(bench.repeat(3, 10), lambda side, _, folder: costs.entry_costs(side, ENTRIES, folder))
    mine, peer = _both(results)
    for what, pick in (("first call of a process", slice(0, 1)), ("later calls", slice(1, None))):
        for attribute, measured in (("wall", ""), ("cpu", ", CPU time of the rank")):
            yield Row(
                what=f"call of a wrapped function → its first line, {what}{measured}",
                unit="s",
                ours=[getattr(cost, attribute) for calls in mine for cost in calls[pick]],
                peer=[getattr(cost, attribute) for calls in peer for cost in calls[pick]],
                notes=["one rank, no process group; what the call itself imports is part of the first one"],
            )


def monitor_rows(bench: Bench) -> Iterator[Row]:
    """The monitor of an idle job."""
    from tests.benchmarks import costs

    results = bench.interleave(
        bench.repeat(1, 3),
        lambda side, _, folder: costs.monitor_cost(side, folder, 5.0 if bench.quick else 20.0),
    )
    mine, peer = _both(results)
    yield Row(
        what="monitor: private memory, the largest of a job (a hosted store included)",
        unit="bytes",
        budget=15 * 2**20,
        ours=[cost.private_bytes for cost in mine],
        peer=[cost.private_bytes for cost in peer],
    )
    yield Row(
        what="monitor: CPU while idle, of a core, the largest of a job",
        unit="share",
        budget=0.003,
        ours=[cost.cpu_share for cost in mine],
        peer=[cost.cpu_share for cost in peer],
    )


def import_rows(bench: Bench) -> Iterator[Row]:
    """What the import adds to torch's."""
    from tests.benchmarks import costs

    compiled = bench.job_folder()
    for side in bench.sides:
        costs.import_cost(side.module, compiled)  # compiles
    results = bench.interleave(bench.repeat(5, 15), lambda side, _, folder: costs.import_cost(side.module, compiled))
    mine, peer = _both(results)
    for index, what, unit, budget in (
        (0, "`from … import CallWrapper, Wrapper` after torch: CPU time", "s", 0.04),
        (1, "`from … import CallWrapper, Wrapper` after torch: private memory", "bytes", 4.0 * 2**20),
    ):
        yield Row(
            what=what,
            unit="s" if unit == "s" else "bytes",
            budget=budget,
            ours=[cost[index] for cost in mine],
            peer=[cost[index] for cost in peer],
            notes=[] if index else ["less garbage collections of what torch has made, which fall into it by chance"],
        )


def barrier_rows(bench: Bench) -> Iterator[Row]:
    """The store barrier that every restart goes through."""
    for clients, budget in ((64, None), (256, 0.1), (1024, None)):
        results = bench.interleave(
            bench.repeat(1, 2), partial(_barrier_times, clients=clients, rounds=7 if clients <= 256 else 5)
        )
        mine, peer = _both(results)
        yield Row(
            what=f"barrier of {clients} store clients",
            unit="s",
            budget=budget,
            factor=1,
            ours=[value for values in mine for value in values],
            peer=[value for values in peer for value in values],
            notes=["of the peer its reentrant barrier, which its restarts use"],
        )


def _barrier_times(side: Implementation, _: int, folder: Path, *, clients: int, rounds: int) -> list[float]:
    from tests.benchmarks import costs

    return costs.barrier_times(side, clients, rounds, folder)


def overhead_rows(bench: Bench) -> Iterator[Row]:
    """The whole account while nothing goes wrong, by a step of 100 ms with 10 sections."""
    from tests.benchmarks import overhead

    steps = bench.repeat(40, 100)
    found: dict[str, list[overhead.Cost]] = {variant: [] for variant in overhead.VARIANTS}
    for number in range(bench.repeat(1, 4)):
        for variant in overhead.VARIANTS if number % 2 == 0 else overhead.VARIANTS[::-1]:
            try:
                found[variant].append(overhead.measure(variant, steps, bench.job_folder()))
            except (RuntimeError, OSError, ValueError) as error:
                bench.problems.append(f"overhead, {variant}: {str(error)[:300]}")
    if found["bare"] and found["torchrun"]:
        yield from overhead.rows(found)
    try:
        yield overhead.scrape_row(bench.repeat(20, 100))
    except (RuntimeError, OSError, ValueError) as error:
        bench.problems.append(f"overhead, scrape: {str(error)[:300]}")


def report_rows(bench: Bench) -> Iterator[Row]:
    """One incident, and the report of a very large run."""
    from tests.benchmarks import reports
    from tests.support.large_run import WORLD

    try:
        yield from reports.incident_rows(bench.job_folder(), bench.repeat(1000, WORLD), bench.repeat(1, 5))
        yield from reports.rows(bench.job_folder(), bench.repeat(1000, WORLD), bench.repeat(1, 5))
    except (RuntimeError, OSError) as error:
        bench.problems.append(f"report: {str(error)[:300]}")


GROUPS: dict[str, Callable[[Bench], Iterator[Row]]] = {
    "ddp": ddp_rows,
    "restart": restart_rows,
    "rank-0": rank_zero_rows,
    "resident": resident_rows,
    "long-timeout": long_timeout_rows,
    "hang": hang_rows,
    "building": building_rows,
    "launch": launch_rows,
    "orphans": orphan_rows,
    "calls": call_rows,
    "entry": entry_rows,
    "monitor": monitor_rows,
    "import": import_rows,
    "barrier": barrier_rows,
    "overhead": overhead_rows,
    "report": report_rows,
}


# -- helpers -----------------------------------------------------------------------------------


def _restarts(
    bench: Bench,
    kind: Kind,
    world_size: int,
    faults: int,
    jobs: int,
    group_timeout: timedelta | None,
    resident_bytes: int = 0,
    limit: float = 60.0,
    only: Side | None = None,
) -> tuple[list[Outcome], list[Outcome]]:
    """Run `jobs` jobs a side; answers ours and the peer's outcomes."""
    from tests.benchmarks import restarts

    results = bench.interleave(
        jobs,
        lambda side, number, folder: restarts.measure(
            side,
            world_size,
            restarts.plan(kind, world_size, faults, seed=1000 * world_size + number),
            folder,
            group_timeout=group_timeout,
            resident_bytes=resident_bytes,
            limit=limit,
        ),
        only,
    )
    return _both(results)


def _restart_row(
    what: str,
    outcomes: tuple[list[Outcome], list[Outcome]],
    pick: slice,
    *,
    attribute: str = "entered",
    budget: float | None = None,
    factor: float | None = None,
    notes: Sequence[str] = (),
) -> Row:
    row = Row(what=what, unit="s", budget=budget, factor=factor, notes=list(notes))
    for name, found in zip(("ours", "peer"), outcomes, strict=True):
        times = [value for outcome in found for value in getattr(outcome, attribute)[pick]]
        setattr(row, name, times)
        stranded = [outcome for outcome in found if outcome.stranded]
        killed = sum(outcome.killed for outcome in found)
        if stranded:
            row.notes.append(
                f"{name}: {len(stranded)} of {len(found)} jobs did not come back within {stranded[0].limit:g} s"
            )
            if name == "peer" and not times:
                row.peer_at_least = stranded[0].limit
        if killed:
            row.notes.append(f"{name}: {killed} healthy ranks were killed")
        row.notes += sorted(
            {f"{name}: {outcome.problem}" for outcome in found if outcome.problem and not outcome.stranded}
        )
    return row


def _both(results: dict[Side, list[T]]) -> tuple[list[T], list[T]]:
    return results.get("ours", []), results.get("peer", [])


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.run", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few repetitions; the figures are rough")
    parser.add_argument("--only", metavar="GROUP,…", help=f"of {', '.join(GROUPS)}")
    parser.add_argument("--side", choices=["both", "ours", "peer"], default="both")
    parser.add_argument(
        "--json", type=Path, default=Path("benchmark.json"), help="where the measurements go (%(default)s)"
    )
    parser.add_argument(
        "--publish", action="store_true", help=f"write {RESULTS.name} here and the table of docs/{PAGE.name}"
    )
    parser.add_argument(
        "--from",
        dest="source",
        type=Path,
        metavar="JSON",
        help="measure nothing; judge and render what an earlier run has written",
    )
    options = parser.parse_args(arguments)
    load = os.getloadavg()[0]
    if options.publish and options.source is None and load > QUIET:
        parser.error(f"--publish needs a quiet machine: its load is {load:.1f}, expected at most {QUIET:g}")
    if options.publish and (options.only or options.side != "both"):
        parser.error("--publish needs all rows of both sides: leave --only and --side out")
    unknown = set((options.only or "").split(",")) - set(GROUPS) - {""}
    if unknown:
        parser.error(f"--only: no such group: {', '.join(sorted(unknown))}; there are {', '.join(GROUPS)}")
    return options


def _leave(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
