"""How does user code show that it is alive, and where it is?

`section`, `heartbeat` and `step` store into the page of the rank's monitor. While a Wrapper's function runs, that is
the Wrapper's page; otherwise it is the page of the launcher's monitor, to which the first call attaches. With neither
they do nothing, so a training script runs unchanged without us. They also do nothing in a process that a rank has
forked, and in a daemonic process of multiprocessing, such as a data loader's worker, which may not be forked. Other
processes that a rank has started may be its program, such as those of `torch.multiprocessing.spawn`."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from types import FrameType, TracebackType

from resilience.errors import ResilienceError
from resilience.monitor import connect
from resilience.monitor.page import RankSide
from resilience.system import collective_calls, environment, processes
from resilience.telemetry import progress

LOOK_AGAIN = 60.0  # seconds after a first attempt to attach that failed; twice as many after each further one
LOOK_LIMIT = 1.0  # seconds that a further attempt takes: the program has no gain from waiting

_page: RankSide | None = None  # page for signs of life
_launcher_link: connect.WorkerLink | None = None  # link to the launcher's monitor
_look_at = -math.inf  # when the next sign of life looks for a link; inf once there was one
_failed_looks = 0  # attempts to attach that failed
_checks_for_stop = False  # the program asks whether the job is to stop
_outer_sections: tuple[str, ...] = ()  # the program opened them before a Wrapper's call, at the launcher's monitor
_is_announced_before = False  # the program announced heartbeats before a Wrapper's call
_was_interrupted = False  # an interruption ended what the program had announced


def activate(page: RankSide) -> None:
    """Send signs of life to a Wrapper's page from now on; those of a client go to both. The Wrapper's monitor applies
    its limits to them. The launcher's monitor applies its own only if a client has announced heartbeats."""
    global _page, _outer_sections, _is_announced_before, _was_interrupted
    link, _was_interrupted = _launcher_link, False
    _outer_sections = () if link is None else link.page.open_sections
    _is_announced_before = link is not None and link.is_armed
    if link is not None and link.is_armed:
        link.rest()  # until the function is called: before, the rank waits for the others
    elif link is not None:
        link.pause()
    _page = connect.wrapper_page = page
    collective_calls.note_in(page)


def deactivate() -> None:
    """Send signs of life to the page used before."""
    global _page
    if _launcher_link is not None and not _launcher_link.is_armed:
        _launcher_link.resume()
    elif _launcher_link is not None and _launcher_link.is_paused:  # the function is over
        _announce(_launcher_link)
    connect.wrapper_page = None
    _page = None if _launcher_link is None else _launcher_link.page
    link = connect.latest()
    collective_calls.note_in(None if link is None else link.page)


def function_interrupted() -> None:
    """Note that a Wrapper's function is over and did not complete. Until it is called again and the program announces
    heartbeats, the launcher's monitor applies no limit, and nothing that the function left open counts."""
    global _was_interrupted
    link, _was_interrupted = _launcher_link, True
    if (wrapper_page := connect.wrapper_page) is not None:
        for name in wrapper_page.open_sections:  # of a thread that outlives the function
            wrapper_page.interrupt(name)
    if link is None:
        return
    link.stop_awaiting()  # a thread that outlives the function may send a sign of life
    if link.is_armed or not link.is_paused:  # it may have returned before, with sections open
        link.interrupt(_outer_sections)


def function_left() -> None:
    """Note that a Wrapper's function has returned, or that this rank is a spare and does not run it. Until it is called
    again or the Wrapper's call is over, the launcher's monitor applies no limit. Open sections stay open."""
    link = _launcher_link
    if link is None:
        return
    link.stop_awaiting()
    if not link.is_paused:
        link.rest()


def function_entered() -> None:
    """Note that a Wrapper's function is called. A suspended announcement from before the Wrapper's call holds again
    from now on; one of the function itself from its next sign of life on."""
    link = _launcher_link
    if link is None or not link.is_paused or not link.is_armed:
        return
    if _is_announced_before:
        _announce(link)
    else:
        link.await_sign()


def _announce(link: connect.WorkerLink) -> None:
    """Let the announcement of heartbeats hold again. After an interruption the first heartbeat is due; after a wait for
    the others, the next one."""
    global _was_interrupted
    if _was_interrupted:
        link.arm()
    else:
        link.go_on()
    _was_interrupted = False


def _link_changed(link: connect.WorkerLink | None) -> None:
    global _page, _launcher_link, _look_at, _outer_sections, _is_announced_before
    _outer_sections, _is_announced_before = (), False  # of another page
    _launcher_link, _look_at = link, math.inf
    if link is not None and _checks_for_stop:
        link.page.is_stop_requested()  # the monitor does not know that yet
    if connect.wrapper_page is None:
        _page = None if link is None else link.page
    elif link is not None and not link.is_armed:
        link.pause()  # until the program announces heartbeats


def _progress() -> dict[str, object]:
    """Return the step and section for log lines written now."""
    page = _page
    if page is None:
        return {}
    sections = page.open_sections
    return {"step": page.step_value, "section": sections[-1] if sections else None}


progress.shown = _progress
connect.on_change = _link_changed
if connect.latest() is not None:  # a client attached before this module was imported, and may have ended that
    _link_changed(connect.current())


def _attached_page() -> RankSide | None:
    """Attach to the launcher's monitor, if there is one. An attempt that fails is repeated by a later sign of life: the
    monitor may have been stopped or overloaded, or this process without a descriptor. Never disturbs the training."""
    global _look_at, _failed_looks
    if time.monotonic() < _look_at:
        return _page
    _look_at = math.inf
    if environment.monitor_socket() is None or processes.is_daemonic():
        return _page
    try:
        if _failed_looks:
            connect.attach(limit=LOOK_LIMIT, turn_limit=LOOK_LIMIT)
        else:
            connect.attach()
    except (ResilienceError, OSError):  # a monitor that has accepted the connection records that it was given up
        pass
    finally:
        if connect.is_attaching():  # this is a signal handler: how the attempt of its thread ends is open
            _look_at = -math.inf
        elif connect.latest() is None:
            _look_at = time.monotonic() + LOOK_AGAIN * 2.0**_failed_looks
            _failed_looks += 1
    return _page


def _forked() -> None:
    """Reset a forked child. A rank's child is not a rank; the child of a process that starts ranks may become one."""
    global _look_at, _failed_looks, _launcher_link, _checks_for_stop
    _launcher_link, _failed_looks, _checks_for_stop = None, 0, False
    _look_at = -math.inf if environment.monitor_socket() is None else math.inf


os.register_at_fork(after_in_child=_forked)


def stop_requested() -> bool:
    """Return True once a signal to the launcher asks the job, or a node of it, to stop. Becomes True on every rank
    within moments; then write a checkpoint and leave.

    The first call in the main thread takes over SIGTERM if no handler is set: if a scheduler signals all processes of a
    node, the rank then has time for a checkpoint. A SIGTERM to this rank alone ends it a second later, as a failure.
    Without the launcher always False. Also works once a client has ended the monitoring, until another program of this
    worker attaches to the monitor: then that program learns of the stop, and this one does not."""
    global _checks_for_stop
    _checks_for_stop = True
    if connect.latest() is None:
        _attached_page()
    link = connect.latest()
    if link is None:
        return False
    if not _takes_sigterm:
        _take_sigterm()
    return link.page.is_stop_requested()


_takes_sigterm = False


def _take_sigterm() -> None:
    global _takes_sigterm
    if threading.current_thread() is threading.main_thread():
        _takes_sigterm = True
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, _on_sigterm)


def _on_sigterm(number: int, frame: FrameType | None) -> None:
    """Let the agent find out whether it was signalled too. SIGTERM ends this process if the job stops anyway, if this
    process is being ended, or if no one listens. If the agent has sent this signal and the page does not show that yet,
    the monitor sends another one."""
    link = connect.latest()
    if link is not None and link.page.is_wanted() and link.request("Stop", f"SIGTERM to rank {link.rank}"):
        return
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGTERM)


def heartbeat() -> None:
    """Send a sign of life."""
    page = _page or _attached_page()
    if page is not None:
        page.heartbeat()


def step(number: int) -> None:
    """Report the training step that is about to begin, counted from 0. Only a higher number is progress."""
    page = _page or _attached_page()
    if page is not None:
        page.step(number)


class section:  # noqa: N801  reads as a statement: `with resilience.section("data"):`
    """Names a part of the program. Sections may nest and overlap; each is timed. If a limit is set for its name, the
    section has that limit.

    Raises: ConfigurationError if a section of this name, or 64 sections, are already open."""

    __slots__ = ("_name", "_opened", "_page")

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        self._page = page = _page or _attached_page()  # close it on the page where it was opened
        if page is not None:
            self._opened = page.enter(self._name)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._page is not None:
            self._page.leave_if_open(self._name, kind is not None, self._opened)
