"""Which fault strikes which rank, where and when?  The whole schedule of a soak, drawn from its seed.

A soak is a series of rounds. Each round is one job: its ranks are hit by one fault after the other, until as many
of them have died as the round allows (`SMALLEST` ranks stay) and its list of faults is at an end. Then the job
completes, and the next round begins with all ranks. Replacing single processes is the launcher's work, not the
Wrapper's; so a round only shrinks.

The plan names initial ranks. It knows which faults end their rank, so it never names a rank that has ended. Two
combinations are left out because they are documented to end a job: the monitor of rank 0, which hosts the store, is
not killed; and a rank without a monitor does not hang."""

from __future__ import annotations

from random import Random
from typing import Any, Literal

import msgspec

Where = Literal["building", "anywhere", "initialize", "finalize", "health_check", "restart", "beside"]

SMALLEST = {4: 2, 8: 4}  # ranks that stay, by the ranks a round begins with
SURVIVED = ("exception", "hang")  # the rank restarts with the others
ENDING = ("base_exception", "exit_0", "exit_1", "kill", "term", "segv", "stop", "hang_with_gil")  # the rank is gone
NEEDS_MONITOR = ("hang", "stop", "hang_with_gil")


class Fault(msgspec.Struct, frozen=True):
    """One fault. `victim` is an initial rank.

    where: "building" and "anywhere" strike `delay_s` after the victim has entered the function; a hook strikes at the
    hook's next call; "restart" strikes `delay_s` after the fault that it follows; "beside" is a monitor, `delay_s`
    after its rank has entered the function. is_ending: the victim may end of it.
    second: a fault on another rank, before the restart from this one is over."""

    number: int
    kind: str
    victim: int
    where: Where
    delay_s: float
    is_ending: bool
    second: Fault | None = None


class Round(msgspec.Struct, frozen=True):
    """One job: how many ranks, whether other processes burn CPU meanwhile, and its faults in order."""

    number: int
    ranks: int
    loaded: bool
    faults: tuple[Fault, ...]


def draw(seed: int, number: int, worlds: tuple[int, ...], loads: tuple[bool, ...]) -> Round:
    """Return the round of that number. Worlds and loads take turns."""
    ranks = worlds[number % len(worlds)]
    drawing = _Drawing(Random(f"{seed}/{number}"), ranks)
    faults = tuple(drawing.fault(place) for place in range(drawing.rng.randint(12, 24)))
    return Round(number, ranks, loads[number // len(worlds) % len(loads)], faults)


class _Drawing:
    """What is known of a round while its faults are drawn."""

    def __init__(self, rng: Random, ranks: int) -> None:
        self.rng = rng
        self._alive = list(range(ranks))
        self._smallest = SMALLEST[ranks]
        self._unmonitored: set[int] = set()

    def fault(self, number: int) -> Fault:
        """Draw the next fault, and for one in four a second one during its restart."""
        fault = self._first(number)
        others = [rank for rank in self._alive if rank != fault.victim]
        if fault.kind == "monitor" or not others or self.rng.random() >= 0.25:
            return fault
        return msgspec.structs.replace(fault, second=self._second(number, self.rng.choice(others)))

    def _first(self, number: int) -> Fault:
        rng, victim = self.rng, self.rng.choice(self._alive)
        if rng.random() < 0.06 and victim and victim not in self._unmonitored:
            self._unmonitored.add(victim)
            return Fault(number, "monitor", victim, "beside", rng.uniform(0.0, 1.0), is_ending=False)
        kind = self._kind(victim, ("exception",) * 8 + ("hang",) + ENDING)
        where: Where = rng.choice(("building", "anywhere", "anywhere"))
        delay = rng.uniform(0.0, 0.05) if where == "building" else rng.uniform(0.0, 2.0)
        return self._fault(number, kind, victim, where, delay)

    def _second(self, number: int, victim: int) -> Fault:
        where: Where = self.rng.choice(("initialize", "finalize", "health_check", "restart", "restart"))
        if where == "restart":  # from outside, wherever the victim then is
            kind = self._kind(victim, ("exception", "kill", "term", "segv", "stop"))
            return self._fault(number, kind, victim, where, self.rng.uniform(0.0, 0.08))
        kind = self._kind(victim, ("exception", "exception", "base_exception", "exit_0", "exit_1", "kill", "segv"))
        if where != "initialize" and len(self._alive) <= self._smallest:
            where = "initialize"  # any exception in another hook ends the rank
        return self._fault(number, kind, victim, where, 0.0)

    def _kind(self, victim: int, kinds: tuple[str, ...]) -> str:
        may_end = len(self._alive) > self._smallest
        return self.rng.choice(
            [
                kind
                for kind in kinds
                if (may_end or kind not in ENDING) and (victim not in self._unmonitored or kind not in NEEDS_MONITOR)
            ]
        )

    def _fault(self, number: int, kind: str, victim: int, where: Where, delay: float) -> Fault:
        is_ending = kind in ENDING or where in ("finalize", "health_check")
        if is_ending:
            self._alive.remove(victim)
        return Fault(number, kind, victim, where, delay, is_ending)


def to_json(rounds: list[Round]) -> Any:
    return msgspec.to_builtins(rounds)


def from_json(faults: list[dict[str, Any]]) -> tuple[Fault, ...]:
    return msgspec.convert(faults, tuple[Fault, ...])
