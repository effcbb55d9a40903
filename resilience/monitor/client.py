"""What user code calls to show that it lives and where it is.

`section`, `heartbeat` and `step` store into the page of the rank's monitor: that of a Wrapper while its
function runs, else that of the launcher's monitor, to which the first of them attaches. Where there is
neither they do nothing, so that a training script runs unchanged without us; nor do they in a process that
a rank forks."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType, TracebackType

from resilience.adapters import collective_calls, environment
from resilience.errors import ResilienceError
from resilience.monitor import connect
from resilience.monitor.page import RankSide
from resilience.telemetry import progress

_page: RankSide | None = None  # where signs go
_wrapper: RankSide | None = None  # a Wrapper's
_own: connect.Link | None = None  # to the launcher's monitor
_is_tried = False  # whether that was looked for


def activate(page: RankSide) -> None:
    """Let user code reach a Wrapper's page from now on. The Wrapper's monitor weighs what it shows; the
    launcher's does only if the program sends heartbeats to that itself."""
    global _page, _wrapper
    if _own is not None and not _own.is_armed:
        _own.pause()
    _page = _wrapper = page
    collective_calls.note_in(page)


def deactivate() -> None:
    """Let user code's signs go where they went before."""
    global _page, _wrapper
    if _own is not None and not _own.is_armed:
        _own.resume()
    _wrapper = None
    _page = None if _own is None else _own.page
    collective_calls.note_in(_page)


def _link_changed(link: connect.Link | None) -> None:
    global _page, _own, _is_tried
    _own, _is_tried = link, True
    if _wrapper is None:
        _page = None if link is None else link.page


def _progress() -> dict[str, object]:
    """What log lines of this moment say of the program."""
    page = _page
    if page is None:
        return {}
    sections = page.open_sections
    return {"step": page.step_value, "section": sections[-1] if sections else None}


progress.shown = _progress
connect.on_change = _link_changed
if connect.current() is not None:  # a client attached before this module was asked for anything
    _link_changed(connect.current())


def _find() -> RankSide | None:
    """Attach to the launcher's monitor, if there is one. Tried once; whoever trains is not disturbed."""
    global _is_tried
    if not _is_tried:
        _is_tried = True
        if environment.monitor_socket() is not None:
            try:
                connect.attach()
            except (ResilienceError, OSError):
                pass  # the launcher shows the rank as not monitored
    return _page


def _forked() -> None:
    """A child of a rank is no rank; that of a process which starts ranks may become one."""
    global _is_tried, _own
    _own = None
    _is_tried = environment.monitor_socket() is not None


os.register_at_fork(after_in_child=_forked)


def stop_requested() -> bool:
    """Return True once the job, or a node of it, is asked to stop by a signal to the launcher. True on every rank,
    within moments; write a checkpoint then, and leave.

    The first call in the main thread takes over SIGTERM where nobody handles it: a scheduler that signals all
    processes of a node leaves the rank the time for a checkpoint. A SIGTERM to this rank alone ends it a second later,
    as a failure. Without the launcher always False."""
    if _own is None:
        _find()
    link = _own
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
    """Let the agent find out whether it is signalled too. Once the job is to stop anyway, this process is being ended,
    or nobody hears, SIGTERM means what it means. If the agent has sent it and that is not known here yet, the monitor
    sends another."""
    link = _own
    if link is not None and link.page.is_wanted() and link.request("Stop", f"SIGTERM to rank {link.rank}"):
        return
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGTERM)


def heartbeat() -> None:
    """Show a sign of life."""
    page = _page or _find()
    if page is not None:
        page.heartbeat()


def step(number: int) -> None:
    """Tell the training step that is about to be done, counted from 0. Only a rise is progress."""
    page = _page or _find()
    if page is not None:
        page.step(number)


class section:  # noqa: N801  reads as a statement: `with resilience.section("data"):`
    """Name a stretch of the program. Sections may nest and overlap; each is timed, and limited where a
    limit is set for its name.

    Raises: ConfigurationError if a section of this name is open already."""

    __slots__ = ("_name", "_page")

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        self._page = page = _page or _find()  # where it is opened is where it is closed
        if page is not None:
            page.enter(self._name)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._page is not None and self._page.is_open(self._name):
            self._page.leave(self._name, failed=kind is not None)
