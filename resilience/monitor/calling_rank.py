"""Watches one rank that calls functions of a Wrapper, from its first call to the end of its process.

`server.RankMonitor` watches. `CallingRank` owns one and is its subject: the rank announces each of its calls to its
monitor, and asks it to host the store of an iteration."""

from __future__ import annotations

import math
import time
from typing import Protocol

import msgspec

from resilience.core.observation import Doing, Observation
from resilience.core.standstills import SHARE, Standstill, united
from resilience.monitor import messages
from resilience.monitor.loader_workers import GRACE
from resilience.monitor.page import MonitorSide
from resilience.monitor.server import FindingsReceiver, RankMonitor
from resilience.system import processes, stacks
from resilience.system.channel import Channel


class AskedStore(Protocol):
    """Asks the store whether it answers."""

    def ask(self) -> None: ...
    def all(self) -> list[Standstill]: ...


class CallingRank:
    """The watch over one rank. monitor: its loop; this object is its `Subject`."""

    announced_at: float | None = None  # a Wrapper's ranks need not announce heartbeats

    def __init__(
        self,
        page: MonitorSide,
        channel: Channel | None,
        rank: processes.Process,
        receiver: FindingsReceiver,
        dump: stacks.Dump | None,
        silences: AskedStore | None = None,
    ) -> None:
        """silences: of the store for which the rank may wait."""
        self._silences = silences
        self._asks_at = math.inf  # when the store is asked, if the rank shows no life until then
        self.monitor = RankMonitor(page, channel, rank, receiver, dump, subject=self)

    def handle(self, message: messages.FromRank) -> None:
        monitor = self.monitor
        monitor.look_soon(message.record if isinstance(message, messages.Emitted) else None)
        match message:
            case messages.Begin():
                monitor.begin_call(message)
            case messages.HostStore(iteration):
                monitor.host(iteration)
            case messages.LeftCall():
                pass  # the page shows it too; this message wakes the loop
            case messages.Emitted(record):
                monitor.take(record)
            case (
                messages.Introduced()
                | messages.Attached()
                | messages.Armed()
                | messages.EndedMonitoring()
                | messages.Progressed()
                | messages.RankRequest()
                | messages.NewLimits()
                | messages.FitFailed()
                | messages.LimitsUnread()
            ):
                monitor.refuse(f"unexpected message: {type(message).__name__}")

    def heard(self) -> None:
        """Do nothing: the rank's process makes all its calls with this monitor."""

    def recorded(self) -> None:
        """Do nothing: no other monitor can continue with the rank."""

    def completed(self, observation: Observation) -> Observation:
        """Add the time in which the store did not answer: in its function the rank may wait for it without a sign of
        that."""
        self._asks_at = math.inf
        soft = self.monitor.limits.watchdog.soft
        is_running = observation.doing is Doing.FUNCTION and observation.interrupted_at is None
        if self._silences is None or soft is None or not is_running or observation.store_due_at is not None:
            return observation
        # It is asked once the main thread has run no bytecode for a good part of its limit, and then again.
        now, asks_at = time.monotonic(), max(observation.since, observation.watchdog_at or 0.0) + SHARE * soft
        if now >= asks_at:
            self._silences.ask()
            asks_at = now + SHARE * soft
        self._asks_at = asks_at
        standstills = united([*observation.standstills, *self._silences.all()])
        return msgspec.structs.replace(observation, standstills=tuple(standstills))

    def died(self) -> None:
        """Do nothing: the monitor ends soon."""

    def due(self, due: float) -> float:
        return min(due, self._asks_at)

    def send(self, number: int) -> None:
        self.monitor.rank.send(number)

    def end_loader_workers(self) -> None:
        """Wait until they have ended, and kill those that do not."""
        self.monitor.loader_workers.finish(GRACE + 1.0)
