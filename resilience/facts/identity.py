"""Where does a record come from?  Its origin: job, attempt, cycle, iteration, node, process, rank.

The order is job ⊃ attempt ⊃ cycle ⊃ iteration ⊃ step; all count from 0. Trace and span ids are hashes of an identity,
so every process of a job computes the same ids without communication."""

from __future__ import annotations

import hashlib
import re
from typing import Annotated, Literal

import msgspec

from resilience.facts.configuration import Configuration
from resilience.facts.encoding import text

Role = Literal["rank", "monitor", "agent"]
# What a decoder accepts. A larger number is damage, and would cost a reader memory or break a date.
Natural = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Nanoseconds = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]  # as UTC up to the year 2262
Seconds = Annotated[float, msgspec.Meta(ge=-1e11, le=1e11)]
LARGEST_WORLD = 2**20  # ranks
WorldSize = Annotated[int, msgspec.Meta(ge=0, le=LARGEST_WORLD)]
LONGEST_NAME = 200  # bytes of a safe name; a file system takes 255, and files beside a folder have longer names
_OWNED = re.compile(r"(?P<node>.+)-(?P<seat>[0-9]+|agent)", re.DOTALL)
_UNSAFE = re.compile(r"[/%@\x00-\x1f\x7f]|^\.")


Key = tuple[str | int, ...]
"""Names an activity within its cycle. The id of its span is a hash of the key."""
ROOT: Key = ("root",)
JOB: Key = ("job",)
CYCLE = "cycle"  # begins the keys of what a launcher does in a cycle


class Origin(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """The origin of a record. `rank` is the present position in the world, `initial_rank` the one at the call of the
    wrapper; both are None for a process that represents a node. layer: whether a Wrapper's or the launcher's monitor
    wrote the record."""

    job_id: str
    node: str
    role: Role
    pid: Natural
    attempt: Natural = 0
    cycle: Natural = 0
    call: Natural = 0
    iteration: Natural | None = None
    initial_rank: WorldSize | None = None
    rank: WorldSize | None = None
    world_size: WorldSize | None = None
    step: int | None = None
    layer: Literal["inprocess", "launcher"] = "inprocess"

    @property
    def is_launchers(self) -> bool:
        """Return True if the launcher wrote the record: an agent, or one of its monitors."""
        return self.role == "agent" or self.layer == "launcher"


class Job(msgspec.Struct, frozen=True, omit_defaults=True):
    """The file job.json of a run folder, which describes the job. Written once, by the first process.

    configuration: what determines how long its steps take. traceparent: the value of TRACEPARENT, the parent span of
    all the job's spans. command: with secrets masked (`facts.masking`). launch: equal in all folders of one launch, on
    all disks."""

    job_id: str
    attempt: Natural = 0
    created_wall_ns: Nanoseconds = 0
    function: str = ""
    command: tuple[str, ...] = ()
    world_size: WorldSize | None = None
    hostname: str = ""
    resilience_version: str = ""
    torch_version: str = ""
    python_version: str = ""
    configuration: Configuration = Configuration()
    traceparent: str = ""
    launch: str = ""
    schema: int = 1


class FileOwner(msgspec.Struct, frozen=True):
    """Whose file in a run folder this is: a rank's, by its initial rank, or the node's agent's. If it is neither,
    nobody knows the owner, and `node` is the file's whole name."""

    node: str
    rank: int | None = None
    is_agent: bool = False

    @property
    def name(self) -> str:
        """Return the name of the owner's files, without a suffix."""
        seat = "agent" if self.is_agent else self.rank
        return self.node if seat is None else f"{self.node}-{seat}"


def owner_of(name: str) -> FileOwner:
    """Return the owner of a file with this name, which has no suffix. A name of another form is a node without rank."""
    match = _OWNED.fullmatch(name)
    if match is None:
        return FileOwner(name)
    seat = match["seat"]
    return FileOwner(match["node"], is_agent=True) if seat == "agent" else FileOwner(match["node"], int(seat))


def safe_name(job_id: str) -> str:
    """Return the name of a file or folder for this id. Two ids never have the same name.

    Characters with a meaning in paths, and a leading dot, become `%` and their hexadecimal code. `@` is one of them, so
    a suffix can begin with it. A long name is cut, and a hash of the id is appended."""
    name = _UNSAFE.sub(lambda match: f"%{ord(match[0]):02X}", text(job_id))
    if len(name.encode()) <= LONGEST_NAME:
        return name
    suffix = "%+" + hashlib.blake2b(text(job_id).encode(), digest_size=16).hexdigest()  # no escape contains `+`
    return name.encode()[: LONGEST_NAME - len(suffix)].decode(errors="ignore") + suffix


def run_name(job_id: str, attempt: int) -> str:
    """Return the name of one launch's run folder: the job's safe name, and from attempt 1 on `@` and the attempt."""
    return safe_name(job_id) + (f"@{attempt}" if attempt else "")


def attempt_of(name: str, job_id: str) -> int | None:
    """Return the attempt whose run folder has this name, None if it is not a folder of this job."""
    job, _, attempt = name.partition("@")
    if job != safe_name(job_id):
        return None
    if name == job:
        return 0
    return int(attempt) if re.fullmatch(r"[1-9][0-9]{0,17}", attempt) else None


def trace_id(job_id: str, attempt: int, cycle: int) -> int:
    """Return the 128-bit trace id that all processes of one cycle share."""
    return _hash("trace", job_id, attempt, cycle, size=16)


def span_id(job_id: str, attempt: int, cycle: int, *path: object) -> int:
    """Return the 64-bit id of the span with this key."""
    return _hash("span", job_id, attempt, cycle, *path, size=8)


def iteration_key(call: int, iteration: int, rank: int) -> Key:
    """Return the key of a rank's iteration."""
    return (call, "iteration", iteration, rank)


def run_key(call: int, iteration: int, rank: int) -> Key:
    """Return the key of the run of the wrapped function in an iteration."""
    return (call, "run", iteration, rank, 0)


def node_key(node: str) -> Key:
    """Return the key of a node's part of a cycle."""
    return (CYCLE, node)


def restart_key(node: str) -> Key:
    """Return the key of the restart after a cycle on a node."""
    return (CYCLE, node, "restart")


def rank_restart_key(rank: int) -> Key:
    """Return the key of a rank's restart after a cycle by a launcher that leaves no records."""
    return (CYCLE, "restart", rank)


def _hash(*parts: object, size: int) -> int:
    digest = hashlib.blake2b(text("\x1f".join(map(str, parts))).encode(), digest_size=size).digest()
    return int.from_bytes(digest, "big") or 1  # an id of all zeros is not valid
