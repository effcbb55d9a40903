"""Are two runs alike, so that limits learned from one fit the other?

How long a step takes follows from the workload and from the shape of the world. The workload is the script, or the name
that the user gives with `--calibration-key`. Other differences (arguments such as `--resume`, the torch version) are
listed and do not matter by themselves. A user whose arguments change durations gives each workload a key of its own."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

LONGEST = 120  # characters of the arguments that a difference shows


class Configuration(msgspec.Struct, frozen=True, omit_defaults=True):
    """What is known of a run. script: as the user named it. key: of `--calibration-key`. arguments: with secrets
    masked. table: the run was read from this table, which says nothing else. 0 and empty: unknown."""

    script: str = ""
    key: str = ""
    world_size: int = 0
    ranks_per_node: int = 0
    arguments: tuple[str, ...] = ()
    torch: str = ""
    table: str = ""

    @property
    def workload(self) -> str:
        """The name of what runs: the key, else the script without its folder."""
        return self.key or self.script.rpartition("/")[2]

    @property
    def name(self) -> str:
        """Equal for runs that may be put together without a question."""
        if self.table:
            return f"table {self.table}"
        shape = f"{self.world_size} ranks" + (f", {self.ranks_per_node} a node" if self.ranks_per_node else "")
        return f"{self.workload or 'an unnamed workload'}, {shape}"


class Difference(msgspec.Struct, frozen=True):
    """Something in which two configurations differ. why: the reason for which limits of one do not fit the other; empty
    for a difference that does not matter by itself."""

    what: str
    before: str
    now: str
    why: str = ""

    @property
    def words(self) -> str:
        """One line about it."""
        reason = f": {self.why}" if self.why else ""
        return f"{self.what} {self.before!r} before, {self.now!r} now{reason}"


def differences(before: Configuration, now: Configuration, ranks: int = 0) -> tuple[Difference, ...]:
    """Return in what two runs differ. ranks: how many ranks the limits of the first run were fitted for (`--ranks`);
    they hold from as many as were observed up to that number. A table of another tool fits any run."""
    if before.table and now.table:
        return _unlike("table", before.table, now.table, "a table does not say what was run")
    if before.table or now.table:
        return ()
    least, most = before.world_size, max(before.world_size, ranks)
    is_in_range = least <= now.world_size <= most
    fits = "" if is_in_range else f"limits hold for {_range(least, most)}; calibrate with --ranks {now.world_size}"
    is_known = before.ranks_per_node and now.ranks_per_node
    return (
        *_unlike(
            "workload",
            before.workload,
            now.workload,
            "another workload takes another time; if it is the same, give both runs one --calibration-key",
        ),
        *_unlike("world size", before.world_size, now.world_size, fits),
        *(
            _unlike(
                "ranks per node",
                before.ranks_per_node,
                now.ranks_per_node,
                "collectives within a node and between nodes take unlike times; calibrate on runs of this shape",
            )
            if is_known
            else ()
        ),
        *_unlike("torch", before.torch, now.torch, ""),
        *_arguments(before.arguments, now.arguments),
    )


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
    """Show the arguments from the first to the last one that differs."""
    if tuple(before) == tuple(now):
        return ()
    shortest = min(len(before), len(now))
    first = next((i for i in range(shortest) if before[i] != now[i]), shortest)
    last = next((i for i in range(shortest - first) if before[-1 - i] != now[-1 - i]), shortest - first)
    first = max(0, first - 1)  # the option's name as well
    return (
        Difference("arguments", _joined(before[first : len(before) - last]), _joined(now[first : len(now) - last])),
    )


def _joined(arguments: Sequence[str]) -> str:
    text = " ".join(arguments)
    return text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"
