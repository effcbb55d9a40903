"""What began and ended when, and inside what?  Intervals of a job, each complete as soon as its last record is there.

    launcher.cycle       a cycle of the whole job, by the agent that has group rank 0
      launcher.node      one node's part of it
        rendezvous, spawn, import, run, stop ...
        restart          by the launcher: detect, stop, gate, rendezvous, spawn, import (a worker's start-up)
    inprocess.call       a call of the wrapped function, by initial rank 0; under the launcher the node stands for it
      inprocess.iteration
        initialize, health_check, run
        restart          in place: its phases
    interruption, monitor.hang   what a rank, its monitor or the agent saw

A restart belongs to the iteration or cycle that was interrupted, although it ends with the first progress in the next
one. `Timeline` feeds a `History` and takes what it can from there. Only the order within each file matters, with one
exception: an agent's file is read together with its ranks' files, or after them.

What a rank leaves open when its call is over, or its monitor ends, ends there. `left_open` gives what has no end on
record."""

from __future__ import annotations

from resilience.core import events
from resilience.core.records import Record
from resilience.history.history import History
from resilience.history.intervals import Interval
from resilience.history.node_timeline import NodeTimeline
from resilience.history.rank_timeline import RankTimeline


class Timeline:
    """The intervals of a job. history: that takes every record; a new one by default.

    is_launched: the launcher's cycles hold the calls."""

    def __init__(self, history: History | None = None, is_launched: bool = False) -> None:
        self.history = History(has_details=False) if history is None else history
        self._ranks: dict[tuple[int, int, int, int], RankTimeline] = {}
        self._nodes: dict[str, NodeTimeline] = {}
        self._is_launched = is_launched

    def take(self, record: Record) -> list[Interval]:
        """Add what a record says; return the intervals that are complete with it."""
        self.history.take(record)
        origin = record.origin
        rank = origin.initial_rank
        if origin.is_launchers:
            return self._node(origin.node).take(record)
        if rank is None:
            return []
        key = (origin.attempt, origin.cycle, origin.call, rank)
        of_rank = self._ranks.get(key)
        if of_rank is None:
            of_rank = self._ranks[key] = RankTimeline(key, self._is_launched)
        found = of_rank.take(record)
        if of_rank.is_over:
            del self._ranks[key]
        if isinstance(record.event, events.StageStarted) and record.event.stage == "run":
            found += self._node(origin.node).entered(record)
        return found

    def left_open(self) -> list[Interval]:
        """Return what has begun and has no end on record, up to the last record of its rank or agent; forget it."""
        found = [interval for rank in self._ranks.values() for interval in rank.left_open()]
        found += [interval for node in self._nodes.values() for interval in node.left_open()]
        self._ranks.clear()
        return found

    def _node(self, name: str) -> NodeTimeline:
        node = self._nodes.get(name)
        if node is None:
            node = self._nodes[name] = NodeTimeline(name, self.history)
        return node
