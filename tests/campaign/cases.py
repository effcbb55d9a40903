"""Which fault strikes where, and what is the truth about it?  A case follows from its seed and nothing else."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

MODES = ("wrapper", "launcher", "both")
KINDS = ("ddp", "fsdp2", "loader", "async", "pipeline")
STEPS = 12
LIMIT = "CAMPAIGN_LIMIT"  # variable of a job: seconds until a hang is noticed
USER_PORT = "CAMPAIGN_USER_PORT"  # for the store of process groups, where the library takes MASTER_PORT for its own
GROUP_TIMEOUT = "CAMPAIGN_GROUP_TIMEOUT"  # the same for collectives, for a contestant that has no other limit

ENDS: dict[str, tuple[str, ...]] = {
    "exception": ("exception",),
    "exit": ("exited",),
    "sigkill": ("killed",),
    "sigsegv": ("crashed",),
    "sigterm": ("told_to_stop",),
}
"""Faults that show at once."""

HANGS: dict[str, tuple[str, ...]] = {
    "sigstop": ("stopped",),
    "sleep": ("hung",),
    "lock": ("waits_for_lock",),
    "py_loop": ("busy_without_progress",),
    "gil": ("blocked_in_native_code",),
    "barrier": ("desynchronised",),
}
"""Faults that show when a limit is exceeded."""

FAULTS: dict[str, tuple[str, ...]] = {**ENDS, **HANGS, "slow": ()}
"""The faults of the first campaign, and the classes that are right for each. `slow` is harmless: a rank that is slow
within its limits."""

MORE: dict[str, tuple[str, ...]] = {"exit0": ("exited", "went_on"), "sigabrt": ("crashed",)}
LOADER: dict[str, tuple[str, ...]] = {"loader_kill": ("exception",), "loader_hang": ("input_stall",)}
"""Faults of a process that loads the data of a rank."""
WATCHED: dict[str, tuple[str, ...]] = {"slow": (), "checkpoint": (), "monitor": ("monitor_lost",)}
"""Nothing has to be noticed, and no rank may restart. `monitor`: the process that watches a rank is killed; the verdict
may say that, and no more."""
HARMLESS = (*WATCHED, "monitor_stopped")
LATER: dict[str, tuple[str, ...]] = {
    "system_exit": ("left", "exited"),  # the Wrapper sees the exception, the launcher only the exit status
    "keyboard_interrupt": ("left", "told_to_stop"),  # the interpreter ends by SIGINT for it
    "sigint": ("left", "told_to_stop"),
    "sighup": ("told_to_stop",),
    "sigusr1": ("told_to_stop",),
    "sigbus": ("crashed",),
    "sigfpe": ("crashed",),
    "memory_error": ("exception",),
    "skipped": ("desynchronised", "went_on"),
    "shape": ("desynchronised", "exception"),
    "everywhere": ("common", "exception"),  # the first ones may interrupt the others before they raise
    "swallowed": ("hung",),
    "monitor_stopped": (),
}
"""Faults that no other set has: of the schedules of those sets the published results came."""
EVERYWHERE = "everywhere"  # all ranks raise the same at the same step: each of them is rightly named
AMBIGUOUS = {"shape": "the error shows on whichever rank is sent more or less than it expects"}
TWO_RANKS = "with two ranks, either may have left the order"
CLASSES = {**FAULTS, **MORE, **LOADER, **WATCHED, **LATER}

QUICK = ("exception", "sigkill", "exit", "sigstop", "lock", "barrier", "slow")
HANDLERS: dict[str, tuple[str, ...]] = {
    "wrapper": ("abort", "finalize", "health_check", "initialize", "load"),
    "launcher": ("stop", "start", "load"),
    "both": ("abort", "finalize", "health_check", "initialize", "load"),
}
"""Where the second fault of a pair may be aimed: the Wrapper's hooks, the worker's handler of SIGTERM, the start of its
next process, and the loading of the checkpoint."""
IN_HANDLER = ("exception", "exit", "sigkill", "sigterm", "sigsegv", "sigstop", "sleep", "lock", "py_loop", "gil")
GROUPS = ("pair", "fsdp2", "harmless", "loader", "eight", "pair", "async", "pipeline")
LIMIT_FACTOR = 4
"""How many times longer all limits are for a case that has to pass on any machine, however busy."""
NEAR_MS = 200
"""If two ranks end within this time, either may be noticed first."""


@dataclass(frozen=True)
class Case:
    """One job with one fault, or two. classes: the right ones; none if nothing has to be noticed. ambiguous: the truth
    does not name one rank, so the case counts for no verdict. kind: of training. second: the fault of another rank,
    delay_ms after the first one, or as soon as that rank is in `place`, a handler of the first fault. patience: all
    limits are longer by this factor."""

    number: int
    seed: int
    mode: str
    world: int
    fault: str
    rank: int
    step: int
    classes: tuple[str, ...] = field(default_factory=tuple)
    ambiguous: str = ""
    kind: str = "ddp"
    second: str = ""
    second_rank: int = -1
    second_classes: tuple[str, ...] = ()
    delay_ms: int = 0
    place: str = ""
    patience: int = 1

    @property
    def is_harmless(self) -> bool:
        return self.fault in HARMLESS and self.second in ("", *HARMLESS)

    @property
    def name(self) -> str:
        faults = self.fault + (f"+{self.second}" if self.second else "") + (f"@{self.place}" if self.place else "")
        kind = "" if self.kind == "ddp" else f"-{self.kind}"
        return f"{self.number:04}-{self.mode}-{self.world}{kind}-{faults}"

    def guilty(self, struck: Sequence[bool] = (True, True)) -> dict[int, tuple[str, ...]]:
        """Return the ranks that are not healthy, with the right classes of each. struck: which of the faults did."""
        if self.fault == EVERYWHERE:
            return dict.fromkeys(range(self.world), self.classes) if struck[0] else {}
        both = ((self.rank, self.classes), (self.second_rank, self.second_classes))
        return {rank: classes for (rank, classes), did in zip(both, struck, strict=True) if did and classes}

    def firsts(self, struck: Sequence[bool] = (True, True)) -> set[int]:
        """Return the ranks of which the verdict has to name one first. An end is noticed before a hang; two ends in
        their order, unless they are near; of two hangs either may be first."""
        if not self.second or not all(struck):
            return set(self.guilty(struck))
        if self.place:
            return {self.rank}  # the second fault strikes in what follows from the first
        if self.fault in HARMLESS or self.second in HARMLESS:
            return {self.second_rank if self.fault in HARMLESS else self.rank}
        both = ((self.rank, self.fault), (self.second_rank, self.second))
        ends = [rank for rank, fault in both if fault in (*ENDS, *MORE)]
        if len(ends) == 2 and self.delay_ms >= NEAR_MS:
            return {self.rank}
        return set(ends) or {self.rank, self.second_rank}


def quick() -> Iterator[Case]:
    """Yield the cases of the quick form: each mode once with each fault, at both sizes in turn."""
    number = 0
    for mode in MODES:
        for fault in QUICK:
            case = _case(number, seed=number, mode=mode, world=(2, 4)[number % 2], fault=fault)
            yield replace(case, patience=LIMIT_FACTOR)
            number += 1


def whole(count: int, worlds: tuple[int, ...] = (2, 4, 8), first: int = 1000) -> Iterator[Case]:
    """Yield the cases with one fault in DDP: every mode, fault and size, then the same with further seeds."""
    every = [(mode, world, fault) for world in worlds for fault in FAULTS for mode in MODES]
    for number in range(count):
        if number % len(every) == 0:
            random.Random(first + number // len(every)).shuffle(every)
        mode, world, fault = every[number % len(every)]
        yield _case(number, first + number, mode, world, fault)


def wide(count: int, worlds: tuple[int, ...] = (2, 4, 8), first: int = 1000) -> Iterator[Case]:
    """Yield pairs of faults, harmless events, and single faults in other kinds of training and at the largest size."""
    for number in range(count):
        seed = first + number
        chance = random.Random(f"wide {seed}")
        group, mode = GROUPS[number % len(GROUPS)], MODES[number % len(MODES)]
        small = [world for world in worlds if world < max(worlds)] or list(worlds)
        faults = [fault for fault in (*FAULTS, *MORE) if fault not in HARMLESS]
        if group == "pair":
            yield _pair(number, seed, mode, max(small), chance)
            continue
        kind, world, fault = "ddp", chance.choice(small), chance.choice(faults)
        if group == "eight":
            world = max(worlds)
        elif group == "harmless":
            kind, fault = chance.choice(KINDS), chance.choice(list(WATCHED))
        else:
            kind = group
            if group == "loader" and chance.random() < 0.5:
                fault = chance.choice(list(LOADER))
        yield _case(number, seed, mode, world, fault, kind)


def large(count: int, worlds: tuple[int, ...] = (2, 4, 8), first: int = 1000) -> Iterator[Case]:
    """Yield what no other set has: other training than DDP at the largest size, and pairs of faults at all sizes but
    the one at which `wide` has them."""
    kinds = [kind for kind in KINDS if kind != "ddp"]
    usual = max(world for world in (*worlds, 0) if world < max(worlds))
    sizes = [world for world in worlds if world != usual] or list(worlds)
    faults = [fault for fault in (*FAULTS, *MORE) if fault not in HARMLESS]
    every = [*kinds, *("pair" for _ in kinds)]
    for number in range(count):
        seed = first + number
        chance = random.Random(f"large {seed}")
        group, mode = every[number % len(every)], MODES[number // len(every) % len(MODES)]
        if group == "pair":
            yield _pair(number, seed, mode, sizes[number % len(sizes)], chance)
        else:
            fault = chance.choice([*LOADER, *faults] if group == "loader" else faults)
            yield _case(number, seed, mode, max(worlds), fault, group)


def handlers(count: int, worlds: tuple[int, ...] = (2, 4, 8), first: int = 1000) -> Iterator[Case]:
    """Yield pairs in which the second rank breaks in a handler of the first fault, each handler of a mode in turn."""
    every = [(mode, place) for mode in MODES for place in HANDLERS[mode]]
    small = [world for world in worlds if 2 < world < 8] or [max(worlds)]
    for number in range(count):
        chance = random.Random(f"handlers {first + number}")
        mode, place = every[number % len(every)]
        faults = chance.choice([*ENDS, *HANGS, *MORE]), chance.choice(IN_HANDLER)
        yield replace(_pair(number, first + number, mode, max(small), chance, faults), delay_ms=0, place=place)


def more(count: int, worlds: tuple[int, ...] = (2, 4, 8), first: int = 1000) -> Iterator[Case]:
    """Yield one fault in DDP of the kinds that no other set has, each in every mode."""
    every = [(mode, fault) for fault in LATER for mode in MODES]
    for number in range(count):
        mode, fault = every[number % len(every)]
        yield _case(number, first + number, mode, random.Random(f"more {first + number}").choice(worlds), fault)


def _case(number: int, seed: int, mode: str, world: int, fault: str, kind: str = "ddp") -> Case:
    chance = random.Random(seed)
    ambiguous = AMBIGUOUS.get(fault, "")
    if fault in ("barrier", "skipped") and world == 2:
        ambiguous = TWO_RANKS
    return Case(
        number=number,
        seed=seed,
        mode=mode,
        world=world,
        fault=fault,
        rank=chance.randrange(world),
        step=chance.randrange(4, 8),
        classes=CLASSES[fault],
        ambiguous=ambiguous,
        kind=kind,
    )


def _pair(number: int, seed: int, mode: str, world: int, chance: random.Random, faults: tuple[str, ...] = ()) -> Case:
    first, second = chance.sample(range(world), 2)
    faults = faults or (chance.choice([*ENDS, *HANGS, *MORE, "monitor"]), chance.choice([*ENDS, *HANGS]))
    ambiguous = "two ranks that each left the order, in one group" if faults == ("barrier", "barrier") else ""
    if world == 2 and "barrier" in faults and "monitor" in faults:
        ambiguous = TWO_RANKS
    return Case(
        number=number,
        seed=seed,
        mode=mode,
        world=world,
        fault=faults[0],
        rank=first,
        step=chance.randrange(4, 8),
        classes=CLASSES[faults[0]],
        ambiguous=ambiguous,
        second=faults[1],
        second_rank=second,
        second_classes=CLASSES[faults[1]],
        delay_ms=chance.randrange(501),
    )


def to_json(case: Case) -> str:
    return json.dumps(asdict(case))


def from_json(text: str) -> Case:
    plain: dict[str, Any] = json.loads(text)
    tuples = {name: tuple(plain[name]) for name in ("classes", "second_classes") if name in plain}
    return Case(**{**plain, **tuples})
