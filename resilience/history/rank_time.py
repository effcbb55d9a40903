"""Where did the time of every rank go?  Rank-seconds, each one productive or lost to one cause.

A rank's time begins with its attempt and ends with its call or its process. It is start-up until the rank works for the
first time: it entered its function or showed progress. It is restart from the moment its node knew of an interruption
until the rank's first progress, or until it enters its function if it has shown none before. If another launcher
restarts a Wrapper's job, it is restart from the node's last record of the earlier cycle until the rank enters its
function. Silence before an interruption is a hang of every rank that was at work, because all of them wait for the
silent one. A spare is idle, and so is a rank that finished before the others. The place of a dead rank is idle as long
as its node is on record. Repeated work is rework, at the earlier speed. If no step is reported, rework is unknown and
counts as zero here; the views say that it is unknown.

A worker of the launcher without a signal of progress may be loading, or its program sends none. Its time is unknown,
except the silence that ended its cycle. If the worker completes, it has worked since its start. If its rank shows
progress in another cycle on the same node, earlier or later, the program sends signals, and the worker was loading.

The time of a lost node counts up to its last record. A node that was not in the job's previous cycle waits at no cost
until that cycle has failed. Its own records do not say when that was, so its metrics count its whole wait.

Durations use each node's own monotonic clock. The same definition applies to a node's metrics and to the report of the
whole job: the job's rank-seconds are the sum over its nodes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from typing import Any, Literal

import msgspec

from resilience.facts import events
from resilience.facts.records import Record
from resilience.history.cycles import Cycle, CycleHistory, NodeCycle
from resilience.history.processes import Worker

Cause = Literal["startup", "restart", "hang", "rework", "idle"]
CAUSES: tuple[Cause, ...] = ("startup", "restart", "hang", "rework", "idle")
_State = Literal["", "startup", "work", "restart", "idle"]
RankCall = tuple[int, int, int]
"""Attempt, cycle, initial rank."""


class RankSeconds(msgspec.Struct):
    """Time of ranks in nanoseconds. work: includes the time lost to hangs and to rework. unknown: of workers that have
    shown no progress, since their start; no part of the total. vacant: the part of idle in which the rank's process had
    ended, or its call had failed."""

    work: int = 0
    startup: int = 0
    restart: int = 0
    hang: int = 0
    rework: int = 0
    idle: int = 0
    unknown: int = 0
    vacant: int = 0

    @property
    def total(self) -> int:
        return self.work + self.startup + self.restart + self.idle

    @property
    def productive(self) -> int:
        return max(0, self.work - self.hang - self.rework)

    def add(self, other: RankSeconds) -> None:
        for name in self.__struct_fields__:
            setattr(self, name, getattr(self, name) + getattr(other, name))


class WrappedRank:
    """One rank in its wrapped function, in one cycle. Takes the rank's records in order."""

    def __init__(self, node: str) -> None:
        self.node = node
        self._spent = RankSeconds()
        self._ended_ns: int | None = None  # when its process ended, or the others went on without it
        self._has_failed = False  # its call is over, and has not completed
        self.began_ns = 0  # its first call
        self._clock_ns = 0  # UTC minus monotonic time of its last record
        self.since = 0  # start of its present state
        self._state: _State = ""
        self._is_active = True
        self._begin_call()

    def _begin_call(self) -> None:
        """Forget the steps of an earlier call: another function may have other steps."""
        self._worked = 0  # nanoseconds of work before the last interruption
        self._is_explained = True  # whether a hang caused the last interruption is known
        self._reached: int | None = None  # the interrupted step
        self._entered: int | None = None  # the step with which it continued after a restart
        self._is_step_unknown = False  # no step has been reported since the last restart
        self._loading = 0  # nanoseconds of work before the first step of the call
        self._step_ns: float | None = None  # duration of one step
        self._repeated = 0  # steps of rework that do not count yet: how long a step takes is not known

    def take(self, record: Record) -> None:
        """Add a record of the rank or of its monitor."""
        self._clock_ns = record.wall_ns - record.mono_ns
        _TAKEN_BY[type(record.event)](self, record.event, record.mono_ns)

    def _stage_started(self, event: events.StageStarted, at: int) -> None:
        if event.stage == "restart":
            self._interrupted(at, None)
        elif event.stage == "run" and not self._is_active:
            self._go("idle", at)
        elif event.stage == "run" and self._state != "restart":
            self._go("work", at)

    def _stage_ended(self, event: events.StageEnded, at: int) -> None:
        if event.outcome == "completed" and event.stage == "run":
            self._go("idle", at)
        elif event.outcome == "completed" and event.stage == "restart":
            self._go("work" if self._is_active else "idle", at)

    def _restart_ended(self, event: events.RestartEnded, at: int) -> None:
        if event.step is None:
            self._is_step_unknown = True
        else:
            self._went_on(event.step)

    def _first_step_reported(self, event: events.FirstStepReported, at: int) -> None:
        if self._entered is None:  # two threads may report it
            self._entered, self._loading = event.step, round(max(0.0, event.after_s) * 1e9)

    def _first_step_taken(self, event: events.RestartStep, at: int) -> None:
        self._went_on(event.step)

    def _outcome_seen(self, event: events.IterationDecided, at: int) -> None:
        self._forget_unknown()
        self._reached = event.step if event.step is not None else self._reached
        self._interrupted(at, event.silent_for_s)

    def _fell_silent(self, event: events.RankFellSilent, at: int) -> None:
        self._interrupted(at, event.silent_for_s)

    def _iteration_started(self, event: events.IterationStarted, at: int) -> None:
        self._is_active, self._is_explained = event.state == "active", True

    def _call_started(self, event: events.CallStarted, at: int) -> None:
        self.began_ns, self._has_failed = self.began_ns or at, False
        self._begin_call()
        self._go("startup", at)

    def _call_ended(self, event: events.CallEnded, at: int) -> None:
        self._has_failed = event.outcome != "completed"
        self._go("idle" if self._has_failed else "", at)

    def _exited(self, event: events.RankExited, at: int) -> None:
        self._ended_ns = at

    def excluded(self, by: Record, offsets: Mapping[str, int]) -> None:
        """Note that the others went on without this rank. It may have died together with its monitor."""
        if self._ended_ns is None and self._state:
            here, there = by.origin.node, self.node
            wall_ns = by.wall_ns - offsets.get(here, 0) + offsets.get(there, 0)
            self._ended_ns = by.mono_ns if here == there else wall_ns - self._clock_ns

    def spent_until(self, until: int | None) -> RankSeconds:
        """Return the rank's time by cause. until: monotonic nanoseconds; None: only intervals that have ended."""
        spent = msgspec.structs.replace(self._spent)
        ends = [at for at in (until, self._ended_ns) if at is not None]
        if self._state and ends:
            setattr(spent, self._state, getattr(spent, self._state) + max(0, min(ends) - self.since))
            if until is not None and self._ended_ns is not None:
                spent.vacant = max(0, until - max(self._ended_ns, self.since))  # the place of a dead rank is empty
                spent.idle += spent.vacant
            if until is not None and self._has_failed:
                spent.vacant = max(0, until - self.since)
        return spent

    def silent_until(self, at: int, silent_ns: int) -> int:
        """Return for how many of the last silent_ns nanoseconds before `at`, when the launcher ended the cycle, a rank
        had been at work. 0 if its Wrapper had an interruption of its own, which says itself how long a rank was silent.
        A rank whose process had ended is idle."""
        gone = 0 if self._ended_ns is None else max(0, at - self._ended_ns)
        is_later = self._state == "restart" and self.since > at and not self._is_explained
        worked = at - self.since if self._state == "work" else self._worked - (self.since - at) if is_later else 0
        return max(0, min(silent_ns, worked) - gone)

    def _go(self, state: _State, at: int) -> None:
        if self._state:
            setattr(self._spent, self._state, getattr(self._spent, self._state) + max(0, at - self.since))
        self._state = state
        if at > self.since:
            self.since = at

    def _interrupted(self, at: int, silent_for_s: float | None) -> None:
        if self._state == "work":
            self._forget_unknown()
            self._worked = max(0, at - self.since)
            self._is_explained = False
            self._go("restart", at)
        if self._state == "restart" and silent_for_s is not None and not self._is_explained:
            silence = min(self._worked, round(max(0.0, silent_for_s) * 1e9))
            self._spent.hang += silence
            self._worked -= silence
            self._is_explained = True

    def _forget_unknown(self) -> None:
        """Forget the steps before a restart if no step was reported after it: its rework stays unknown."""
        if self._is_step_unknown:
            self._is_step_unknown, self._entered, self._reached, self._loading = False, None, None, 0

    def _went_on(self, step: int) -> None:
        """Count the rework of a rank that continues with `step`: it repeats its work beyond that step."""
        self._is_step_unknown = False
        entered = 0 if self._entered is None and step == 0 else self._entered
        if self._reached is not None:
            if entered is not None and self._reached > entered and self._worked > self._loading:
                self._step_ns = (self._worked - self._loading) / (self._reached - entered)
            self._repeated += max(0, self._reached - step)
            if self._step_ns is not None:
                self._spent.rework += min(self._spent.productive, round(self._repeated * self._step_ns))
                self._repeated = 0
        self._entered, self._reached, self._loading = step, None, 0


_TAKEN_BY: dict[type[events.Event], Callable[[WrappedRank, Any, int], None]] = {
    events.StageStarted: WrappedRank._stage_started,
    events.StageEnded: WrappedRank._stage_ended,
    events.RestartEnded: WrappedRank._restart_ended,
    events.FirstStepReported: WrappedRank._first_step_reported,
    events.RestartStep: WrappedRank._first_step_taken,
    events.IterationDecided: WrappedRank._outcome_seen,
    events.RankFellSilent: WrappedRank._fell_silent,
    events.IterationStarted: WrappedRank._iteration_started,
    events.CallStarted: WrappedRank._call_started,
    events.CallEnded: WrappedRank._call_ended,
    events.RankExited: WrappedRank._exited,
}
OF_TIMES = frozenset(_TAKEN_BY)
"""Events that move a wrapped rank from one cause to another."""


class RankTimes:
    """The time of all ranks by cause. Wrapped functions are followed record by record. The time of launched workers
    outside of them is derived from the cycles."""

    def __init__(self) -> None:
        self._wrapped: dict[RankCall, WrappedRank] = {}
        self._excluded: dict[RankCall, tuple[Record, Mapping[str, int]]] = {}  # the record that says so, and offsets

    def take(self, record: Record, rank: int) -> None:
        """Add a record of a rank in a wrapped function, or of its monitor."""
        origin = record.origin
        key = (origin.attempt, origin.cycle, rank)
        wrapped = self._wrapped.get(key)
        if wrapped is None:
            wrapped = self._wrapped[key] = WrappedRank(origin.node)
        wrapped.take(record)

    def excluded(self, rank: int, record: Record, offsets: Mapping[str, int]) -> None:
        """Note that the others went on without a rank. record: of another rank's monitor, perhaps on another node, and
        perhaps read before those of the rank. offsets: how far each node's clock is ahead, in nanoseconds."""
        self._excluded.setdefault((record.origin.attempt, record.origin.cycle, rank), (record, offsets))

    def spent(self, cycles: CycleHistory, until: Callable[[str, Cycle], int | None]) -> dict[int, RankSeconds]:
        """Return each rank's time by cause, by initial rank.

        until: returns the end of the count of a node's cycle in monotonic nanoseconds; if None, only ended intervals
        count."""
        for key in self._excluded.keys() & self._wrapped.keys():
            self._wrapped[key].excluded(*self._excluded[key])
        by_rank: dict[int, RankSeconds] = {}
        launched: set[RankCall] = set()
        for node, parts in cycles.nodes.items():
            signalling = {  # ranks that have shown progress on this node
                rank for part in parts.values() for rank, worker in part.workers.items() if worker.has_shown_progress
            }
            for place in sorted(place for place, part in parts.items() if part.started is not None):
                workers = parts[place].workers
                visit = _Visit(cycles, node, place, until(node, place), signalling)
                for rank, worker in workers.items():
                    launched.add((*place, rank))
                    wrapped = self._wrapped.get((*place, rank))
                    earlier = None if visit.before is None else self._wrapped.get((*visit.before, rank))
                    by_rank.setdefault(rank, RankSeconds()).add(visit.spent_by(rank, worker, wrapped, earlier))
        earlier_ends: dict[tuple[int, int, str], int | None] = {}  # attempt, rank, node -> end of its earlier cycle
        for key in sorted(self._wrapped.keys() - launched):
            wrapped = self._wrapped[key]
            end, seat = until(wrapped.node, key[:2]), (key[0], key[2], wrapped.node)
            spent = wrapped.spent_until(end)
            earlier_end = earlier_ends.get(seat)
            if earlier_end is not None:  # another launcher has restarted it
                spent.restart += spent.startup + max(0, wrapped.began_ns - earlier_end)
                spent.startup = 0
            earlier_ends[seat] = end
            by_rank.setdefault(key[2], RankSeconds()).add(spent)
        return by_rank


class _Visit:
    """One node in one cycle. until: end of the count in monotonic nanoseconds. signalling: ranks that show
    progress in any cycle. before: the cycle from which the node was restarted into this one."""

    def __init__(self, cycles: CycleHistory, node: str, place: Cycle, until: int | None, signalling: Set[int]) -> None:
        self._part, self._signalling = cycles.part(node, place), signalling
        self.before = cycles.before(node, place)
        self._before = None if self.before is None else cycles.part(node, self.before)
        failed = self._part.failed_at
        self._is_over = failed is not None
        self._end = until if failed is None else failed[0]
        failed_before = None if self._before is None else self._before.failed_at
        self._since = cycles.waited_since(node, place) if failed_before is None else failed_before[0]

    def spent_by(
        self, rank: int, worker: Worker, wrapped: WrappedRank | None, earlier: WrappedRank | None
    ) -> RankSeconds:
        """Return one worker's time by cause. earlier: its rank in the previous cycle, in a wrapped function."""
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
                if rank in self._signalling:
                    until = before_silence  # it was loading
                else:
                    spent.unknown = max(0, before_silence - until)
        since = worker.started_ns if self._since is None else self._since
        if earlier is not None:
            since = max(since, earlier.since)
        if at_work is not None:
            until = at_work if self._end is None else min(at_work, self._end)
        waited = max(0, until - since)
        if inside is not None:
            spent = inside.spent_until(self._end)
            if self._end is not None:  # a Wrapper knows nothing of a hang that the launcher's monitor has found
                spent.hang += inside.silent_until(self._end, self._part.silent_ns)
            waited, spent.startup = waited + spent.startup, 0
        elif at_work is not None and self._end is not None:
            self._outside(spent, rank, worker, at_work, self._end)
        if self._part.started is None or self._part.started.why == "first":
            spent.startup += waited
        else:
            spent.restart += waited
        return spent

    def _outside(self, spent: RankSeconds, rank: int, worker: Worker, at_work: int, end: int) -> None:
        """Add the time of a worker that calls no Wrapper."""
        is_done = worker.exit is not None and worker.exit.expected and worker.exited_ns is not None
        until = min(end, worker.exited_ns) if is_done and worker.exited_ns is not None else end
        spent.work = max(0, until - at_work)
        spent.idle = max(0, end - until)
        spent.hang = max(0, min(spent.work, self._part.silent_ns - spent.idle))  # it waits for no rank once it is done
        if self._before is not None and worker.first_step is not None:
            before = self._before.workers.get(rank) or next(iter(self._before.workers.values()), None)
            spent.rework = 0 if before is None else _rework(self._before, before, worker.first_step[1])


def _rework(part: NodeCycle, worker: Worker, resumed: int) -> int:
    """Return the nanoseconds of a cycle's work that a rank repeats. worker: of that rank, or of another one if it was
    on another node, because all ranks step together. resumed: the step with which it continues."""
    reached, failed, first = part.reached, part.failed_at, worker.first_step
    if reached is None or failed is None or first is None or reached <= first[1]:
        return 0
    worked = max(0, failed[0] - first[0] - part.silent_ns)
    return min(worked, round(max(0, reached - resumed) * worked / (reached - first[1])))
