"""What is the current state of each rank?  One small file per rank, for exporters and `resilience status`.

A monitor writes what it observes of its rank to `timings/<node>-<rank>.signs`. The file is replaced as a whole, at
intervals: after a change, and every `alive_every` seconds without one. These are observations, not events: nothing is
counted from them. An old file says nothing about the rank since then: its monitor may be stopped, or the disk full."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec

from resilience.core.observation import Doing
from resilience.core.watch import heartbeat_limit
from resilience.errors import DecodeError
from resilience.facts import encoding
from resilience.facts.deadlines import HEARTBEAT, of_section
from resilience.facts.identity import FileOwner, Origin
from resilience.facts.limits import Limits
from resilience.system import files

WRITE_EVERY = 2.0  # minimum seconds between two writes of a rank's file
FILES_PER_SECOND = 128  # maximum files per second that all ranks of a job write: they may share one file server
MOST_SECTIONS = 16
OLD_LOOKS = 3  # intervals after which a snapshot is old: its monitor cannot write another one
OUTSIDE = Doing.OUTSIDE.value  # no monitor watches the rank now
OWES_NO_SIGN = (Doing.WAITING.value, Doing.ENDING.value, OUTSIDE)
_NAME = re.compile(r"(?P<node>.+)-(?P<rank>\d+)\.signs")


class SnapshotSection(msgspec.Struct, frozen=True, omit_defaults=True):
    """An open section. at: when it was entered. limit_s: the shorter of its two limits."""

    name: str
    at: float
    limit_s: float | None = None


class Allowed(msgspec.Struct, frozen=True, omit_defaults=True):
    """An active limit of a section, or of heartbeats under the name "". seconds: the shorter of its two. has_first: the
    first occurrences after a start have a limit of their own."""

    name: str
    seconds: float
    is_learned: bool = False
    has_first: bool = False


class RankSnapshot(msgspec.Struct, frozen=True, omit_defaults=True):
    """The observed state of a rank. Times are seconds of its host's monotonic clock; add `offset` to get UTC.

    heartbeat_at: of the last heartbeat, ping, step, or start or end of a section. written_at: when any of this changed;
    a change of written_at alone does not count. alive_at: when the monitor last checked its rank; updated every
    `alive_every` seconds at least. away_since: when the Wrapper's function ended, until it runs again."""

    origin: Origin
    doing: str
    written_at: float = 0.0
    offset: float = 0.0
    step: int | None = None
    step_at: float | None = None
    heartbeat_at: float | None = None
    sections: tuple[SnapshotSection, ...] = ()
    sections_more: int = 0  # number of open sections beyond the first MOST_SECTIONS
    limits: tuple[Allowed, ...] = ()  # of at most MOST_SECTIONS sections
    alive_at: float | None = None
    away_since: float | None = None
    schema: int = 1

    def is_like(self, other: RankSnapshot | None) -> bool:
        """Return True if the other snapshot shows the same state."""
        if other is None:
            return False
        aligned: RankSnapshot = msgspec.structs.replace(
            other, written_at=self.written_at, offset=self.offset, alive_at=self.alive_at
        )
        return self == aligned

    @property
    def known_until(self) -> float:
        """Return when the monitor last looked at its rank: then, everything here was so."""
        return self.written_at if self.alive_at is None else max(self.written_at, self.alive_at)

    def open_for(self, section: SnapshotSection) -> float:
        """Return for how many seconds a section has certainly been open."""
        return self._lasted(section.at)

    def silent_for(self) -> float | None:
        """Return for how many seconds the rank has certainly been silent. None if it never gave a sign of life, or owes
        none: it waits for the others, for instance because its function has returned, it shuts down, or it has ended
        its monitoring."""
        if self.heartbeat_at is None or self.doing in OWES_NO_SIGN:
            return None
        return self._lasted(self.heartbeat_at)

    def _lasted(self, since: float) -> float:
        """Return for how long something has certainly lasted, without the time for which the function has not run."""
        is_cut = self.away_since is not None and since < self.away_since
        until = min(self.known_until, self.away_since or 0.0) if is_cut else self.known_until
        return max(0.0, until - since)

    def is_old(self, now: float) -> bool:
        """Return True if its monitor should have written another one long ago: it is stopped, or the disk full. now: of
        the host's monotonic clock."""
        return self.doing != OUTSIDE and now - self.known_until > old_after(self.origin.world_size)

    def wall(self, at: float) -> float:
        """Return a time of this host as UTC seconds."""
        return at + self.offset


def allowed(limits: Limits, are_heartbeats_announced: bool = False) -> tuple[Allowed, ...]:
    """Return the limits of heartbeats and sections that hold, for readers of the snapshot."""
    rows = [("", HEARTBEAT, heartbeat_limit(limits, are_heartbeats_announced))]
    rows += [(name, of_section(name), limit) for name, limit in list(limits.sections.items())[:MOST_SECTIONS]]
    active = []
    for name, deadline, limit in rows:
        seconds = limit.hard if limit.soft is None else limit.soft
        if seconds is not None:
            has_first = deadline in limits.first or (name in limits.warmup and limits.warmup_occurrences > 0)
            active.append(Allowed(name, seconds, deadline in limits.learned, has_first))
    return tuple(active)


def pause(world_size: int | None) -> float:
    """Return the seconds between two writes of one rank's file."""
    return max(WRITE_EVERY, (world_size or 1) / FILES_PER_SECOND)


def alive_every(world_size: int | None) -> float:
    """Return the seconds after which a rank's file is written again even without a change."""
    return 2 * pause(world_size)


def old_after(world_size: int | None) -> float:
    """Return the age in seconds from which on a rank's file says nothing about the present."""
    return OLD_LOOKS * alive_every(world_size)


def path_of(folder: Path, node: str, rank: int) -> Path:
    """Return the path of a rank's snapshot. folder: the run folder."""
    return folder / "timings" / f"{FileOwner(node, rank).name}.signs"


def write(folder: Path, snapshot: RankSnapshot) -> bool:
    """Replace a rank's file; return True on success."""
    rank = -1 if snapshot.origin.initial_rank is None else snapshot.origin.initial_rank
    return files.replace(path_of(folder, snapshot.origin.node, rank), encoding.to_json(snapshot))


_read = encoding.reader(RankSnapshot)


def read(path: Path | str) -> RankSnapshot:
    """Read a rank's file. Raises: OSError, DecodeError."""
    with open(path, "rb", buffering=0) as file:
        return _read(file.read())


def read_of(folder: Path, node: str, ranks: Iterable[int]) -> list[RankSnapshot]:
    """Return the snapshots of these ranks of a node, without reading the files of others. Skip unreadable files."""
    snapshots = []
    for rank in ranks:
        try:
            snapshots.append(read(path_of(folder, node, rank)))
        except (OSError, DecodeError):
            continue
    return snapshots


def read_all(
    folder: Path, node: str | None = None, note: Callable[[Path, Exception], None] = lambda path, error: None
) -> dict[int, RankSnapshot]:
    """Return the snapshots of one node's ranks, or of all, by initial rank. Skip unreadable files.

    note: takes the path of each file that was skipped, and why."""
    snapshots: dict[int, RankSnapshot] = {}
    try:
        names = os.listdir(folder / "timings")
    except OSError:
        return snapshots
    for name in names:
        match = _NAME.fullmatch(name)
        if match is None or node not in (None, match["node"]):
            continue
        try:
            snapshot = read(f"{folder}/timings/{name}")
        except (OSError, DecodeError) as error:
            note(folder / "timings" / name, error)  # it is damaged, or from another version
            continue
        rank = int(match["rank"])
        # After ranks have moved between nodes, an old file remains.
        if rank not in snapshots or _order(snapshot) > _order(snapshots[rank]):
            snapshots[rank] = snapshot
    return snapshots


def _order(signs: RankSnapshot) -> tuple[int, int, float]:
    return signs.origin.attempt, signs.origin.cycle, signs.wall(signs.written_at)
