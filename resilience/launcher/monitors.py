"""One monitor for each local rank, started once, told what to watch, and replaced when it is lost.

A worker is assigned to its rank's monitor when it is started. What the monitor has of it (page, line, dump) is
kept here too, so that another monitor goes on where one was killed or hangs, while the worker notices
nothing. A rank without a monitor runs on; `is_monitored` says so. Single thread: the agent's."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from resilience.adapters import private, processes
from resilience.adapters.channel import ChannelClosed, close_all, listen
from resilience.core.attribution import Exit
from resilience.core.identity import Origin
from resilience.core.watch import Limits
from resilience.errors import MonitorError
from resilience.monitor import messages
from resilience.monitor.starting import MonitorProcess

PROBE_EVERY = 1.0  # seconds
PROBE_LIMIT = 5.0  # seconds without an answer: the monitor hangs
START_LIMIT = 30.0  # seconds for a monitor to begin; it needs 0.2
STEADY = 30.0  # seconds after which a monitor's loss is no repetition
DELAYS = (0.0, 0.5, 2.0, 10.0, 30.0)  # seconds before a lost monitor is replaced, by losses in a row
PATH_LIMIT = 100  # bytes: the kernel's is 107


class Lost(msgspec.Struct, frozen=True):
    """A monitor is gone or hangs; another one takes its place. `worker_pid`: goes on unmonitored."""

    monitor_pid: int
    why: str
    worker_pid: int | None


Message = messages.ToAgent | Lost


class Monitors:
    """The monitors of one node."""

    def __init__(self, folder: Path, node: str, local_world_size: int, drain: str = "") -> None:
        """folder: the run folder. drain: the socket of the drain process, if there is one. Nothing is started yet."""
        self._folder = folder
        self._node = node
        self._size = local_world_size
        self._drain = drain
        self._places: list[_Place] = []
        self._sockets: Path | None = None

    def start(self) -> None:
        """Start a monitor for each local rank; they are ready a little later. Raises: MonitorError."""
        try:
            self._sockets = Path(private.make(longest=PATH_LIMIT - 8))
            for local_rank in range(self._size):
                self._places.append(_Place(self._sockets / str(local_rank)))
                self._places[-1].start()
        except OSError as error:
            self.close(0.0)
            raise MonitorError(f"the rank monitors of {self._node} cannot be started: {error}") from error

    def socket(self, local_rank: int) -> str:
        """Return where the monitor of a rank listens: RESILIENCE_MONITOR_SOCKET of its worker."""
        return str(self._places[local_rank].path)

    def pid(self, local_rank: int) -> int | None:
        """Return the pid of a rank's monitor, None while there is none."""
        monitor = self._places[local_rank].monitor
        return None if monitor is None else monitor.pid

    def is_monitored(self, local_rank: int) -> bool:
        """Whether the rank's monitor is there and answers."""
        return self._places[local_rank].is_watching

    # -- what monitors are told -----------------------------------------------------------------

    def assign(
        self,
        local_rank: int,
        pid: int,
        origin: Origin,
        limits: Limits,
        output: Sequence[str] = (),
        is_cold: bool = True,
    ) -> None:
        """Have a worker watched that has just been started and not been waited for. origin: of the rank.
        output: the files of its stdout and stderr. is_cold: a node has not run the job before."""
        state = processes.state(pid)
        self._places[local_rank].assign(
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
        """Tell how a worker ended; its monitor may have been too late to see it."""
        self._places[local_rank].tell(messages.Reaped(pid, end))

    def dismiss(self, reason: str) -> None:
        """All workers are about to be ended on purpose."""
        for place in self._places:
            place.dismiss(messages.Dismissed(reason))

    def dismiss_one(self, local_rank: int, reason: str) -> None:
        """The worker is to end: if its program caught a SIGTERM, it gets another one, which it does not catch."""
        self._places[local_rank].dismiss(messages.Dismissed(reason))

    def request_stop(self) -> None:
        """Let all programs know that the job is asked to stop; each monitor answers whether its one looks."""
        for place in self._places:
            place.request_stop()

    def look(self, but: int | None = None) -> None:
        """Have it put on record where all programs are now; each monitor answers when that is done. but: a local rank
        that is left out."""
        for local_rank, place in enumerate(self._places):
            if local_rank != but:
                place.tell(messages.Look())

    def others_seen(self, local_rank: int, pid: int) -> None:
        """Tell the monitor of a worker that hangs that it is on record where the others are."""
        self._places[local_rank].tell(messages.OthersSeen(pid))

    def limit(self, limits: Limits) -> None:
        """Let these limits hold from now on."""
        for place in self._places:
            place.limit(limits)

    # -- what they say --------------------------------------------------------------------------

    def filenos(self) -> list[int]:
        """Return what becomes readable when a monitor has something to say, or is gone."""
        return [place.monitor.fileno() for place in self._places if place.monitor is not None]

    def poll(self, timeout: float) -> list[tuple[int, Message]]:
        """Return what monitors say, by local rank, within `timeout` seconds; replace those that are lost.

        To be called at least every few seconds."""
        deadline = time.monotonic() + timeout
        while True:
            said = [(rank, message) for rank, place in enumerate(self._places) for message in place.hear()]
            now = time.monotonic()
            said += [(rank, message) for rank, place in enumerate(self._places) for message in place.tend(now)]
            if said or now >= deadline:
                return said
            self._await(min(deadline, *(place.tend_at for place in self._places), now + PROBE_EVERY) - now)

    def _await(self, limit: float) -> None:
        poll = select.poll()
        for fd in self.filenos():
            poll.register(fd, select.POLLIN)
        poll.poll(max(0.0, limit) * 1000)

    def close(self, limit: float) -> None:
        """End all monitors, within about `limit` seconds. A worker that is still there is left alone."""
        deadline = time.monotonic() + limit
        for place in self._places:
            place.tell(messages.Leave())
        for place in self._places:
            place.close(max(0.0, deadline - time.monotonic()))
        self._places.clear()
        if self._sockets is not None:
            with contextlib.suppress(OSError):
                self._sockets.rmdir()


class _Place:
    """The monitor of one local rank, whichever it is at the moment, and what it watches."""

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
        self._probed_at = 0.0
        self._unanswered_since: float | None = None
        self.tend_at = 0.0

    @property
    def is_watching(self) -> bool:
        return self.monitor is not None and self._is_ready

    # -- telling --------------------------------------------------------------------------------

    def start(self) -> None:
        """Start a monitor, and have it go on with what there is to watch. Raises: OSError."""
        self.monitor = MonitorProcess(self._listener)
        self._is_ready = False
        self._started_at = self._probed_at = time.monotonic()
        self._unanswered_since = None
        self.tend_at = self._started_at + PROBE_EVERY
        if self._assigned is not None:
            self.tell(self._assigned, self._link_fds)
        if self._dismissed is not None:
            self.tell(self._dismissed)
        if self._is_stopping:
            self.tell(messages.Stop())

    def tell(self, message: messages.FromAgent, fds: Sequence[int] = ()) -> None:
        """Tell the monitor something. What it cannot take is told to the next one, for it hangs."""
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
            self.tell(messages.Limited(limits))

    # -- hearing --------------------------------------------------------------------------------

    def hear(self) -> list[Message]:
        """Return what the monitor has said."""
        said: list[Message] = []
        while self.monitor is not None:
            try:
                heard = self.monitor.hear(0.0)
            except ChannelClosed:
                said.append(self._lose("it is gone"))
                break
            if heard is None:
                break
            message, fds = heard
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
            said.append(message)
        return said

    def _connected(self, message: messages.Connected, fds: list[int]) -> None:
        if self._assigned is None or message.worker_pid != self._assigned.worker_pid:
            close_all(fds)
            return
        self._assigned = msgspec.structs.replace(self._assigned, link=message.link)
        if fds:
            close_all(self._link_fds)
            self._link_fds = fds

    def tend(self, now: float) -> list[Message]:
        """Probe the monitor, replace a lost one."""
        if now < self.tend_at:
            return []
        self.tend_at = now + PROBE_EVERY
        if self.monitor is None:
            try:
                self.start()
            except OSError as error:  # no memory, no processes: later perhaps
                self._losses += 1
                self.tend_at = now + self._delay()
                return [Lost(0, f"no other one could be started: {error}", self._worker_pid)]
            return []
        if not self._is_ready:
            return [] if now - self._started_at < START_LIMIT else [self._lose("it did not begin")]
        if self._unanswered_since is not None:
            if now - self._unanswered_since >= PROBE_LIMIT:
                return [self._lose(f"it did not answer for {PROBE_LIMIT:g} s")]
            return []
        self._probe += 1
        self._unanswered_since = now
        self.tell(messages.Probe(self._probe))
        return []

    def _lose(self, why: str) -> Lost:
        """Have another monitor in place of this one, which is gone or as good as gone."""
        assert self.monitor is not None
        now = time.monotonic()
        pid = self.monitor.pid
        self.monitor.kill()
        self.monitor = None
        self._losses = 1 if now - self._started_at > STEADY else self._losses + 1
        self.tend_at = now + self._delay()
        return Lost(pid, why, self._worker_pid)

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
        """End the monitor and give everything back."""
        if self.monitor is not None:
            self.monitor.end(limit)
            self.monitor = None
        self._forget_worker()
        self._listener.close()
        with contextlib.suppress(OSError):
            self.path.unlink()
