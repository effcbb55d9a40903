"""Does the launcher's protocol hold?  Runs many seeded schedules of virtual jobs; a task, not a test.

`python -m tests.launcher_simulation --schedules 200000 --seed 0` runs the schedules of seeds 0 to 199999 and prints
what they came to. A schedule that breaks an invariant is reduced to the faults it needs and printed with the command
that shows it step by step: `python -m tests.launcher_simulation --seed S --trace`. Status 1 if anything broke."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Sequence

import msgspec

from resilience.errors import InternalError
from tests.launcher_simulation.jobs import Job
from tests.launcher_simulation.schedules import Schedule, draw

MOST_FAILURES = 5


def broken_by(schedule: Schedule) -> InternalError | None:
    """Return the error that a schedule ends with, None if all holds."""
    try:
        Job(schedule).run()
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


def simulate(seeds: Sequence[int]) -> int:
    """Run the schedules of all seeds. Return how many broke an invariant."""
    began = time.monotonic()
    number = failures = steps = 0
    seconds = 0.0
    ends: Counter[str] = Counter()
    cycles: Counter[int] = Counter()
    faults: Counter[str] = Counter()
    for seed in seeds:
        number += 1
        schedule = draw(seed)
        faults.update(type(fault).__name__ for fault in schedule.faults)
        try:
            report = Job(schedule).run()
        except InternalError as error:
            failures += 1
            show_failure(schedule, error)
            if failures == MOST_FAILURES:
                break
            continue
        ends.update(report.ends)
        cycles[report.cycles] += 1
        steps += report.steps
        if number % 20_000 == 0:
            print(f"{number:,} in {time.monotonic() - began:.0f} s, {failures} broke an invariant", flush=True)
        seconds += report.seconds
    took = time.monotonic() - began
    print(f"{number:,} schedules in {took:.0f} s: {number / took:,.0f} a second")
    print(f"{steps:,} steps, {seconds / 3600:,.0f} virtual hours")
    print("faults:", ", ".join(f"{count:,} {name}" for name, count in faults.most_common()))
    print("cycles of a job:", ", ".join(f"{count:,} x {size}" for size, count in sorted(cycles.items())))
    print("agents ended:", ", ".join(f"{count:,} {end}" for end, count in ends.most_common()))
    print(f"{failures} broke an invariant")
    return failures


def show_failure(schedule: Schedule, error: InternalError) -> None:
    print(f"\nseed {schedule.seed}: {error}")
    print(f"  least that breaks: {reduced(schedule)}")
    print(f"  python -m tests.launcher_simulation --seed {schedule.seed} --trace\n", flush=True)


def trace(schedule: Schedule) -> int:
    """Run one schedule, reduced to the faults that it needs if it breaks something, and print each step."""
    if broken_by(schedule) is not None:
        schedule = reduced(schedule)
    print(schedule)
    try:
        print(Job(schedule, trace=lambda now, who, what: print(f"{now:10.4f}  {who:<10} {what}")).run())
    except InternalError as error:
        print(error)
        return 1
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--schedules", type=int, default=1000, help="how many (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="the first one's seed (default: %(default)s)")
    parser.add_argument("--trace", action="store_true", help="run only the first and print each step")
    options = parser.parse_args(arguments)
    if options.trace:
        return trace(draw(options.seed))
    return 1 if simulate(range(options.seed, options.seed + options.schedules)) else 0


if __name__ == "__main__":
    sys.exit(main())
