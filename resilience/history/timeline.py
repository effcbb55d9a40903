"""When did each activity begin and end, and what encloses it?  Intervals of a job, each returned once it is complete.

    launcher.cycle       a cycle of the whole job, from the agent with group rank 0
      launcher.node      one node's part of it
        rendezvous, spawn, import, run, stop ...
        restart          by the launcher: detect, stop, gate, rendezvous, spawn, import (a worker's start-up)
    inprocess.call       a call of the wrapped function, from initial rank 0; under the launcher the node replaces it
      inprocess.iteration
        initialize, health_check, run
        restart          in place: its phases
      restart            by torchrun, of each rank: it belongs to the cycle that failed
    interruption, monitor.hang   recorded by a rank, its monitor or the agent

A restart belongs to the interrupted iteration or cycle, although it ends with the first progress in the next one.
`Timeline` feeds a `History` and reads from it where possible. Only the order within each file matters, with one
exception: an agent's file must be read together with its ranks' files, or after them.

When a call or its monitor ends, the rank's open intervals end too. `left_open` returns the intervals without an end on
record."""

from __future__ import annotations

from resilience.facts import events
from resilience.facts.records import Record
from resilience.history.history import History
from resilience.history.intervals import Interval
from resilience.history.node_timeline import NodeTimeline
from resilience.history.other_restarts import OtherRestarts
from resilience.history.rank_timeline import RankTimeline


class Timeline:
    """The intervals of a job. history: takes every record; a new one by default.

    is_launched: the launcher's cycles enclose the calls."""

    def __init__(self, history: History | None = None, is_launched: bool = False) -> None:
        self.history = History(has_details=False) if history is None else history
        self._ranks: dict[tuple[int, int, int, int], RankTimeline] = {}
        self._nodes: dict[str, NodeTimeline] = {}
        self._is_launched = is_launched
        self._others = OtherRestarts()

    def take(self, record: Record) -> list[Interval]:
        """Add a record. Return the intervals that it completes."""
        self.history.take(record)
        origin = record.origin
        rank = origin.initial_rank
        if origin.is_launchers:
            return self._node(origin.node).take(record)
        if rank is None:
            return []
        key = (origin.attempt, origin.cycle, origin.call, rank)
        timeline = self._ranks.get(key)
        if timeline is None:
            timeline = self._ranks[key] = RankTimeline(key, self._is_launched)
        intervals = timeline.take(record)
        if timeline.is_over:
            del self._ranks[key]
        if not self._is_launched:
            intervals += self._others.take(record)
        if isinstance(record.event, events.StageStarted) and record.event.stage == "run":
            intervals += self._node(origin.node).entered(record)
        return intervals

    def left_open(self) -> list[Interval]:
        """Return intervals without an end on record, ended at the last record of their rank or agent. Forget them."""
        intervals = [interval for rank in self._ranks.values() for interval in rank.left_open()]
        intervals += [interval for node in self._nodes.values() for interval in node.left_open()]
        self._ranks.clear()
        return intervals

    def _node(self, name: str) -> NodeTimeline:
        node = self._nodes.get(name)
        if node is None:
            node = self._nodes[name] = NodeTimeline(name, self.history)
        return node
