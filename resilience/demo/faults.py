"""Which fault hits which rank at which step?  The fault schedule of the demonstration, from options and a seed."""

from __future__ import annotations

import random
import re
from typing import Literal, get_args

import msgspec

from resilience.errors import ConfigurationError
from resilience.facts.in_words import count

Kind = Literal["exception", "kill", "hang"]
KINDS: tuple[Kind, ...] = get_args(Kind)
HANG_LIMIT = 3.0  # seconds of silence after which a rank counts as hung


class DemoFault(msgspec.Struct, frozen=True):
    """A fault of the process that is `rank` when it begins `step`."""

    kind: Kind
    step: int
    rank: int


def schedule(texts: list[str], ranks: int, steps: int, seed: int) -> tuple[DemoFault, ...]:
    """Return the planned faults in the order of their steps. No two faults share a step.

    texts: values of --fault. An omitted step is drawn from the middle of the fault's share of the run.
    Raises: ConfigurationError."""
    if texts == ["none"]:
        return ()
    parsed = [_parsed(text, ranks, steps) for text in texts or KINDS]
    generator = random.Random(seed)
    taken = {step for _, step, _ in parsed if step is not None}
    if len(taken) < sum(step is not None for _, step, _ in parsed):
        raise ConfigurationError("--fault names a step twice; each fault needs its own step")
    if len(parsed) > steps // 10:
        raise ConfigurationError(
            f"{count(len(parsed), 'fault')} in {count(steps, 'step')}; the limit is {steps // 10}, one per ten steps"
        )
    faults = []
    for number, (kind, step, rank) in enumerate(parsed):
        share = steps / len(parsed)
        drawn = int((number + generator.uniform(0.3, 0.8)) * share)
        drawn_rank = generator.randrange(ranks)
        while step is None:
            step = drawn if drawn not in taken else None
            taken.add(drawn)
            drawn = drawn % (steps - 1) + 1
        faults.append(DemoFault(kind, step, drawn_rank if rank is None else rank))
    return tuple(sorted(faults, key=lambda fault: fault.step))


def _parsed(text: str, ranks: int, steps: int) -> tuple[Kind, int | None, int | None]:
    match = re.fullmatch(r"(\w+)(?:@(\d{1,9})(?::(\d{1,9}))?)?", text)
    kinds = {str(kind): kind for kind in KINDS}
    if match is None or match[1] not in kinds:
        raise ConfigurationError(
            f"--fault is {text!r}, expected KIND, KIND@STEP or KIND@STEP:RANK with KIND one of "
            f"{', '.join(KINDS)}, such as kill@40:1; or only `none`",
            option="--fault",
            value=text,
        )
    step, rank = (None if part is None else int(part) for part in match.group(2, 3))
    if step is not None:
        checked(f"the step of --fault {text}", step, range(1, steps))
    if rank is not None:
        checked(f"the rank of --fault {text}", rank, range(ranks))
    return kinds[match[1]], step, rank


def span(allowed: range) -> str:
    return f"{allowed.start} to {allowed.stop - 1}"


def checked(option: str, value: int, allowed: range) -> int:
    """Return `value`. Raises: ConfigurationError if it is not allowed."""
    if value not in allowed:
        raise ConfigurationError(f"{option} is {value}, expected {span(allowed)}", option=option, value=value)
    return value
