"""Watches one worker of the launcher: any program, which attaches itself, or never does.

`server.RankMonitor` watches; this lets the worker's program in, tells the agent what becomes of it, and knows
what the agent wants. A worker that is not attached is watched for its end only. What a former monitor of
the same worker had of it (page, line, dump) can be gone on with: the worker does not notice the change."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from resilience.adapters import processes, stacks
from resilience.adapters.channel import Channel, ChannelClosed, close_all
from resilience.core import events, watch
from resilience.core.attribution import Exit, InterruptionRecord
from resilience.core.identity import Origin
from resilience.core.silences import Shown
from resilience.core.watch import Doing, Observation
from resilience.errors import DecodeError
from resilience.monitor import messages
from resilience.monitor.listening import Listener
from resilience.monitor.page import MonitorSide, Page
from resilience.monitor.server import RankMonitor

LOG_TAIL_LINES = 200
MOST_APPLICANTS = 8  # connections that have been let in and have not attached yet
REAP_LIMIT = 2.0  # seconds for the agent to tell how a worker ended, where only its parent can see that

Tell = Callable[[messages.ToAgent, Sequence[int]], None]


class AgentOutlet:
    """What is found goes to the agent."""

    def __init__(self, tell: Tell) -> None:
        self._tell = tell
        self.are_others_seen = False  # set where the agent says so

    def begin(self, begin: messages.Begin) -> None:
        """A Wrapper begins its calls with a monitor of its own."""

    def host(self, iteration: int) -> None:
        """The agent's store process hosts stores."""

    def started(self, origin: Origin) -> None:
        """A Wrapper's own monitor tells of its restarts."""

    def hung_up(self) -> None:
        """Nothing is told to the program."""

    def suspect(self, rank: int, suspicion: events.HangSuspected) -> None:
        self._tell(messages.Suspected(rank, suspicion), ())

    def interrupt(self, record: InterruptionRecord) -> None:
        self._tell(messages.Found(record, ended=False), ())

    def stand_in(self, record: InterruptionRecord) -> None:
        self._tell(messages.Found(record, ended=True), ())

    def finish(self) -> None:
        return None


class WorkerMonitor(RankMonitor):
    """The watch over one worker, from its assignment to its end."""

    def __init__(
        self,
        assigned: messages.Assigned,
        rank: processes.Process,
        selector: selectors.BaseSelector,
        tell: Tell,
        agent_lost_at: float | None = None,
        look_at_agent: Callable[[], None] = lambda: None,
        shown: Shown | None = None,
    ) -> None:
        """look_at_agent: called when the worker is gone; calls `agent_lost` if the agent is gone too. shown: which
        silences earlier workers of this rank have shown."""
        nobodys = Page.create()  # until somebody attaches
        self._agent = AgentOutlet(tell)
        self._agent.are_others_seen = assigned.is_adopted  # nobody can look at them
        super().__init__(MonitorSide(nobodys), None, rank, self._agent, None, selector)
        self._tell = tell
        self._assigned = assigned
        self._link: messages.Link | None = None
        self._own = nobodys
        self._applicants: dict[Channel, Page] = {}
        self._agent_lost_at = agent_lost_at
        self._look_at_agent = look_at_agent
        self._is_group = False  # the worker leads a process group of its own
        with contextlib.suppress(ProcessLookupError):
            self._is_group = os.getpgid(rank.pid) == rank.pid
        self._listener = Listener(shown)
        self._is_dismissed = False
        self._took_sigterm = False  # for a request of its own to stop the job
        self._is_stopping = False
        self.has_successor = False  # another process waits to be watched
        self._gone_at = 0.0
        self._began = time.monotonic()
        self._witness.has_iterations = False
        self._witness.log_lines = LOG_TAIL_LINES
        folder = Path(os.fsdecode(assigned.folder))
        self._is_cold = assigned.is_cold
        self.open(msgspec.structs.replace(assigned.origin, layer="launcher"), folder, assigned.limits)
        self._witness.logs = (*self._witness.logs, *(Path(os.fsdecode(path)) for path in assigned.output))
        self._witness.drain = assigned.drain

    def run(self) -> None:
        """Watch until the worker is gone and the agent has been told, or until `leave`."""
        try:
            super().run()
        finally:
            self._let_go()

    # -- what the agent wants -------------------------------------------------------------------

    @property
    def pid(self) -> int:
        return self._rank.pid

    @property
    def is_over(self) -> bool:
        """Whether the watch is about to end."""
        return self._is_over

    @property
    def is_attached(self) -> bool:
        """Whether a program is attached, or is about to be."""
        return self._channel is not None or bool(self._applicants)

    @property
    def shown(self) -> Shown:
        """Which silences the job has shown on this rank."""
        return self._listener.shown

    def limit(self, limits: watch.Limits) -> None:
        """Let these limits hold from now on."""
        self._watch = msgspec.structs.replace(self._watch, limits=limits)

    def dismiss(self) -> None:
        """The worker is ended on purpose."""
        self._is_dismissed = True
        self._page.dismiss()
        if self._took_sigterm:
            self._witness.program.send(signal.SIGTERM)

    def request_stop(self) -> None:
        """Let the program know that the job is asked to stop, also one that attaches later."""
        self._is_stopping = True
        is_heard = self._page.request_stop() and self._channel is not None
        self._tell(messages.Stopping(self.pid, is_heard), ())

    def look(self) -> None:
        """Put on record where the program is, and how it hangs if it does."""
        if self._channel is not None and not self._is_gone:
            self.emit(self._witness.look())
        self._tell(messages.Looked(self.pid), ())

    def others_seen(self) -> None:
        """It is on record where the node's other ranks are: this one may be ended."""
        self._agent.are_others_seen = True

    def reaped(self, status: Exit) -> None:
        """The agent knows how the worker ended."""
        if self._status in (None, Exit()):
            self._status = status

    def agent_lost(self, at: float) -> None:
        """Nobody is left who looks after the worker."""
        self._agent_lost_at = at

    def leave(self) -> None:
        """Let the worker alone."""
        self._is_over = True

    # -- attaching ------------------------------------------------------------------------------

    def apply(self, channel: Channel) -> None:
        """Somebody connects: let it in if it is the worker, or a program of its that is the first."""
        why = self._why_not(channel)
        if why:
            self._refuse(f"foreign connection: {why}")
            channel.send(messages.encode(messages.Refused(why)))
            channel.close()
            return
        origin = self._assigned.origin
        welcome = messages.Welcome(origin.rank or 0, origin.world_size or 1, self._watch.limits)
        page = Page.create()
        self._applicants[channel] = page
        self._selector.register(channel, selectors.EVENT_READ, lambda: self._hear_applicant(channel))
        channel.send(messages.encode(welcome), [page.fd])

    def _why_not(self, channel: Channel) -> str:
        peer = channel.peer
        if peer.uid != os.geteuid():
            return f"process {peer.pid} belongs to user {peer.uid}"
        if len(self._applicants) >= MOST_APPLICANTS:
            return "too many connections"
        if not processes.is_descendant(peer.pid, self.pid):
            return f"process {peer.pid} is not of worker {self.pid}"
        if self._channel is not None and peer.pid != self.pid:
            assert self._link is not None
            return f"process {self._link.pid} of this worker is attached already"
        return ""

    def _hear_applicant(self, channel: Channel) -> None:
        try:
            received = channel.receive_with_fds(0.0)
        except ChannelClosed:
            self._send_off(channel)
            return
        if received is None:
            return
        data, fds = received
        try:
            message = messages.decode_for_monitor(data)
        except DecodeError as error:
            self._refuse(f"malformed message: {error}"[:200])
            message = None
        pid = channel.peer.pid
        if isinstance(message, messages.Attached) and len(fds) == 1:
            page = self._applicants.pop(channel)
            self._selector.unregister(channel)
            self.attach(messages.Link(pid, message.is_locked), page, channel, fds[0], is_new=True)
        else:
            self._refuse(f"foreign connection: process {pid} did not attach itself")
            close_all(fds)
            self._send_off(channel)

    def _send_off(self, channel: Channel) -> None:
        page = self._applicants.pop(channel, None)
        if page is not None:
            self._selector.unregister(channel)
            page.close()
            channel.close()

    def attach(self, link: messages.Link, page: Page, channel: Channel, dump: int, is_new: bool) -> None:
        """Watch the program that stores into `page` from now on. is_new: the agent does not know it yet."""
        try:
            program = self._rank if link.pid == self.pid else processes.Process(link.pid)
        except ProcessLookupError:
            channel.close()
            page.close()
            os.close(dump)
            return
        self._detach()
        self._listener.start_again()
        self._link, self._own, self._channel = link, page, channel
        self._page = self._witness.page = MonitorSide(page)
        self._witness.program = program
        self._dump = self._witness.dump = stacks.Dump(dump)
        if self._is_stopping:
            self._page.request_stop()
        if self._is_dismissed:
            self._page.dismiss()
        if link.limits is not None:
            self.limit(link.limits)
        self._selector.register(channel, selectors.EVENT_READ, self._receive)
        if link.is_locked and program is self._rank:
            self._watch_mutex()
        self._tell(messages.Connected(self.pid, link), (page.fd, channel.fileno(), dump) if is_new else ())

    def _detach(self) -> None:
        """Let go of the program before."""
        if self._channel is not None:
            self._hung_up()
        self._fold_timings(time.monotonic())
        if self._witness.program is not self._rank:
            self._witness.program.close()
            self._witness.program = self._rank
        self._own.close()
        if self._dump is not None:
            os.close(self._dump.fd)
            self._dump = self._witness.dump = None

    # -- the rank's messages --------------------------------------------------------------------

    def _receive(self) -> bool:
        """Take what the rank says. One that takes its leave makes room for a process that waits."""
        has_more = super()._receive()
        if self.has_successor and self._channel is None and not self._applicants and not self._is_gone:
            self._is_over |= self._page.read().doing is Doing.OUTSIDE
        return has_more

    def _handle(self, message: messages.FromRank) -> None:
        match message:
            case messages.Emitted(record):
                self._take(record)
            case messages.Progressed(sign, at, step):
                ago = max(0.0, time.monotonic() - at)
                self.emit(events.WorkerProgressed(sign, max(0.0, at - self._began), step, ago))
            case messages.Armed():
                self._link_changed(heartbeats_from=time.monotonic())
            case messages.Limited(limits):
                self.limit(limits)
                self._link_changed(limits=limits)
            case messages.Request(action, description):
                self._request(action, description[: messages.DESCRIPTION])
            case _:
                self._refuse(f"unexpected message: {type(message).__name__}")

    def _request(self, action: str, description: str) -> None:
        """The program wants the agent to decide something. A SIGTERM that it took for a scheduler's may have been
        the agent's, who ends it: then it gets another, now that it can know. Without an agent that decides, the program
        gets the SIGTERM back."""
        if action == "Stop":
            self._took_sigterm = True
            if self._assigned.is_adopted:
                self.dismiss()
                return
            if self._is_dismissed:
                self._witness.program.send(signal.SIGTERM)
                return
        rank = self._assigned.origin.rank or 0
        self._tell(messages.Requested(action, description, rank, self.pid), ())

    def _link_changed(self, **changes: object) -> None:
        assert self._link is not None
        self._link = msgspec.structs.replace(self._link, **changes)
        self._tell(messages.Connected(self.pid, self._link), ())

    # -- observing, obeying ---------------------------------------------------------------------

    def _observe(self) -> Observation:
        seen = super()._observe()
        is_known = self._status not in (None, Exit()) or time.monotonic() >= self._gone_at + REAP_LIMIT
        was_ended = self._watch.finding is not None  # then an exit status of 0 says nothing
        ended_well = self._status is not None and self._status.code == 0 and not was_ended
        return msgspec.structs.replace(
            seen,
            doing=seen.doing if self._channel is not None else Doing.OUTSIDE,
            heartbeats_from=self._announced_at,
            is_gone=seen.is_gone and is_known,
            said_goodbye=seen.said_goodbye or ended_well,
            is_dismissed=self._is_dismissed,
            agent_lost_at=self._agent_lost_at,
        )

    @property
    def _announced_at(self) -> float | None:
        return None if self._link is None else self._link.heartbeats_from

    def _rank_gone(self, noticed_by: Literal["mutex", "pidfd"]) -> None:
        if not self._is_gone:
            super()._rank_gone(noticed_by)
            self._look_at_agent()  # whose end is the worker's, and may be noticed later
            self._gone_at = time.monotonic()
            if self._status is None:
                self._status = self._rank.exit_status(0.05)
            self._selector.unregister(self._rank.pidfd)
            self._selector.unregister(self._wake_read)

    def _sleep(self, wake_at: float | None) -> None:
        if self._is_gone:  # and nobody has said how
            wake_at = self._gone_at + REAP_LIMIT
        super()._sleep(wake_at)

    def _send(self, number: int) -> None:
        if not self._rank.send(0):
            return
        is_final = number == signal.SIGKILL or self._agent_lost_at is not None
        if is_final and self._is_group:
            self._send_to_group(number)
            return
        if self._witness.program is not self._rank:
            self._witness.program.send(number)
        self._rank.send(number)

    def _send_to_group(self, number: int) -> None:
        """Signal the worker with what it has started. The worker itself may be gone."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)

    # -- the end --------------------------------------------------------------------------------

    def _let_go(self) -> None:
        if self._is_group and self._is_gone and self._agent_lost_at is not None:
            self._send_to_group(signal.SIGKILL)  # nobody else is left to end what the worker has started
        self._detach()
        for channel in list(self._applicants):
            self._send_off(channel)
        for fd in (self._rank.pidfd, self._wake_read):
            with contextlib.suppress(KeyError):
                self._selector.unregister(fd)
        if self._is_gone:
            goodbye = self._seen.said_goodbye or self._is_dismissed
            self._tell(messages.Gone(self.pid, self._status or Exit(), goodbye), ())
        if self._file is not None:
            self._file.close()
        if self._death is not None:
            self._death.join(1.0)
        if self._death is None or not self._death.is_alive():  # else it may still write there
            os.close(self._wake_read)
            os.close(self._wake_write)
            self._rank.close()


def resumed(assigned: messages.Assigned, fds: Sequence[int]) -> tuple[Page, Channel, int]:
    """Return page, line and dump that a monitor before had. Raises: MonitorError, OSError, ValueError."""
    page_fd, line_fd, dump_fd = fds
    return Page.attach(page_fd), Channel(socket.socket(fileno=line_fd)), dump_fd
