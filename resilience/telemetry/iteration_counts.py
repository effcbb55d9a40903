"""How often did iterations of a Wrapper end, and how?  Counted once for all ranks of a node.

An interrupted iteration counts if another one follows it in the same call: that is a restart in place. If none does,
the fault ends the call, and the launcher may restart the job, which it counts as its own. Torchrun counts nothing, so
without our launcher the last iteration of a cycle counts too, once an iteration of a later cycle follows. Wrapper and
launcher may also react to the same death: the Wrapper starts another iteration, and a moment later the launcher ends
it. So under the launcher, if ranks died before the next iteration, it must last for SETTLED_S, or end by itself: ranks
end it, or one of them dies in it without the launcher. The report knows the launcher's decision, and gives the same
numbers (`attribution.restarts`)."""

from __future__ import annotations

import math

from resilience.facts import events
from resilience.facts.identity import Origin
from resilience.facts.records import Record

SETTLED_S = 10.0  # the launcher notices a death within a second, and stops the workers at once

Call = tuple[int, int, int]  # attempt, cycle, call
Key = tuple[int, int, int, int]  # attempt, cycle, call, iteration


class IterationCounts:
    """The iterations of one node, in any order of its records. Only the latest ones of each call are kept."""

    def __init__(self) -> None:
        self._is_launched = False
        self._newest_ns = 0
        self._ended_below: dict[Call, int] = {}  # the iterations of each call before this one have all ended
        self._ended: set[Key] = set()  # besides them
        self._interrupted: set[Key] = set()  # ended, but not counted yet
        self._ended_by_ranks: set[Key] = set()
        self._started_ns: dict[Key, int] = {}
        self._lost_ns: dict[Key, int] = {}  # when the first rank was lost
        self._lost_ranks: dict[Key, set[int]] = {}
        self._died: set[tuple[int, int, int]] = set()  # attempt, cycle, rank: the launcher had not stopped it
        self._sizes: dict[Key, int] = {}  # the world of each iteration, and of the one before the latest
        self._latest: dict[Call, int] = {}  # iteration of each call
        self._cycles: dict[int, int] = {}  # the latest cycle of each attempt
        self._counts = {"completed": 0, "interrupted": 0}

    def take(self, record: Record) -> None:
        """Add a record."""
        origin, event = record.origin, record.event
        self._newest_ns = max(self._newest_ns, record.mono_ns)
        self._is_launched |= origin.role == "agent"
        if isinstance(event, events.WorkerExited) and not event.expected:
            self._died.add((origin.attempt, origin.cycle, event.worker_rank))
        if origin.initial_rank is None or origin.is_launchers:
            return
        key = key_of(origin)
        if isinstance(event, events.IterationStarted):
            self._cycles[key[0]] = max(self._cycles.get(key[0], 0), key[1])
            self._pass(key)
            if key[3] >= self._latest.get(key[:3], -1) - 1:
                self._sizes[key] = origin.world_size or 0
        is_latest = key[3] >= self._latest.get(key[:3], -1)
        match event:
            case events.IterationStarted() if is_latest:
                self._started_ns[key] = min(self._started_ns.get(key, record.mono_ns), record.mono_ns)
            case events.IterationEnded(outcome="lost"):  # its stand-in reports the outcome
                if is_latest:
                    self._lost_ns[key] = min(self._lost_ns.get(key, record.mono_ns), record.mono_ns)
                    self._lost_ranks.setdefault(key, set()).add(origin.initial_rank)
            case events.IterationEnded():
                if is_latest:
                    self._ended_by_ranks.add(key)
                self._take_end(key, event.outcome == "completed")
            case events.RankStoodInFor() if event.initial_rank == origin.initial_rank:
                self._take_end(key, event.result == "completed")
            case _:  # no other event matters here
                pass

    def counted(self, now_ns: int | None) -> dict[str, int]:
        """Return the numbers by outcome. now_ns: on this host's monotonic clock, None in a replay."""
        now_ns = self._newest_ns if now_ns is None else now_ns
        followed = {key for key in self._interrupted if self._is_followed(key, now_ns)}
        self._interrupted -= followed
        self._counts["interrupted"] += len(followed)
        return {outcome: count for outcome, count in self._counts.items() if count}

    def _pass(self, key: Key) -> None:
        """Note that an iteration began. Drop what only the latest iteration of its call needs to keep."""
        call, latest = key[:3], self._latest.get(key[:3], -1)
        if key[3] > latest:
            self._latest[call] = key[3]
            for known in (self._started_ns, self._lost_ns, self._lost_ranks):
                known.pop((*call, latest), None)
            self._sizes.pop((*call, latest - 1), None)
            self._ended_by_ranks.discard((*call, latest))
            if (*call, latest - 1) in self._interrupted:  # another one follows that one, and one more
                self._interrupted.discard((*call, latest - 1))
                self._counts["interrupted"] += 1

    def _take_end(self, key: Key, is_completed: bool) -> None:
        call, below = key[:3], self._ended_below.get(key[:3], 0)
        if key in self._ended or 0 <= key[3] < below:
            return
        self._ended.add(key)
        while (*call, below) in self._ended:
            self._ended.discard((*call, below))
            below += 1
        self._ended_below[call] = below
        if is_completed:
            self._counts["completed"] += 1
        else:
            self._interrupted.add(key)

    def _is_followed(self, key: Key, now_ns: int) -> bool:
        call, next_one = key[:3], (*key[:3], key[3] + 1)
        latest = self._latest.get(call, -1)
        if not self._is_launched and key[1] < self._cycles.get(key[0], 0):
            return True
        if latest != next_one[3] or not self._is_launched or next_one in self._ended_by_ranks:
            return latest > key[3]
        has_all = 0 < self._sizes.get(key, 0) == self._sizes.get(next_one)
        if has_all or any((*key[:2], rank) in self._died for rank in self._lost_ranks.get(next_one, ())):
            return True
        until_ns = min(now_ns, self._lost_ns.get(next_one, now_ns))
        return until_ns - self._started_ns.get(next_one, math.inf) >= SETTLED_S * 1e9


def key_of(origin: Origin) -> Key:
    """Return the place of an iteration; -1 before the first one of a call."""
    return origin.attempt, origin.cycle, origin.call, -1 if origin.iteration is None else origin.iteration
