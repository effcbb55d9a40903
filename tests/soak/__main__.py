"""`python -m tests.soak --minutes 60 --seed 0`: does a job survive an hour of random faults?

Draws the whole schedule from the seed and writes it down, then runs round after round until the time is over
(`tests.soak.plan` says what a round is). Before that, ranks without this package show what torch alone keeps each time
everything is built again. Prints a table and writes everything as JSON. Status 1 if a rank ended that no fault was
meant to end, if a round did not come to its end, or if ranks grow more for one restart than torch alone does
(`figures.ALLOWED`).

All of it lies in one folder, which is removed at the end unless a round failed or `--keep` is given. What a round
leaves running is ended by pid."""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import msgspec

from resilience.facts import events
from tests.soak import figures
from tests.soak.figures import RoundResult
from tests.soak.plan import Round, draw
from tests.support.load import busy
from tests.support.ranks import Job, started
from tests.support.server import ForkServer

ROUND_LIMIT = 420.0  # seconds; a round of 24 faults, each of them a hang that ends in a kill, and load
BUSY = 8
REBUILDS = 12  # of ranks without this package
LEAVE_LIMIT = 60.0  # seconds for data loaders and monitors of a finished round to be gone


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parsed(arguments)
    folder = Path(tempfile.mkdtemp(prefix="soak-"))
    rounds = _schedule(options)
    (folder / "schedule.json").write_bytes(msgspec.json.format(msgspec.json.encode(rounds)))
    print(f"schedule of {len(rounds)} rounds in {folder / 'schedule.json'}", flush=True)
    results: list[RoundResult] = []
    os.environ["TMPDIR"] = str(folder)  # what data loaders and checkpoints put down
    server = ForkServer(["tests.soak.job", "tests.soak.rebuilding"])
    try:
        torchs = [
            leak for ranks in sorted({each.ranks for each in rounds}) for leak in measure_torch(server, ranks, folder)
        ]
        deadline = time.monotonic() + 60 * options.minutes
        for each in rounds:
            if time.monotonic() > deadline:
                break
            result = run_round(server, each, folder / f"{each.number}")
            results.append(result)
            print(_line(result), flush=True)
            _write(options, rounds, results, torchs)
            if not result.failed and not result.lost_healthy and not options.keep:
                shutil.rmtree(folder / f"{each.number}")
        found = _write(options, rounds, results, torchs)
        print(f"\n{figures.table(found)}\n\nwritten to {options.out}", flush=True)
    finally:
        server.close()
    is_good = not (found["healthy_ranks_lost"] or found["rounds_failed"] or found["leaks"]) and bool(results)
    if is_good and not options.keep:
        shutil.rmtree(folder)
    else:
        print(f"kept in {folder}")
    return 0 if is_good else 1


def run_round(server: ForkServer, each: Round, folder: Path) -> RoundResult:
    """Run one job to its end, and fold what it left."""
    folder.mkdir()
    began = time.monotonic()
    kwargs = {"faults": msgspec.to_builtins(each.faults), "workers": _workers(each.ranks)}
    failed, lost, leaks = "", [], []
    job: Job | None = None
    try:
        with busy(BUSY) if each.loaded else nullcontext():
            with started(server, folder, each.ranks, "tests.soak.job:train", kwargs) as job:
                job.leave_limit = LEAVE_LIMIT
                try:
                    ended = job.wait_ranks(ROUND_LIMIT)
                    _await_monitors(job, each.ranks)
                    job.ran_to_its_end = True
                finally:
                    records = list(job.records())
    except AssertionError as error:
        failed = str(error)
        (folder / "failed.txt").write_text(failed)
        failed = failed.splitlines()[0]
        assert job is not None
        ended = [job.finished[rank] for rank in sorted(job.finished)]
        records = list(job.records())
    strikes = figures.strikes_of(folder)
    struck = figures.may_end(strikes)
    # These keep more, for they do their monitor's work.
    unmonitored = {strike["rank"] for strike in strikes if strike["kind"] == "monitor"}
    assert job is not None
    sums = set()
    for rank, end in job.finished.items():
        if end.value is not None:
            sums.add(round(end.value["sum"], 3))
            if rank not in unmonitored:
                leaks += [leak] if (leak := figures.leaks_of(each.number, rank, end.value["looks"])) else []
        elif rank not in struck and not failed:
            lost.append(f"round {each.number} rank {rank}: {_how(end)}")
    if len(sums) > 1:
        failed = failed or f"ranks ended with different parameters: {sorted(sums)}"
    return RoundResult(
        number=each.number,
        ranks=each.ranks,
        loaded=each.loaded,
        seconds=time.monotonic() - began,
        strikes=strikes,
        ended_ranks=sum(end.value is None for end in ended),
        lost_healthy=lost,
        restarts=figures.restarts_of(each.number, records, strikes),
        leaks=leaks,
        failed=failed,
    )


def measure_torch(server: ForkServer, ranks: int, folder: Path) -> list[figures.Leak]:
    """Return the growth of each rank that builds everything REBUILDS times without this package."""
    place = folder / f"torch-{ranks}"
    place.mkdir()
    kwargs = {"times": REBUILDS, "workers": _workers(ranks)}
    with started(server, place, ranks, "tests.soak.rebuilding:rebuild", kwargs) as job:
        ended = job.wait_ranks(ROUND_LIMIT)
    if any(end.value is None for end in ended):
        raise RuntimeError(f"torch alone did not come to its end: {[_how(end) for end in ended]}{job.output()}")
    leaks = [figures.leaks_of(-1, rank, end.value["looks"]) for rank, end in enumerate(ended)]
    return [leak for leak in leaks if leak is not None]


def _workers(ranks: int) -> int:
    return 2 if ranks <= 4 else 1


def _await_monitors(job: Job, ranks: int) -> None:
    """Wait until each rank's monitor has ended, but for those that were killed."""
    killed = {strike["rank"] for strike in figures.strikes_of(job.folder) if strike["kind"] == "monitor"}
    for rank in set(range(ranks)) - killed:
        job.await_record(events.MonitorEnded, rank=rank, role="monitor", limit=LEAVE_LIMIT)


def _how(end: Any) -> str:
    if end.signal is not None:
        return f"signal {end.signal}"
    return f"code {end.code} {end.type} {end.error}".strip()[:300]


def _line(result: RoundResult) -> str:
    took = [restart.seconds for restart in result.restarts if restart.seconds is not None]
    return (
        f"round {result.number}: {result.ranks} ranks{', loaded' if result.loaded else ''}, {result.seconds:.0f} s, "
        f"{len(result.strikes)} faults, {len(result.restarts)} restarts, slowest {max(took, default=0.0):.1f} s, "
        f"{sum(bool(restart.ladder) for restart in result.restarts)} with ladder, {result.ended_ranks} ranks ended, "
        f"healthy lost: {result.lost_healthy or 0}{'  FAILED: ' + result.failed if result.failed else ''}"
    )


def _write(
    options: argparse.Namespace, rounds: list[Round], results: list[RoundResult], torchs: list[figures.Leak]
) -> dict[str, Any]:
    found = figures.summary(results, torchs)
    told = {
        "seed": options.seed,
        "minutes": options.minutes,
        "figures": found,
        "rounds": msgspec.to_builtins(results),
        "schedule": msgspec.to_builtins(rounds[: len(results)]),
    }
    options.out.write_text(json.dumps(told, indent=1))
    return found


def _schedule(options: argparse.Namespace) -> list[Round]:
    worlds = (options.world,) if options.world else (4, 8)
    loads = {"none": (False,), "busy": (True,), "both": (False, True)}[options.load]
    most = math.ceil(options.minutes * 4) + 1  # no round takes less than 15 s
    return [draw(options.seed, number, worlds, loads) for number in range(most)]


def _parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--minutes", type=float, default=60.0, help="no round begins later (default: %(default)g)")
    parser.add_argument("--seed", type=int, default=0, help="of the schedule (default: %(default)s)")
    parser.add_argument("--world", type=int, choices=(4, 8), help="ranks of a job (default: 4 and 8 take turns)")
    parser.add_argument(
        "--load", choices=("none", "busy", "both"), default="both", help=f"{BUSY} processes burn CPU (default: both)"
    )
    parser.add_argument("--out", type=Path, default=Path("soak.json"), help="JSON (default: %(default)s)")
    parser.add_argument("--keep", action="store_true", help="keep the folder of every round")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
