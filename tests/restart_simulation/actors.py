"""Which actors does a virtual cluster have?  Ranks, their monitors, and the errands of monitors for ranks.

Only their state at a moment; `testing.cluster` moves them."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from resilience.core import watch
from resilience.core.observation import Doing, Observation
from resilience.core.restart import ENTRY, Operation, Stage
from tests.restart_simulation.faults import Fail, Stall
from tests.restart_simulation.invariants import Truth

Seconds = float


class Actor:
    """Runs a protocol: one operation after another, until it ends or dies.

    token: changes with every step; an event scheduled under an earlier token is stale. pauses: operations before which
    it stops, and for how long. silent_since: when it last ran bytecode, None if it runs bytecode now."""

    __slots__ = ("operation", "pauses", "process", "protocol", "seat", "silent_since", "token", "truth")

    def __init__(self, truth: Truth, process: Rank | Monitor | None = None) -> None:
        self.truth = truth
        self.seat = truth.seat
        self.process: Any = process
        self.protocol: Generator[Operation, Any, Any]
        self.operation: Operation
        self.token = 0
        self.pauses: dict[int, Seconds] = {}
        self.silent_since: Seconds | None = None


class Rank(Actor):
    """A live rank, and the content of its page."""

    __slots__ = (
        "asks_since",
        "called_at",
        "dies_before",
        "doing",
        "faults",
        "has_left",
        "hook",
        "ignores_term",
        "interrupted_at",
        "is_answering",
        "is_critical",
        "linger",
        "lingers_since",
        "lives_on",
        "misassigned",
        "monitor",
        "operations",
        "pinged_at",
        "published",
        "raises",
        "since",
        "takes_monitor_along",
    )

    def __init__(self, truth: Truth, ignores_term: bool) -> None:
        super().__init__(truth)
        self.process = self
        self.monitor = Monitor(self)
        # From the schedule.
        self.ignores_term = ignores_term
        self.dies_before = 0
        self.takes_monitor_along = False
        self.is_critical = False  # its process holds the store
        self.faults: dict[tuple[int, Stage], Fail | Stall] = {}
        self.misassigned: set[int] = set()  # iterations after which its assignment raises
        self.linger: dict[int, Seconds] = {}
        self.raises: dict[int, bool] = {}  # number of its operation; True if the exception lands after its effect
        # Its position.
        self.operations = 0
        self.published = ENTRY  # the iteration of the seat that it published last
        self.is_answering = False  # it has left the function and is about to answer the last call
        self.called_at = 0.0
        self.lives_on = False  # its process, after the call
        # Its page.
        self.asks_since: Seconds | None = None  # it waits for a stopped store
        self.has_left = False
        self.doing = Doing.WAITING
        self.since = 0.0
        self.hook = ""
        self.pinged_at: Seconds | None = None
        self.interrupted_at: Seconds | None = None
        self.lingers_since: Seconds | None = None  # not on the page: when it should have left its function

    def __str__(self) -> str:
        return f"rank {self.truth.seat.initial_rank}"

    def does(self, doing: Doing, now: Seconds, hook: str = "") -> None:
        if (doing, hook) != (self.doing, self.hook):
            self.doing, self.hook, self.since = doing, hook, now

    def observed(self, now: Seconds) -> Observation:
        """Return its monitor's observation."""
        return Observation(
            iteration=self.seat.iteration,
            doing=self.doing,
            since=self.since,
            hook=self.hook,
            watchdog_at=min((at for at in (self.silent_since, self.asks_since) if at is not None), default=now),
            store_due_at=self.asks_since,
            ran_at=now if self.silent_since is None else self.silent_since,
            ping_at=self.pinged_at,
            interrupted_at=self.interrupted_at,
            is_gone=self.truth.end is not None and not self.lives_on,
            said_goodbye=self.truth.end is not None and self.truth.is_alive and not self.has_left,
            has_left=self.has_left,
        )

    def stalled_since(self) -> Seconds | None:
        """Return since when it has really made no progress, None if it makes progress."""
        moments = (self.silent_since, self.pinged_at, self.lingers_since)
        return min((at for at in moments if at is not None), default=None)


class Monitor:
    """The process beside a rank. token: changes with every scheduled check, so that only the latest one counts."""

    __slots__ = (
        "busy_until",
        "dies_before",
        "errands",
        "is_alive",
        "operations",
        "others_seen_at",
        "queue",
        "rank",
        "token",
        "watch",
    )

    def __init__(self, rank: Rank) -> None:
        self.rank = rank
        self.watch = watch.Watch()
        self.token = 0
        self.operations = 0
        self.dies_before = 0
        self.is_alive = True
        self.busy_until = self.others_seen_at = 0.0  # when its evidence, and that of the other ranks, is taken
        self.errands: list[Errand] = []  # in progress: at most one of its own, any number for neighbours
        self.queue: list[Errand] = []  # its own waiting ones


class Errand(Actor):
    """One protocol that a monitor runs for a rank: a report, or standing in."""

    __slots__ = ("monitor", "rank", "stands_in")

    def __init__(self, monitor: Monitor, rank: Rank, stands_in: bool) -> None:
        super().__init__(rank.truth, monitor)
        self.monitor = monitor
        self.rank = rank
        self.stands_in = stands_in

    def __str__(self) -> str:
        does = "stands in for" if self.stands_in else "reports"
        return f"monitor {self.monitor.rank.truth.seat.initial_rank} {does} {self.truth.seat.initial_rank}"
