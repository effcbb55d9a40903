"""What a rank, its monitor and the agent say to each other, beside what the page shows.

One message a datagram, msgpack, tagged by kind; never pickle. A rank's message never blocks it. Two lines:
rank and monitor (in-process and under the launcher), agent and monitor (under the launcher)."""

from __future__ import annotations

from typing import Literal

import msgspec

from resilience.adapters.channel import LIMIT
from resilience.core import restart, watch
from resilience.core.attribution import Exit, InterruptionRecord
from resilience.core.encoding import reader, to_msgpack
from resilience.core.events import HangSuspected
from resilience.core.identity import Job, Origin
from resilience.core.records import Record
from resilience.errors import DecodeError

DESCRIPTION = 2000  # characters of a request's that are passed on

# -- rank to monitor -----------------------------------------------------------------------------


class Begin(msgspec.Struct, frozen=True, tag="begin"):
    """A call begins: who speaks, which limits hold, where the account is kept.

    folder: the run folder, by `os.fsencode`: a path may be no UTF-8, and is opened. prefix: of the call's keys in
    the store."""

    origin: Origin
    folder: bytes
    prefix: str
    limits: watch.Limits
    waits: restart.Limits
    heartbeat_timeout: float
    interval: float
    base_host: str = ""
    job: Job | None = None  # from rank 0


class Emitted(msgspec.Struct, frozen=True, tag="emitted"):
    """A record of the rank."""

    record: Record


class Left(msgspec.Struct, frozen=True, tag="left"):
    """The rank is out of its call: look at the page."""


class Host(msgspec.Struct, frozen=True, tag="host"):
    """This rank is rank 0 of `iteration`: host the store of its process groups and publish it."""

    iteration: int


class Introduced(msgspec.Struct, frozen=True, tag="introduced"):
    """The answer to Introduce: which rank connects, as its environment says."""

    rank: int
    world_size: int


class Attached(msgspec.Struct, frozen=True, tag="attached"):
    """The page is mapped; with the descriptor of the rank's dump. is_locked: the page's mutex is held, and
    its release tells of the rank's death."""

    is_locked: bool


class Armed(msgspec.Struct, frozen=True, tag="armed"):
    """From now on the rank sends heartbeats: the limit of the first one holds."""


class Progressed(msgspec.Struct, frozen=True, tag="progressed"):
    """The rank's first sign of progress, or its first step. at: monotonic seconds."""

    sign: Literal["heartbeat", "step", "ping", "section"]
    at: float
    step: int | None = None


class Request(msgspec.Struct, frozen=True, tag="request"):
    """The rank asks for a decision about its node or the workload."""

    action: str
    description: str = ""


# -- monitor to rank -----------------------------------------------------------------------------


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """From the monitor: it watches, and hosts the wrapper's store if that is its task; or why not."""

    error: str = ""


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """The monitor takes this process for its rank; with the descriptor of a page."""

    rank: int
    world_size: int
    limits: watch.Limits


class ShowStacks(msgspec.Struct, frozen=True, tag="stacks"):
    """Leave the stacks of all threads in the dump, and this number behind them."""

    number: int


class Alert(msgspec.Struct, frozen=True, tag="alert"):
    """A line that a person at the terminal of this rank should read."""

    text: str


class Introduce(msgspec.Struct, frozen=True, tag="introduce"):
    """Say which rank you are: nobody else does."""


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """The monitor does not watch this process."""

    why: str


# -- agent to monitor ----------------------------------------------------------------------------


class Open(msgspec.Struct, frozen=True, tag="open"):
    """The first message: whose monitor this is."""

    agent_pid: int


class Link(msgspec.Struct, frozen=True, tag="link"):
    """What a monitor knows of its rank's attachment, so that another one can go on with it. `pid`: of the
    attached process. heartbeats_from: monotonic seconds, which all processes of a host share."""

    pid: int
    is_locked: bool
    heartbeats_from: float | None = None
    limits: watch.Limits | None = None  # those that the rank has set itself


class Adopt(msgspec.Struct, frozen=True, tag="adopt"):
    """Watch processes of this user that connect, one after the other. No agent decides what follows from what they ask
    for. folder: the run folder, by `os.fsencode`; attempt: that it belongs to."""

    job_id: str
    node: str
    folder: bytes
    limits: watch.Limits
    attempt: int = 0


class Assigned(msgspec.Struct, frozen=True, tag="assigned"):
    """Watch this worker from now on.

    start_time: of the process, in clock ticks after boot, for its pid may be another's meanwhile. folder, output: the
    run folder, and the files that keep what the worker writes, for the end of its log; paths by `os.fsencode`. drain:
    the socket of the process that writes these files, empty if the worker does. link: that a monitor before had,
    together with the descriptors of page, line and dump. is_adopted: nobody assigned it, it connected. is_cold: a node
    of this cycle has not run the job before, so caches may be cold there, and all ranks wait for it."""

    worker_pid: int
    start_time: int
    origin: Origin
    folder: bytes
    limits: watch.Limits
    output: tuple[bytes, ...] = ()
    drain: str = ""
    link: Link | None = None
    is_adopted: bool = False
    is_cold: bool = True


class Limited(msgspec.Struct, frozen=True, tag="limited"):
    """These limits hold from now on. Also from the rank."""

    limits: watch.Limits


class Dismissed(msgspec.Struct, frozen=True, tag="dismissed"):
    """The worker is ended on purpose: no limit holds any more, and its end is no interruption."""

    reason: str = ""


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """The job is asked to stop: let the program know, which may write a checkpoint and leave."""


class Look(msgspec.Struct, frozen=True, tag="look"):
    """Another rank hangs: put on record where the worker is now, before either is ended."""


class OthersSeen(msgspec.Struct, frozen=True, tag="others_seen"):
    """The answer to Found, for a rank that hangs: it is on record where the node's other ranks are."""

    worker_pid: int


class Reaped(msgspec.Struct, frozen=True, tag="reaped"):
    """How the worker ended, for a monitor that could not see it itself."""

    worker_pid: int
    exit: Exit


class Probe(msgspec.Struct, frozen=True, tag="probe"):
    """Are you there?"""

    number: int


class Leave(msgspec.Struct, frozen=True, tag="leave"):
    """Finish and exit. A worker that is still there is left alone."""


# -- monitor to agent ----------------------------------------------------------------------------


class Found(msgspec.Struct, frozen=True, tag="found"):
    """A limit is exceeded and the worker about to be ended; or (`ended`) it is gone, and nobody wanted it."""

    record: InterruptionRecord
    ended: bool


class Suspected(msgspec.Struct, frozen=True, tag="suspected"):
    """A rank may hang; nobody has set a limit for what it does."""

    rank: int
    suspicion: HangSuspected


class Gone(msgspec.Struct, frozen=True, tag="gone"):
    """The worker's end is accounted for. Once for each that was assigned, after all else about it.

    goodbye: it had ended well, or was dismissed."""

    worker_pid: int
    exit: Exit
    goodbye: bool


class Stopping(msgspec.Struct, frozen=True, tag="stopping"):
    """The program knows that it is to stop. is_heard: it looks for that; else only a signal tells it."""

    worker_pid: int
    is_heard: bool


class Looked(msgspec.Struct, frozen=True, tag="looked"):
    """The answer to Look: it is on record, or nothing can be seen of the worker."""

    worker_pid: int


class Requested(msgspec.Struct, frozen=True, tag="requested"):
    """The rank asks for a decision about its node or the workload."""

    action: str
    description: str
    rank: int
    worker_pid: int


class Connected(msgspec.Struct, frozen=True, tag="connected"):
    """The rank's program is attached, or what it has announced changed. When it has just attached, with
    the descriptors of page, line and dump."""

    worker_pid: int
    link: Link


class Alive(msgspec.Struct, frozen=True, tag="alive"):
    """The answer to a probe."""

    number: int


FromRank = Begin | Emitted | Left | Host | Introduced | Attached | Armed | Progressed | Request | Limited
ToRank = Ready | Introduce | Welcome | Refused | ShowStacks | Alert
FromAgent = Open | Adopt | Assigned | Limited | Dismissed | Stop | Look | OthersSeen | Reaped | Probe | Leave
ToAgent = Ready | Found | Suspected | Gone | Requested | Stopping | Looked | Connected | Alive

_from_rank = reader(FromRank, "msgpack")
_to_rank = reader(ToRank, "msgpack")
_from_agent = reader(FromAgent, "msgpack")
_to_agent = reader(ToAgent, "msgpack")


def encode(message: FromRank | ToRank | FromAgent | ToAgent) -> bytes:
    """Return the message as one datagram."""
    return to_msgpack(message)


def decode_for_monitor(message: bytes) -> FromRank:
    """Read a rank's message. Raises: DecodeError."""
    decoded: FromRank = _from_rank(_whole(message))
    return decoded


def decode_for_rank(message: bytes) -> ToRank:
    """Read a monitor's message. Raises: DecodeError."""
    decoded: ToRank = _to_rank(_whole(message))
    return decoded


def decode_from_agent(message: bytes) -> FromAgent:
    """Read an agent's message. Raises: DecodeError."""
    decoded: FromAgent = _from_agent(_whole(message))
    return decoded


def decode_for_agent(message: bytes) -> ToAgent:
    """Read what a monitor tells its agent. Raises: DecodeError."""
    decoded: ToAgent = _to_agent(_whole(message))
    return decoded


def shortened(record: InterruptionRecord) -> InterruptionRecord:
    """Return the record without what makes it too large for one message."""
    small: InterruptionRecord = msgspec.structs.replace(record, stacks=(), log_tail=(), message=record.message[:2000])
    if small.exception is not None:
        exception = msgspec.structs.replace(small.exception, stack=small.exception.stack[-10:], causes=())
        small = msgspec.structs.replace(small, exception=exception)
    return small


def _whole(message: bytes) -> bytes:
    if len(message) > LIMIT:
        raise DecodeError(f"a message of more than {LIMIT} bytes")
    return message
