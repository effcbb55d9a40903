"""What does a rank or its monitor record about an interruption?  The types of interruptions and their records.

An interruption is the reason why an iteration ended, as recorded by one rank or its monitor. `attribution` combines all
records of one restart into one incident: the first mover, the cascade, the cleared ranks and the rules."""

from __future__ import annotations

import contextlib
from enum import Enum
from typing import Literal, NamedTuple

import msgspec

from resilience.errors import DecodeError
from resilience.facts.encoding import reader, to_json_text
from resilience.facts.identity import Nanoseconds, Seconds
from resilience.facts.seats import Seat

SCHEMA = 1

Category = Literal["user_code", "host", "network", "storage", "accelerator", "scheduler", "unknown"]
FaultOrigin = Literal["own", "communication", "consequence"]
"""Origin of a rank's exception. own: the rank's own fault. consequence: another rank's fault or the abort caused it.
communication: not decided yet, because it came out of a communication call, which also fails when a peer ends."""
Hang = Literal["stopped", "in_kernel", "in_collective", "in_loop", "runs_again", "holds_gil", "on_lock", "in_call"]


class Interruption(Enum):
    """Why an iteration ended, according to one rank or its monitor."""

    EXCEPTION = "exception"
    BASE_EXCEPTION = "base_exception"
    SOFT_TIMEOUT = "soft_timeout"
    HARD_TIMEOUT = "hard_timeout"
    TERMINATED = "terminated"
    UNRESPONSIVE = "unresponsive"
    MONITOR_PROCESS_EXCEPTION = "monitor_process_exception"


HANGS = frozenset((Interruption.SOFT_TIMEOUT, Interruption.HARD_TIMEOUT))
LOOK = "look"
"""The detector of a record that a look at this rank gave when another rank had exceeded a limit."""


class Frame(msgspec.Struct, frozen=True):
    """One line of a stack, innermost last. line: 0 if it is not known; some instructions belong to no line."""

    file: str
    line: int
    function: str


class ThreadStack(msgspec.Struct, frozen=True):
    """The Python stack of one thread."""

    thread: str
    frames: tuple[Frame, ...] = ()


def type_and_message(kind: str, message: str) -> str:
    """Return an exception's type and message, as the last line of a traceback does."""
    return f"{kind}: {message}" if message else kind


class Cause(msgspec.Struct, frozen=True, omit_defaults=True):
    """An exception that led to another one. relation: it was named by `raise … from`; it was being handled when the
    other one was raised; or it is part of an exception group."""

    type: str
    message: str
    relation: Literal["cause", "context", "part"]
    stack: tuple[Frame, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def in_words(self) -> str:
        """Return type and message."""
        return type_and_message(self.type, self.message)


class ExceptionInfo(msgspec.Struct, frozen=True, omit_defaults=True):
    """An exception, converted to plain data when it was caught so that nothing keeps its frames alive.

    fingerprint: equal for repetitions of one failure (`facts.fingerprints`). chain: "Type: message" of each __cause__ /
    __context__, outermost last. notes: texts from `add_note`. causes: the exceptions that a traceback shows above this
    one, nearest first."""

    type: str
    message: str
    fingerprint: str
    stack: tuple[Frame, ...] = ()
    chain: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    causes: tuple[Cause, ...] = ()

    @property
    def in_words(self) -> str:
        """Return type and message."""
        return type_and_message(self.type, self.message)


OBEYED = 128 + 15  # exit code by which a program says that it obeyed a SIGTERM
_STOPS = frozenset(("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2"))  # what asks a process to stop


class Exit(msgspec.Struct, frozen=True, omit_defaults=True):
    """How a process ended: exit code or signal name, None if unknown."""

    code: int | None = None
    signal: str | None = None
    oom: bool | None = None

    @property
    def is_stop(self) -> bool:
        """True if the process ended because it was asked to stop: by such a signal, or with OBEYED."""
        return self.signal in _STOPS or self.code == OBEYED


class OpenSection(msgspec.Struct, frozen=True, omit_defaults=True):
    """An open section, how long it had been open (seconds), and its limit, if any."""

    name: str
    open_s: Seconds
    limit_s: Seconds | None = None


class Collective(msgspec.Struct, frozen=True, omit_defaults=True):
    """A collective that this rank entered, the last one of its group.

    group, seq: equal on all participating ranks. left: the rank has returned from it. members: the members of the group
    in torch's numbering as (first, distance, number), if their distance is constant. expected: the operation that would
    continue the previous ones. is_recorded: from torch's flight recorder, which also has collectives that C++ starts.
    is_transfer: a send or a receive."""

    group: int
    seq: int
    op: str
    left: bool
    members: tuple[int, int, int] | None = None
    expected: str = ""
    is_recorded: bool = False
    is_transfer: bool = False


class ProgramPosition(NamedTuple):
    """Where a rank is in its program: its highest step, its open sections, outermost first, and the last collectives
    that it entered."""

    step: int | None
    sections: tuple[str, ...]
    collectives: tuple[Collective, ...]


class ProcessInfo(msgspec.Struct, frozen=True, omit_defaults=True):
    """The process at detection. state: letter of /proc/<pid>/stat (R S D T Z …); cpu_s_delta: CPU seconds that it used
    in the previous `over_s` seconds; runnable_s: seconds of these in which its main thread ran or waited for a
    processor."""

    state: str | None = None
    cpu_s_delta: float | None = None
    over_s: Seconds | None = None
    rss_bytes: int | None = None
    threads: int | None = None
    runnable_s: Seconds | None = None


class Detector(msgspec.Struct, frozen=True, omit_defaults=True):
    """What detected it: watchdog, ping, section:<name>, step, hook:<name>, exit, exception, peer, monitor, look; with
    its limit (seconds), if any."""

    name: str
    limit_s: Seconds | None = None


class InterruptionRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """One rank's interruption. Only rank (initial rank) and interruption are always known.

    The rank or its monitor writes what it knows; `None` and empty mean "not known here"."""

    rank: int
    interruption: Interruption
    message: str = ""
    exception: ExceptionInfo | None = None
    origin: FaultOrigin | None = None  # of an exception; None if no wrapper determined it
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
    hang: Hang | None = None  # if a limit was exceeded: how it hung (`core.hang_kind`)
    stacks: tuple[ThreadStack, ...] = ()
    stack_method: str | None = None  # own-thread, faulthandler, py-spy, traceback, none: <reason>
    log_tail: tuple[str, ...] = ()
    progress_unknown: bool = False  # no limit that could detect a lack of progress was armed
    schema: int = SCHEMA

    @property
    def program_had_failed(self) -> bool:
        """Return True if a limit of this or another rank fired while a failed program's interpreter shut down: the
        reason matters, not how long that takes."""
        is_known = self.exception is not None or self.exit is not None
        is_seen = self.interruption in HANGS or (self.detector is not None and self.detector.name == LOOK)
        return is_known and is_seen and self.stage == "ending"


def encode(record: InterruptionRecord) -> str:
    """Return the record as JSON text, as the store holds it."""
    return to_json_text(record)


_read = reader(InterruptionRecord)


def load_decoder() -> None:
    """Build the decoder, which takes 2 ms. Called before any fault, so a restart does not pay for it."""
    with contextlib.suppress(DecodeError):
        _read("")


def decode(text: str | bytes) -> InterruptionRecord:
    """Read a record back. Raises: DecodeError."""
    return _read(text)


def missed_completion(seat: Seat, limit: float) -> str:
    """Return the encoded record of a rank that completed, but whose peers did not arrive in time."""
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
