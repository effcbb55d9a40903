"""What does each rank show right now?  One small file a rank, for exporters and `resilience status`.

A monitor leaves there what it sees of its rank (`timings/<node>-<rank>.signs`), replaced as a whole, now and
then and only when something has changed. These are observations, no events: nothing is counted from
them, and a stale file only means that the rank shows nothing new."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import msgspec

from resilience.adapters import files
from resilience.core import encoding
from resilience.core.deadlines import HEARTBEAT, of_section
from resilience.core.identity import Origin
from resilience.core.watch import Limits
from resilience.errors import DecodeError

ALIVE_EVERY = 10.0
EVERY = 2.0  # seconds between two writes of a rank's file, at least
A_SECOND = 128  # files that all ranks of a job write in a second, at most: they may share one file server
MOST_SECTIONS = 16
_NAME = re.compile(r"(?P<node>.+)-(?P<rank>\d+)\.signs")


class Open(msgspec.Struct, frozen=True, omit_defaults=True):
    """An open section. at: when it was entered. limit_s: the shorter one of its limits."""

    name: str
    at: float
    limit_s: float | None = None


class Allowed(msgspec.Struct, frozen=True, omit_defaults=True):
    """A limit in force, of a section, or of heartbeats under the name "". seconds: the shorter one of its two."""

    name: str
    seconds: float
    is_learned: bool = False


class Signs(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a rank shows. Times are seconds of its host's monotonic clock; plus `offset` they are UTC.

    heartbeat_at: of the last heartbeat, ping, step or end of a section. written_at: when any of this was new; changes
    of it alone are none. alive_at: when the monitor last looked at its rank, told every `alive_every` seconds at
    least."""

    origin: Origin
    doing: str
    written_at: float = 0.0
    offset: float = 0.0
    step: int | None = None
    step_at: float | None = None
    heartbeat_at: float | None = None
    sections: tuple[Open, ...] = ()
    sections_more: int = 0  # open ones beyond the first MOST_SECTIONS
    limits: tuple[Allowed, ...] = ()  # of MOST_SECTIONS sections at most
    alive_at: float | None = None
    schema: int = 1

    def is_like(self, other: Signs | None) -> bool:
        """Whether it shows the same as another one."""
        if other is None:
            return False
        plain: Signs = msgspec.structs.replace(
            other, written_at=self.written_at, offset=self.offset, alive_at=self.alive_at
        )
        return self == plain

    def open_for(self, section: Open, now: float) -> float:
        """Return for how many seconds a section has been open for sure. now: on its host's monotonic clock."""
        return max(0.0, self._known_until(now) - section.at)

    def silent_for(self, now: float) -> float | None:
        """Return for how many seconds the rank has been silent for sure, None if it never gave a sign of life."""
        if self.heartbeat_at is None:
            return None
        return max(0.0, self._known_until(now) - self.heartbeat_at)

    def _known_until(self, now: float) -> float:
        """Return the time until which what the file says is still true.

        While the file may be about to be replaced, that is when it was written; an older file says that nothing has
        changed since."""
        is_settled = now - self.written_at > 2 * pause(self.origin.world_size)
        return now if is_settled else self.written_at

    def wall(self, at: float) -> float:
        """Return a time of this host as UTC seconds."""
        return at + self.offset


def allowed(limits: Limits) -> tuple[Allowed, ...]:
    """Return the limits of heartbeats and sections, for whoever looks at what the rank shows."""
    rows = [("", HEARTBEAT, limits.heartbeat)]
    rows += [(name, of_section(name), limit) for name, limit in list(limits.sections.items())[:MOST_SECTIONS]]
    found = []
    for name, deadline, limit in rows:
        seconds = limit.hard if limit.soft is None else limit.soft
        if seconds is not None:
            found.append(Allowed(name, seconds, deadline in limits.learned))
    return tuple(found)


def pause(world_size: int | None) -> float:
    """Return the seconds between two writes of one rank's file."""
    return max(EVERY, (world_size or 1) / A_SECOND)


def alive_every(world_size: int | None) -> float:
    """Return the seconds after which a rank's file is written again though it shows nothing new."""
    return max(ALIVE_EVERY, 4 * pause(world_size))


def path_of(folder: Path, node: str, rank: int) -> Path:
    """Return where a rank's signs are. folder: the run folder."""
    return folder / "timings" / f"{node}-{rank}.signs"


def write(folder: Path, signs: Signs) -> bool:
    """Replace a rank's file; answers whether it worked."""
    rank = -1 if signs.origin.initial_rank is None else signs.origin.initial_rank
    return files.replace(path_of(folder, signs.origin.node, rank), encoding.to_json(signs))


_read = encoding.reader(Signs)


def read(path: Path) -> Signs:
    """Read a rank's file. Raises: OSError, DecodeError."""
    return _read(path.read_bytes())


def read_of(folder: Path, node: str, ranks: Iterable[int]) -> list[Signs]:
    """Return what these ranks of a node show, without a look at the files of others. What cannot be read is left
    out."""
    found = []
    for rank in ranks:
        try:
            found.append(read(path_of(folder, node, rank)))
        except (OSError, DecodeError):
            continue
    return found


def read_all(folder: Path, node: str | None = None) -> dict[int, Signs]:
    """Return what the ranks show, of one node or of all, by initial rank. What cannot be read is left out."""
    found: dict[int, Signs] = {}
    try:
        names = [path for path in (folder / "timings").iterdir() if path.suffix == ".signs"]
    except OSError:
        return found
    for path in names:
        named = _NAME.fullmatch(path.name)
        if named is None or node not in (None, named["node"]):
            continue
        try:
            signs = read(path)
        except (OSError, DecodeError):
            continue  # it goes, or is of another version
        rank = int(named["rank"])
        # After a change of ranks between nodes an old file stays behind.
        if rank not in found or _order(signs) > _order(found[rank]):
            found[rank] = signs
    return found


def _order(signs: Signs) -> tuple[int, int, float]:
    return signs.origin.attempt, signs.origin.cycle, signs.wall(signs.written_at)
