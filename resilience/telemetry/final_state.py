"""How did a job end on this node?  Derived from its records; None while it runs, or if no record says it.

completed and failed come from the job's final verdict; stopped means that the whole job was asked to stop (a
preemption); left means that this node takes no further part while the job may continue. Under the launcher the agent
decides; a node that left may come back with another agent, which has not ended. Without the launcher the calls of the
wrapped function decide, when no rank of the node is in a call. They were stopped if each ended by a signal to stop that
its monitor had not sent; shortly after another fault in the same call, such signals are a consequence of it. A rank
that the others excluded may have died together with its monitor, and is in none. If torchrun may start the ranks again,
they have not failed for good, and torchrun itself may have stopped them for that: then they have only left."""

from __future__ import annotations

from typing import Literal

from resilience.attribution.symptoms import were_stopped
from resilience.facts import events
from resilience.facts.records import Record
from resilience.history.job_end import EndOfJob
from resilience.history.processes import AgentProcess
from resilience.history.rank_states import excluded_by

Outcome = Literal["completed", "failed", "stopped", "left"]
Call = tuple[int, int, int]  # attempt, cycle, call

_FAILED = ("failed", "exhausted", "shutdown")


class FinalState:
    """Follows the records of one node."""

    def __init__(self, may_begin_again: bool = False) -> None:
        """may_begin_again: torchrun may start the ranks again if their calls fail."""
        self._may_begin_again = may_begin_again
        self._agent: AgentProcess | None = None  # the newest
        self._verdict: events.JobEnded | None = None
        self._leaves = False
        self._group_rank: int | None = None  # of this node in the newest cycle
        self._ranks: dict[int, int | None] = {}  # by initial rank: the rank in the newest iteration
        self._call: Call = (0, 0, 0)
        self._in_call: set[int] = set()
        self._signalled: set[int] = set()  # by their own monitors
        self._ends: list[tuple[str, float]] = []  # outcome and Unix time of each end in the call
        self._verdict_at = self._call_ended_at = 0.0  # Unix time

    def take(self, record: Record) -> None:
        """Add a record."""
        origin, event = record.origin, record.event
        if origin.role == "agent":
            self._take_agent(record)
        match event:
            case events.JobEnded():
                self._verdict, self._verdict_at = event, record.wall_ns / 1e9
            case events.RendezvousCompleted():
                self._group_rank = event.group_rank
            case events.IterationStarted() if origin.initial_rank is not None:
                self._ranks[origin.initial_rank] = origin.rank
            case events.StopRequested():
                self._leaves = event.leaves
            case events.RankSignalled() if origin.initial_rank is not None:
                self._signalled.add(origin.initial_rank)
            case events.CallStarted() | events.CallEnded() | events.RankExited() if origin.initial_rank is not None:
                self._take_from_rank(record, origin.initial_rank)
            case events.RankStoodInFor() | events.NodeFellSilent():
                for rank in self._in_call.intersection(excluded_by(record)):
                    self._take_from_rank(record, rank)
            case _:  # no other event matters here
                pass

    def _take_agent(self, record: Record) -> None:
        """Forget the end of an earlier agent. It may have had the same pid, and the first record of this one may be
        lost."""
        is_back = self._verdict is not None and isinstance(record.event, events.CycleStarted)
        is_new = self._agent is None or not self._agent.is_of(record)
        if is_new:
            self._group_rank = None
        if is_new or is_back:
            self._agent, self._verdict, self._leaves = AgentProcess(record), None, False
        assert self._agent is not None
        self._agent.took(record)

    def _take_from_rank(self, record: Record, rank: int) -> None:
        call = (record.origin.attempt, record.origin.cycle, record.origin.call)
        if call < self._call:
            return
        if call > self._call:
            self._call, self._call_ended_at = call, 0.0
            self._in_call.clear()
            self._ends.clear()
        if isinstance(record.event, events.CallStarted):
            self._in_call.add(rank)
            self._signalled.discard(rank)
            return
        at = record.wall_ns / 1e9
        self._call_ended_at = max(self._call_ended_at, at)
        if isinstance(record.event, events.CallEnded):
            self._ends.append((record.event.outcome, at))
        elif rank in self._in_call:
            is_stop = isinstance(record.event, events.RankExited) and record.event.status.is_stop
            self._ends.append(("stopped" if is_stop and rank not in self._signalled else "lost", at))
        self._in_call.discard(rank)

    @property
    def is_first(self) -> bool:
        """Return True on one node of the job: the first one of the newest cycle, or the one with rank 0. After the loss
        of rank 0 within a node, for a while on two nodes. False everywhere until a cycle or an iteration has begun."""
        if self._agent is not None:
            return self._group_rank == 0
        return 0 in self._ranks.values()

    @property
    def outcome(self) -> Outcome | None:
        """Return how the job ended on this node, None if it has not."""
        if self._agent is not None:
            return None if self._verdict is None else self._outcome_of(self._verdict)
        if self._in_call or not self._ends:
            return None
        if self._has_completed:
            return "completed"
        if not self.has_failed:
            return "left" if self._may_begin_again else "stopped"
        return None if self._may_begin_again else "failed"

    @property
    def has_failed(self) -> bool:
        """Return True if all calls of the wrapped function on this node have ended, none of them has completed, and
        they were not stopped."""
        if not self._ends or self._in_call or self._has_completed:
            return False
        asked = [at for outcome, at in self._ends if outcome == "stopped"]
        return not were_stopped(asked, (at for outcome, at in self._ends if outcome != "stopped"))

    @property
    def _has_completed(self) -> bool:
        return any(outcome == "completed" for outcome, _ in self._ends)

    @property
    def at(self) -> float:
        """Return the time of that, in Unix time."""
        return self._verdict_at if self._agent is not None else self._call_ended_at

    def ended(self, proven: EndOfJob | None) -> tuple[Outcome, float] | None:
        """Return outcome and Unix time of the end, None if it has not. proven: by other records of the launcher."""
        if self.outcome is not None:
            return self.outcome, self.at
        return None if proven is None else (self._outcome_of(proven), proven.at_ns / 1e9)

    def _outcome_of(self, end: events.JobEnded | EndOfJob) -> Outcome:
        if end.outcome == "completed":
            return "completed"
        if end.outcome in _FAILED:
            return "failed"
        return "stopped" if end.outcome == "preempted" and not self._leaves else "left"
