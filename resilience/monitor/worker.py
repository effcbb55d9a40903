"""Watches one worker of the launcher: any program, whether it attaches to the monitor or not.

`server.RankMonitor` watches. `WorkerMonitor` owns one and is its subject: it lets the worker's program attach, reports
its end to the agent, and follows the agent's orders. A worker that is not attached is watched for its end only. A new
monitor can continue with the previous monitor's page, channel and dump; the worker does not notice the change. What the
previous one has recorded is noted in the page."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import msgspec

from resilience.core.observation import Doing, Observation
from resilience.core.silences import Shown
from resilience.errors import DecodeError
from resilience.facts import encoding, events
from resilience.facts.identity import Origin
from resilience.facts.interruptions import Exit, InterruptionRecord
from resilience.monitor import messages
from resilience.monitor.duration_recorder import Position
from resilience.monitor.listening import Listener
from resilience.monitor.loader_workers import LoaderWorkers
from resilience.monitor.page import MonitorSide, Page
from resilience.monitor.server import RankMonitor
from resilience.system import processes, stacks
from resilience.system.channel import Channel, ChannelClosed, close_all

LOG_TAIL_LINES = 200
MOST_APPLICANTS = 8  # accepted connections that have not attached yet
REAP_LIMIT = 2.0  # seconds for the agent to report how a worker ended, if only its parent can see that

Tell = Callable[[messages.ToAgent, Sequence[int]], None]


class _Note(msgspec.Struct, frozen=True):
    """What a monitor leaves in the page for its successor. tail: number of the page's entries that it has read.
    raised: learned limits that no longer fit, and the longer ones in their place."""

    tail: int
    position: Position
    raised: dict[str, float] = {}


_note = encoding.reader(_Note, "msgpack")


class AgentReceiver:
    """Sends findings to the agent."""

    def __init__(self, tell: Tell, pid: int) -> None:
        """pid: of the worker."""
        self._tell = tell
        self._pid = pid
        self.are_others_seen = False  # set when the agent confirms it

    def begin(self, begin: messages.Begin) -> None:
        """Do nothing: a Wrapper begins its calls with its own monitor."""

    def host(self, iteration: int) -> None:
        """Do nothing: the agent's store process hosts stores."""

    def started(self, origin: Origin) -> None:
        """Do nothing: a Wrapper's own monitor reports its restarts."""

    def hung_up(self) -> None:
        """Do nothing: the program gets no messages."""

    def suspect(self, rank: int, suspicion: events.HangSuspected) -> None:
        self._tell(messages.Suspected(rank, suspicion), ())

    def seek_others(self) -> None:
        self._tell(messages.SeeksOthers(self._pid), ())

    def interrupt(self, record: InterruptionRecord) -> None:
        self._tell(messages.Found(record, ended=False), ())

    def stand_in(self, record: InterruptionRecord) -> None:
        self._tell(messages.Found(record, ended=True), ())

    def finish(self) -> None:
        return None


class WorkerMonitor:
    """The watch over one worker, from its assignment to its end. monitor: its loop; this object is its `Subject`."""

    def __init__(
        self,
        assigned: messages.Assigned,
        rank: processes.Process,
        selector: selectors.BaseSelector,
        tell: Tell,
        agent_lost_at: float | None = None,
        look_at_agent: Callable[[], None] = lambda: None,
        shown: Shown | None = None,
        raised: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        """look_at_agent: called when the worker is gone; calls `agent_lost` if the agent is gone too. shown: silences
        that earlier workers of this rank have shown. raised: learned limits that did not fit them. Raises: OSError, as
        with too many open files."""
        unattached_page = Page.create()  # until a program attaches
        self._agent = AgentReceiver(tell, rank.pid)
        self._agent.are_others_seen = assigned.is_adopted  # no agent can observe them
        self._tell = tell
        self._assigned = assigned
        self._link: messages.Attachment | None = None
        self._attached_page = unattached_page
        self._applicants: dict[Channel, Page] = {}
        self._agent_lost_at = agent_lost_at
        self._look_at_agent = look_at_agent
        self._is_group = False  # the worker leads a process group of its own
        with contextlib.suppress(ProcessLookupError):
            self._is_group = os.getpgid(rank.pid) == rank.pid
        self._is_dismissed = False
        self._took_sigterm = False  # and asked the agent to stop the job
        self._is_stopping = False
        self.has_successor = False  # another process waits to be watched
        self._gone_at = 0.0
        self._began = time.monotonic()
        self._selector = selector
        listener = Listener(shown, is_first_sign_expected=not assigned.is_cold)  # else a new node prepares itself
        side = MonitorSide(unattached_page)
        try:
            self.monitor = RankMonitor(
                side, None, rank, self._agent, None, self, selector, listener, raised, is_cold=assigned.is_cold
            )
        except OSError:
            unattached_page.close()
            raise
        self._open(assigned)

    def _open(self, assigned: messages.Assigned) -> None:
        """Begin to record. Nothing of a worker repeats iterations; what it prints is in files of its own."""
        monitor, witness = self.monitor, self.monitor.witness
        witness.has_iterations = False
        witness.log_lines = LOG_TAIL_LINES
        folder = Path(os.fsdecode(assigned.folder))
        monitor.open(msgspec.structs.replace(assigned.origin, layer="launcher"), folder, assigned.limits)
        witness.logs = (*witness.logs, *(Path(os.fsdecode(path)) for path in assigned.output))
        witness.drain = assigned.drain

    def run(self) -> None:
        """Watch until the worker is gone and the agent knows it, or until `leave`."""
        try:
            self.monitor.run()
        finally:
            self.release()

    # -- the agent's orders -----------------------------------------------------------------------

    @property
    def pid(self) -> int:
        return self.monitor.rank.pid

    @property
    def is_over(self) -> bool:
        """Return True if the watch is about to end."""
        return self.monitor.is_over

    @property
    def loader_workers(self) -> LoaderWorkers:
        """Return the data loader workers of this worker; they may outlive it."""
        return self.monitor.loader_workers

    @property
    def is_attached(self) -> bool:
        """Return True if a program is attached and has not left, or if one is about to be attached."""
        return self._is_held or bool(self._applicants)

    @property
    def _is_held(self) -> bool:
        """Return True if a program is attached and has not ended the monitoring."""
        return self.monitor.channel is not None and not self.monitor.page.is_monitoring_ended

    @property
    def shown(self) -> Shown:
        """Return the silences that the job has shown on this rank."""
        return self.monitor.listener.shown

    @property
    def raised(self) -> Mapping[str, float]:
        """Return the learned limits that no longer fit, and the longer ones in their place, in seconds by deadline."""
        return self.monitor.raised

    def dismiss(self) -> None:
        """Note that the worker is ended on purpose."""
        self._is_dismissed = True
        self.monitor.page.dismiss()
        if self._took_sigterm:
            self.monitor.witness.program.send(signal.SIGTERM)

    def request_stop(self) -> None:
        """Notify the program that the job is asked to stop, including programs that attach later."""
        self._is_stopping = True
        is_heard = self.monitor.page.request_stop() and self.monitor.channel is not None
        self._tell(messages.WillStop(self.pid, is_heard), ())

    def look(self, is_suspicion: bool) -> None:
        """Record the program's position, and how it hangs if it does. is_suspicion: another rank may hang."""
        hang, monitor = None, self.monitor
        if monitor.channel is not None and not monitor.is_gone:
            position = monitor.look()
            hang = position.hang
            monitor.emit(msgspec.structs.replace(position, is_suspicion=is_suspicion))
        self._tell(messages.Looked(self.pid, is_suspicion, hang), ())

    def others_seen(self) -> None:
        """Note that the node's other ranks are on record: this one may be ended."""
        self._agent.are_others_seen = True

    def reaped(self, status: Exit) -> None:
        """Take the worker's exit status from the agent."""
        self.monitor.reaped(status)

    def agent_lost(self, at: float) -> None:
        """Note that the agent is gone. at: monotonic seconds."""
        self._agent_lost_at = at

    def leave(self) -> None:
        """Stop watching; leave the worker alone."""
        self.monitor.stop()

    # -- attaching ------------------------------------------------------------------------------

    def apply(self, channel: Channel) -> None:
        """Accept a connection from the worker, or from the first program that the worker has started. Raises: OSError,
        with nothing done, if it is unknown to which worker its process belongs."""
        reason = self._refusal_reason(channel)
        if reason:
            self._refuse(channel, reason, f"foreign connection: {reason}")
            return
        try:
            page = Page.create()
        except OSError as error:
            reason = f"there is no page for process {channel.peer.pid}: {error.strerror}"
            self._refuse(channel, reason, reason)
            return
        origin = self._assigned.origin
        welcome = messages.Welcome(origin.rank or 0, origin.world_size or 1, self.monitor.limits)
        self._applicants[channel] = page
        self._selector.register(channel, selectors.EVENT_READ, lambda: self._hear_applicant(channel))
        channel.send(messages.encode(welcome), [page.fd])

    def _refuse(self, channel: Channel, reason: str, recorded: str) -> None:
        self.monitor.refuse(recorded)
        channel.send(messages.encode(messages.Refused(reason)))
        channel.close()
        if self.monitor.channel is None:
            self.monitor.listener.expect_nothing()  # the program runs on without its monitor

    def _refusal_reason(self, channel: Channel) -> str:
        peer = channel.peer
        if peer.uid != os.geteuid():
            return f"process {peer.pid} belongs to user {peer.uid}"
        if len(self._applicants) >= MOST_APPLICANTS:
            return "too many connections"
        if not processes.is_descendant(peer.pid, self.pid):
            return f"process {peer.pid} does not belong to worker {self.pid}"
        if self._is_held and peer.pid != self.pid:
            assert self._link is not None
            return f"process {self._link.pid} of this worker is already attached"
        return ""

    def _hear_applicant(self, channel: Channel) -> None:
        try:
            received = channel.receive_with_fds(0.0)
        except ChannelClosed:
            reason = f"process {channel.peer.pid} gave up attaching; it is not watched until it tries again"
            self.monitor.emit(events.TelemetryDropped("timing", reason, 1))
            self._close_applicant(channel)
            return
        if received is None:
            return
        data, fds = received
        try:
            message = messages.decode_for_monitor(data)
        except DecodeError as error:
            self.monitor.refuse(f"malformed message: {error}"[:200])
            message = None
        pid = channel.peer.pid
        if isinstance(message, messages.Attached) and len(fds) == 1:
            page = self._applicants.pop(channel)
            self._selector.unregister(channel)
            self.attach(messages.Attachment(pid, message.is_locked), page, channel, fds[0], is_new=True)
        else:
            self.monitor.refuse(f"foreign connection: process {pid} did not attach itself")
            close_all(fds)
            self._close_applicant(channel)

    def _close_applicant(self, channel: Channel) -> None:
        page = self._applicants.pop(channel, None)
        if page is not None:
            self._selector.unregister(channel)
            page.close()
            channel.close()
            self.monitor.listener.expect_nothing()  # it gave up, and runs on without its monitor

    def attach(self, link: messages.Attachment, page: Page, channel: Channel, dump: int, is_new: bool) -> None:
        """Watch the program that stores into `page` from now on. is_new: the agent does not know it yet."""
        monitor = self.monitor
        try:
            program = monitor.rank if link.pid == self.pid else processes.Process(link.pid)
        except OSError as error:
            page.close()
            os.close(dump)
            if isinstance(error, ProcessLookupError):
                channel.close()
                return
            reason = f"process {link.pid} cannot be watched: {error.strerror}"
            self._refuse(channel, reason, reason)
            return
        self._detach()
        monitor.listener.start_again()
        if is_new and self._link is not None and monitor.recorder is not None:  # not the first program of this worker
            monitor.recorder.process_started(self._assigned.origin.cycle, is_cold=False)
        self._link, self._attached_page = link, page
        is_mutex_held = link.is_locked and program is monitor.rank
        monitor.connect(MonitorSide(page), channel, stacks.Dump(dump), program, is_mutex_held)
        if not is_new:
            self._continue()
        if self._is_stopping:
            monitor.page.request_stop()
        if self._is_dismissed:
            monitor.page.dismiss()
        if link.limits is not None:
            monitor.limit(link.limits)
        self._tell(messages.Connected(self.pid, link), (page.fd, channel.fileno(), dump) if is_new else ())

    def _continue(self) -> None:
        """Continue where the previous monitor stopped recording. Without its note, begin at the page's oldest entry."""
        try:
            note = _note(self.monitor.page.note())
        except DecodeError:
            return
        self.monitor.continue_from(note.tail, note.position, note.raised)

    def recorded(self) -> None:
        """Leave a note for a monitor that may replace this one."""
        monitor = self.monitor
        if monitor.recorder is not None:
            note = _Note(monitor.page.tail, monitor.recorder.position, monitor.raised)
            monitor.page.leave_note(encoding.to_msgpack(note))

    def _detach(self) -> None:
        """Release the previous program."""
        self.monitor.disconnect()
        self._attached_page.close()

    # -- the rank's messages --------------------------------------------------------------------

    def heard(self) -> None:
        """If the program has left, let a waiting process take its place."""
        monitor = self.monitor
        is_free = not self.is_attached and not monitor.is_gone
        if self.has_successor and is_free and monitor.page.read().doing is Doing.OUTSIDE:
            monitor.stop()

    def handle(self, message: messages.FromRank) -> None:
        """Handle one message of the program."""
        monitor = self.monitor
        match message:
            case messages.Emitted(record):
                monitor.take(record)
            case messages.Progressed(sign, at, step):
                ago = max(0.0, time.monotonic() - at)
                monitor.emit(events.WorkerProgressed(sign, max(0.0, at - self._began), step, ago))
            case messages.Armed(at):
                self._link_changed(heartbeats_from=at)
            case messages.EndedMonitoring():
                pass  # the page shows it too; this message has `heard` called
            case messages.NewLimits(limits):
                monitor.limit(limits)
                self._link_changed(limits=limits)
            case messages.RankRequest(action, description):
                self._request(action, description[: messages.DESCRIPTION])
            case messages.FitFailed(deadline, error):
                monitor.emit(events.TimeoutsFitFailed(deadline, error))
            case messages.LimitsUnread(file, error):
                monitor.emit(events.TimeoutsUnread(file, error))
            case (
                messages.Begin()
                | messages.HostStore()
                | messages.LeftCall()
                | messages.Introduced()
                | messages.Attached()
            ):
                self.monitor.refuse(f"unexpected message: {type(message).__name__}")

    def _request(self, action: str, description: str) -> None:
        """Pass a request on to the agent. If the program took a SIGTERM for a scheduler's, it may have been the agent's
        own. Then the agent is ending the program, which gets another SIGTERM now that the page shows this. Without an
        agent the program gets the SIGTERM back."""
        if action == "Stop":
            self._took_sigterm = True
            if self._assigned.is_adopted:
                self.dismiss()
                return
            if self._is_dismissed:
                self.monitor.witness.program.send(signal.SIGTERM)
                return
        rank = self._assigned.origin.rank or 0
        self._tell(messages.Requested(action, description, rank, self.pid), ())

    def _link_changed(self, **changes: object) -> None:
        assert self._link is not None
        self._link = msgspec.structs.replace(self._link, **changes)
        self._tell(messages.Connected(self.pid, self._link), ())

    # -- observing, obeying ---------------------------------------------------------------------

    @property
    def announced_at(self) -> float | None:
        """Return when the program announced heartbeats, in monotonic seconds, None if it did not."""
        return None if self._link is None else self._link.heartbeats_from

    def completed(self, observation: Observation) -> Observation:
        """Return an observation with what follows from the program's link and from the agent's orders."""
        monitor = self.monitor
        is_known = monitor.status not in (None, Exit()) or time.monotonic() >= self._gone_at + REAP_LIMIT
        was_ended = monitor.finding is not None  # if so, an exit status of 0 means nothing
        ended_well = monitor.status is not None and monitor.status.code == 0 and not was_ended
        if self._link is None:  # no program has attached yet
            rule = monitor.limits.rule
            silence = None if rule is None else monitor.listener.silence(rule, self._began)
            observation = msgspec.structs.replace(observation, doing=Doing.STARTING, since=self._began, silence=silence)
        elif monitor.channel is None:
            observation = msgspec.structs.replace(observation, doing=Doing.OUTSIDE)
        return msgspec.structs.replace(
            observation,
            heartbeats_from=self.announced_at,
            is_gone=observation.is_gone and is_known,
            said_goodbye=observation.said_goodbye or ended_well,
            is_dismissed=self._is_dismissed,
            agent_lost_at=self._agent_lost_at,
        )

    def died(self) -> None:
        """Note that the worker is gone. The agent's end also ends the worker, and may be noticed later."""
        self._look_at_agent()
        self._gone_at = time.monotonic()
        self.monitor.stop_waking_for_end()

    def due(self, due: float) -> float:
        """Return when the loop has to look again: once the worker is gone, when its exit status counts as unknown."""
        return self._gone_at + REAP_LIMIT if self.monitor.is_gone else due

    def send(self, number: int) -> None:
        """Signal the worker and the program that is attached, or the worker's whole process group if that is final."""
        rank, program = self.monitor.rank, self.monitor.witness.program
        if not rank.send(0):
            return
        is_final = number == signal.SIGKILL or self._agent_lost_at is not None
        if is_final and self._is_group:
            self._send_to_group(number)
            return
        if program is not rank:
            program.send(number)
        rank.send(number)

    def _send_to_group(self, number: int) -> None:
        """Signal the worker's process group. The worker itself may be gone."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)

    # -- the end --------------------------------------------------------------------------------

    def end_loader_workers(self) -> None:
        """Let the thread go on: this process watches the next worker, and the agent waits for its answers. Without a
        thread, kill them now."""
        if not self.loader_workers.is_waiting:
            self.loader_workers.finish(0.0)

    def release(self) -> None:
        """Release what the watch holds. Tell the agent how the worker ended, if it did."""
        monitor = self.monitor
        if self._is_group and monitor.is_gone and self._agent_lost_at is not None:
            self._send_to_group(signal.SIGKILL)  # no other process is left to end what the worker has started
        self._detach()
        for channel in list(self._applicants):
            self._close_applicant(channel)
        if monitor.is_gone:
            goodbye = monitor.said_goodbye or self._is_dismissed
            self._tell(messages.Gone(self.pid, monitor.status or Exit(), goodbye), ())
        monitor.release()


def resumed(assigned: messages.Assigned, fds: Sequence[int]) -> tuple[Page, Channel, int]:
    """Return the previous monitor's page, channel and dump. Raises: MonitorError, OSError, ValueError."""
    page_fd, channel_fd, dump_fd = fds
    return Page.attach(page_fd), Channel(socket.socket(fileno=channel_fd)), dump_fd
