"""When may user code shut its process groups down while an iteration is interrupted?

Many a function calls `destroy_process_group` in a `finally`. If gloo's threads have not read a cut by then, or the cut
comes while the groups go, gloo ends the process by SIGABRT (`collectives` says why). So during a call torch's
`ProcessGroup.shutdown`, which `destroy_process_group` calls for each group before it drops any, first waits until the
cut is read. Once the default group is shut down, no cut touches the connections that the groups had. Without a cut it
costs about 1 ms. Stacks leave out the frames of this module."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from resilience.system import collectives
from resilience.system.group_aborts import c10d


@contextlib.contextmanager
def after_cuts(kind: type | None = None) -> Iterator[None]:
    """While the body runs, let groups be shut down only when a cut has been read. kind: a class like torch's
    ProcessGroup, instead of it."""
    kind = getattr(c10d(), "ProcessGroup", None) if kind is None else kind
    original = None if kind is None else vars(kind).get("shutdown")
    if original is None:  # this torch has no torch.distributed, or shuts groups down in another way
        yield
        return

    def shutdown(group: Any) -> None:
        _await_cut(group is c10d()._world.default_pg)
        original(group)

    setattr(kind, "shutdown", shutdown)  # noqa: B010  no plain assignment to a method
    try:
        yield
    finally:
        setattr(kind, "shutdown", original)  # noqa: B010


def _await_cut(are_all_given_up: bool) -> None:
    """Wait in a thread of its own: an interruption of the main thread must leave no lock held, and no copy open."""
    thread = threading.Thread(
        target=collectives.await_cut, args=(are_all_given_up,), name="resilience-shutdown", daemon=True
    )
    try:
        thread.start()
    except RuntimeError:  # this host or process has no thread left
        return
    thread.join()
