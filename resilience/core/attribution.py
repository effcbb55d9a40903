"""What broke, and whose fault was it?  Interruptions, their records, and the incident they make up.

An interruption is why an iteration ended as one rank saw it. All records of one restart are folded
into one incident: the first mover, the cascade, who is exonerated and by which rule."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Literal

import msgspec

from resilience.core.encoding import reader, to_json_text
from resilience.core.identity import Nanoseconds, Seconds

if TYPE_CHECKING:
    from resilience.core.restart import Seat

SCHEMA = 1

Category = Literal["user_code", "host", "network", "storage", "accelerator", "scheduler", "unknown"]
Place = Literal["first", "cascade"]
FaultOrigin = Literal["own", "communication", "consequence"]
"""Whose fault a rank's exception is: its own; nobody's, because another rank's fault or our abort brought it about; or
not decided yet, because it left a communication call, where a peer's end shows as an error too."""
Hang = Literal["stopped", "in_kernel", "in_collective", "in_loop", "holds_gil", "on_lock", "in_call"]


class Interruption(Enum):
    """Why an iteration ended, as seen by one rank or its monitor."""

    EXCEPTION = "exception"
    BASE_EXCEPTION = "base_exception"
    SOFT_TIMEOUT = "soft_timeout"
    HARD_TIMEOUT = "hard_timeout"
    TERMINATED = "terminated"
    UNRESPONSIVE = "unresponsive"
    MONITOR_PROCESS_EXCEPTION = "monitor_process_exception"


HANGS = frozenset((Interruption.SOFT_TIMEOUT, Interruption.HARD_TIMEOUT))


class Frame(msgspec.Struct, frozen=True):
    """One line of a stack, innermost last."""

    file: str
    line: int
    function: str


class ThreadStack(msgspec.Struct, frozen=True):
    """The Python stack of one thread."""

    thread: str
    frames: tuple[Frame, ...] = ()


class Cause(msgspec.Struct, frozen=True, omit_defaults=True):
    """An exception that led to another one. relation: it was named by `raise … from`, it was being handled when the
    other one was raised, or it is a part of an exception group."""

    type: str
    message: str
    relation: Literal["cause", "context", "part"]
    stack: tuple[Frame, ...] = ()
    notes: tuple[str, ...] = ()


class ExceptionInfo(msgspec.Struct, frozen=True, omit_defaults=True):
    """An exception, taken apart when it was caught so that nothing keeps its frames alive.

    fingerprint: equal for repetitions of one failure (`core.fingerprints`). chain: "Type: message" of each __cause__ /
    __context__, outermost last. notes: what `add_note` added. causes: what a traceback shows above it, the nearest
    first."""

    type: str
    message: str
    fingerprint: str
    stack: tuple[Frame, ...] = ()
    chain: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    causes: tuple[Cause, ...] = ()


class Exit(msgspec.Struct, frozen=True, omit_defaults=True):
    """How a process ended: exit code or signal name, None where it could not be learned."""

    code: int | None = None
    signal: str | None = None
    oom: bool | None = None


class OpenSection(msgspec.Struct, frozen=True, omit_defaults=True):
    """A section that was open, for how long (seconds), and its limit if it had one."""

    name: str
    open_s: Seconds
    limit_s: Seconds | None = None


class Collective(msgspec.Struct, frozen=True, omit_defaults=True):
    """A collective that this rank entered, the last one of its group.

    group, seq: equal on all ranks that take part. left: the rank has come out of it again. ranks: the members of the
    group as torch numbers them, (first, distance, number), if they have a constant distance. expected: the operation
    that would continue the ones before. is_recorded: by torch's flight recorder, which also has what C++ starts.
    is_transfer: a send or a receive."""

    group: int
    seq: int
    op: str
    left: bool
    members: tuple[int, int, int] | None = None
    expected: str = ""
    is_recorded: bool = False
    is_transfer: bool = False


class ProcessInfo(msgspec.Struct, frozen=True, omit_defaults=True):
    """The process at detection. state: letter of /proc/<pid>/stat (R S D T Z …); cpu_s_delta: CPU
    seconds it used in the `over_s` seconds before."""

    state: str | None = None
    cpu_s_delta: float | None = None
    over_s: Seconds | None = None
    rss_bytes: int | None = None
    threads: int | None = None


class Detector(msgspec.Struct, frozen=True, omit_defaults=True):
    """What noticed: watchdog, ping, section:<name>, step, hook:<name>, exit, exception, peer, monitor;
    with the limit (seconds) it used, if any."""

    name: str
    limit_s: Seconds | None = None


class InterruptionRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """One rank's interruption. Only rank (initial rank) and interruption are always known.

    The rank or its monitor writes what it sees; `None` and empty mean "not known here"."""

    rank: int
    interruption: Interruption
    message: str = ""
    exception: ExceptionInfo | None = None
    origin: FaultOrigin | None = None  # of an exception; None where no wrapper could tell
    exit: Exit | None = None
    detector: Detector | None = None
    iteration: int | None = None
    active_rank: int | None = None
    node: str | None = None
    pid: int | None = None
    detected_wall_ns: Nanoseconds | None = None
    arrival_order: int | None = None  # position in the store's order, from 1
    stage: str | None = None  # what the rank was doing: run, initialize, finalize, barrier …
    silent_for_s: Seconds | None = None
    last_heartbeat_age_s: Seconds | None = None
    step: int | None = None
    open_sections: tuple[OpenSection, ...] = ()
    last_collectives: tuple[Collective, ...] = ()
    process: ProcessInfo | None = None
    hang: Hang | None = None  # in which way it hung (`core.hangs`), of a limit that was exceeded
    stacks: tuple[ThreadStack, ...] = ()
    stack_method: str | None = None  # own-thread, faulthandler, py-spy, traceback, none: <reason>
    log_tail: tuple[str, ...] = ()
    progress_unknown: bool = False  # nothing was armed that could have shown a lack of progress
    schema: int = SCHEMA


def encode(record: InterruptionRecord) -> str:
    """Return the record as it stands in the store: JSON, without what only files need."""
    return to_json_text(record)


_read = reader(InterruptionRecord)


def decode(text: str | bytes) -> InterruptionRecord:
    """Read a record back. Raises: DecodeError."""
    return _read(text)


def missed_completion(seat: Seat, limit: float) -> str:
    """The record of a rank that completed and waited in vain for the others, encoded."""
    return encode(
        InterruptionRecord(
            rank=seat.initial_rank,
            interruption=Interruption.UNRESPONSIVE,
            message=f"not every rank reached the completion barrier within {limit:g} s",
            detector=Detector("completion_barrier", limit),
            iteration=seat.iteration,
            active_rank=seat.rank,
            stage="completion_barrier",
        )
    )
