"""Does any input break a decoder or a reader? A task: `python -m tests.fuzz --inputs 1000000 --seed 0`.

The same seed gives the same inputs. A failure is printed with the command that feeds its input alone. Status 1 if
there was one."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.fuzz.running import Outcome, feed, once
from tests.fuzz.targets import targets


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--inputs", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--target", default="", help="targets whose names begin with this")
    parser.add_argument("--once", default="", metavar="SEED", help="feed this input alone; needs the whole --target")
    options = parser.parse_args(arguments)
    os.environ.pop("RESILIENCE_RUN_DIR", None)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        chosen = [target for target in targets(Path(folder)) if target.name.startswith(options.target)]
        if options.once:
            error = once(chosen, options.target, options.once)
            print(error or "nothing was raised beyond the contract")
            return bool(error)
        outcome = feed(chosen, options.inputs, options.seed, lambda so_far: _progress(so_far, options.inputs, began))
    _show(outcome, options.seed, time.monotonic() - began)
    return bool(outcome.failures)


def _progress(outcome: Outcome, inputs: int, began: float) -> None:
    done = outcome.inputs.total()
    took = time.monotonic() - began
    print(f"{done:>9,} of {inputs:,} inputs, {outcome.failed} failures, {took:.0f} s", file=sys.stderr)


def shown(failure: tuple[str, str, str]) -> str:
    """Return a failure with the command that shows it again."""
    name, own, error = failure
    return f"\npython -m tests.fuzz --target {name!r} --once {own}\n{error}"


def _show(outcome: Outcome, seed: int, took: float) -> None:
    print(f"{'target':34}{'inputs':>9}{'µs each':>10}")
    for name, count in outcome.inputs.most_common():
        print(f"{name:34}{count:9,}{outcome.seconds[name] / count * 1e6:10.0f}")
    print(f"{outcome.inputs.total():,} inputs of seed {seed} in {took:.0f} s: {outcome.failed} failures")
    for failure in outcome.failures:
        print(shown(failure))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
