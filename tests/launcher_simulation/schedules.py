"""What goes wrong in a job of several nodes, where and when?  Faults as values, and the schedules that seeds stand for.

A schedule is all that `jobs.Job` needs to repeat a run exactly. Nodes are numbers, node 0 hosts the job's store where
it is hosted by a node. An operation's number counts what one agent asks of the store, from 1. Seconds are virtual."""

from __future__ import annotations

from random import Random
from typing import Literal

import msgspec

from resilience.core.budget import Budget
from resilience.core.control import Policy
from resilience.core.stopping import Mode
from resilience.core.supervision import Rules
from resilience.core.terms import Terms

Seconds = float
Kind = Literal["crash", "delay", "repeat", "pause", "partition", "signal"]


class Crash(msgspec.Struct, frozen=True, tag=True):
    """An agent is killed, with all processes of its node: before an operation, or at a moment if that is given."""

    node: int
    operation: int = 0
    at: Seconds | None = None


class Delay(msgspec.Struct, frozen=True, tag=True):
    """An operation takes `duration` longer. The agent's other thread goes on to count."""

    node: int
    operation: int
    duration: Seconds


class Repeat(msgspec.Struct, frozen=True, tag=True):
    """The answer of an operation is lost on its way, and the client of the store asks again: it takes effect twice."""

    node: int
    operation: int


class Pause(msgspec.Struct, frozen=True, tag=True):
    """An agent is stopped before an operation and goes on after `duration`. With `frozen` its whole host is."""

    node: int
    operation: int
    duration: Seconds
    frozen: bool = False


class Partition(msgspec.Struct, frozen=True, tag=True):
    """A node and the store do not reach each other from a moment on, for `duration`."""

    node: int
    at: Seconds
    duration: Seconds


class PartitionBefore(msgspec.Struct, frozen=True, tag=True):
    """The same from before an operation on."""

    node: int
    operation: int
    duration: Seconds


class Freeze(msgspec.Struct, frozen=True, tag=True):
    """The store answers nobody from a moment on, for `duration`."""

    at: Seconds
    duration: Seconds


class StoreDies(msgspec.Struct, frozen=True, tag=True):
    """The process that hosts the store is gone."""

    at: Seconds


class Fails(msgspec.Struct, frozen=True, tag=True):
    """A worker of a node ends badly in a cycle, `after` seconds from its start. same: each such failure is the same."""

    node: int
    cycle: int
    after: Seconds
    same: bool = False


class Hangs(msgspec.Struct, frozen=True, tag=True):
    """The workers of a node make no progress in a cycle, until their monitor ends one of them after a minute. They do
    not heed SIGTERM."""

    node: int
    cycle: int


class Signalled(msgspec.Struct, frozen=True, tag=True):
    """A signal to an agent: at a moment, or before an operation."""

    node: int
    signal: Literal["SIGTERM", "SIGINT"] = "SIGTERM"
    at: Seconds | None = None
    operation: int = 0


class Asks(msgspec.Struct, frozen=True, tag=True):
    """A rank of a node asks for something, at a moment."""

    node: int
    action: Literal["ShutdownWorkload", "ExcludeThisNode"]
    at: Seconds


class Sick(msgspec.Struct, frozen=True, tag=True):
    """The health check of a node fails before a cycle."""

    node: int
    cycle: int


class Breaks(msgspec.Struct, frozen=True, tag=True):
    """An agent fails by an error of its own while its workers run, and says so as it ends."""

    node: int
    at: Seconds


Fault = (
    Breaks
    | Crash
    | Delay
    | Repeat
    | Pause
    | Partition
    | PartitionBefore
    | Freeze
    | StoreDies
    | Fails
    | Hangs
    | Signalled
    | Asks
    | Sick
)


class Schedule(msgspec.Struct, frozen=True):
    """One run of a job.

    comes: when each node's agent is started, in seconds; work: seconds that workers need; comes_back: an agent that
    was killed is started anew after so many seconds, None for never; reports_steps: workers report one more step in
    each cycle; ranks: of the infrastructure, by node, if it gives any; latency: factor on the time of every
    operation."""

    seed: int
    comes: tuple[Seconds, ...]
    terms: Terms
    rules: Rules
    faults: tuple[Fault, ...] = ()
    work: Seconds = 20.0
    node_hosts_store: bool = True
    comes_back: Seconds | None = None
    reports_steps: bool = True
    ranks: tuple[int, ...] = ()
    latency: float = 1.0


TERMS = Terms(2, 3, join_limit=60.0, last_call=3.0)
RULES = Rules("any-failed", Budget(3), apart=30.0)
EVICTED_WITHIN = 30.0  # seconds between the first and the last SIGTERM: `--stop-grace`, and Kubernetes' grace period
STORE_TIMEOUT = 30.0  # seconds for which the host of the store waits for it
OPERATIONS = 120  # an agent has asked for about as many after a restart


def draw(seed: int) -> Schedule:
    """Return the schedule of a seed: one to five nodes, up to four faults."""
    rng = Random(seed)
    nodes = rng.choice((1, 2, 2, 3, 3, 3, 4, 4, 5))
    most = max(1, nodes - rng.choice((0, 0, 0, 1, 2)))
    least = max(1, most - rng.choice((0, 0, 1, 1, 2)))
    late = rng.random() < 0.3
    comes = tuple(rng.uniform(0, 30) if late and rng.random() < 0.4 else rng.uniform(0, 1.5) for _ in range(nodes))
    policy: Policy = rng.choice(("any-failed", "any-failed", "min-healthy"))
    mode: Mode = rng.choice(("leave", "leave", "stop"))
    budget = Budget(
        rng.choice((0, 1, 2, 3, 5)), rng.choice((0, 3)), rng.choice((0, 3)), rng.choice((0, 4)), window_s=120.0
    )
    node_hosts_store = rng.random() < 0.7
    faults = [
        fault
        for _ in range(rng.choice((0, 1, 1, 1, 2, 2, 2, 3, 3, 4)))
        for fault in _faults(rng, nodes, node_hosts_store)
    ]
    ranks: tuple[int, ...] = ()
    if nodes == most and rng.random() < 0.2:
        ranks = tuple(rng.sample(range(nodes), nodes))
        if rng.random() < 0.2:  # two nodes were given one rank
            ranks = (ranks[-1], *ranks[1:])
    schedule = Schedule(
        seed=seed,
        comes=(0.0, *comes[1:]) if node_hosts_store else comes,
        terms=Terms(least, most, join_limit=60.0, last_call=3.0),
        rules=Rules(policy, budget, apart=30.0, mode=mode),
        faults=tuple(faults),
        work=rng.choice((3.0, 10.0, 20.0)),
        node_hosts_store=node_hosts_store,
        comes_back=rng.choice((None, 1.0, 5.0, 20.0)),
        reports_steps=rng.random() < 0.7,
        ranks=ranks,
        latency=rng.choice((0.1, 1.0, 1.0, 3.0)),
    )
    apart = rng.choice((None, 30.0))  # drawn last, so a seed has the same faults as before there was a choice
    return msgspec.structs.replace(schedule, rules=msgspec.structs.replace(schedule.rules, apart=apart))


def _faults(rng: Random, nodes: int, node_hosts_store: bool) -> list[Fault]:
    node, cycle = rng.randrange(nodes), rng.choice((0, 0, 0, 1, 1, 2))
    operation = rng.randint(1, rng.choice((20, 50, OPERATIONS)))
    at = rng.random() * rng.choice((5, 10, 25))
    kind = rng.randrange(29)
    if kind < 5:
        return [Crash(node, operation)]
    if kind < 6:
        return [Crash(node, at=at)]
    if kind < 8:
        return [Delay(node, operation, rng.choice((0.5, 3.0, 10.0, 40.0)) * rng.uniform(0.5, 1.0))]
    if kind < 10:
        return [Repeat(node, operation)]
    if kind < 12:
        return [Pause(node, operation, rng.uniform(1, 40), rng.random() < 0.5)]
    if kind < 15:
        node = rng.randrange(1, nodes) if node_hosts_store and nodes > 1 else node
        duration = rng.choice((3.0, 8.0, 30.0, 1000.0)) * rng.uniform(0.5, 1.0)
        return [PartitionBefore(node, operation, duration) if rng.random() < 0.7 else Partition(node, at, duration)]
    if kind < 16:
        return [Freeze(at, rng.choice((3.0, 10.0, 60.0)) * rng.uniform(0.5, 1.0))]
    if kind < 17:
        return [StoreDies(at)]
    if kind < 21:
        return [Fails(node, cycle, rng.choice((0.0, 1.0, 10.0)) * rng.random(), rng.random() < 0.3)]
    if kind < 22:
        return [Hangs(node, cycle)]
    if kind < 25:
        if rng.random() < 0.5:
            return [Signalled(node, operation=operation)]
        return [Signalled(node, rng.choice(("SIGTERM", "SIGTERM", "SIGINT")), at)]
    if kind < 26:  # a scheduler ends the whole job, or evicts several nodes
        some = rng.sample(range(nodes), rng.randint(1, nodes))
        return [Signalled(one, at=at + rng.choice((0.01, 0.5, 2.0)) * rng.random()) for one in some]
    if kind < 27:
        return [Asks(node, rng.choice(("ShutdownWorkload", "ExcludeThisNode", "ExcludeThisNode")), at)]
    return [Sick(node, cycle)] if kind < 28 else [Breaks(node, at)]


def only_sigterms(seed: int) -> Schedule:
    """Return the schedule of a seed with SIGTERM to some of its nodes as the only faults."""
    schedule, rng = draw(seed), Random(-1 - seed)
    nodes = range(len(schedule.comes))
    faults = tuple(
        Signalled(node, operation=rng.randint(1, 40)) if rng.random() < 0.6 else Signalled(node, at=8 * rng.random())
        for node in rng.sample(nodes, rng.randint(1, len(nodes)))
    )
    return msgspec.structs.replace(schedule, faults=faults)


def all_sigterms(seed: int) -> Schedule:
    """Return the schedule of a seed with SIGTERM to each of its nodes, as by a scheduler that ends the whole job.

    The first one comes at any time once all agents have started, the others within `EVICTED_WITHIN` seconds of it. The
    nodes that are left may have formed another cycle by then, or several. Without the signals the job would run on."""
    schedule, rng = draw(seed), Random(-2 - seed)
    first = max(schedule.comes) + rng.choice((0.5, 5.0, 20.0)) * rng.random()
    spread = EVICTED_WITHIN * rng.choice((0.02, 0.2, 1.0))
    nodes = range(len(schedule.comes))
    rules = msgspec.structs.replace(schedule.rules, mode="leave")
    return msgspec.structs.replace(
        schedule,
        faults=tuple(Signalled(node, at=first + spread * rng.random()) for node in nodes),
        rules=rules,
        work=200.0,
        ranks=(),  # two nodes with one rank are a fault of their own
    )


def everywhere(kind: Kind, node: int) -> list[Schedule]:
    """Return the schedules in which one fault strikes one of three nodes before each of its operations in turn, in a
    job that also restarts once."""
    faults: dict[str, list[Fault]] = {
        "crash": [Crash(node, number) for number in range(1, OPERATIONS)],
        "delay": [Delay(node, number, 12.0) for number in range(1, OPERATIONS)],
        "repeat": [Repeat(node, number) for number in range(1, OPERATIONS)],
        "pause": [Pause(node, number, 12.0) for number in range(1, OPERATIONS)],
        "partition": [PartitionBefore(node, number, 1000.0) for number in range(1, OPERATIONS)],
        "signal": [Signalled(node, operation=number) for number in range(1, OPERATIONS)],
    }
    return [
        Schedule(
            seed=number,
            comes=(0.0, 0.2, 0.4),
            terms=TERMS,
            rules=RULES,
            faults=(fault, Fails(2 - node if node != 1 else 0, 0, 3.0)),
            node_hosts_store=number % 2 == 0 and kind not in ("crash", "partition"),
            comes_back=None if number % 3 else 2.0,
        )
        for number, fault in enumerate(faults[kind])
    ]
