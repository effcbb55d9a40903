"""What fails, where and when?  Faults as values, and the schedules that seeds stand for.

A schedule is all that `testing.cluster` needs to repeat a run exactly: the same seed draws the same faults, delays and
interleaving. Ranks are initial ranks; seconds are virtual."""

from __future__ import annotations

from random import Random
from typing import Literal

import msgspec

from resilience.core.restart import ENTRY, End, Stage
from resilience.facts.interruptions import FaultOrigin

Seconds = float
Victim = Literal["rank", "monitor", "both"]
How = Literal["sleep", "spin", "stuck", "slow"]
VICTIMS: tuple[Victim, ...] = ("rank", "monitor", "both")
Assignment = Literal["shift", "fill_gaps", "grouped"]


class KillFault(msgspec.Struct, frozen=True, tag=True):
    """A process ends: before its `operation`-th operation (from 1), or at a moment if `at` is given.

    For a monitor, its operations in the store count; for "both", the rank's operations."""

    rank: int
    victim: Victim = "rank"
    operation: int = 0
    at: Seconds | None = None


class Fail(msgspec.Struct, frozen=True, tag=True):
    """A stage raises. `end`: FAILED for an Exception, FATAL for a BaseException. `origin`: "communication" if another
    rank may have caused the error."""

    rank: int
    iteration: int
    stage: Stage
    end: End = End.FAILED
    origin: FaultOrigin = "own"


class Stall(msgspec.Struct, frozen=True, tag=True):
    """A stage does not end in time.

    sleep: runs no bytecode until it is interrupted. spin: runs bytecode but sends no pings, until it is interrupted.
    stuck: runs no bytecode and cannot be interrupted. slow: takes `duration`."""

    rank: int
    iteration: int
    stage: Stage
    how: How
    duration: Seconds = 0.0


class Linger(msgspec.Struct, frozen=True, tag=True):
    """An interrupted function takes a long time to leave."""

    rank: int
    iteration: int
    duration: Seconds


class Pause(msgspec.Struct, frozen=True, tag=True):
    """A rank stops before its `operation`-th operation and continues after `duration`, as by SIGSTOP."""

    rank: int
    operation: int
    duration: Seconds


class Raise(msgspec.Struct, frozen=True, tag=True):
    """An exception lands in a rank outside its stages, as from a signal handler: at its `operation`-th operation, and
    on its way out at each of the next `times` - 1. after: it lands after the operation's effect, not before."""

    rank: int
    operation: int
    times: int = 1
    after: bool = False


class Freeze(msgspec.Struct, frozen=True, tag=True):
    """The process that hosts the store is stopped at a moment, for `duration`: it answers no client meanwhile."""

    rank: int
    at: Seconds
    duration: Seconds


class FalseSuspicion(msgspec.Struct, frozen=True, tag=True):
    """A neighbour believes that a living rank is dead, and stands in for it."""

    rank: int
    at: Seconds


class Misassign(msgspec.Struct, frozen=True, tag=True):
    """A rank's assignment raises after an iteration, in the rank and in whoever stands in for it."""

    rank: int
    iteration: int


Fault = KillFault | Fail | Misassign | Stall | Linger | Pause | Raise | Freeze | FalseSuspicion


class Schedule(msgspec.Struct, frozen=True):
    """One run of a cluster.

    active: ranks that run the function; the others are spares. block: arrivals read together in a barrier.
    latency: factor on the time of every store operation. critical: the rank that leaves last."""

    seed: int
    ranks: int
    faults: tuple[Fault, ...] = ()
    active: int = 1_000_000
    assignment: Assignment = "shift"
    block: int = 32
    latency: float = 1.0
    critical: int = 0


HANGS: tuple[How, ...] = ("sleep", "spin", "stuck", "slow")  # hooks can only have the last two
HOOKS = (Stage.INITIALIZE, Stage.CHECK_BEFORE, Stage.FINALIZE, Stage.CHECK_AFTER)
LIMITS = (60.0, 90.0, 120.0)  # seconds: soft, hard, and of waits between ranks
OPERATIONS = 90  # about the number that a rank performs until after two restarts
STAND_IN_OPERATIONS = 30


def draw(seed: int, fewest: int = 3, most: int = 8) -> Schedule:
    """Return the schedule of a seed, with `fewest` to `most` ranks and up to four faults."""
    rng = Random(seed)
    ranks = rng.randint(fewest, most)
    faults: list[Fault] = []
    for number in range(rng.choice((0, 1, 1, 1, 2, 2, 2, 3, 3, 4))):
        fault = _fault(rng, rng.randrange(ranks), rng.choice((0, 0, 0, 1, 1, 2)[: 1 + 5 * number]))
        faults.append(fault)
        if isinstance(fault, KillFault) and fault.victim == "rank" and rng.random() < 0.3:
            faults.append(KillFault(fault.rank, "monitor", rng.randint(1, STAND_IN_OPERATIONS)))
    return Schedule(
        seed=seed,
        ranks=ranks,
        faults=tuple(faults),
        active=rng.choice((ranks, ranks, max(1, ranks - 1), max(1, ranks // 2))),
        assignment=rng.choice(("shift", "shift", "fill_gaps", "grouped")),
        block=rng.choice((2, 3, 32)),
        latency=rng.choice((0.1, 1.0, 1.0, 3.0)),
    )


def _fault(rng: Random, rank: int, iteration: int) -> Fault:
    operation = rng.randint(1, rng.choice((25, 50, OPERATIONS)))
    kind = rng.randrange(24)
    if kind < 6:
        return KillFault(rank, "rank", operation)
    if kind < 8:
        return KillFault(rank, "both", operation)
    if kind < 10:
        return KillFault(rank, rng.choice(VICTIMS), at=rng.random() * rng.choice((1, 3, 10)))
    if kind < 13:
        end = rng.choice((End.FAILED, End.FAILED, End.FATAL))
        return Fail(rank, iteration, Stage.FUNCTION, end, rng.choice(("own", "communication")))
    if kind < 15:
        return Fail(rank, iteration, rng.choice(HOOKS), rng.choice((End.FAILED, End.FATAL)))
    if kind < 17:
        how, duration = rng.choice(HANGS), rng.uniform(10, 200)
        if rng.random() < 0.3:  # close to a limit, so that a late event meets a wait that ends
            how, duration = "slow", rng.choice(LIMITS) + rng.uniform(-1.0, 1.0)
        return Stall(rank, iteration, Stage.FUNCTION, how, duration)
    if kind < 18:
        stage = rng.choice((*HOOKS, Stage.ABORT, Stage.COLLECT))
        return Stall(rank, iteration, stage, rng.choice(HANGS[2:]), rng.uniform(1, 85))
    if kind < 19:
        if rng.random() < 0.5:
            return Linger(rank, iteration, rng.uniform(0.5, 120))
        return Pause(rank, operation, rng.uniform(1, 150))
    if kind < 21:
        return Raise(rank, operation, rng.choice((1, 2, 2, 3, 10, 99)), rng.random() < 0.5)
    if kind < 22:
        return Misassign(rank, rng.choice((ENTRY, iteration, iteration)))
    if kind < 23:
        return Freeze(rank, rng.random() * rng.choice((1, 3, 10)), rng.uniform(1, 95))
    return FalseSuspicion(rank, rng.random() * rng.choice((1, 3, 10)))


def everywhere(victim: Victim, ranks: int, rank: int, restarts: int = 0, block: int = 32) -> list[Schedule]:
    """Return the schedules that kill one process at each of its operations in turn.

    restarts: the next rank's function raises in that many iterations, so that the kills also hit restarts. A monitor
    acts only if its rank dies, so that rank is killed at the first second."""
    faults: list[Fault] = [Fail((rank + 1) % ranks, number, Stage.FUNCTION) for number in range(restarts)]
    if victim == "monitor":
        faults.append(KillFault(rank, "rank", at=1.0))
    last = STAND_IN_OPERATIONS if victim == "monitor" else OPERATIONS
    return [
        Schedule(seed=number, ranks=ranks, faults=(KillFault(rank, victim, number), *faults), block=block)
        for number in range(1, last + 1)
    ]


def raised_everywhere(times: int, ranks: int, rank: int, restarts: int = 0, latency: float = 1.0) -> list[Schedule]:
    """Return the schedules that raise in one rank at each of its operations in turn, before and after it, and
    `times` - 1 more times on its way out. restarts: as in `everywhere`."""
    other_faults = tuple(Fail((rank + 1) % ranks, number, Stage.FUNCTION) for number in range(restarts))
    return [
        Schedule(seed=number, ranks=ranks, faults=(Raise(rank, number, times, after), *other_faults), latency=latency)
        for number in range(1, OPERATIONS + 1)
        for after in (False, True)
    ]


def late_returns(ranks: int, rank: int, limit: Seconds, count: int = 100) -> list[Schedule]:
    """Return the schedules in which the function of one rank returns within a second of `limit`, before it or after,
    in even steps: in some of them success comes first although another rank has given up waiting."""
    return [
        Schedule(number, ranks, (Stall(rank, 0, Stage.FUNCTION, "slow", limit - 1.0 + 2.0 * number / count),))
        for number in range(count)
    ]
