"""Does the restart protocol hold?  Runs many seeded schedules of a virtual cluster; a task, not a test.

`python -m tests.simulate --schedules 100000 --seed 0 --ranks 3-8` runs the schedules of seeds 0 to 99999 and prints
what they came to. A schedule that breaks an invariant is reduced to the faults it needs and printed with the
command that shows it step by step: `python -m tests.simulate --seed S --trace`. `--large 10000` restarts one job of
so many ranks. Status 1 if anything broke."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Sequence

import msgspec

from resilience.core.restart import Stage
from resilience.errors import InternalError
from tests.restart_simulation.cluster import Cluster, ScheduleReport
from tests.restart_simulation.faults import Fail, KillFault, Schedule, draw

MOST_FAILURES = 5


def broken_by(schedule: Schedule) -> InternalError | None:
    """Return the error that a schedule ends with, None if all holds."""
    try:
        Cluster(schedule).run()
    except InternalError as error:
        return error
    return None


def reduced(schedule: Schedule) -> Schedule:
    """Return the schedule without the faults that it does not need to break something."""
    for fault in schedule.faults:
        fewer = tuple(other for other in schedule.faults if other is not fault)
        smaller = msgspec.structs.replace(schedule, faults=fewer)
        if broken_by(smaller) is not None:
            return reduced(smaller)
    return schedule


def simulate(seeds: Sequence[int], fewest: int, most: int, most_failures: int) -> int:
    """Run the schedules of all seeds, or until so many have failed; returns how many broke an invariant."""
    began = time.monotonic()
    number = 0
    broken: Counter[str] = Counter()
    ends: Counter[str] = Counter()
    iterations: Counter[int] = Counter()
    steps = waited = 0
    seconds = 0.0
    for seed in seeds:
        number += 1
        schedule = draw(seed, fewest, most)
        try:
            report = Cluster(schedule).run()
        except InternalError as error:
            broken[str(error).partition(":")[0]] += 1
            show_failure(schedule, error, fewest, most)
            if broken.total() == most_failures:
                break
            continue
        ends.update(report.ends)
        iterations[report.iterations] += 1
        steps += report.steps
        seconds += report.seconds
        waited += bool(report.vain_waits)
    took = time.monotonic() - began
    print(f"{number:,} schedules of {fewest} to {most} ranks in {took:.0f} s: {number / took:,.0f} a second")
    print(f"{steps:,} steps, {seconds / 3600:,.0f} virtual hours")
    print("iterations begun:", ", ".join(f"{count:,} x {size}" for size, count in sorted(iterations.items())))
    print("ranks ended:", ", ".join(f"{count:,} {end}" for end, count in ends.most_common()))
    print(f"{waited:,} with waits that reached their limit, each explained; {broken.total()} broke an invariant")
    for invariant, count in broken.most_common():
        print(f"{count:>8,} {invariant}")
    return broken.total()


def show_failure(schedule: Schedule, error: InternalError, fewest: int, most: int) -> None:
    print(f"\nseed {schedule.seed}: {error}")
    print(f"  least that breaks: {reduced(schedule)}")
    print(f"  python -m tests.simulate --seed {schedule.seed} --ranks {fewest}-{most} --trace\n")


def trace(schedule: Schedule) -> int:
    """Run one schedule and print each step."""
    print(schedule)
    cluster = Cluster(schedule, trace=lambda now, who, what: print(f"{now:10.4f}  {who:<28} {what}"))
    try:
        show(cluster.run())
    except InternalError as error:
        print(error)
        return 1
    return 0


def large(ranks: int) -> None:
    """Kill one of very many ranks in a job, and let the others restart."""
    for fault in (KillFault(7, "rank", 14), Fail(7, 0, Stage.FUNCTION)):
        began = time.monotonic()
        report = Cluster(Schedule(seed=0, ranks=ranks, faults=(fault,))).run()
        print(f"{ranks:,} ranks, {fault}: {time.monotonic() - began:.1f} s")
        show(msgspec.structs.replace(report, ends=tuple(sorted(set(report.ends)))))


def show(report: ScheduleReport) -> None:
    print(report)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--schedules", type=int, default=1000, help="how many (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="the first one's seed (default: %(default)s)")
    parser.add_argument("--ranks", default="3-8", help="fewest and most ranks (default: %(default)s)")
    parser.add_argument("--trace", action="store_true", help="run only the first and print each step")
    parser.add_argument(
        "--failures", type=int, default=MOST_FAILURES, help="stop after so many failures (default: %(default)s)"
    )
    parser.add_argument("--large", type=int, metavar="RANKS", help="one restart of so many ranks instead")
    options = parser.parse_args(arguments)
    fewest, _, most = options.ranks.partition("-")
    if options.large:
        large(options.large)
        return 0
    if options.trace:
        return trace(draw(options.seed, int(fewest), int(most or fewest)))
    seeds = range(options.seed, options.seed + options.schedules)
    return 1 if simulate(seeds, int(fewest), int(most or fewest), options.failures) else 0


if __name__ == "__main__":
    sys.exit(main())
