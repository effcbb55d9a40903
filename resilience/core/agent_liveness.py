"""Which agents are still alive?  Each agent raises a count in the job's store; others measure how long it stands still.

Every agent uses its own clock, so clocks of two hosts are never compared. A gap between two looks counts for at most
two intervals: time in which this agent or the store was stopped is not the other agent's silence.

A lost agent may still run behind a failed network. So an agent whose counts do not reach the store declares itself lost
before the others may (`Lease`), and ends all its work with the store. If a job splits in two, only the part with the
store continues. The threads are in `launcher.rendezvous.agent_heartbeat`."""

from __future__ import annotations

from collections.abc import Iterable

from resilience.core.agent_protocol import Counts, Protocol, ReadClock, Seconds
from resilience.core.restart import Read

LEASE = 0.75  # share of the silence after which others declare an agent lost; its workers end in the remaining time
STOP_LIMIT = 10.0  # seconds that an agent waits for a silent store once a signal has asked it to stop
LOOKS = 20  # looks within a lease
COUNTS = 3  # counts within a lease at least, because a count may be late


def key(id: str) -> str:
    """Return the key of an agent's count."""
    return f"beat/{id}"


def count_every(interval: Seconds, *limits: Seconds) -> Seconds:
    """Return the seconds between two counts of an agent: `interval`, or less if that is too long for its limits.

    limits: seconds of silence after which this agent is lost, for others or for itself."""
    return min(interval, LEASE * min(limits) / COUNTS)


class Silences:
    """How long each of the other agents has been silent, as observed by one agent."""

    def __init__(self, interval: Seconds, limit: Seconds) -> None:
        """interval: seconds between two looks; limit: seconds of silence after which an agent is lost."""
        self.limit = limit
        self._interval = interval
        self._counts: dict[str, tuple[int, Seconds]] = {}  # id -> last count, silent for
        self._looked_at: dict[str, Seconds] = {}

    def lost(self, ids: Iterable[str]) -> Protocol[list[str]]:
        """Return which of these agents are lost. This costs one operation for any number of agents. Agents that were
        looked at within the interval are not looked at again."""
        ids = list(ids)
        now = yield ReadClock()
        due = [id for id in ids if now - self._looked_at.get(id, float("-inf")) >= self._interval]
        if due:
            for id, count in zip(due, (yield Counts(tuple(map(key, due)))), strict=True):
                self.hear(id, count, now)
        return [id for id in ids if self._counts[id][1] >= self.limit]

    def hear(self, id: str, count: int, now: Seconds) -> Seconds:
        """Note an agent's present count. Return how many seconds it has been silent."""
        since = now - self._looked_at.get(id, float("-inf"))
        last, silent_for = self._counts.get(id, (-1, 0.0))
        self._looked_at[id] = now
        silent_for = silent_for + min(since, 2 * self._interval) if count == last else 0.0
        self._counts[id] = count, silent_for
        return silent_for


class SignsOfLife:
    """Does any of several agents still count?  One agent's observation, of a job that may be over: another agent may
    delete the counts at any moment."""

    def __init__(self, interval: Seconds, limit: Seconds) -> None:
        """interval: seconds between two looks; limit: seconds of silence after which an agent is lost."""
        self._limit = limit
        self._first: dict[str, str] = {}  # id -> count at the first look
        self._silences = Silences(interval, limit)

    def look(self, ids: Iterable[str]) -> Protocol[bool | None]:
        """Return True if one of these agents has counted since the first look, or if a count was deleted; False if all
        of them are lost; None if neither is known yet."""
        ids = list(ids)
        counts = yield Read(tuple(map(key, ids)))
        now = yield ReadClock()
        if None in counts or any(
            self._first.setdefault(id, count) != count for id, count in zip(ids, counts, strict=True)
        ):
            return True
        silent_for = [self._silences.hear(id, int(count), now) for id, count in zip(ids, counts, strict=True)]
        return None if min(silent_for, default=self._limit) < self._limit else False


class Timer:
    """Has a condition held for long enough?"""

    def __init__(self, limit: Seconds) -> None:
        self._limit = limit
        self._since: Seconds | None = None

    def has_run_out(self, is_running: bool, now: Seconds) -> bool:
        """Return True if the condition has held at every look for `limit` seconds."""
        if not is_running:
            self._since = None
            return False
        if self._since is None:
            self._since = now
        return now - self._since >= self._limit


class Lease:
    """How long an agent may continue once its counts no longer reach the store."""

    def __init__(self, limit: Seconds) -> None:
        """limit: seconds of silence after which others declare this agent lost."""
        self.seconds = LEASE * limit
        self.is_shortened = False
        self._limit = limit
        self._count = -1
        self._counted_at = 0.0  # when the last count was found to have reached the store
        self._looked_at = 0.0
        self._silent_for = 0.0
        self.has_run_out = False

    def shorten(self, seconds: Seconds) -> None:
        """Let the lease last at most so long. An agent that was asked to stop waits no longer for a silent store."""
        if seconds < self.seconds:
            self.seconds, self.is_shortened = seconds, True

    def look(self, count: int, now: Seconds) -> bool:
        """Return True once the lease has run out; this is final. Call it LOOKS times within the lease. count: how many
        counts have reached the store. A long gap between two looks counts little, because this process may have been
        stopped; the store then says what happened meanwhile."""
        if self.has_run_out:
            return True
        if count != self._count:
            self._count, self._counted_at, self._silent_for = count, now, 0.0
        else:
            self._silent_for += min(now - self._looked_at, 2 * self.seconds / LOOKS)
        self._looked_at = now
        self.has_run_out = self._silent_for >= self.seconds
        return self.has_run_out

    def time_left(self, now: Seconds) -> Seconds | None:
        """Return the seconds until others may continue without this agent, None if its lease has not run out. Here a
        gap between two looks counts in full, because the others did not stand still."""
        if not self.has_run_out:
            return None
        return max(0.0, self._counted_at + self._limit - now)
