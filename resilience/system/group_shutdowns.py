"""When are process groups dropped that a failing function destroys?

Many functions call `destroy_process_group` in a `finally`. If gloo's threads have not read a cut by then, or the cut
comes while the groups are dropped, gloo ends the process by SIGABRT (`collectives` says why). And a rank whose peer
closes its connections may wait for a lost send. So during a call, the groups of a world that is destroyed while an
exception is handled are kept. `collectives` drops them later, like those that user code leaves: when nothing cuts any
more.

`destroy_process_group` calls `ProcessGroup.shutdown` for each group, for the default group last. That method, which
does nothing for gloo, is wrapped. Without an exception the groups are dropped at once, so that peers that still wait
for this rank learn of it."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

from resilience.system import collectives
from resilience.system.group_aborts import c10d


@contextlib.contextmanager
def kept(cuts: bool = True, outside: BaseException | None = None, kind: type | None = None) -> Iterator[None]:
    """While the body runs, keep the groups of a world that user code destroys while it handles an exception.

    cuts: a restart cuts groups; if it does not, the end of their connections is all that frees the peers. outside: the
    exception that the caller handles. kind: a class like torch's ProcessGroup, instead of it."""
    kind = getattr(c10d(), "ProcessGroup", None) if kind is None else kind
    original = None if kind is None else vars(kind).get("shutdown")
    if original is None or not cuts:  # this torch may have no torch.distributed, or shut groups down in another way
        yield
        return

    def shutdown(group: Any) -> None:
        if sys.exc_info()[1] not in (None, outside) and group is c10d()._world.default_pg:
            collectives.keep_destroyed()
        original(group)

    setattr(kind, "shutdown", shutdown)  # noqa: B010  no plain assignment to a method
    try:
        yield
    finally:
        if vars(kind).get("shutdown") is shutdown:  # else user code has replaced it
            setattr(kind, "shutdown", original)  # noqa: B010
