"""Which fault strikes where, and what is the truth about it?  A case follows from its seed and nothing else."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

MODES = ("wrapper", "launcher", "both")
STEPS = 12

FAULTS: dict[str, tuple[str, ...]] = {
    "exception": ("exception",),
    "exit": ("exited",),
    "sigkill": ("killed",),
    "sigsegv": ("crashed",),
    "sigterm": ("told_to_stop",),
    "sigstop": ("stopped",),
    "sleep": ("hung",),
    "lock": ("waits_for_lock",),
    "py_loop": ("busy_without_progress",),
    "gil": ("blocked_in_native_code",),
    "barrier": ("desynchronised",),
    "slow": (),
}
"""Each fault, and the classes that are right for it. `slow` is harmless: a rank that is slow within its limits."""

QUICK = ("exception", "sigkill", "exit", "sigstop", "lock", "barrier", "slow")


@dataclass(frozen=True)
class Case:
    """One job with one fault. classes: the right ones; none if nothing has to be noticed. ambiguous: the truth does
    not name one rank, so the case counts for no verdict."""

    number: int
    seed: int
    mode: str
    world: int
    fault: str
    rank: int
    step: int
    classes: tuple[str, ...] = field(default_factory=tuple)
    ambiguous: str = ""

    @property
    def is_harmless(self) -> bool:
        return not self.classes

    @property
    def name(self) -> str:
        return f"{self.number:04}-{self.mode}-{self.world}-{self.fault}"


def quick() -> Iterator[Case]:
    """Yield the cases of the quick form: each mode once with each fault, at both sizes in turn."""
    number = 0
    for mode in MODES:
        for fault in QUICK:
            yield _case(number, seed=number, mode=mode, world=(2, 4)[number % 2], fault=fault)
            number += 1


def whole(count: int, worlds: tuple[int, ...] = (2, 4, 8), first: int = 1000) -> Iterator[Case]:
    """Yield the cases of the whole campaign: every mode, fault and size, then the same with further seeds."""
    every = [(mode, world, fault) for world in worlds for fault in FAULTS for mode in MODES]
    for number in range(count):
        if number % len(every) == 0:
            random.Random(first + number // len(every)).shuffle(every)
        mode, world, fault = every[number % len(every)]
        yield _case(number, first + number, mode, world, fault)


def _case(number: int, seed: int, mode: str, world: int, fault: str) -> Case:
    chance = random.Random(seed)
    ambiguous = "with two ranks, either may have left the order" if (fault, world) == ("barrier", 2) else ""
    return Case(
        number=number,
        seed=seed,
        mode=mode,
        world=world,
        fault=fault,
        rank=chance.randrange(world),
        step=chance.randrange(4, 8),
        classes=FAULTS[fault],
        ambiguous=ambiguous,
    )


def to_json(case: Case) -> str:
    return json.dumps(asdict(case))


def from_json(text: str) -> Case:
    plain: dict[str, Any] = json.loads(text)
    return Case(**{**plain, "classes": tuple(plain["classes"])})
