"""How does a worker reach the monitor that its launcher has started?

Through the socket named by RESILIENCE_MONITOR_SOCKET or, in the compatible API, FT_RANK_MONITOR_IPC_SOCKET. The monitor
checks who connects and sends a page. The worker maps it, holds its mutex, arms its stacks and sends the stacks' file.
From then on signs of life are stores into the page. A process has one link at a time; its forked children have
none."""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import time
from collections.abc import Callable, Collection

from resilience.core.limits import configured
from resilience.core.observation import Doing
from resilience.core.restart import ENTRY
from resilience.errors import DecodeError, MonitorError, error_in_words
from resilience.facts.limits import Limits
from resilience.facts.seats import Seat
from resilience.monitor import messages
from resilience.monitor.page import Page, RankSide
from resilience.system import collective_calls, environment, exit_status, stacks
from resilience.system.channel import Channel, ChannelClosed, close_all, connect

TURN_LIMIT = 180.0  # seconds for a monitor without an agent to finish with the process that it watches now
LONGEST = 4000  # characters of a path in a message
ATTACH_LIMIT = 10.0  # seconds; a monitor that has just been restarted answers late


class WorkerLink:
    """The worker's end: `page` for signs of life, `send` for messages.

    rank, world_size, limits: as the monitor knows them. client_limits: those of `limits` that clients calculate, as all
    clients of this process have set them. is_armed: the worker has announced heartbeats, so its limits
    apply whatever it does. is_open: its clients may use it. is_ended: this process has ended the monitoring; a forked
    child has not."""

    def __init__(self, page: RankSide, channel: Channel, welcome: messages.Welcome) -> None:
        self.page = page
        self.channel = channel
        self.rank = welcome.rank
        self.world_size = welcome.world_size
        self.limits = welcome.limits
        self.client_limits = configured(welcome.limits)
        self.is_armed = False
        self._announced_at = 0.0  # how that time counts: later by the waits since then
        self.is_paused = False
        self.is_open = True
        self.is_ended = False
        self.dropped = 0
        self._has_progressed = False
        self._reporting: Callable[[str], None] | None = None  # what the page calls once a sign has been awaited
        page.on_progress = self._progressed

    def send(self, message: messages.FromRank) -> bool:
        """Send without blocking. Return True if the message was sent."""
        is_sent = self.channel.send(messages.encode(message))
        self.dropped += not is_sent
        return is_sent

    def arm(self) -> bool:
        """Announce heartbeats: the limit of the first one counts from now on, also within a Wrapper's call. Return
        False if the monitor could not be reached; an earlier announcement stays in force."""
        if self.is_paused and self.is_armed:
            self._continue()
        elif self.is_paused:
            self.resume()
        self._announced_at = time.monotonic()
        is_sent = self.send(messages.Armed(self._announced_at))
        self.is_armed |= is_sent
        return is_sent

    def limit(self, limits: Limits) -> bool:
        """Apply these limits from now on. Return False if the monitor could not be reached."""
        if not self.send(messages.NewLimits(limits)):
            return False
        self.limits = limits
        return True

    def request(self, action: str, description: str = "") -> bool:
        """Ask for a decision about this node or the workload."""
        return self.send(messages.RankRequest(action, description[: messages.DESCRIPTION]))

    def fit_failed(self, deadline: str, error: Exception) -> None:
        """Have the monitor record that no limit could be fitted. All ranks fit the same durations, so one reports."""
        if self.rank == 0:
            self.send(messages.FitFailed(deadline, error_in_words(error)))

    def limits_unread(self, file: str, error: OSError) -> None:
        """Have the monitor record that this rank could not read the limits of an earlier start."""
        self.send(messages.LimitsUnread(file[-LONGEST:], error_in_words(error)))

    def _progressed(self, sign: str) -> None:
        """Report the first sign of progress and the first step, and nothing after that. The next sign takes the
        place of one that a full channel did not take. Runs in user code's thread."""
        if sign != "step" and self._has_progressed:
            return  # 0.1 µs in a program that never reports a step
        collective_calls.wrap()  # torch may have been imported after this process attached
        is_sent = self.send(messages.Progressed(sign, time.monotonic(), self.page.step_value))  # type: ignore[arg-type]
        if is_sent or not self.is_open:
            self._has_progressed = True
            if sign == "step":
                self.page.on_progress = None

    def pause(self) -> None:
        """Pause: another monitor watches. Only the end of this process is noticed."""
        self.is_paused = True
        self.page.doing(Doing.OUTSIDE)

    def interrupt(self, outer: Collection[str]) -> None:
        """Pause until the next announcement, because an interruption has ended what the program announced. Sections
        that it left open are closed. Those in `outer`, in which the program still is, count as failed."""
        for name in self.page.open_sections:
            if name in outer:
                self.page.interrupt(name)
            else:
                self.page.leave_if_open(name, failed=True)
        self.stop_awaiting()
        self.rest()

    def rest(self) -> None:
        """Pause until the next announcement. Open sections stay open."""
        self.pause()
        self.send(messages.Armed(None))

    def await_sign(self) -> None:
        """Announce heartbeats again with the next sign of life, unless the program does it before."""
        self.stop_awaiting()
        self._reporting, self.page.on_progress = self.page.on_progress, self._first_sign

    def _first_sign(self, sign: str) -> None:
        self.arm()
        if self.page.on_progress is not None:
            self.page.on_progress(sign)

    def go_on(self) -> None:
        """Continue after a rest in which nothing was interrupted. It counts as if it had not been."""
        self.stop_awaiting()
        self.is_paused = False
        self._announced_at = self.page.later(self._announced_at)
        self.send(messages.Armed(self._announced_at))
        self.page.doing(Doing.FUNCTION)

    def _continue(self) -> None:
        self.stop_awaiting()
        self.is_paused = False
        self.page.forget_signs()
        self.page.doing(Doing.FUNCTION)

    def stop_awaiting(self) -> None:
        """Announce nothing with the next sign of life."""
        if self.page.on_progress == self._first_sign:
            self.page.on_progress = self._reporting

    def resume(self) -> None:
        """Apply limits again from now on, without regard to anything earlier."""
        self.is_paused = False
        self.page.set_seat(Seat(self.rank, self.rank, self.world_size, self.world_size, ENTRY))
        self.page.doing(Doing.FUNCTION)

    def end(self) -> None:
        """End the monitoring: no limit applies any more, and no client uses this link. The connection stays: the
        monitor sees where this process is and how it ends, and shows it that the job is asked to stop. The main thread
        also releases the page's mutex, for which a thread of the monitor waits: another process may be next."""
        if self.is_open:
            self.is_open, self.is_ended = False, True
            self.pause()
            self.page.end_monitoring()
            if _is_main_thread():
                self.page.unlock_life()
            self.send(messages.EndedMonitoring())
        if _link is self:
            on_change(None)

    def close(self) -> None:
        """Close the connection. The main thread also releases the page, whose mutex it may hold."""
        self.channel.hang_up()
        if _is_main_thread():
            self.page.close()

    def forget(self) -> None:
        """Drop the link in a forked child: it belongs to the parent."""
        self.is_open = False
        self.channel.close()


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _ignore(link: WorkerLink | None) -> None:
    pass


_link: WorkerLink | None = None
_lock = threading.RLock()  # a signal handler may attach while its thread does
_is_attaching = False  # belongs to the thread that holds the lock
_is_end_noted = False  # in this process, or in the one that forked it
_is_over = False  # the main thread has left the program
wrapper_page: RankSide | None = None  # of the Wrapper's call that this process is in; `monitor.client` sets it
on_change: Callable[[WorkerLink | None], None] = _ignore  # `monitor.client` sets it


def current() -> WorkerLink | None:
    """Return this process's link, None if there is none, or if a client has ended the monitoring."""
    return None if _link is None or _link.is_ended else _link


def latest() -> WorkerLink | None:
    """Return this process's link, also if a client has ended the monitoring. None if there was never one."""
    return _link


def is_attaching() -> bool:
    """Return True while a thread of this process attaches."""
    return _is_attaching


def attach(path: str | None = None, limit: float = ATTACH_LIMIT, turn_limit: float = TURN_LIMIT) -> WorkerLink:
    """Return this process's link to its monitor: the existing one, or a new one.

    path: of the monitor's socket, by default from the environment. limit: seconds for the monitor's answer. turn_limit:
    seconds more while it watches another process, as a monitor without an agent may. Raises: MonitorError, also in a
    signal handler that interrupts this function."""
    global _is_attaching
    with _lock:
        if _is_attaching:
            raise MonitorError("this thread attaches to the rank monitor already; a signal handler cannot wait for it")
        _is_attaching = True
        try:
            return current() or _new_link(path, limit, turn_limit)
        finally:
            _is_attaching = False


def _new_link(path: str | None, limit: float, turn_limit: float) -> WorkerLink:
    """Attach, and return the link. Belongs to the thread that holds the lock."""
    global _link
    path = path or environment.monitor_socket()
    if path is None:
        raise MonitorError(
            "there is no rank monitor: neither RESILIENCE_MONITOR_SOCKET nor FT_RANK_MONITOR_IPC_SOCKET is "
            "set; start the script by `resilience run`, or set the second one to a RankMonitorServer's path"
        )
    ended, _link = _link, _attach(path, time.monotonic() + limit, turn_limit)
    if ended is not None:
        ended.close()
    _note_the_end(_link)
    on_change(_link)
    return _link


def _attach(path: str, deadline: float, turn_limit: float) -> WorkerLink:
    try:
        channel = connect(path, max(0.001, deadline - time.monotonic()))
    except OSError as error:
        raise MonitorError(f"the rank monitor at {path} cannot be reached: {error}") from error
    try:
        if channel.peer.uid != os.geteuid():
            raise MonitorError(
                f"{path} belongs to user {channel.peer.uid}, this process to {os.geteuid()}; run both as the same user"
            )
        welcome, page = _await_welcome(channel, path, deadline, turn_limit)
        side = RankSide(page)
        page.close()  # it stays mapped
        is_main = _is_main_thread()
        if is_main:  # a mutex belongs to a thread, so another thread's would show the wrong end
            side.lock_life()
        link = WorkerLink(side, channel, welcome)
        link.resume()
        dump = stacks.arm()
        if not channel.send(messages.encode(messages.Attached(is_main)), [dump.fd]):
            raise MonitorError(f"the rank monitor at {path} is gone")
        _start_showing_stacks(channel)
    except BaseException:
        channel.close()
        raise
    collective_calls.note_in(wrapper_page or side)
    return link


def _await_welcome(channel: Channel, path: str, deadline: float, turn_limit: float) -> tuple[messages.Welcome, Page]:
    """Wait for the monitor's answer."""
    try:
        answer, fds = _receive_answer(channel, path, deadline, "is it stopped or overloaded, or out of descriptors?")
        if isinstance(answer, messages.Introduce):
            close_all(fds)
            channel.send(messages.encode(messages.Introduced(*environment.rank_and_world_size())))
            why = "it watches another process that has not ended; start a monitor for each rank"
            answer, fds = _receive_answer(channel, path, time.monotonic() + turn_limit, why)
    except ChannelClosed as error:
        raise MonitorError(f"the rank monitor at {path} closed the connection") from error
    except DecodeError as error:
        raise MonitorError(f"the rank monitor at {path} has another version: {error}; use one version") from error
    if not isinstance(answer, messages.Welcome) or len(fds) != 1:
        close_all(fds)
        reason = answer.why if isinstance(answer, messages.Refused) else "its answer has an unexpected kind"
        raise MonitorError(f"the rank monitor at {path} does not watch this process: {reason}")
    try:
        return answer, Page.attach(fds[0])
    except BaseException:
        close_all(fds)
        raise


def _receive_answer(channel: Channel, path: str, deadline: float, why: str) -> tuple[messages.ToRank, list[int]]:
    """Return the monitor's next message, and its descriptors. why: a likely cause if none arrives in time. Raises:
    ChannelClosed, DecodeError, MonitorError."""
    received = channel.receive_with_fds(max(0.001, deadline - time.monotonic()))
    if received is None:
        raise MonitorError(f"the rank monitor at {path} did not answer in time: {why}")
    data, fds = received
    return messages.decode_for_rank(data), fds


def _start_showing_stacks(channel: Channel) -> None:
    """Raises: MonitorError. Without this thread every hang would seem to hold the GIL."""
    try:
        threading.Thread(target=_show_stacks, args=(channel,), name=stacks.THREAD, daemon=True).start()
    except RuntimeError as error:
        raise MonitorError(f"no thread of this process can show its stacks: {error}") from error


def _show_stacks(channel: Channel) -> None:
    """Dump this process's stacks whenever the monitor asks. Runs in its own thread until the channel is closed."""
    while True:
        try:
            data = channel.receive(3600.0)
            match None if data is None else messages.decode_for_rank(data):
                case messages.ShowStacks(number):
                    with contextlib.suppress(Exception):  # this thread answers later questions, too
                        collective_calls.note_recorded()
                    with contextlib.suppress(Exception):
                        stacks.answer(number)
                case messages.Ready() | messages.Introduce() | messages.Welcome() | messages.Refused():
                    pass  # the thread began after them
                case None | messages.TerminalLine():  # a line is for a Wrapper's rank
                    pass
        except ChannelClosed:
            return
        except DecodeError:  # another version's message: it gets no answer
            continue


def _note_the_end(link: WorkerLink) -> None:
    """Have the end of the program noted before its threads are joined and its exit handlers run, which may take
    minutes. `atexit` calls the latest handler first, so one that is registered here would run after most of them."""
    global _is_end_noted, _is_over
    if not _is_end_noted:
        import concurrent.futures.thread  # noqa: F401  # what it registers, the join of its threads, then comes later

        _is_end_noted = True
        try:
            getattr(threading, "_register_atexit", atexit.register)(_program_ends)
        except RuntimeError:  # this program ends already
            _is_over = True
    if _is_over:
        link.page.ends(exit_status.noted())


def _program_ends() -> None:
    """An exception here would leave the program's threads unjoined."""
    global _is_over
    _is_over, link = True, _link
    if link is not None:
        link.page.ends(exit_status.noted())


def _forget_in_child() -> None:
    global _link, _lock, _is_attaching, _is_over
    _is_over = _is_attaching = False
    _lock = threading.RLock()  # a thread that exists only in the parent may hold it
    if _link is not None:
        _link.forget()
        _link = None


os.register_at_fork(after_in_child=_forget_in_child)
