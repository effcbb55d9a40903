"""What was run?  The facts on which the durations of a run depend.

The workload is the script, or the name that the user gives with `--calibration-key`. Other facts (arguments such as
`--resume`, the torch version) are kept, but do not matter by themselves."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import msgspec

from resilience.facts.in_words import count

MOST = 16 << 10  # bytes of arguments that are kept: they travel in one message to the monitor


class Configuration(msgspec.Struct, frozen=True, omit_defaults=True):
    """What is known about a run. script: as the user wrote it. key: from `--calibration-key`. arguments: with secrets
    masked. table: the run was read from this table, which has no other facts. 0 and empty: unknown."""

    script: str = ""
    key: str = ""
    world_size: int = 0
    ranks_per_node: int = 0
    arguments: tuple[str, ...] = ()
    torch: str = ""
    table: str = ""

    @property
    def workload(self) -> str:
        """Return the name of the workload: the key, else the script without its folder."""
        return self.key or self.script.rpartition("/")[2]

    @property
    def name(self) -> str:
        """Return a name that is equal for runs that may be combined without asking the user."""
        if self.table:
            return f"table {self.table}"
        shape = count(self.world_size, "rank") + (f", {self.ranks_per_node} a node" if self.ranks_per_node else "")
        return f"{self.workload or 'an unnamed workload'}, {shape}"


def abridged(arguments: Sequence[str], most: int = MOST) -> tuple[str, ...]:
    """Return arguments of at most about `most` bytes. The first one that does not fit and all after it become one text
    with their number and a checksum, so equal command lines stay equal."""
    used = 0
    for number, argument in enumerate(arguments):
        used += len(argument.encode(errors="surrogateescape"))
        if used > most:
            rest = "\0".join(arguments[number:]).encode(errors="surrogateescape")
            checksum = hashlib.sha256(rest).hexdigest()[:16]
            return (*arguments[:number], f"… {len(arguments) - number} more, {len(rest)} bytes, sha256 {checksum}")
    return tuple(arguments)
