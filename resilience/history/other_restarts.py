"""When did a launcher like torchrun restart a rank, and for how long?  Intervals, a part of `history.timeline`.

Such a launcher leaves no records. `history.other_launchers` says what is known of its restarts: a rank's calls are in a
later cycle. Here each rank that came back gets one interval, from its own file alone, so that files may be read in any
order. It belongs to the cycle that failed. It begins when the rank learns of the last interruption there, or else with
the last end of its call or process, and ends when the rank enters its function again. A rank that came back on another
node has no interval: its records before are in another file. Neither has one that came back as a spare: it waits."""

from __future__ import annotations

import msgspec

from resilience.facts import events
from resilience.facts.identity import ROOT, Key, Origin, rank_restart_key
from resilience.facts.records import Record
from resilience.history.intervals import Fact, Interval


class _RankCycle:
    """What is known of one rank in its newest cycle. Times are UTC nanoseconds."""

    def __init__(self, origin: Origin) -> None:
        self.origin = origin
        self.place = (origin.call, origin.iteration or 0)  # the newest call and iteration
        self.noticed_ns: int | None = None  # of the interruption of this iteration
        self.ended_ns: int | None = None
        self.kind = "peer"
        self.cause: Key | None = None
        self.before: _RankCycle | None = None
        self.is_restarted = False  # torchrun started this cycle
        self.has_entered = self.is_spare = False

    def enter(self, origin: Origin, is_spare: bool) -> None:
        """Note the start of an iteration."""
        place = (origin.call, origin.iteration or 0)
        self.is_spare = is_spare
        if is_spare:
            self.before = None  # it waits for its turn, perhaps for hours: that is no restart
        if place > self.place:
            self.place, self.noticed_ns, self.kind, self.cause = place, None, "peer", None

    def notice(self, at_ns: int, by: int | None, kind: str = "peer") -> None:
        """Note that the rank learned of the interruption; later records are about its consequences. by: the rank that
        failed first, as far as is known."""
        if self.noticed_ns is None:
            self.noticed_ns, self.kind = at_ns, kind
            self.cause = None if by is None else (self.place[0], "interruption", self.place[1], by, 0)


class OtherRestarts:
    """The restarts of a job's ranks by another launcher."""

    def __init__(self) -> None:
        self._ranks: dict[tuple[str, int], _RankCycle] = {}  # by node and initial rank

    def take(self, record: Record) -> list[Interval]:
        """Add a record of a rank or its monitor. Return the restart that ends with it."""
        rank, event = record.origin.initial_rank, record.event
        if rank is None or not isinstance(event, _OF_RANKS):
            return []
        known = self._cycle_of(record.origin, rank)
        if known is None:
            return []  # a late record of an earlier cycle
        match event:
            case events.CallStarted():
                known.is_restarted |= event.restarts_left is not None
            case events.IterationStarted():
                known.enter(record.origin, event.state == "inactive")
            case events.RankInterrupted(interruption):
                at_ns = interruption.detected_wall_ns
                known.notice(
                    record.wall_ns if at_ns is None else at_ns, interruption.rank, interruption.interruption.value
                )
            case events.IterationDecided():
                known.notice(record.wall_ns, event.by)
            case events.CallEnded() | events.RankExited():
                known.ended_ns = max(record.wall_ns, known.ended_ns or 0)
            case events.StageStarted(stage="run") if not (known.has_entered or known.is_spare):
                known.has_entered = True
                return _restart(rank, known, record)
            case _:  # another stage
                pass
        return []

    def _cycle_of(self, origin: Origin, rank: int) -> _RankCycle | None:
        known = self._ranks.get((origin.node, rank))
        cycle = (origin.attempt, origin.cycle)
        if known is not None and cycle < (known.origin.attempt, known.origin.cycle):
            return None
        if known is None or cycle > (known.origin.attempt, known.origin.cycle):
            later = self._ranks[origin.node, rank] = _RankCycle(origin)
            if known is not None and known.origin.attempt == origin.attempt:
                later.before, known.before = known, None
            known = later
        return known


def _restart(rank: int, known: _RankCycle, record: Record) -> list[Interval]:
    before = known.before
    since = None if before is None else before.ended_ns if before.noticed_ns is None else before.noticed_ns
    if before is None or since is None or not known.is_restarted:
        return []
    origin = msgspec.structs.replace(record.origin, cycle=before.origin.cycle, call=before.place[0], iteration=None)
    end_ns = max(since, record.wall_ns)
    facts: dict[str, Fact] = {"interruption.kind": before.kind}
    return [
        Interval(
            *("restart", rank_restart_key(rank), ROOT, origin, since, end_ns, "completed"),
            facts=facts,
            cause=before.cause,
            each_s=((end_ns - since) / 1e9,),
        )
    ]


_OF_RANKS = (
    events.CallStarted,
    events.IterationStarted,
    events.RankInterrupted,
    events.IterationDecided,
    events.CallEnded,
    events.RankExited,
    events.StageStarted,
)
