"""What does this rank show right now?  Writes the snapshot of one rank that `status` and the metrics read."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec

from resilience.core import watch
from resilience.core.observation import Doing, Observation
from resilience.facts.identity import Origin
from resilience.facts.limits import Limits
from resilience.monitor.evidence import shortest
from resilience.monitor.page import PageView
from resilience.system.background import WRITER
from resilience.telemetry import rank_snapshot


class Snapshots:
    """The snapshots of one rank. due: when to write the next one, in monotonic seconds."""

    def __init__(self) -> None:
        self.due = time.monotonic() + rank_snapshot.WRITE_EVERY
        self._last: rank_snapshot.RankSnapshot | None = None

    def write(
        self,
        folder: Path | None,
        origin: Origin | None,
        view: PageView,
        observation: Observation,
        limits: Limits,
        now: float,
        is_last: bool = False,
    ) -> None:
        """Write what page and observation show, unless nothing has changed or the disk does not answer.

        origin: of the rank, with its iteration if the page shows iterations. is_last: the rank is gone."""
        self.due = now + rank_snapshot.pause(None if origin is None else origin.world_size)
        is_shown = view.last_sign_at is not None or view.doing is not Doing.OUTSIDE
        if origin is None or folder is None or not is_shown:
            return  # it is not attached, and another monitor may watch it
        sections = () if is_last else observation.open_sections
        snapshot = rank_snapshot.RankSnapshot(
            origin=origin,
            doing=view.hook or view.doing.value if not is_last else Doing.OUTSIDE.value,
            written_at=now,
            offset=time.time() - time.monotonic(),
            step=view.step,
            step_at=observation.step_at,
            heartbeat_at=view.last_sign_at,
            sections=tuple(
                rank_snapshot.SnapshotSection(
                    sign.name, sign.seen_at, shortest(watch.section_limit(limits, observation, sign))
                )
                for sign in sections[: rank_snapshot.MOST_SECTIONS]
            ),
            sections_more=max(0, len(sections) - rank_snapshot.MOST_SECTIONS),
            limits=rank_snapshot.allowed(limits, observation.heartbeats_from is not None),
            alive_at=now,
            away_since=view.away_since,
        )
        previous = self._last
        if previous is not None and snapshot.is_like(previous):
            if not is_last and now - (previous.alive_at or 0.0) < rank_snapshot.alive_every(origin.world_size):
                return
            snapshot = msgspec.structs.replace(snapshot, written_at=previous.written_at)  # unchanged, but alive
        if is_last or not WRITER.is_stalled:
            self._last = snapshot
            WRITER.submit(lambda: _write(folder, snapshot, view.doing is Doing.OUTSIDE), is_last)


def _write(folder: Path, snapshot: rank_snapshot.RankSnapshot, is_outside: bool) -> None:
    """Replace the file of a rank. In a Wrapper's call it belongs to the Wrapper's monitor, unless a client reports to
    the launcher's one too; but steps are reported to the Wrapper's only. is_outside: the launcher's sees nothing."""
    origin = snapshot.origin
    rank = -1 if origin.initial_rank is None else origin.initial_rank
    for other in rank_snapshot.read_of(folder, origin.node, [rank]) if origin.is_launchers else ():
        if (other.origin.attempt, other.origin.cycle) == (origin.attempt, origin.cycle):
            if is_outside and not other.origin.is_launchers:
                return
            if snapshot.step is None:
                snapshot = msgspec.structs.replace(snapshot, step=other.step, step_at=other.step_at)
    rank_snapshot.write(folder, snapshot)
