"""Run the campaign: `--help` says how."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import asdict, replace
from pathlib import Path

from tests.benchmarks import table
from tests.campaign import cases, drawing, scoring
from tests.campaign.cases import Case
from tests.campaign.contestants import CONTESTANTS, Contestant, Verdict
from tests.campaign.running import Measures, Outcome, end, run, undisturbed

RENAMED = {"nvrx, ft_launcher": "nvrx, ft_launcher, limits set"}
"""Contestants in the published results that have another name now."""
SETS = {"single": cases.whole, "wide": cases.wide, "handlers": cases.handlers, "more": cases.more, "large": cases.large}


def main() -> int:
    options = _options()
    if options.show:
        outcomes = [outcome for path in options.show for outcome in load(path)]
        print(scoring.page(outcomes), end="")
        if options.draw:
            (options.draw / "benchmark-confidence.svg").write_text(drawing.reliability(outcomes))
            (options.draw / "benchmark-contestants.svg").write_text(drawing.contestants(outcomes))
        return 0
    work = Path(tempfile.mkdtemp(prefix="campaign-"))
    out = options.out or (work / "out" if options.quick else Path("campaign"))
    out.mkdir(parents=True, exist_ok=True)
    results = out / "results.jsonl"
    if not options.resume and results.exists():
        print(f"{results} exists: --resume goes on with it, another --out begins anew", file=sys.stderr)
        return 2
    stored = list(load(results))
    if foreign := _foreign(options, stored):
        print(
            f"{results} has case {foreign.name} with seed {foreign.seed}, which these options (--set, --first-seed, "
            "--worlds, --quick) do not give: results of two schedules must not mix. Use its options, or another --out",
            file=sys.stderr,
        )
        return 2
    contestant = CONTESTANTS[options.contestant]
    done = [each for each in stored if each.contestant == contestant.name]
    chosen = list(_chosen(options))
    campaign = Campaign(contestant, chosen, done, work, out)
    print(f"{len(chosen)} cases, {len(done)} of them done; jobs in {work}, results in {results}", flush=True)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupt)
    began = time.monotonic()
    is_complete = campaign.run(options.jobs, began + options.minutes * 60)
    took_s = time.monotonic() - began
    if not is_complete and not options.quick:
        print(f"the time is up after {len(campaign.done)} cases; --resume goes on")
    print(scoring.page(list(campaign.done.values())))
    if options.quick:
        failed = [each for each in campaign.done.values() if not scoring.is_passed(each)]
        for each in failed:
            print(f"failed: {each.case.name}: {each.verdict}, recovered {each.recovered}, equal {each.is_equal}")
        is_late = not is_complete or took_s > options.minutes * 60
        if is_late:
            print(
                f"failed: {len(campaign.done)} of {len(chosen)} cases took {took_s:.0f} s, expected all within "
                f"{options.minutes * 60:g} s (--minutes {options.minutes:g})"
            )
        return int(bool(failed) or is_late)
    return 0


def _interrupt(number: int, frame: object) -> None:
    """End the campaign once: a second signal must not stop it from ending its cases."""
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_IGN)
    raise KeyboardInterrupt


class Campaign:
    """Runs the cases that are not done yet, and keeps each outcome in a file as soon as it is known."""

    def __init__(self, contestant: Contestant, chosen: list[Case], done: list[Outcome], work: Path, out: Path) -> None:
        self.contestant, self.chosen, self.work, self.out = contestant, chosen, work, out
        self.done = {each.case.number: each for each in done}
        self._left = deque(case for case in chosen if case.number not in self.done)
        self._lock, self._is_stopped = threading.Lock(), False
        self._commit = table.commit() or "-"

    def run(self, jobs: int, deadline: float) -> bool:
        """Run the cases, `jobs` at a time, and begin none after the deadline. Return True if all are done. On an
        interruption the cases that run are ended, and not kept."""
        right = self._undisturbed()
        with ThreadPoolExecutor(jobs) as pool:
            workers = [pool.submit(self._work, right, deadline) for _ in range(jobs)]
            try:
                for worker in workers:
                    worker.result()
            except BaseException:
                self._is_stopped = True
                while wait(workers, timeout=0.2).not_done:
                    end(f"{os.getpid()}-")
                raise
        return not self._left

    def _work(self, right: dict[str, str], deadline: float) -> None:
        while not self._is_stopped and time.monotonic() < deadline:
            with self._lock:
                if not self._left:
                    return
                case = self._left.popleft()
            # Commands and records, which verdicts are made from, have the folder's name: it must not tell the truth.
            outcome = run(case, self.contestant, self.work / f"{case.number:04}", right[case.kind])
            with self._lock:
                if not self._is_stopped:
                    self._keep(outcome)

    def _keep(self, outcome: Outcome) -> None:
        outcome = replace(outcome, commit=self._commit, date=table.today())
        self.done[outcome.case.number] = outcome
        with (self.out / "results.jsonl").open("a") as file:
            file.write(json.dumps(asdict(outcome)) + "\n")
        print(_line(len(self.done), len(self.chosen), outcome), flush=True)

    def _undisturbed(self) -> dict[str, str]:
        """Return the result of each kind of training without a fault, from a file where an earlier part has it."""
        path = self.out / "undisturbed.json"
        right: dict[str, str] = json.loads(path.read_text()) if path.exists() else {}
        for kind in sorted({case.kind for case in self._left} - right.keys()):
            right[kind] = undisturbed(self.contestant, kind, self.work / f"undisturbed-{kind}")
            path.write_text(json.dumps(right))
        return right


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m tests.campaign", description="Faults with a known truth, and a score.")
    parser.add_argument("--show", type=Path, nargs="+", metavar="RESULTS", help="print the tables of these files only")
    parser.add_argument("--draw", type=Path, metavar="FOLDER", help="with --show: also draw them, as SVG")
    parser.add_argument("--quick", action="store_true", help="the fixed cases that all have to pass")
    parser.add_argument("--cases", type=int, default=1000, help="how many of the whole campaign (default 1000)")
    parser.add_argument("--first-seed", type=int, default=1000, help="seed of the first case (default 1000)")
    parser.add_argument(
        "--set",
        choices=sorted(SETS),
        default="single",
        help="one fault in DDP; pairs and everything else; pairs in handlers; further kinds of faults; large: other "
        "training with the most ranks, and pairs at other sizes",
    )
    parser.add_argument("--numbers", type=_numbers, help="only these cases: 3,17")
    parser.add_argument("--worlds", type=_numbers, default=(2, 4, 8))
    parser.add_argument("--contestant", choices=sorted(CONTESTANTS), default="ours")
    parser.add_argument("--jobs", type=int, default=1, help="cases at the same time (default 1)")
    parser.add_argument(
        "--minutes",
        type=float,
        default=120.0,
        help="begin no case after that (default 120); with --quick, longer is a failure",
    )
    parser.add_argument("--resume", action="store_true", help="leave out what results.jsonl has already")
    parser.add_argument(
        "--out", type=Path, help="folder for the results (default: campaign, and a new one with --quick)"
    )
    return parser.parse_args()


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))


def _schedule(options: argparse.Namespace, count: int) -> Iterator[Case]:
    return cases.quick() if options.quick else SETS[options.set](count, options.worlds, options.first_seed)


def _foreign(options: argparse.Namespace, stored: list[Outcome]) -> Case | None:
    """Return a stored case that is not the one which the schedule of these options has under its number, if any."""
    count = max((each.case.number + 1 for each in stored), default=0)
    expected = {case.number: case for case in _schedule(options, count)}
    return next((each.case for each in stored if each.case != expected.get(each.case.number)), None)


def _chosen(options: argparse.Namespace) -> Iterator[Case]:
    for case in _schedule(options, options.cases):
        if options.numbers and case.number not in options.numbers:
            continue
        if options.contestant == "ours" or case.mode == "launcher":  # the mode is ours; for others one is enough
            yield case


def load(path: Path) -> Iterator[Outcome]:
    """Yield the outcomes in a file of results."""
    for line in path.read_text().splitlines() if path.exists() else ():
        plain = json.loads(line)
        case = cases.from_json(json.dumps(plain.pop("case")))
        verdict = plain.pop("verdict")
        blamed = tuple((rank, confidence) for rank, confidence in verdict.pop("blamed"))
        measures = plain.pop("measures", {})
        measures.pop("steps_lost", None)  # of the published cases; it left out the last step that had begun
        struck = tuple(plain.pop("struck", (plain["is_injected"], False)))
        contestant = RENAMED.get(plain["contestant"], plain.pop("contestant"))
        said = Verdict(**verdict, blamed=blamed)
        yield Outcome(case, contestant, said, struck=struck, measures=Measures(**measures), **plain)


def _line(number: int, count: int, outcome: Outcome) -> str:
    bar = "#" * (20 * number // count)
    said = outcome.verdict
    what = "unknown" if said.is_unknown else f"rank {said.rank} {said.what} {said.confidence:g}"
    spent = outcome.measures
    state = "wedged" if outcome.is_wedged else "recovered" if outcome.recovered else "ended"
    mark = "ok" if scoring.is_passed(outcome) else "--"
    case = outcome.case
    return (
        f"[{bar:20}] {number}/{count} {mark} {case.name} rank {case.rank} step {case.step}: {state}, {what}, "
        f"{outcome.duration_s:.0f} s, detect {_s(spent.detect_s)}, recover {_s(spent.recover_s)}"
    )


def _s(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.1f} s"


if __name__ == "__main__":
    sys.exit(main())
