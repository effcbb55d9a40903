"""`python -m tests.live_limits`: record, calibrate, run healthy jobs and hung ones with the learned limits.

For each case of the matrix: two runs or three, `resilience calibrate`, healthy repetitions with `--timeouts` (nothing
may be killed), then runs with a hang (a rank is stopped). A hang counts as found only if the row's limit ended the
stopped rank, and the job then completed. Only documented commands are used. Prints a row for each case and writes the
table into a page. Status 1 if a healthy job was ended, or a hang was not found.

Jobs of a case that do not depend on each other run beside each other (`--parallel`): they sleep most of the time.
The durations are short: `--scale` multiplies them. With `--case`, the page keeps the rows of other cases. Delays are
from the moment at which the rank stopped to the record of the monitor; beside them stand five times the maximum, and
the rule of the peer, five times each run's maximum, averaged."""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec

from resilience.calibrate import timings
from resilience.calibrate.held_out import nvrx_rule
from resilience.calibration import rank_groups
from resilience.calibration.limits_file import Timeouts
from resilience.facts import events
from resilience.facts.records import Record
from resilience.system import timeouts_file
from tests.support.account import Account
from tests.support.ranks import free_port

JOB = Path(__file__).with_name("job.py")
RUN_LIMIT = 600.0  # seconds of one job
RANKS = 2
HUNG_RANK = 1
SECTION = "train"
ROUNDED = 1e-3  # of a limit in the file
RECORDED = ("first", "second", "third")
BEGIN, END = "<!-- live: begin -->", "<!-- live: end -->"

MATRIX: dict[str, dict[str, Any]] = {
    "heartbeats, slow load": {"shows": "heartbeat", "load": 3.0},
    "sections, evaluation every 10th": {"shows": "section", "tenth": 0.4},
    "steps, slow first step": {"shows": "step", "first": 4.0},
    "steps, evaluation every 100th": {"shows": "step", "hundredth": 1.5},
    "steps, checkpoint of 30 s": {"shows": "step", "checkpoint": 30.0},
    "sections, restart in the middle": {"shows": "section", "crash": [0, 1, 90]},
    "sections, unlike ranks": {"shows": "section", "slow_ranks": [1]},
    "steps, two nodes": {"shows": "step", "nodes": 2},
    "60 steps of 0.7 s, recorded three times": {"shows": "step", "steps": 60, "step": 0.7, "record": 3},
}


class Row(msgspec.Struct):
    """What came of a case. delays: seconds to the record of each hang."""

    case: str
    limit: str = "-"
    status: str = "-"
    limit_s: float = 0.0
    five_s: float = 0.0
    peer_s: float = 0.0
    healthy: int = 0
    ended: int = 0
    hangs: int = 0
    delays: list[float] = []


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="tests.live_limits", description=__doc__)
    parser.add_argument("--healthy", type=int, default=20, help="healthy repetitions of each case")
    parser.add_argument("--hangs", type=int, default=5, help="hangs of each case")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--step", type=float, default=0.05, help="seconds")
    parser.add_argument("--scale", type=float, default=1.0, help="of loads, evaluations and checkpoints")
    parser.add_argument("--parallel", type=int, default=5, help="jobs beside each other")
    parser.add_argument("--case", action="append", default=[], help="only cases with this in their name")
    parser.add_argument("--page", type=Path, help="write the table here, between its marks")
    options = parser.parse_args(arguments)
    rows = []
    for case, plan in MATRIX.items():
        if not options.case or any(each in case for each in options.case):
            with tempfile.TemporaryDirectory(prefix="live-limits-") as folder:
                rows.append(measured(case, plan, Path(folder), options))
            print(line(rows[-1]), flush=True)
    if options.page is not None:
        write(options.page, rows)
    is_good = all(row.ended == 0 and len(row.delays) == row.hangs for row in rows)
    return 0 if is_good else 1


def measured(case: str, plan: dict[str, Any], folder: Path, options: argparse.Namespace) -> Row:
    """Record, calibrate, run."""
    scaled = {key: value * options.scale if isinstance(value, float) else value for key, value in plan.items()}
    whole = {"steps": options.steps, "step": options.step, **scaled}
    (folder / "plan.json").write_text(json.dumps(whole))
    limits = folder / "runs" / "timeouts.yaml"
    row = Row(case, healthy=options.healthy, hangs=options.hangs)
    with ThreadPoolExecutor(options.parallel) as pool:

        def all_of(names: Sequence[str], **settings: Any) -> list[bool]:
            return list(pool.map(lambda name: run(folder, name, whole, **settings), names))

        if not all(all_of(recorded(plan))):
            ends = (path.read_text(errors="replace")[-2000:] for path in sorted(folder.glob("*.log")))
            raise RuntimeError(f"{case}: a recorded job did not complete:\n" + "\n".join(ends))
        command = ["calibrate", *(str(folder / "runs" / name) for name in recorded(plan)), "--out", str(limits)]
        subprocess.run([*RESILIENCE, *command], check=False, stdout=subprocess.DEVNULL, timeout=RUN_LIMIT)
        describe(row, plan, timeouts_file.read(limits), folder)
        healthy = [f"healthy{number}" for number in range(options.healthy)]
        went_well = all_of(healthy, limits=limits)
        hung = [f"hang{number}" for number in range(options.hangs)]
        recovered = all_of(hung, limits=limits, hang=(cycle_of(plan), HUNG_RANK, whole["steps"] // 2 + 7))
    row.ended = sum(
        not is_good or bool(silent(folder / "runs" / name)) for name, is_good in zip(healthy, went_well, strict=True)
    )
    for name, is_good in zip(hung, recovered, strict=True):
        stopped_at = float((folder / f"{name}.mark").read_text())
        found_at = found_s(silent(folder / "runs" / name), row)
        row.delays += [found_at - stopped_at] if found_at is not None and is_good else []
    return row


def found_s(exceeded: Sequence[Record], row: Row) -> float | None:
    """Return when the limit of the row found that the stopped rank hangs, in wall seconds; None if it did not, or if
    another limit or one on another rank was exceeded before it."""
    first = min(exceeded, key=lambda record: record.wall_ns, default=None)
    if first is None or not isinstance(first.event, events.RankFellSilent) or first.origin.rank != HUNG_RANK:
        return None
    name = f"section:{row.limit}" if row.limit == SECTION else row.limit
    is_of_row = first.event.limit == name and math.isclose(first.event.allowed_s, row.limit_s, rel_tol=ROUNDED)
    return first.wall_ns * 1e-9 if is_of_row else None


def recorded(plan: dict[str, Any]) -> Sequence[str]:
    """Return the names of the runs that are recorded."""
    return RECORDED[: plan.get("record", 2)]


def cycle_of(plan: dict[str, Any]) -> int:
    """Return the cycle in which a rank hangs: after the restart, where there is one."""
    return 1 if "crash" in plan else 0


def describe(row: Row, plan: dict[str, Any], found: Timeouts, folder: Path) -> None:
    """Note the limit that finds the hang, and what other rules would have allowed."""
    row.limit = SECTION if plan["shows"] == "section" else plan["shows"]
    known = found.deadlines[row.limit]
    row.status, row.limit_s = known.status, known.timeout_s or 0.0
    if known.groups:
        own = next(group for group in known.groups if rank_groups.holds(group.ranks, HUNG_RANK))
        row.status, row.limit_s = f"{own.status}, of its ranks", own.timeout_s or 0.0
    if known.outside is not None and cycle_of(plan) == 0:
        row.status, row.limit_s = f"{known.outside.status}, outside phases", known.outside.timeout_s
    runs = timings.read([folder / "runs" / name for name in recorded(plan)]).runs
    maxima = [each.deadlines[row.limit].max_s for each in runs]
    row.five_s, row.peer_s = 5 * max(maxima), nvrx_rule([[longest] for longest in maxima])


RESILIENCE = (str(Path(sys.executable).with_name("resilience")),)


def run(
    folder: Path, name: str, plan: dict[str, Any], limits: Path | None = None, hang: Sequence[int] | None = None
) -> bool:
    """Run a job to its end; return whether it went well. hang: cycle, rank and step."""
    nodes = plan.get("nodes", 1)
    command = [*RESILIENCE, "run", "--run-dir", str(folder / "runs"), "--nproc-per-node", str(RANKS // nodes)]
    command += ["--max-restarts", "3"]
    if limits is not None:
        command += ["--timeouts", str(limits)]
    if nodes > 1:
        endpoint = f"127.0.0.1:{free_port()}"
        command += ["--nnodes", str(nodes), "--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--rdzv-id", name]
    environment = {**os.environ, "RESILIENCE_JOB_ID": name, "PYTHONPATH": os.pathsep.join(sys.path)}
    if hang is not None:
        environment |= {"HANG": json.dumps(hang), "HANG_MARK": str(folder / f"{name}.mark")}
    agents = []
    for node in range(nodes):
        with (folder / f"{name}-{node}.log").open("wb") as log:
            agents.append(
                subprocess.Popen(
                    [*command, str(JOB), str(folder / "plan.json")],
                    env=environment,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            )
    try:
        return [agent.wait(RUN_LIMIT) for agent in agents] == [0] * nodes
    finally:
        for agent in agents:
            if agent.poll() is None:
                os.killpg(agent.pid, signal.SIGKILL)
                agent.wait()


def silent(folder: Path) -> list[Record]:
    """Return the records of limits that were exceeded."""
    return [record for record in Account(folder).records() if isinstance(record.event, events.RankFellSilent)]


def line(row: Row) -> str:
    delay = f"{statistics.median(row.delays):.2f} (to {max(row.delays):.2f})" if row.delays else "-"
    return (
        f"| {row.case} | {row.limit}: {row.status} | {row.ended} of {row.healthy} | {len(row.delays)} of {row.hangs} | "
        f"{row.limit_s:.2f} | {delay} | {row.five_s:.2f} | {row.peer_s:.2f} |"
    )


def write(page: Path, rows: Sequence[Row]) -> None:
    """Write the rows into the page's table; rows of other cases stay."""
    before, rest = page.read_text().split(BEGIN)
    old, after = rest.split(END)
    known = {case: each for each in old.splitlines() for case in MATRIX if each.startswith(f"| {case} |")}
    lines = known | {row.case: line(row) for row in rows}
    header = ("case", "limit", "healthy ended", "hangs found", "limit, s", "delay, s", "5 × max, s", "peer's rule, s")
    table = [
        f"| {' | '.join(header)} |",
        f"|{' --- |' * len(header)}",
        *(lines[case] for case in MATRIX if case in lines),
    ]
    page.write_text("\n".join((f"{before}{BEGIN}", *table, f"{END}{after}")))


if __name__ == "__main__":
    sys.exit(main())
