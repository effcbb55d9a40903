"""Does any input break a decoder or a reader? A task: `python -m tests.fuzz --inputs 1000000 --seed 0`.

The same seed and number of processes give the same inputs. A failure is printed with the command that feeds its input
alone. Status 1 if there was one."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.fuzz.running import Outcome, feed, merged, once
from tests.fuzz.target import Target
from tests.fuzz.targets import targets


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--inputs", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--jobs", type=int, default=1, help="processes; each has a share of the inputs, seeds of its own"
    )
    parser.add_argument("--target", default="", help="targets whose names begin with this")
    parser.add_argument("--once", default="", metavar="SEED", help="feed this input alone; needs the whole --target")
    options = parser.parse_args(arguments)
    if options.once:
        with _chosen(options.target) as chosen:
            error = once(chosen, options.target, options.once)
        print(error or "nothing was raised beyond the contract")
        return bool(error)
    began = time.monotonic()
    shares = [(options, number, began) for number in range(options.jobs)]
    with multiprocessing.get_context("fork").Pool(options.jobs) as pool:
        outcome = merged(pool.imap_unordered(_share, shares))
    _show(outcome, options.seed, time.monotonic() - began)
    return bool(outcome.failures)


def _share(share: tuple[argparse.Namespace, int, float]) -> Outcome:
    """Feed one process's share of the inputs."""
    options, number, began = share
    inputs = options.inputs // options.jobs + (number < options.inputs % options.jobs)
    with _chosen(options.target) as chosen:
        return feed(chosen, inputs, f"{options.seed}.{number}", lambda so_far: _progress(so_far, number, inputs, began))


@contextmanager
def _chosen(target: str) -> Iterator[list[Target]]:
    """Give the targets whose names begin with this, with files in memory where the machine has such a folder."""
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="fuzz-", dir=memory) as folder:
        yield [each for each in targets(Path(folder)) if each.name.startswith(target)]


def _progress(outcome: Outcome, number: int, inputs: int, began: float) -> None:
    done = outcome.inputs.total()
    took = time.monotonic() - began
    text = f"process {number}: {done:,} of {inputs:,} inputs, {outcome.failed} failures, {took:.0f} s"
    print("\n".join([*map(shown, outcome.failures), text]), file=sys.stderr, flush=True)


def shown(failure: tuple[str, str, str]) -> str:
    """Return a failure with the command that shows it again."""
    name, own, error = failure
    return f"\npython -m tests.fuzz --target {name!r} --once {own}\n{error}"


def _show(outcome: Outcome, seed: int, took: float) -> None:
    print(f"{'target':72}{'inputs':>9}{'refused':>9}{'µs each':>10}")
    for name, count in outcome.inputs.most_common():
        print(f"{name:72}{count:9,}{outcome.refused[name]:9,}{outcome.seconds[name] / count * 1e6:10.0f}")
    inputs, refused = outcome.inputs.total(), outcome.refused.total()
    print(f"{inputs:,} inputs of seed {seed}, {refused:,} of them refused, in {took:.0f} s: {outcome.failed} failures")
    for failure in outcome.failures:
        print(shown(failure))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
