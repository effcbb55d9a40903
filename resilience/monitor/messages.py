"""Which messages do a rank, its monitor and the agent exchange, besides the page?

One message per datagram, msgpack, tagged by kind; never pickle. Sending never blocks a rank. There are two channels:
rank and monitor (in-process and under the launcher), agent and monitor (under the launcher)."""

from __future__ import annotations

from typing import Literal

import msgspec

from resilience.core import restart
from resilience.errors import DecodeError
from resilience.facts.encoding import reader, to_msgpack
from resilience.facts.events import HangSuspected
from resilience.facts.identity import Job, Origin
from resilience.facts.interruptions import Exit, Hang, InterruptionRecord
from resilience.facts.limits import Limits
from resilience.facts.records import Record
from resilience.system.channel import LIMIT

DESCRIPTION = 2000  # characters of a request's description that are passed on
MOST_LIMITS = LIMIT - 4096  # bytes of limits that a rank sets itself: the agent sends them on, together with paths

# -- rank to monitor -----------------------------------------------------------------------------


class Begin(msgspec.Struct, frozen=True, tag="begin"):
    """A call begins: the sender, the limits in force, and the run folder.

    folder: encoded with `os.fsencode`, because a path may not be UTF-8. prefix: of the call's keys in the store.
    store: host and port of the server that the rank is connected to, if its store is a TCPStore."""

    origin: Origin
    folder: bytes
    prefix: str
    limits: Limits
    waits: restart.WaitLimits
    heartbeat_timeout: float
    interval: float
    base_host: str = ""
    store: tuple[str, int] | None = None
    job: Job | None = None  # from rank 0


class Emitted(msgspec.Struct, frozen=True, tag="emitted"):
    """A record of the rank."""

    record: Record


class LeftCall(msgspec.Struct, frozen=True, tag="left"):
    """The rank has left its call: read the page."""


class HostStore(msgspec.Struct, frozen=True, tag="host"):
    """This rank is rank 0 of `iteration`: host the store of its process groups and publish it."""

    iteration: int


class Introduced(msgspec.Struct, frozen=True, tag="introduced"):
    """The answer to Introduce: the connecting rank, according to its environment."""

    rank: int
    world_size: int


class Attached(msgspec.Struct, frozen=True, tag="attached"):
    """The page is mapped; comes with the descriptor of the rank's dump. is_locked: the rank holds the page's mutex, and
    the mutex's release shows the rank's death."""

    is_locked: bool


class Armed(msgspec.Struct, frozen=True, tag="armed"):
    """The rank announced heartbeats: the limit of the first one applies. at: monotonic seconds; None withdraws it."""

    at: float | None


class EndedMonitoring(msgspec.Struct, frozen=True, tag="ended"):
    """A client has ended the monitoring of this program: read the page."""


class Progressed(msgspec.Struct, frozen=True, tag="progressed"):
    """The rank's first sign of progress, or its first step. at: monotonic seconds."""

    sign: Literal["heartbeat", "step", "ping", "section"]
    at: float
    step: int | None = None


class RankRequest(msgspec.Struct, frozen=True, tag="request"):
    """The rank asks for a decision about its node or the workload."""

    action: str
    description: str = ""


class FitFailed(msgspec.Struct, frozen=True, tag="fit_failed"):
    """The fit of a deadline's limit in the job raised an error."""

    deadline: str
    error: str


class LimitsUnread(msgspec.Struct, frozen=True, tag="limits_unread"):
    """The rank could not read the limits of an earlier start."""

    file: str
    error: str


# -- monitor to rank -----------------------------------------------------------------------------


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The monitor watches, and hosts the wrapper's store if that is its task. error: why not. Sent once more if a
    monitor of a Wrapper does not supervise its node any longer."""

    error: str = ""


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """The monitor accepts this process as its rank; comes with the descriptor of a page."""

    rank: int
    world_size: int
    limits: Limits


class ShowStacks(msgspec.Struct, frozen=True, tag="stacks"):
    """Write the stacks of all threads to the dump, followed by this number."""

    number: int


class TerminalLine(msgspec.Struct, frozen=True, tag="alert"):
    """A line for a person at this rank's terminal."""

    text: str


class Introduce(msgspec.Struct, frozen=True, tag="introduce"):
    """Send your rank: no agent has named it."""


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """The monitor does not watch this process."""

    why: str


# -- agent to monitor ----------------------------------------------------------------------------


class OpenMonitor(msgspec.Struct, frozen=True, tag="open"):
    """The first message: which agent owns this monitor."""

    agent_pid: int


class Attachment(msgspec.Struct, frozen=True, tag="link"):
    """A monitor's knowledge of its rank's attachment, with which another monitor can continue. `pid`: of the attached
    process. heartbeats_from: monotonic seconds, the same clock in all processes of a host. limits: those that the rank
    has set itself; the agent keeps them in `Assigned.limits`."""

    pid: int
    is_locked: bool
    heartbeats_from: float | None = None
    limits: Limits | None = None


class Adopt(msgspec.Struct, frozen=True, tag="adopt"):
    """Watch processes of this user that connect, one after the other. There is no agent to act on their requests.
    folder: the run folder, by `os.fsencode`; attempt: the one it belongs to."""

    job_id: str
    node: str
    folder: bytes
    limits: Limits
    attempt: int = 0


class Assigned(msgspec.Struct, frozen=True, tag="assigned"):
    """Watch this worker from now on.

    start_time: of the process, in clock ticks after boot, because its pid may belong to another process by now; 0 if it
    could not be read. folder, output: the run folder, and the worker's output files, for the end of its log; paths by
    `os.fsencode`. drain: the socket of the process that writes these files, empty if the worker does. link: the
    previous monitor's, with the descriptors of page, channel and dump. is_adopted: the worker connected, no agent
    assigned it. is_cold: a node of this cycle has not run the job before; its caches may be cold, and all ranks wait
    for it."""

    worker_pid: int
    start_time: int
    origin: Origin
    folder: bytes
    limits: Limits
    output: tuple[bytes, ...] = ()
    drain: str = ""
    link: Attachment | None = None
    is_adopted: bool = False
    is_cold: bool = True


class NewLimits(msgspec.Struct, frozen=True, tag="limited"):
    """These limits apply from now on. The rank may send it too."""

    limits: Limits


class Dismissed(msgspec.Struct, frozen=True, tag="dismissed"):
    """The worker is ended on purpose: no limit applies any more, and its end is not an interruption."""

    reason: str = ""


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """The job is asked to stop: notify the program, which may write a checkpoint and leave."""


class Look(msgspec.Struct, frozen=True, tag="look"):
    """Another rank hangs: record where this worker is now, before either is ended. is_suspicion: it may hang."""

    is_suspicion: bool = False


class OthersRecorded(msgspec.Struct, frozen=True, tag="others_seen"):
    """The answer to Found, for a hung rank: the node's other ranks are on record."""

    worker_pid: int


class OthersPositions(msgspec.Struct, frozen=True, tag="positions"):
    """The answer to SeeksOthers. hangs: how the other ranks of the node hang, by rank. missing: ranks that did not
    answer in time. elsewhere: number of ranks on other nodes."""

    worker_pid: int
    hangs: dict[int, Hang | None]
    missing: tuple[int, ...]
    elsewhere: int


class Reaped(msgspec.Struct, frozen=True, tag="reaped"):
    """How the worker ended, for a monitor that could not observe it."""

    worker_pid: int
    exit: Exit


class ProbeMonitor(msgspec.Struct, frozen=True, tag="probe"):
    """Asks the monitor to answer with Alive."""

    number: int


class Leave(msgspec.Struct, frozen=True, tag="leave"):
    """Finish and exit. A worker that still runs is left alone."""


# -- monitor to agent ----------------------------------------------------------------------------


class Found(msgspec.Struct, frozen=True, tag="found"):
    """A limit is exceeded and the worker is about to be ended. Or (`ended`) the worker is gone without an order."""

    record: InterruptionRecord
    ended: bool


class Suspected(msgspec.Struct, frozen=True, tag="suspected"):
    """A rank may hang; no limit is set for its present activity."""

    rank: int
    suspicion: HangSuspected


class SeeksOthers(msgspec.Struct, frozen=True, tag="seeks"):
    """The worker is late compared with its own past: where are the other ranks?"""

    worker_pid: int


class Gone(msgspec.Struct, frozen=True, tag="gone"):
    """The worker's end is on record. Sent once for each assigned worker, after all other messages about it.

    goodbye: it ended well, or was dismissed."""

    worker_pid: int
    exit: Exit
    goodbye: bool


class WillStop(msgspec.Struct, frozen=True, tag="stopping"):
    """The program has been asked to stop. is_heard: it checks for such requests; else it needs a signal."""

    worker_pid: int
    is_heard: bool


class Looked(msgspec.Struct, frozen=True, tag="looked"):
    """The answer to Look: the worker's state is on record, or it cannot be observed. hang: how it hangs, if it does."""

    worker_pid: int
    is_suspicion: bool = False
    hang: Hang | None = None


class Requested(msgspec.Struct, frozen=True, tag="requested"):
    """The rank asks for a decision about its node or the workload."""

    action: str
    description: str
    rank: int
    worker_pid: int


class Connected(msgspec.Struct, frozen=True, tag="connected"):
    """The rank's program is attached, or its announcement has changed. On attachment it comes with the descriptors of
    page, channel and dump."""

    worker_pid: int
    link: Attachment


class Alive(msgspec.Struct, frozen=True, tag="alive"):
    """The answer to a probe."""

    number: int


FromRank = (
    Begin
    | Emitted
    | LeftCall
    | EndedMonitoring
    | HostStore
    | Introduced
    | Attached
    | Armed
    | Progressed
    | RankRequest
    | NewLimits
    | FitFailed
    | LimitsUnread
)
ToRank = Ready | Introduce | Welcome | Refused | ShowStacks | TerminalLine
FromAgent = (
    OpenMonitor
    | Adopt
    | Assigned
    | NewLimits
    | Dismissed
    | Stop
    | Look
    | OthersRecorded
    | OthersPositions
    | Reaped
    | ProbeMonitor
    | Leave
)
ToAgent = Ready | Found | Suspected | SeeksOthers | Gone | Requested | WillStop | Looked | Connected | Alive

WithLimits = Assigned | Adopt | NewLimits

_from_rank = reader(FromRank, "msgpack")
_to_rank = reader(ToRank, "msgpack")
_from_agent = reader(FromAgent, "msgpack")
_to_agent = reader(ToAgent, "msgpack")


def encode(message: FromRank | ToRank | FromAgent | ToAgent) -> bytes:
    """Return the message as one datagram."""
    return to_msgpack(message)


def bytes_of(limits: Limits) -> int:
    """Return how many bytes of a message the limits take."""
    return len(to_msgpack(limits))


def with_fitting_limits(message: WithLimits) -> tuple[WithLimits, str]:
    """Return the message, and what its limits leave out so that it fits one datagram; empty if they are complete."""
    limits = message.limits
    settled = msgspec.structs.replace(limits, shadow=None)
    unlearned = msgspec.structs.replace(limits.unlearned or settled, rule=limits.rule)
    attempts = (
        ("", limits),
        ("limits on trial", settled),
        ("limits on trial, limits outside known phases", msgspec.structs.replace(settled, outside={})),
        ("all learned limits", unlearned),
        (  # without the rule: it would end a rank within a section for which a longer limit is set
            "all limits of sections and silences, all learned limits",
            msgspec.structs.replace(unlearned, sections={}, warmup={}, first={}, outside={}, learned={}, rule=None),
        ),
    )
    shortened = [(msgspec.structs.replace(message, limits=shorter), left_out) for left_out, shorter in attempts]
    return next((candidate for candidate in shortened if len(encode(candidate[0])) <= LIMIT), shortened[-1])


def decode_for_monitor(message: bytes) -> FromRank:
    """Read a rank's message. Raises: DecodeError."""
    decoded: FromRank = _from_rank(_checked_size(message))
    return decoded


def decode_for_rank(message: bytes) -> ToRank:
    """Read a monitor's message. Raises: DecodeError."""
    decoded: ToRank = _to_rank(_checked_size(message))
    return decoded


def decode_from_agent(message: bytes) -> FromAgent:
    """Read an agent's message. Raises: DecodeError."""
    decoded: FromAgent = _from_agent(_checked_size(message))
    return decoded


def decode_for_agent(message: bytes) -> ToAgent:
    """Read a monitor's message to its agent. Raises: DecodeError."""
    decoded: ToAgent = _to_agent(_checked_size(message))
    return decoded


def shortened(record: InterruptionRecord) -> InterruptionRecord:
    """Return the record, shortened so that it fits one message."""
    small: InterruptionRecord = msgspec.structs.replace(record, stacks=(), log_tail=(), message=record.message[:2000])
    if small.exception is not None:
        exception = msgspec.structs.replace(small.exception, stack=small.exception.stack[-10:], causes=())
        small = msgspec.structs.replace(small, exception=exception)
    return small


def _checked_size(message: bytes) -> bytes:
    if len(message) > LIMIT:
        raise DecodeError(f"a message of more than {LIMIT} bytes")
    return message
