"""Run the campaign: `--help` says how."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from tests.campaign import cases, scoring
from tests.campaign.cases import Case
from tests.campaign.contestants import CONTESTANTS, Verdict
from tests.campaign.running import Measures, Outcome, run, undisturbed

SETS = {"single": cases.whole, "wide": cases.wide}


def main() -> int:
    options = _options()
    if options.show:
        print(scoring.page([outcome for path in options.show for outcome in load(path)]), end="")
        return 0
    work = Path(tempfile.mkdtemp(prefix="campaign-"))
    out = options.out or (work / "out" if options.quick else Path("campaign"))
    out.mkdir(parents=True, exist_ok=True)
    results = out / "results.jsonl"
    done = {(each.contestant, each.case.number): each for each in load(results)} if options.resume else {}
    if not options.resume and results.exists():
        print(f"{results} exists: --resume goes on with it, another --out begins anew", file=sys.stderr)
        return 2
    chosen = list(_chosen(options))
    deadline = time.monotonic() + options.minutes * 60
    print(f"{len(chosen)} cases, {len(done)} of them done; jobs in {work}, results in {results}", flush=True)
    contestant = CONTESTANTS[options.contestant]
    right: dict[str, str] = {}
    for number, case in enumerate(chosen):
        if (contestant.name, case.number) in done:
            continue
        if time.monotonic() > deadline:
            print(f"the time is up after {number} cases; --resume goes on")
            break
        if case.kind not in right:
            right[case.kind] = undisturbed(contestant, case.kind, work / f"undisturbed-{case.kind}")
        outcome = run(case, contestant, work / case.name, right[case.kind])
        done[contestant.name, case.number] = outcome
        with results.open("a") as file:
            file.write(json.dumps(asdict(outcome)) + "\n")
        print(_line(number + 1, len(chosen), outcome), flush=True)
    outcomes = list(done.values())
    print(scoring.page(outcomes))
    if options.quick:
        failed = [each for each in outcomes if not scoring.is_passed(each)]
        for each in failed:
            print(f"failed: {each.case.name}: {each.verdict}, recovered {each.recovered}, equal {each.is_equal}")
        return int(bool(failed) or len(outcomes) < len(chosen))
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m tests.campaign", description="Faults with a known truth, and a score.")
    parser.add_argument("--show", type=Path, nargs="+", metavar="RESULTS", help="print the tables of these files only")
    parser.add_argument("--quick", action="store_true", help="the fixed cases that all have to pass")
    parser.add_argument("--cases", type=int, default=1000, help="how many of the whole campaign (default 1000)")
    parser.add_argument("--first-seed", type=int, default=1000, help="seed of the first case (default 1000)")
    parser.add_argument("--set", choices=sorted(SETS), default="single", help="one fault in DDP, or everything else")
    parser.add_argument("--numbers", type=_numbers, help="only these cases: 3,17")
    parser.add_argument("--worlds", type=_numbers, default=(2, 4, 8))
    parser.add_argument("--contestant", choices=sorted(CONTESTANTS), default="ours")
    parser.add_argument("--minutes", type=float, default=120.0, help="begin no case after that (default 120)")
    parser.add_argument("--resume", action="store_true", help="leave out what results.jsonl has already")
    parser.add_argument(
        "--out", type=Path, help="folder for the results (default: campaign, and a new one with --quick)"
    )
    return parser.parse_args()


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))


def _chosen(options: argparse.Namespace) -> Iterator[Case]:
    every = SETS[options.set](options.cases, options.worlds, options.first_seed)
    for case in cases.quick() if options.quick else every:
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
        measures = Measures(**plain.pop("measures", {}))
        struck = tuple(plain.pop("struck", (plain["is_injected"], False)))
        yield Outcome(case=case, verdict=Verdict(**verdict, blamed=blamed), struck=struck, measures=measures, **plain)


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
