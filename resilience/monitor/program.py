"""The monitor of one local rank, as the launcher starts it: `python -m resilience.monitor.program LINE LISTENER`.

LINE is the agent's line, LISTENER the socket to which workers connect, both descriptors. It watches one
worker after the other and outlives them. The agent assigns them; or it lets the monitor adopt the processes
that connect, whose pid is known from the connection's credentials. It ends when the agent says so; when the agent dies
it ends its worker and itself. Imports neither torch nor an exporter: a node has as many of these as ranks."""

from __future__ import annotations

import contextlib
import gc
import os
import selectors
import socket
import sys
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import msgspec

from resilience.adapters import channel as lines
from resilience.adapters import processes, terminal, titles
from resilience.adapters.background import WRITER
from resilience.adapters.channel import Channel, ChannelClosed, close_all
from resilience.adapters.processes import Process, ignore_job_signals, is_descendant
from resilience.core.attribution import Exit
from resilience.core.identity import Origin
from resilience.core.printable import printable
from resilience.core.silences import Shown
from resilience.errors import DecodeError, MonitorError
from resilience.monitor import messages
from resilience.monitor.worker import WorkerMonitor, resumed

MOST_WAITING = 16  # connections that wait for a worker to be assigned
OUTBOX = 256  # messages kept for an agent that does not read


class Program:
    """The monitor's process. `run` returns when it is to end."""

    def __init__(self, line: Channel, listener: socket.socket) -> None:
        self._line = line
        self._listener = listener
        self._selector = selectors.DefaultSelector()
        self._selector.register(line, selectors.EVENT_READ, self._on_line)
        self._selector.register(listener, selectors.EVENT_READ, self._accept)
        self._agent: Process | None = None
        self._agent_lost_at: float | None = None
        self._outbox: deque[tuple[bytes, tuple[int, ...]]] = deque(maxlen=OUTBOX)
        self._worker: WorkerMonitor | None = None
        self._shown: tuple[int | None, Shown] = None, Shown()  # which silences workers of a rank have shown
        self._titled: int | None = None  # the rank that lists of processes show
        self._next: deque[tuple[messages.Assigned, list[int]]] = deque()
        self._dismissed: set[int] = set()  # of the next ones
        self._stopped: set[int] = set()  # of these too: the job was asked to stop before they are watched
        self._waiting: deque[Channel] = deque()
        self._adopt: messages.Adopt | None = None
        self._newcomers: set[Channel] = set()  # asked which rank they are
        self._is_leaving = False

    def run(self) -> None:
        """Watch whatever worker is assigned."""
        while self._next or not self._is_leaving:
            if self._next:
                self._watch(*self._next.popleft())
                continue
            for key, _ in self._selector.select():
                key.data()
        if self._agent_lost_at is not None:
            self._tidy()

    # -- workers --------------------------------------------------------------------------------

    def _watch(self, assigned: messages.Assigned, fds: list[int]) -> None:
        """Watch one worker until its end."""
        process = _process(assigned)
        if process is None:
            close_all(fds)
            self.tell(messages.Gone(assigned.worker_pid, Exit(), goodbye=False))
            return
        rank = assigned.origin.rank
        if self._titled != rank:
            self._titled = rank
            titles.name(f"res-monitor {rank}")
            titles.show([f"resilience-monitor: rank {rank} on {assigned.origin.node}"])
        shown = self._shown[1] if self._shown[0] == rank else None
        worker = self._worker = WorkerMonitor(
            assigned, process, self._selector, self.tell, self._agent_lost_at, self._look_at_agent, shown
        )
        if assigned.link is not None:
            self._resume(worker, assigned, assigned.link, fds)
        if process.pid in self._dismissed:
            worker.dismiss()
        if process.pid in self._stopped:
            worker.request_stop()
        waiting, self._waiting = self._waiting, deque()
        for line in waiting:
            if self._is_of_next(line):
                self._waiting.append(line)
            else:
                worker.apply(line)
        worker.run()
        self._worker = None
        self._shown = rank, worker.shown
        del worker
        gc.collect()  # its pages are mapped as long as anything refers to them

    def _resume(self, worker: WorkerMonitor, assigned: messages.Assigned, link: messages.Link, fds: list[int]) -> None:
        """Go on with what the monitor before had."""
        try:
            page, line, dump = resumed(assigned, fds)
        except (MonitorError, OSError, ValueError):
            close_all(fds)  # the worker is watched for its end
            return
        worker.attach(link, page, line, dump, is_new=False)

    def _accept(self) -> None:
        """Take one connection. What those before it have sent is heard before the next is taken."""
        line = lines.accept(self._listener)
        if line is None:
            return
        if self._is_newcomer(line):
            self._ask(line)
        elif self._worker is not None and not self._is_of_next(line):
            self._worker.apply(line)
        elif len(self._waiting) < MOST_WAITING:
            self._waiting.append(line)
        else:
            line.close()

    def _is_of_next(self, line: Channel) -> bool:
        """Whether the worker comes that is to be watched when this one's end is accounted for."""
        return any(is_descendant(line.peer.pid, assigned.worker_pid) for assigned, _ in self._next)

    def _is_newcomer(self, line: Channel) -> bool:
        """Whether nobody has assigned the process that connects, and this monitor may adopt it."""
        if self._adopt is None or self._is_of_next(line):
            return False
        worker = self._worker
        return worker is None or worker.is_over or not is_descendant(line.peer.pid, worker.pid)

    def _ask(self, line: Channel) -> None:
        """Find out which rank a newcomer is, unless it is another user's."""
        why = f"process {line.peer.pid} belongs to user {line.peer.uid}" if line.peer.uid != os.geteuid() else ""
        if not why and len(self._newcomers) >= MOST_WAITING:
            why = "too many connections"
        if why:
            line.send(messages.encode(messages.Refused(why)))
            line.close()
            return
        self._newcomers.add(line)
        self._selector.register(line, selectors.EVENT_READ, lambda: self._hear_newcomer(line))
        line.send(messages.encode(messages.Introduce()))

    def _hear_newcomer(self, line: Channel) -> None:
        message = None
        with contextlib.suppress(ChannelClosed, DecodeError):
            data = line.receive(0.0)
            if data is None:
                return
            message = messages.decode_for_monitor(data)
        self._newcomers.discard(line)
        self._selector.unregister(line)
        state = processes.state(line.peer.pid)
        if isinstance(message, messages.Introduced) and state is not None:
            self._take_in(line, message, state.start_time)
        else:
            line.close()

    def _take_in(self, line: Channel, introduced: messages.Introduced, start_time: int) -> None:
        """Watch a process that connected, as soon as the one before has ended or has taken its leave."""
        adopt, pid, rank = self._adopt, line.peer.pid, introduced.rank
        assert adopt is not None
        if not self._is_of_next(line):
            origin = Origin(
                adopt.job_id,
                adopt.node,
                "rank",
                pid,
                attempt=adopt.attempt,
                initial_rank=rank,
                rank=rank,
                world_size=introduced.world_size,
            )
            assigned = messages.Assigned(pid, start_time, origin, adopt.folder, adopt.limits, is_adopted=True)
            self._next.append((assigned, []))
        self._waiting.append(line)
        if self._worker is not None:
            self._worker.has_successor = True
            if not self._worker.is_attached:
                self._worker.leave()

    # -- the agent ------------------------------------------------------------------------------

    def tell(self, message: messages.ToAgent, fds: Sequence[int] = ()) -> None:
        """Tell the agent something, now or when it reads again."""
        data = messages.encode(message)
        if len(data) > self._line.limit and isinstance(message, messages.Found):
            short = messages.shortened(message.record)
            data = messages.encode(msgspec.structs.replace(message, record=short))
        if len(data) > self._line.limit:  # it would stand before all that comes after it for ever
            _say(f"a message of {len(data)} bytes is left out")
            return
        self._outbox.append((data, tuple(fds)))
        self._flush()

    def _flush(self) -> None:
        while self._outbox and self._line.send(*self._outbox[0]):
            self._outbox.popleft()
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._outbox else 0)
        with contextlib.suppress(KeyError):  # the line is gone
            self._selector.modify(self._line, wanted, self._on_line)

    def _on_line(self) -> None:
        self._flush()
        while True:
            try:
                received = self._line.receive_with_fds(0.0)
            except ChannelClosed:
                self._line_closed()
                return
            if received is None:
                return
            data, fds = received
            try:
                self._obey(messages.decode_from_agent(data), fds)
            except DecodeError as error:
                close_all(fds)
                _say(str(error))

    def _obey(self, message: messages.FromAgent, fds: list[int]) -> None:
        worker = self._worker
        match message:
            case messages.Open(agent_pid):
                self._open(agent_pid)
            case messages.Adopt():
                self._adopt = message
            case messages.Assigned():
                self._next.append((message, fds))
            case messages.Probe(number):
                self.tell(messages.Alive(number))
            case messages.Leave():
                self._leave()
            case messages.Limited(limits):
                if worker is not None:
                    worker.limit(limits)
                waiting = ((msgspec.structs.replace(assigned, limits=limits), fds) for assigned, fds in self._next)
                self._next = deque(waiting)
            case messages.Dismissed():
                if worker is not None:
                    worker.dismiss()
                self._dismissed = {assigned.worker_pid for assigned, _ in self._next}
            case messages.Stop():
                if worker is not None:
                    worker.request_stop()
                self._stopped = {assigned.worker_pid for assigned, _ in self._next}
            case messages.Look():
                if worker is not None:
                    worker.look()
                for assigned, _ in self._next:  # nobody has seen these yet
                    self.tell(messages.Looked(assigned.worker_pid))
            case messages.OthersSeen(pid):
                if worker is not None and worker.pid == pid:
                    worker.others_seen()
            case messages.Reaped(pid, status):
                if worker is not None and worker.pid == pid:
                    worker.reaped(status)

    def _open(self, agent_pid: int) -> None:
        try:
            self._agent = Process(agent_pid)
        except ProcessLookupError:
            self._lose_agent()
            return
        self._selector.register(self._agent.pidfd, selectors.EVENT_READ, self._lose_agent)
        self.tell(messages.Ready())

    def _line_closed(self) -> None:
        """Only an agent that ends lets go of the line, unless it wants this monitor to go alone."""
        self._selector.unregister(self._line)
        self._look_at_agent()
        if self._agent_lost_at is None:
            self._leave()

    def _look_at_agent(self) -> None:
        """Notice now if the agent is gone or about to be."""
        state = None if self._agent is None else self._agent.state()
        if state is None or state.wait_status is not None:
            self._lose_agent()

    def _lose_agent(self) -> None:
        """Nobody is left whom a worker belongs to."""
        if self._agent is not None:
            with contextlib.suppress(KeyError):
                self._selector.unregister(self._agent.pidfd)
        if self._agent_lost_at is None:
            self._agent_lost_at = time.monotonic()
            self._is_leaving = True
            if self._worker is not None:
                self._worker.agent_lost(self._agent_lost_at)

    def _leave(self) -> None:
        self._is_leaving = True
        self._next.clear()
        if self._worker is not None:
            self._worker.leave()

    def _tidy(self) -> None:
        """Remove what the agent would have: this monitor's socket and, the last of all, its folder."""
        path = Path(self._listener.getsockname())
        with contextlib.suppress(OSError):
            path.unlink()
        with contextlib.suppress(OSError):
            path.parent.rmdir()


def _say(text: str) -> None:
    """Write a line to the agent's stderr, if its reader takes it at once: a monitor waits for no reader."""
    line = printable(f"resilience monitor {os.getpid()}: {text}\n").encode()
    terminal.put(terminal.stream(terminal.STDERR), line, time.monotonic())


def _process(assigned: messages.Assigned) -> Process | None:
    """The worker's process, None once it has been reaped."""
    try:
        process = Process(assigned.worker_pid)
    except ProcessLookupError:
        return None
    state = process.state()
    if state is not None and state.start_time == assigned.start_time:
        return process
    process.close()
    return None


def main(arguments: Sequence[str]) -> None:
    ignore_job_signals()
    line, listener = (socket.socket(fileno=int(fd)) for fd in arguments)
    Program(Channel(line), listener).run()
    WRITER.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
