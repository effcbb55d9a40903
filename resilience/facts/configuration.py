"""Do limits learned from one run fit another run?

The duration of a step depends on the workload and on the shape of the world. The workload is the script, or the name
that the user gives with `--calibration-key`. Other differences (arguments such as `--resume`, the torch version) are
listed, but do not matter by themselves. If arguments change durations, the user gives each workload its own key."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import msgspec

LONGEST = 120  # characters of the arguments that a difference shows
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
        shape = f"{self.world_size} ranks" + (f", {self.ranks_per_node} a node" if self.ranks_per_node else "")
        return f"{self.workload or 'an unnamed workload'}, {shape}"


class Difference(msgspec.Struct, frozen=True):
    """One difference between two configurations. why: the reason why limits of one do not fit the other; empty for a
    difference that does not matter by itself."""

    what: str
    before: str
    now: str
    why: str = ""

    @property
    def words(self) -> str:
        """Return one line about it."""
        reason = f": {self.why}" if self.why else ""
        return f"{self.what} {self.before!r} before, {self.now!r} now{reason}"


def differences(before: Configuration, now: Configuration, ranks: int = 0) -> tuple[Difference, ...]:
    """Return the differences of two runs. ranks: the number of ranks that the limits of the first run were fitted for
    (`--ranks`); they apply from the observed number up to this number. A table of another tool fits any run."""
    if before.table and now.table:
        return _unlike("table", before.table, now.table, "a table does not say what was run")
    if before.table or now.table:
        return ()
    least, most = before.world_size, max(before.world_size, ranks)
    is_in_range = least <= now.world_size <= most
    is_known = before.ranks_per_node and now.ranks_per_node
    fits = "" if is_in_range else f"limits hold for {_range(least, most)}"
    return (
        *_unlike(
            "workload",
            before.workload,
            now.workload,
            "another workload takes a different time; if it is the same, give both runs one --calibration-key",
        ),
        *_unlike("world size", before.world_size, now.world_size, fits),
        *(
            _unlike(
                "ranks per node",
                before.ranks_per_node,
                now.ranks_per_node,
                "collectives within a node and between nodes take different times; calibrate on runs of this shape",
            )
            if is_known
            else ()
        ),
        *_unlike("torch", before.torch, now.torch, ""),
        *_arguments(before.arguments, now.arguments),
    )


def advice(before: Configuration, now: Configuration, ranks: int) -> str:
    """Return what to do if limits that were fitted for `ranks` ranks would fit a job of this size, empty if nothing
    helps."""
    for_more = differences(before, now, max(ranks, now.world_size))
    is_larger = now.world_size > max(before.world_size, ranks)
    return f"; calibrate with --ranks {now.world_size}" if is_larger and not serious(for_more) else ""


def serious(found: Sequence[Difference]) -> str:
    """Return why limits of one run do not fit the other, empty if they do."""
    return "; ".join(difference.words for difference in found if difference.why)


def harmless(found: Sequence[Difference]) -> str:
    """Return the differences that do not matter by themselves."""
    return "; ".join(difference.words for difference in found if not difference.why)


def _unlike(what: str, before: object, now: object, why: str) -> tuple[Difference, ...]:
    return () if before == now else (Difference(what, str(before), str(now), why),)


def _range(least: int, most: int) -> str:
    return f"{least} ranks" if least == most else f"{least} to {most} ranks"


def _arguments(before: Sequence[str], now: Sequence[str]) -> tuple[Difference, ...]:
    """Return the arguments from the first to the last difference."""
    if tuple(before) == tuple(now):
        return ()
    shortest = min(len(before), len(now))
    first = next((i for i in range(shortest) if before[i] != now[i]), shortest)
    last = next((i for i in range(shortest - first) if before[-1 - i] != now[-1 - i]), shortest - first)
    first = max(0, first - 1)  # the option's name as well
    return (
        Difference("arguments", _joined(before[first : len(before) - last]), _joined(now[first : len(now) - last])),
    )


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


def _joined(arguments: Sequence[str]) -> str:
    line = " ".join(arguments)
    return line if len(line) <= LONGEST else line[: LONGEST - 1] + "…"
