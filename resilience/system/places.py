"""Where in torch's process groups is a thread, and can it be freed there?

The innermost Python frame shows it: its file, its function, and its instruction. Reads the state of other threads and
changes nothing. Imports no torch by itself."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any, NamedTuple

from resilience.system.frames import current_frames, is_wrapper
from resilience.system.patience import innermost


class Place(NamedTuple):
    """A thread's position. Equal places: the thread has not moved. Keeps the frame, because ids are reused."""

    frame: FrameType
    instruction: int

    @property
    def where(self) -> str:
        """`file:line function`."""
        return f"{self.frame.f_code.co_filename}:{self.frame.f_lineno or 0} {self.frame.f_code.co_name}"


def place_of(thread_id: int) -> Place | None:
    """Return a thread's position in Python. thread_id: threading's ident."""
    frame: FrameType | None = current_frames().get(thread_id)
    while frame is not None and is_wrapper(frame.f_code.co_filename):
        frame = frame.f_back
    return None if frame is None else Place(frame, frame.f_lasti)


def is_in_process_groups(place: Place | None) -> bool:
    """Return True if a thread is in a call of torch's process groups: it builds one, or waits in a collective.

    If user code calls `Work.wait()`, the innermost frame is the user's: False."""
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    return place is not None and place.frame.f_code.co_filename == getattr(c10d, "__file__", None)


def is_unfreeable(place: Place, store_port: int | None) -> bool:
    """Return True if cuts cannot free a thread here: it builds a gloo group over the iteration's store, whose port is
    `store_port`.

    A user's own store is not ours to cut, unless it was constructed in this iteration (`store_constructor`)."""
    frame = place.frame
    if store_port is None or not is_in_process_groups(place) or _port_of(frame.f_locals.get("store")) != store_port:
        return False
    function = frame.f_code.co_name
    if function == "_new_process_group_helper":
        return bool(frame.f_locals.get("backend_str") == "gloo")
    return function in ("_create_process_group_wrapper", "_store_based_barrier")


def awaited_store(place: Place) -> str:
    """Return the kind of store that a call of torch's process groups uses, "" outside such a call."""
    if not is_in_process_groups(place):
        return ""
    store = innermost(place.frame.f_locals.get("store"))
    return "" if store is None else type(store).__name__


def awaited_port(place: Place | None) -> int | None:
    """Return the port of the server of a store over which a thread builds a group, None elsewhere."""
    return _port_of(place.frame.f_locals.get("store")) if place is not None and is_in_process_groups(place) else None


def _port_of(store: Any) -> int | None:
    return getattr(innermost(store), "port", None)
