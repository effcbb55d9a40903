"""One monitor process per local rank: started once, assigned to a worker, and replaced when it is lost.

A worker is assigned to its rank's monitor when the worker starts. What the monitor has from the worker (page, line,
dump) is also kept here. So if a monitor is killed or hangs, another one continues, and the worker notices nothing. A
rank without a monitor keeps running; `is_monitored` reports that. Used by the agent's main thread only."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from resilience.errors import MonitorError
from resilience.facts.identity import Origin
from resilience.facts.interruptions import Exit
from resilience.facts.limits import Limits
from resilience.monitor import messages
from resilience.monitor.starting import MonitorProcess
from resilience.system import private, processes
from resilience.system.channel import ChannelClosed, close_all, listen

PROBE_EVERY = 1.0  # seconds
PROBE_LIMIT = 5.0  # seconds without an answer after which a monitor counts as hung
START_LIMIT = 30.0  # seconds for a monitor to start; it needs 0.2 s
STEADY = 30.0  # seconds of running after which a monitor's loss counts as the first
DELAYS = (0.0, 0.5, 2.0, 10.0, 30.0)  # seconds before a lost monitor is replaced, by losses in a row
PATH_LIMIT = 100  # bytes; the kernel's limit is 107


class MonitorGone(msgspec.Struct, frozen=True):
    """A monitor is gone or hangs; another one replaces it. `worker_pid`: the worker that is unmonitored until then.
    `is_replaced`: it hung, so this agent ended it."""

    monitor_pid: int
    why: str
    worker_pid: int | None
    is_replaced: bool = False


Message = messages.ToAgent | MonitorGone


class Monitors:
    """The monitors of one node."""

    def __init__(self, folder: Path, node: str, local_world_size: int, drain: str = "") -> None:
        """folder: the run folder. drain: the socket of the drain process, if there is one. Starts nothing yet."""
        self._folder = folder
        self._node = node
        self._size = local_world_size
        self._drain = drain
        self._slots: list[_MonitorSlot] = []
        self._sockets: Path | None = None

    def start(self) -> None:
        """Start a monitor for each local rank; they become ready a little later. Raises: MonitorError."""
        try:
            self._sockets = Path(private.make(longest=PATH_LIMIT - 8))
            for local_rank in range(self._size):
                self._slots.append(_MonitorSlot(self._sockets / str(local_rank)))
                self._slots[-1].start()
        except OSError as error:
            self.close(0.0)
            raise MonitorError(f"the rank monitors of {self._node} cannot be started: {error}") from error

    def socket(self, local_rank: int) -> str:
        """Return the socket of a rank's monitor: RESILIENCE_MONITOR_SOCKET of its worker."""
        return str(self._slots[local_rank].path)

    def pid(self, local_rank: int) -> int | None:
        """Return the pid of a rank's monitor, None while there is none."""
        monitor = self._slots[local_rank].monitor
        return None if monitor is None else monitor.pid

    def is_monitored(self, local_rank: int) -> bool:
        """Return True if the rank's monitor runs and has reported ready."""
        return self._slots[local_rank].is_watching

    # -- messages to monitors -------------------------------------------------------------------

    def assign(
        self,
        local_rank: int,
        pid: int,
        origin: Origin,
        limits: Limits,
        output: Sequence[str] = (),
        is_cold: bool = True,
    ) -> None:
        """Let a monitor watch a worker that has just started and has not been reaped. origin: of the rank. output: the
        files of its stdout and stderr. is_cold: some node of the cycle has not run the job before."""
        state = processes.state(pid)
        self._slots[local_rank].assign(
            messages.Assigned(
                worker_pid=pid,
                start_time=0 if state is None else state.start_time,
                origin=origin,
                folder=os.fsencode(self._folder),
                limits=limits,
                output=tuple(map(os.fsencode, output)),
                drain=self._drain,
                is_cold=is_cold,
            )
        )

    def reaped(self, local_rank: int, pid: int, end: Exit) -> None:
        """Tell a monitor how its worker ended; the monitor may have come too late to see that."""
        self._slots[local_rank].tell(messages.Reaped(pid, end))

    def dismiss(self, reason: str) -> None:
        """Announce that all workers will be stopped on purpose."""
        for slot in self._slots:
            slot.dismiss(messages.Dismissed(reason))

    def dismiss_one(self, local_rank: int, reason: str) -> None:
        """Announce that a worker must end: a program that caught SIGTERM gets another one, which it does not catch."""
        self._slots[local_rank].dismiss(messages.Dismissed(reason))

    def request_stop(self) -> None:
        """Tell all programs that the job was asked to stop; each monitor answers whether its program checks this."""
        for slot in self._slots:
            slot.request_stop()

    def look(self, but: int | None = None, is_suspicion: bool = False) -> None:
        """Record where all programs are now; each monitor answers when that is done. but: a local rank to leave out.
        is_suspicion: that rank may hang."""
        for local_rank, slot in enumerate(self._slots):
            if local_rank != but:
                slot.tell(messages.Look(is_suspicion))

    def others_found(self, local_rank: int, positions: messages.OthersPositions) -> None:
        """Tell the monitor of a suspected worker where the others are."""
        self._slots[local_rank].tell(positions)

    def others_seen(self, local_rank: int, pid: int) -> None:
        """Tell the monitor of a hung worker that the positions of the others are on record."""
        self._slots[local_rank].tell(messages.OthersRecorded(pid))

    def limit(self, limits: Limits) -> None:
        """Apply these limits from now on."""
        for slot in self._slots:
            slot.limit(limits)

    # -- messages from monitors -----------------------------------------------------------------

    def filenos(self) -> list[int]:
        """Return the descriptors that become readable when a monitor has a message or is gone."""
        return [slot.monitor.fileno() for slot in self._slots if slot.monitor is not None]

    def poll(self, timeout: float) -> list[tuple[int, Message]]:
        """Return the monitors' messages, with local ranks, within `timeout` seconds; replace lost monitors.

        Call this at least every few seconds."""
        deadline = time.monotonic() + timeout
        while True:
            now = time.monotonic()  # first: what a monitor has answered by then is heard before it counts as late
            received = [(rank, message) for rank, slot in enumerate(self._slots) for message in slot.hear()]
            received += [(rank, message) for rank, slot in enumerate(self._slots) for message in slot.tend(now)]
            if received or now >= deadline:
                return received
            self._await(min(deadline, *(slot.tend_at for slot in self._slots), now + PROBE_EVERY) - now)

    def _await(self, limit: float) -> None:
        poll = select.poll()
        for fd in self.filenos():
            poll.register(fd, select.POLLIN)
        poll.poll(max(0.0, limit) * 1000)

    def close(self, limit: float) -> None:
        """End all monitors, within about `limit` seconds. Workers that still run are not touched."""
        deadline = time.monotonic() + limit
        for slot in self._slots:
            slot.tell(messages.Leave())
        for slot in self._slots:
            slot.close(max(0.0, deadline - time.monotonic()))
        self._slots.clear()
        if self._sockets is not None:
            with contextlib.suppress(OSError):
                self._sockets.rmdir()


class _MonitorSlot:
    """The current monitor of one local rank, and what it watches."""

    def __init__(self, path: Path) -> None:
        """Raises: OSError."""
        self.path = path
        self.monitor: MonitorProcess | None = None
        self._listener: socket.socket = listen(path)
        self._assigned: messages.Assigned | None = None
        self._dismissed: messages.Dismissed | None = None
        self._is_stopping = False
        self._link_fds: list[int] = []
        self._is_ready = False
        self._started_at = 0.0
        self._losses = 0
        self._probe = 0
        self._unanswered_since: float | None = None
        self.tend_at = 0.0

    @property
    def is_watching(self) -> bool:
        return self.monitor is not None and self._is_ready

    # -- sending --------------------------------------------------------------------------------

    def start(self) -> None:
        """Start a monitor, and let it continue with the present worker. Raises: OSError."""
        self.monitor = MonitorProcess(self._listener)
        self._is_ready = False
        self._started_at = time.monotonic()
        self._unanswered_since = None
        self.tend_at = self._started_at + PROBE_EVERY
        if self._assigned is not None:
            self.tell(self._assigned, self._link_fds)
        if self._dismissed is not None:
            self.tell(self._dismissed)
        if self._is_stopping:
            self.tell(messages.Stop())

    def tell(self, message: messages.FromAgent, fds: Sequence[int] = ()) -> None:
        """Send the monitor a message. If it hangs and cannot take the message, its replacement gets the same state."""
        if self.monitor is not None:
            self.monitor.send(message, fds)

    def assign(self, assigned: messages.Assigned) -> None:
        self._forget_worker()
        self._assigned = assigned
        self.tell(assigned)

    def dismiss(self, dismissed: messages.Dismissed) -> None:
        if self._assigned is not None:
            self._dismissed = dismissed
            self.tell(dismissed)

    def request_stop(self) -> None:
        if self._assigned is not None:
            self._is_stopping = True
            self.tell(messages.Stop())

    def limit(self, limits: Limits) -> None:
        if self._assigned is not None:
            self._assigned = msgspec.structs.replace(self._assigned, limits=limits)
            self.tell(messages.NewLimits(limits))

    # -- receiving ------------------------------------------------------------------------------

    def hear(self) -> list[Message]:
        """Return the monitor's messages."""
        received: list[Message] = []
        while self.monitor is not None:
            try:
                item = self.monitor.hear(0.0)
            except ChannelClosed:
                received.append(self._lose("its channel closed"))
                break
            if item is None:
                break
            message, fds = item
            if not isinstance(message, messages.Connected):
                close_all(fds)
            match message:
                case messages.Ready():
                    self._is_ready = True
                    continue
                case messages.Alive(number):
                    if number == self._probe:
                        self._unanswered_since = None
                    continue
                case messages.Connected():
                    self._connected(message, fds)
                case messages.Gone(pid) if self._assigned is not None and pid == self._assigned.worker_pid:
                    self._forget_worker()
                case (
                    messages.Found()
                    | messages.Suspected()
                    | messages.SeeksOthers()
                    | messages.Gone()
                    | messages.Requested()
                    | messages.WillStop()
                    | messages.Looked()
                ):
                    pass  # for the caller
            received.append(message)
        return received

    def _connected(self, message: messages.Connected, fds: list[int]) -> None:
        if self._assigned is None or message.worker_pid != self._assigned.worker_pid:
            close_all(fds)
            return
        # One copy: a message to the next monitor may not have room for two.
        limits = self._assigned.limits if message.link.limits is None else message.link.limits
        link = msgspec.structs.replace(message.link, limits=None)
        self._assigned = msgspec.structs.replace(self._assigned, link=link, limits=limits)
        if fds:
            close_all(self._link_fds)
            self._link_fds = fds

    def tend(self, now: float) -> list[Message]:
        """Probe the monitor; replace it if it is lost."""
        if now < self.tend_at:
            return []
        self.tend_at = now + PROBE_EVERY
        if self.monitor is None:
            try:
                self.start()
            except OSError as error:  # no memory or processes: try again later
                self._losses += 1
                self.tend_at = now + self._delay()
                return [MonitorGone(0, f"no replacement could be started: {error}", self._worker_pid)]
            return []
        if not self._is_ready:
            return [] if now - self._started_at < START_LIMIT else [self._lose("it did not begin", is_replaced=True)]
        if self._unanswered_since is not None:
            if now - self._unanswered_since >= PROBE_LIMIT:
                return [self._lose(f"it did not answer for {PROBE_LIMIT:g} s", is_replaced=True)]
            return []
        self._probe += 1
        self._unanswered_since = time.monotonic()  # not `now`: this process may have stood still since then
        self.tell(messages.ProbeMonitor(self._probe))
        return []

    def _lose(self, reason: str, is_replaced: bool = False) -> MonitorGone:
        """Drop this monitor, which is gone or hangs, and schedule a replacement."""
        assert self.monitor is not None
        now = time.monotonic()
        pid = self.monitor.pid
        self.monitor.kill()
        self.monitor = None
        self._losses = 1 if now - self._started_at > STEADY else self._losses + 1
        self.tend_at = now + self._delay()
        return MonitorGone(pid, reason, self._worker_pid, is_replaced)

    def _delay(self) -> float:
        return DELAYS[min(self._losses, len(DELAYS)) - 1]

    @property
    def _worker_pid(self) -> int | None:
        return None if self._assigned is None else self._assigned.worker_pid

    def _forget_worker(self) -> None:
        self._assigned = self._dismissed = None
        self._is_stopping = False
        close_all(self._link_fds)
        self._link_fds = []

    def close(self, limit: float) -> None:
        """End the monitor and release its resources."""
        if self.monitor is not None:
            self.monitor.end(limit)
            self.monitor = None
        self._forget_worker()
        self._listener.close()
        with contextlib.suppress(OSError):
            self.path.unlink()
