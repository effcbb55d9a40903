"""Who speaks?  The origin of a record: job, attempt, cycle, iteration, node, process, rank.

Words and their order stand in the style guide: job ⊃ attempt ⊃ cycle ⊃ iteration ⊃ step, all counted
from 0. Trace and span ids are hashes of an identity, so that every process of a job computes the same
ids unasked."""

from __future__ import annotations

import hashlib
import re
from typing import Annotated, Literal

import msgspec

from resilience.core.configuration import Configuration
from resilience.core.encoding import text

Role = Literal["rank", "monitor", "agent"]
# What a decoder accepts: a number of another size is damage, and would cost a reader its memory or a date.
Natural = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Nanoseconds = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]  # as UTC up to the year 2262
Seconds = Annotated[float, msgspec.Meta(ge=-1e11, le=1e11)]
WorldSize = Annotated[int, msgspec.Meta(ge=0, le=2**20)]
ROLES: tuple[Role, ...] = ("rank", "monitor", "agent")
LONGEST_NAME = 200  # bytes of a safe name; a file system takes 255, and files beside a folder have longer names
_UNSAFE = re.compile(r"[/%@\x00-\x1f\x7f]|^\.")


Key = tuple[str | int, ...]
"""Names something that went on for a time within its cycle; its span's id is a hash of it."""
ROOT: Key = ("root",)
JOB: Key = ("job",)


class Origin(msgspec.Struct, frozen=True, omit_defaults=True):
    """Where a record comes from. `rank` is the position in the world now, `initial_rank` the one at
    the call of the wrapper; both None where the process speaks for a node. layer: whose monitor speaks, a
    Wrapper's or the launcher's."""

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
        """Whether the launcher speaks: an agent, or a monitor of its."""
        return self.role == "agent" or self.layer == "launcher"


class Job(msgspec.Struct, frozen=True):
    """What job.json says: which job this run folder belongs to. Written once, by the first rank 0.

    command: with secrets masked. configuration: what decides how long its steps take. traceparent: what TRACEPARENT
    said, the span that all of the job's are part of. launch: where the ranks of the launch meet, which stays the same
    when their launcher starts them anew."""

    job_id: str
    attempt: int
    cycle: int
    world_size: int
    function: str
    command: tuple[str, ...]
    hostname: str
    resilience_version: str
    torch_version: str
    python_version: str
    started_wall_ns: int
    configuration: Configuration = Configuration()
    traceparent: str = ""
    launch: str = ""
    schema: int = 1


def safe_name(job_id: str) -> str:
    """Return the name of a file or folder that stands for this id; two ids never have the same name.

    Characters that a path gives a meaning, and a dot in front, are written as `%` and their hexadecimal code. `@` is
    one of them, so that what is added to a name can begin with it. The rest of a long name is a hash of the id."""
    name = _UNSAFE.sub(lambda match: f"%{ord(match[0]):02X}", text(job_id))
    if len(name.encode()) <= LONGEST_NAME:
        return name
    mark = "%+" + hashlib.blake2b(text(job_id).encode(), digest_size=16).hexdigest()  # no escape has a `+`
    return name.encode()[: LONGEST_NAME - len(mark)].decode(errors="ignore") + mark


def run_name(job_id: str, attempt: int) -> str:
    """Return the name of the run folder of one launch: the job's safe name, and from attempt 1 on `@` and it."""
    return safe_name(job_id) + (f"@{attempt}" if attempt else "")


def attempt_of(name: str, job_id: str) -> int | None:
    """Return the attempt of this job whose run folder has this name, None if it is none of the job's."""
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
    return ("cycle", node)


def restart_key(node: str) -> Key:
    """Return the key of the restart that a cycle ended with on a node."""
    return ("cycle", node, "restart")


def _hash(*parts: object, size: int) -> int:
    digest = hashlib.blake2b(text("\x1f".join(map(str, parts))).encode(), digest_size=size).digest()
    return int.from_bytes(digest, "big") or 1  # all zeros is no valid id
