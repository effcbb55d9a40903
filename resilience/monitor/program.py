"""The monitor of one local rank, as the launcher starts it: `python -m resilience.monitor.program LINE LISTENER`.

Both arguments are descriptors: LINE is the channel to the agent, LISTENER the socket to which workers connect. The
program watches one worker after another and outlives them. The agent assigns workers, or lets the monitor adopt the
processes that connect, whose pid the connection's credentials show. It ends on the agent's order; if the agent dies, it
ends its worker and itself. It imports neither torch nor an exporter: a node has one of these per rank."""

from __future__ import annotations

import contextlib
import gc
import os
import selectors
import socket
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from resilience.core.silences import Shown
from resilience.errors import DecodeError, MonitorError
from resilience.facts.identity import Origin
from resilience.facts.interruptions import Exit
from resilience.facts.printable import printable
from resilience.monitor import messages
from resilience.monitor.loader_workers import LoaderWorkers
from resilience.monitor.worker import WorkerMonitor, resumed
from resilience.system import channel as lines
from resilience.system import processes, terminal, titles
from resilience.system.background import WRITER
from resilience.system.channel import Channel, ChannelClosed, close_all
from resilience.system.processes import Process, ignore_job_signals, is_descendant
from resilience.system.timed_selector import TimedSelector

MOST_WAITING = 16  # connections that wait for an assigned worker
RETRY_EVERY = 1.0  # seconds between two attempts to watch a worker without a descriptor left
REST = 0.1  # seconds without connections, if one cannot be accepted: a program waits a second or more for its answer
OUTBOX = 256  # messages kept for an agent that does not read


class Program:
    """The monitor's process. `run` returns when the process has to end."""

    def __init__(self, line: Channel, listener: socket.socket) -> None:
        self._agent_channel = line
        self._listener = listener
        self._socket_file = lines.file_at(Path(listener.getsockname()))
        self._selector = TimedSelector()
        self._selector.register(line, selectors.EVENT_READ, self._on_agent_message)
        self._selector.register(listener, selectors.EVENT_READ, self._accept)
        self._agent: Process | None = None
        self._agent_lost_at: float | None = None
        self._outbox: deque[tuple[bytes, tuple[int, ...]]] = deque()  # the descriptors are its own
        self._worker: WorkerMonitor | None = None
        self._watched_rank: int | None = None  # by the last worker, which has shown what follows
        self._shown_silences = Shown()
        self._raised: Mapping[str, float] = {}
        self._titled_rank: int | None = None  # the rank in the process title
        self._next: deque[tuple[messages.Assigned, list[int]]] = deque()
        self._dismissed: set[int] = set()  # pids among the next workers
        self._stopped: set[int] = set()  # likewise: the job was asked to stop before they are watched
        self._waiting: deque[Channel] = deque()
        self._unknown: deque[Channel] = deque()  # from a process of which it is unknown to which worker it belongs
        self._is_resting = False  # no connection is accepted meanwhile
        self._has_reported_rest = False
        self._adopt: messages.Adopt | None = None
        self._newcomers: set[Channel] = set()  # asked for their rank
        self._is_leaving = False
        self._loader_workers: list[LoaderWorkers] = []  # of earlier workers

    def run(self) -> None:
        """Watch assigned workers until this process has to end."""
        while self._next or not self._is_leaving:
            if not (self._next and self._watch_next()):
                for key, _ in self._selector.select(RETRY_EVERY if self._next else None):
                    key.data()
        if self._agent_lost_at is not None:
            self._remove_socket()
        for loader_workers in self._loader_workers:
            loader_workers.finish(0.0)  # at once: the agent does not wait for this process

    # -- workers --------------------------------------------------------------------------------

    def _watch_next(self) -> bool:
        """Watch the next worker until its end. Return False if this process has no descriptor left for it."""
        assigned, fds = self._next[0]
        if self._watched_rank != assigned.origin.rank:
            self._watched_rank, self._shown_silences, self._raised = assigned.origin.rank, Shown(), {}
        try:
            worker = self._opened(assigned)
        except OSError:
            return False
        self._next.popleft()
        if worker is None:
            close_all(fds)
            self.tell(messages.Gone(assigned.worker_pid, Exit(), goodbye=False))
        else:
            self._watch(assigned, worker, fds)
        return True

    def _opened(self, assigned: messages.Assigned) -> WorkerMonitor | None:
        """Return what watches a worker, None once it has been reaped. Raises: OSError, as with too many open files."""
        process = _process(assigned)
        if process is None:
            return None
        try:
            return WorkerMonitor(
                assigned,
                process,
                self._selector,
                self.tell,
                self._agent_lost_at,
                self._look_at_agent,
                self._shown_silences,
                self._raised,
            )
        except OSError:
            process.close()
            raise

    def _watch(self, assigned: messages.Assigned, worker: WorkerMonitor, fds: list[int]) -> None:
        self._worker = worker
        if self._titled_rank != (rank := assigned.origin.rank):
            self._titled_rank = rank
            titles.name(f"res-monitor {rank}")
            titles.show([f"resilience-monitor: rank {rank} on {assigned.origin.node}"])
        if assigned.link is not None:
            self._resume(worker, assigned, assigned.link, fds)
        if worker.pid in self._dismissed:
            worker.dismiss()
        if worker.pid in self._stopped:
            worker.request_stop()
        waiting, self._waiting = self._waiting, deque()
        for channel in waiting:
            try:
                if self._is_of_next(channel):
                    self._waiting.append(channel)
                else:
                    worker.apply(channel)
            except OSError as error:
                self._keep_unknown(channel, error)
        worker.run()
        self._worker = None
        self._shown_silences, self._raised = worker.shown, worker.raised
        outliving = [*self._loader_workers, worker.loader_workers]
        self._loader_workers = [workers for workers in outliving if workers.is_waiting]
        del worker
        gc.collect()  # its pages stay mapped as long as anything refers to them

    def _resume(
        self, worker: WorkerMonitor, assigned: messages.Assigned, link: messages.Attachment, fds: list[int]
    ) -> None:
        """Continue with the previous monitor's page, channel and dump."""
        try:
            page, channel, dump = resumed(assigned, fds)
        except (MonitorError, OSError, ValueError):
            close_all(fds)  # the worker is watched for its end only
            return
        worker.attach(link, page, channel, dump, is_new=False)

    def _accept(self) -> None:
        """Accept one connection. Messages on earlier connections are read before the next one is accepted."""
        try:
            channel = lines.accept(self._listener)
        except OSError as error:
            self._rest(error)
            return
        if channel is not None:
            self._place(channel)

    def _place(self, channel: Channel) -> None:
        """Give a connection to the worker to which its process belongs."""
        try:
            if self._is_newcomer(channel):
                self._ask(channel)
            elif self._worker is not None and not self._is_of_next(channel):
                self._worker.apply(channel)
            elif len(self._waiting) < MOST_WAITING:
                self._waiting.append(channel)
            else:
                channel.close()
        except OSError as error:  # /proc cannot be read
            self._keep_unknown(channel, error)

    def _keep_unknown(self, channel: Channel, error: OSError) -> None:
        """Keep a connection until it is known to which worker its process belongs."""
        if len(self._unknown) == MOST_WAITING:
            self._unknown.popleft().close()
        self._unknown.append(channel)
        self._rest(error)

    def _rest(self, error: OSError) -> None:
        """Accept no connection for a moment. It stays in the listener's queue, so the loop would not wait otherwise."""
        if self._is_resting:
            return
        self._is_resting = True
        self._selector.unregister(self._listener)
        self._selector.call_in(REST, self._end_rest)
        if not self._has_reported_rest:
            self._has_reported_rest = True
            _print(f"programs that attach have to wait: {error.strerror}; raise the limit of open files (`ulimit -n`)")

    def _end_rest(self) -> None:
        self._is_resting = False
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        unknown, self._unknown = self._unknown, deque()
        for channel in unknown:
            if channel.is_closed():  # its process waits no longer
                channel.close()
            else:
                self._place(channel)

    def _is_of_next(self, channel: Channel) -> bool:
        """Return True if the connection comes from a worker that is watched next. Raises: OSError if that is
        unknown."""
        return any(is_descendant(channel.peer.pid, assigned.worker_pid) for assigned, _ in self._next)

    def _is_newcomer(self, channel: Channel) -> bool:
        """Return True if the connecting process is not assigned and this monitor may adopt it. Raises: OSError if that
        is unknown."""
        if self._adopt is None or self._is_of_next(channel):
            return False
        worker = self._worker
        return worker is None or worker.is_over or not is_descendant(channel.peer.pid, worker.pid)

    def _ask(self, channel: Channel) -> None:
        """Ask a newcomer for its rank, unless it belongs to another user."""
        reason = (
            f"process {channel.peer.pid} belongs to user {channel.peer.uid}" if channel.peer.uid != os.geteuid() else ""
        )
        if not reason and len(self._newcomers) >= MOST_WAITING:
            reason = "too many connections"
        if reason:
            channel.send(messages.encode(messages.Refused(reason)))
            channel.close()
            return
        self._newcomers.add(channel)
        self._selector.register(channel, selectors.EVENT_READ, lambda: self._hear_newcomer(channel))
        channel.send(messages.encode(messages.Introduce()))

    def _hear_newcomer(self, channel: Channel) -> None:
        message = None
        with contextlib.suppress(ChannelClosed, DecodeError):
            data = channel.receive(0.0)
            if data is None:
                return
            message = messages.decode_for_monitor(data)
        self._newcomers.discard(channel)
        self._selector.unregister(channel)
        if isinstance(message, messages.Introduced):
            self._watch_newcomer(channel, message)
        else:
            channel.close()

    def _watch_newcomer(self, channel: Channel, introduced: messages.Introduced) -> None:
        """Watch a process that has connected, as soon as the previous one has ended or left."""
        if channel.is_closed():  # it has gone
            channel.close()
            return
        adopt, pid, rank = self._adopt, channel.peer.pid, introduced.rank
        assert adopt is not None
        try:
            is_of_next = self._is_of_next(channel)
        except OSError:  # /proc cannot be read now
            self._selector.call_in(REST, lambda: self._watch_newcomer(channel, introduced))
            return
        state = processes.state(pid)
        start_time = 0 if state is None else state.start_time
        if not is_of_next:
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
        self._waiting.append(channel)
        if self._worker is not None:
            self._worker.has_successor = True
            if not self._worker.is_attached:
                self._worker.leave()

    # -- the agent ------------------------------------------------------------------------------

    def tell(self, message: messages.ToAgent, fds: Sequence[int] = ()) -> None:
        """Send the agent a message, now or when it reads again."""
        data = messages.encode(message)
        if len(data) > self._agent_channel.limit and isinstance(message, messages.Found):
            short = messages.shortened(message.record)
            data = messages.encode(msgspec.structs.replace(message, record=short))
        if len(data) > self._agent_channel.limit:  # it would block all later messages forever
            _print(f"a message of {len(data)} bytes is too long and was dropped")
            return
        if not self._outbox and self._agent_channel.send(data, fds):
            return
        own: list[int] = []  # the caller may close its own before the agent reads
        try:
            own.extend(map(os.dup, fds))
        except OSError as error:
            close_all(own)
            _print(f"a message with {len(fds)} files was dropped: they cannot be kept for the agent: {error.strerror}")
            return
        if len(self._outbox) == OUTBOX:
            close_all(self._outbox.popleft()[1])
        self._outbox.append((data, tuple(own)))
        self._flush()

    def _flush(self) -> None:
        while self._outbox and self._agent_channel.send(*self._outbox[0]):
            close_all(self._outbox.popleft()[1])
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._outbox else 0)
        with contextlib.suppress(KeyError):  # the channel is gone
            self._selector.modify(self._agent_channel, wanted, self._on_agent_message)

    def _on_agent_message(self) -> None:
        self._flush()
        while True:
            try:
                received = self._agent_channel.receive_with_fds(0.0)
            except ChannelClosed:
                self._agent_channel_closed()
                return
            if received is None:
                return
            data, fds = received
            try:
                self._handle_order(messages.decode_from_agent(data), fds)
            except DecodeError as error:
                close_all(fds)
                _print(str(error))

    def _handle_order(self, message: messages.FromAgent, fds: list[int]) -> None:
        worker = self._worker
        match message:
            case messages.OpenMonitor(agent_pid):
                self._open(agent_pid)
            case messages.Adopt():
                self._adopt = message
            case messages.Assigned():
                self._next.append((message, fds))
            case messages.ProbeMonitor(number):
                self.tell(messages.Alive(number))
            case messages.Leave():
                self._leave()
            case messages.NewLimits(limits):
                if worker is not None:
                    worker.monitor.limit(limits)
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
            case messages.Look(is_suspicion):
                if worker is not None:
                    worker.look(is_suspicion)
                for assigned, _ in self._next:  # these are not watched yet
                    self.tell(messages.Looked(assigned.worker_pid, is_suspicion))
            case messages.OthersPositions(pid, hangs, missing, elsewhere):
                if worker is not None and worker.pid == pid:
                    worker.monitor.suspicions.others_found(hangs, missing, elsewhere)
            case messages.OthersRecorded(pid):
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

    def _agent_channel_closed(self) -> None:
        """Leave, since the agent has closed the channel. A dying agent also ends the worker."""
        self._selector.unregister(self._agent_channel)
        self._look_at_agent()
        if self._agent_lost_at is None:
            self._leave()

    def _look_at_agent(self) -> None:
        """Check now if the agent is gone or about to be."""
        agent = self._agent
        state = None if agent is None else agent.state()  # None also if it cannot be read
        if agent is None or agent.has_ended() or (state is not None and state.wait_status is not None):
            self._lose_agent()

    def _lose_agent(self) -> None:
        """Note the agent's end: its worker ends too."""
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

    def _remove_socket(self) -> None:
        """Remove what the agent would have removed: this monitor's socket and, by the last monitor, the folder."""
        path = Path(self._listener.getsockname())
        with contextlib.suppress(OSError):
            lines.remove_own_file(path, self._socket_file)
        with contextlib.suppress(OSError):
            path.parent.rmdir()


def _print(text: str) -> None:
    """Write a line to the agent's stderr unless that would block: a monitor waits for no reader."""
    line = printable(f"resilience monitor {os.getpid()}: {text}\n").encode()
    terminal.put(terminal.stream(terminal.STDERR), line, time.monotonic())


def _process(assigned: messages.Assigned) -> Process | None:
    """Return the worker's process, None once it has been reaped. Raises: OSError, as with too many open files."""
    try:
        process = Process(assigned.worker_pid, start_time=assigned.start_time or None)
    except ProcessLookupError:
        return None
    if process.is_reaped():
        process.close()
        return None
    return process


def main(arguments: Sequence[str]) -> None:
    ignore_job_signals()
    terminal.stream(terminal.STDERR)  # opened now, because later no descriptor may be left
    line, listener = (socket.socket(fileno=int(fd)) for fd in arguments)
    Program(Channel(line), listener).run()
    WRITER.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
