"""Did an error come out of a communication call?  Such calls also fail when another rank ends.

An error is judged by its type and by the place where it was raised, never by its text; so are the errors that led to
it. C++ code leaves no frame, so a plain RuntimeError counts if its innermost frame calls into torch's process groups.
This is no proof: a wrong argument to `all_reduce` raises the same error. `core.restart` decides once it is known
whether another rank has a fault."""

from __future__ import annotations

from collections.abc import Collection

from resilience.facts.interruptions import Cause, ExceptionInfo

_GROUPS = "torch.distributed.Dist"  # DistError and its subclasses: DistBackendError, DistNetworkError, DistStoreError
_CONNECTIONS = frozenset(
    ("ConnectionError", "ConnectionAbortedError", "ConnectionRefusedError", "ConnectionResetError", "BrokenPipeError")
)
_CALLS = ("/torch/distributed/distributed_c10d.py", "/torch/distributed/_functional_collectives.py")
_CALLERS = ("/torch/nn/parallel/distributed.py", "/torch/futures/__init__.py", "/torch/autograd/graph.py")
"""Files that call C++ code in which collectives run: DDP, a collective's future, the engine that runs DDP's hooks."""
_WAITS = frozenset(("wait", "wait_tensor"))  # methods of a collective's Work, called by user code


def left_communication(error: ExceptionInfo, names: Collection[str] = ()) -> bool:
    """Return True if an error, or one that led to it, came out of a communication call. An exception group counts if
    all of its parts did. names: those in the line that raised the error, if known."""
    led = [cause for cause in error.causes if cause.relation != "part"]
    parts = [cause for cause in error.causes if cause.relation == "part"]
    return (
        _left_communication(error, names)
        or any(map(_left_communication, led))
        or (bool(parts) and all(map(_left_communication, parts)))
    )


def _left_communication(error: ExceptionInfo | Cause, names: Collection[str] = ()) -> bool:
    if lost_loader_process(error):
        return False
    if error.type.startswith(_GROUPS) or error.type in _CONNECTIONS:
        return True
    if error.type != "RuntimeError" or not error.stack:
        return False
    innermost = error.stack[-1].file
    if innermost.endswith(_CALLERS) or not _WAITS.isdisjoint(names):
        return True
    if "/torch/distributed/" in innermost and "/torch/distributed/checkpoint/" not in innermost:
        return True
    return any(frame.file.endswith(_CALLS) for frame in error.stack)


def lost_loader_process(error: ExceptionInfo | Cause) -> bool:
    """Return True if a process of this rank's own data loader died. An exception of the dataset does not count: torch's
    `reraise` raises it again as an error of the rank."""
    is_loading = any("/torch/utils/data/" in frame.file for frame in error.stack)
    is_lost = error.type in ("RuntimeError", "EOFError") or error.type in _CONNECTIONS
    return is_loading and is_lost and error.stack[-1].function != "reraise"
