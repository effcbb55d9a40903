"""Where did the time of every rank go?  Rank-seconds, each one productive or lost to one cause.

A rank's time begins with its attempt and ends with its call or its process. It is start-up until the rank works for the
first time: it entered its function or showed progress. It is restart from the moment its node knew of an interruption
until the rank's first progress, or until it enters its function if it has shown none before. If another launcher
restarts a Wrapper's job, it is restart from the node's last record of the earlier cycle until the rank enters its
function; if the node was not in the job's previous cycle, from the last record of that cycle on. A rank is compared
with the one that had its position among the node's ranks in the earlier cycle, because ranks get new numbers after the
loss of a node.

Silence before an interruption is a hang of every rank that was at work, because all of them wait for the silent one. A
spare is idle, and so is a rank that finished before the others. The place of a dead rank is idle as long as its node is
on record. Repeated work is rework, at the earlier speed, also if a restart by the launcher repeats steps of a wrapped
function. If no step is reported, or if the rank had called several wrapped functions before the launcher's restart,
rework is unknown and counts as zero here; the views say that it is unknown.

A worker of the launcher without a signal of progress may be loading, or its program sends none. Its time is unknown,
except the silence that ended its cycle. If the worker completes, it has worked since its start. If the rank in its
position shows progress in another cycle on the same node, earlier or later, the program sends signals, and the worker
was loading.

The time of a lost node counts up to its last record. A node that was not in the job's previous cycle waits at no cost
until that cycle has failed. Its own records do not say when that was, so its metrics count its whole wait.

Durations use each node's own monotonic clock. The same definition applies to a node's metrics and to the report of the
whole job: the job's rank-seconds are the sum over its nodes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Set

from resilience.facts.records import Record
from resilience.history.cycles import Cycle, CycleHistory, NodeCycle
from resilience.history.processes import Worker
from resilience.history.wrapped_rank import RankSeconds, WrappedRank

RankCall = tuple[int, int, int]
"""Attempt, cycle, initial rank."""


class RankTimes:
    """The time of all ranks by cause. Wrapped functions are followed record by record. The time of launched workers
    outside of them is derived from the cycles."""

    def __init__(self, offsets: Mapping[str, int]) -> None:
        """offsets: how far each node's clock is ahead, in nanoseconds."""
        self._offsets = offsets
        self._wrapped: dict[RankCall, WrappedRank] = {}
        self._excluded: dict[RankCall, Record] = {}  # the record that says so

    def take(self, record: Record, rank: int) -> None:
        """Add a record of a rank in a wrapped function, or of its monitor."""
        origin = record.origin
        key = (origin.attempt, origin.cycle, rank)
        wrapped = self._wrapped.get(key)
        if wrapped is None:
            wrapped = self._wrapped[key] = WrappedRank(origin.node)
        wrapped.take(record)

    def excluded(self, rank: int, record: Record) -> None:
        """Note that the others went on without a rank. record: of another rank's monitor, perhaps on another node, and
        perhaps read before those of the rank."""
        self._excluded.setdefault((record.origin.attempt, record.origin.cycle, rank), record)

    def spent(self, cycles: CycleHistory, until: Callable[[str, Cycle], int | None]) -> dict[int, RankSeconds]:
        """Return each rank's time by cause, by initial rank.

        until: returns the end of the count of a node's cycle in monotonic nanoseconds; if None, only ended intervals
        count."""
        self._end_excluded()
        by_rank: dict[int, RankSeconds] = {}
        launched: set[RankCall] = set()
        for node, parts in cycles.nodes.items():
            signalling = {  # positions on this node of ranks that have shown progress
                position
                for part in parts.values()
                for position, rank in enumerate(sorted(part.workers))
                if part.workers[rank].has_shown_progress
            }
            for place in sorted(place for place, part in parts.items() if part.started is not None):
                workers = parts[place].workers
                visit = _Visit(cycles, node, place, until(node, place), signalling)
                formers = (
                    {} if visit.before is None else self._formers(visit.before, parts[visit.before].workers, workers)
                )
                inside = {rank: self._wrapped.get((*place, rank)) for rank in workers}
                resumed = [of_rank.first_step for of_rank in inside.values() if of_rank is not None]
                visit.resumed = min((step for step in resumed if step is not None), default=None)
                for position, (rank, worker) in enumerate(sorted(workers.items())):
                    launched.add((*place, rank))
                    wrapped = inside[rank]
                    by_rank.setdefault(rank, RankSeconds()).add(
                        visit.spent_by(position, worker, wrapped, formers.get(rank))
                    )
        for rank, seconds in self._spent_without_agent(sorted(self._wrapped.keys() - launched), until):
            by_rank.setdefault(rank, RankSeconds()).add(seconds)
        return by_rank

    def counted_until(self, call: RankCall, until: Callable[[str, Cycle], int | None]) -> int | None:
        """Return where `spent` ends the count of a rank in a cycle, before its place is vacant, in UTC nanoseconds;
        None if it called no Wrapper there, or if the count has no end."""
        wrapped = self._wrapped.get(call)
        if wrapped is not None and call in self._excluded:
            wrapped.excluded(self._excluded[call], self._offsets)
        end = None if wrapped is None else until(wrapped.node, call[:2])
        if wrapped is None or end is None:
            return None
        return wrapped.counted_until(end) - self._offsets.get(wrapped.node, 0)

    def _end_excluded(self) -> None:
        for key in self._excluded.keys() & self._wrapped.keys():
            self._wrapped[key].excluded(self._excluded[key], self._offsets)

    def _spent_without_agent(
        self, calls: Iterable[RankCall], until: Callable[[str, Cycle], int | None]
    ) -> Iterator[tuple[int, RankSeconds]]:
        """Yield the time of ranks that the launcher of this package has not started, in the order of their cycles."""
        earlier: dict[tuple[int, str, int], tuple[Cycle, WrappedRank, int | None]] = {}  # an earlier cycle, and its end
        ended_ns: dict[Cycle, int] = {}  # last record of each cycle in UTC
        positions: Counter[tuple[Cycle, str]] = Counter()
        calls, resumed = list(calls), dict[tuple[Cycle, str], int]()  # step with which each node began each cycle
        for attempt, cycle, rank in calls:
            wrapped = self._wrapped[attempt, cycle, rank]
            if wrapped.first_step is not None:
                here = (attempt, cycle), wrapped.node
                resumed[here] = min(wrapped.first_step, resumed.get(here, wrapped.first_step))
            if (end := until(wrapped.node, (attempt, cycle))) is not None:
                end_ns = end + wrapped.clock_ns - self._offsets.get(wrapped.node, 0)
                ended_ns[attempt, cycle] = max(end_ns, ended_ns.get((attempt, cycle), end_ns))
        places = sorted({call[:2] for call in calls})
        previous = dict(zip(places[1:], places, strict=False))
        for attempt, cycle, rank in calls:
            wrapped, place = self._wrapped[attempt, cycle, rank], (attempt, cycle)
            end, seat = until(wrapped.node, place), (attempt, wrapped.node, positions[place, wrapped.node])
            positions[place, wrapped.node] += 1
            spent = wrapped.spent_until(end)
            before, former, since = earlier.get(seat, (place, wrapped, None))
            if since is not None:  # another launcher has restarted it
                if before == previous[place]:
                    spent.rework += former.repeated_from(resumed.get((place, wrapped.node)), since, 0)
                else:  # the job went on without it until that cycle ended
                    until_ns = ended_ns.get(previous[place], 0) + self._offsets.get(wrapped.node, 0)
                    since = max(since, until_ns - wrapped.clock_ns)
                spent.restart += spent.startup + max(0, wrapped.began_ns - since)
                spent.startup = 0
            earlier[seat] = (place, wrapped, end)
            yield rank, spent

    def _formers(self, place: Cycle, before: Iterable[int], ranks: Iterable[int]) -> dict[int, WrappedRank]:
        """Return for ranks of a node the rank that had the same position on the node in an earlier cycle, if that one
        was in a wrapped function. before: the node's ranks then: after the loss of another node they have new
        numbers."""
        pairs = zip(sorted(ranks), sorted(before), strict=False)
        known = ((rank, self._wrapped.get((*place, former))) for rank, former in pairs)
        return {rank: former for rank, former in known if former is not None}


class _Visit:
    """One node in one cycle. until: end of the count in monotonic nanoseconds. signalling: positions of ranks that show
    progress in any cycle. before: the cycle from which the node was restarted into this one. resumed: the lowest step
    with which one of its ranks began a wrapped function: all ranks step together."""

    def __init__(self, cycles: CycleHistory, node: str, place: Cycle, until: int | None, signalling: Set[int]) -> None:
        self._part, self._signalling = cycles.part(node, place), signalling
        self.before = cycles.before(node, place)
        self.resumed: int | None = None
        self._before = None if self.before is None else cycles.part(node, self.before)
        failed = self._part.failed_at
        self._is_over = failed is not None
        self._end = until if failed is None else failed[0]
        failed_before = None if self._before is None else self._before.failed_at
        self._failed_before = None if failed_before is None else failed_before[0]
        self._since = cycles.waited_since(node, place) if failed_before is None else failed_before[0]

    def spent_by(
        self, position: int, worker: Worker, wrapped: WrappedRank | None, former: WrappedRank | None
    ) -> RankSeconds:
        """Return one worker's time by cause. position: of its rank on the node. former: the rank in that position in
        the previous cycle, if in a wrapped function."""
        spent = RankSeconds()
        if worker.started_ns is None:
            return spent
        inside = wrapped if worker.called_ns is not None else None
        at_work = worker.called_ns if inside is not None else None if worker.progress is None else worker.progress[0]
        until = worker.started_ns
        if at_work is None and self._end is not None:
            if self._is_over and self._part.has_completed(worker):
                at_work = worker.started_ns
            else:
                spent.work = spent.hang = max(0, min(self._end - worker.started_ns, self._part.silent_ns))
                before_silence = self._end - spent.hang
                if position in self._signalling:
                    until = before_silence  # it was loading
                else:
                    spent.unknown = max(0, before_silence - until)
        since = worker.started_ns if self._since is None else self._since
        if former is not None:
            since = max(since, former.since)
        if at_work is not None:
            until = at_work if self._end is None else min(at_work, self._end)
        waited = max(0, until - since)
        if inside is not None:
            spent = inside.spent_until(self._end)
            if self._end is not None:  # a Wrapper knows nothing of a hang that the launcher's monitor has found
                spent.hang += inside.silent_until(self._end, self._part.silent_ns)
            if former is not None and self._before is not None and self._failed_before is not None:
                spent.rework += former.repeated_from(self.resumed, self._failed_before, self._before.silent_ns)
            waited, spent.startup = waited + spent.startup, 0
        elif at_work is not None and self._end is not None:
            self._outside(spent, position, worker, at_work, self._end)
        if self._part.started is None or self._part.started.why == "first":
            spent.startup += waited
        else:
            spent.restart += waited
        return spent

    def _outside(self, spent: RankSeconds, position: int, worker: Worker, at_work: int, end: int) -> None:
        """Add the time of a worker that calls no Wrapper."""
        until = self._part.worked_until(worker, end)
        spent.work = max(0, until - at_work)
        spent.idle = max(0, end - until)
        spent.hang = max(0, min(spent.work, self._part.silent_ns - spent.idle))  # it waits for no rank once it is done
        if self._before is not None and worker.first_step is not None:
            formers = [former for _, former in sorted(self._before.workers.items())]  # all ranks step together
            former = formers[min(position, len(formers) - 1)] if formers else None
            spent.rework = 0 if former is None else _rework(self._before, former, worker.first_step[1])


def _rework(part: NodeCycle, worker: Worker, resumed: int) -> int:
    """Return the nanoseconds of a cycle's work that a rank repeats. worker: the one in its position then, or
    another one of the node, because all ranks step together. resumed: the step with which it continues."""
    reached, failed, first = part.reached, part.failed_at, worker.first_step
    if reached is None or failed is None or first is None or reached <= first[1]:
        return 0
    until = part.worked_until(worker, failed[0])
    silent = max(0, part.silent_ns - (failed[0] - until))  # it waits for no rank once it is done
    worked = max(0, until - first[0] - silent)
    return min(worked, round(max(0, reached - resumed) * worked / (reached - first[1])))
