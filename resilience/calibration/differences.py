"""Do limits learned from one run fit another run?

The duration of a step depends on the workload and on the shape of the world. The workload is the script, or the name
that the user gives with `--calibration-key`. Other differences (arguments such as `--resume`, the torch version) are
listed, but do not matter by themselves. If arguments change durations, the user gives each workload its own key."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from resilience.facts.configuration import Configuration
from resilience.facts.in_words import count

LONGEST = 120  # characters of the arguments that a difference shows
OF_TABLE = "a table does not say what was run"


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
    (`--ranks`); they apply from the observed number up to this number. A table of another tool may fit any run: only
    the user knows."""
    if before.table and now.table:
        return _unlike("table", before.table, now.table, OF_TABLE)
    if before.table or now.table:
        return _unlike("source", before.name, now.name, "")
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


def serious(listed: Sequence[Difference]) -> str:
    """Return why limits of one run do not fit the other, empty if they do."""
    return "; ".join(difference.words for difference in listed if difference.why)


def harmless(listed: Sequence[Difference]) -> str:
    """Return the differences that do not matter by themselves."""
    return "; ".join(difference.words for difference in listed if not difference.why)


def _unlike(what: str, before: object, now: object, why: str) -> tuple[Difference, ...]:
    return () if before == now else (Difference(what, str(before), str(now), why),)


def _range(least: int, most: int) -> str:
    return count(least, "rank") if least == most else f"{least} to {most} ranks"


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


def _joined(arguments: Sequence[str]) -> str:
    line = " ".join(arguments)
    return line if len(line) <= LONGEST else line[: LONGEST - 1] + "…"
