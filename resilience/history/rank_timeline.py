"""What happened on one rank in a wrapped function, and when?  A part of `history.timeline`."""

from __future__ import annotations

from collections import Counter, defaultdict

from resilience.facts import events
from resilience.facts.identity import ROOT, Key, iteration_key, node_key
from resilience.facts.interruptions import InterruptionRecord
from resilience.facts.records import Record
from resilience.history.intervals import Fact, Interval, Open, anchor, ended, hang, instant

KEPT = 8  # iterations to which late records can still belong


class RankTimeline:
    """One rank in one call. call: attempt, cycle, call and initial rank."""

    def __init__(self, call: tuple[int, int, int, int], is_launched: bool) -> None:
        self._call, self._rank = call[2], call[3]
        self._cycle = call[:2]
        self._is_launched = is_launched
        self._root: Open | None = None
        self._iterations: dict[int, Open] = {}
        self._stages: dict[str, Open] = {}
        self._counts: defaultdict[int, Counter[Key]] = defaultdict(Counter)  # by iteration
        self._first: dict[int, int] = {}  # iteration -> initial rank of the record that came first
        self._kind = "peer"  # why the present restart began, as far as this rank knows
        self._state = "active"
        self._last: Record | None = None
        self.is_over = False

    def take(self, record: Record) -> list[Interval]:
        event, self._last = record.event, record
        match event:
            case events.CallStarted():
                return self._call_started(record, event)
            case events.IterationStarted():
                opened = self._iteration(record)
                opened.facts = {"world_size.active": event.active_world_size, "rank.state": event.state}
                self._state = event.state
                self._iterations[record.origin.iteration or 0] = opened
                self._forget(record.origin.iteration or 0)
            case events.IterationEnded():
                begun = self._iterations.pop(record.origin.iteration or 0, None)
                return [ended(begun or self._iteration(record), record, event)]
            case events.StageStarted(stage):
                before = self._stages.pop(stage, None)  # the record of its end is lost
                self._stages[stage] = self._stage(record, stage)
                if before is not None:
                    return [before.closed(record, "lost", "reader")]
            case events.StageEnded():
                return [self._stage_ended(record, event)]
            case events.RankInterrupted():
                return [self._interrupted(record, event.record)]
            case events.RankFellSilent():
                parent = iteration_key(self._call, record.origin.iteration or 0, self._rank)
                key = self._numbered("hang", record.origin.iteration or 0)
                return [hang(record, event, key, parent)]
            case events.CallEnded(outcome=outcome):
                self.is_over = True
                return self._closed(record, outcome, "call")
            case events.MonitorEnded():
                self.is_over = True
                return self._closed(record, "lost", "monitor")
            case _:
                self._note(record)
        return []

    def left_open(self) -> list[Interval]:
        return [] if self._last is None else self._closed(self._last, "open", "reader")

    def _note(self, record: Record) -> None:
        event, iteration = record.event, record.origin.iteration or 0
        if isinstance(event, events.IterationDecided):
            if event.by is not None and record.origin.iteration is not None:
                self._first[iteration] = event.by
        elif iteration in self._iterations:
            self._iterations[iteration].note(event, record.wall_ns)

    def _call_started(self, record: Record, event: events.CallStarted) -> list[Interval]:
        if self._rank != 0 or self._is_launched:
            return []
        key = _root_of(self._call)
        facts: dict[str, Fact] = {"function": event.function, "world_size.initial": event.world_size}
        parent = None if self._call == 0 else ROOT  # a trace has one root: later calls are children of the first one
        self._root = Open("inprocess.call", key, parent, record.origin, record.wall_ns, facts, mono_ns=record.mono_ns)
        return [anchor(self._root)]

    def _iteration(self, record: Record) -> Open:
        origin, iteration = record.origin, record.origin.iteration or 0
        parent = node_key(origin.node) if self._is_launched else _root_of(self._call)
        key = iteration_key(self._call, iteration, self._rank)
        before = (self._cycle, iteration_key(self._call, iteration - 1, self._rank)) if iteration else None
        mono_ns = record.mono_ns
        return Open("inprocess.iteration", key, parent, origin, record.wall_ns, previous=before, mono_ns=mono_ns)

    def _stage(self, record: Record, stage: str) -> Open:
        iteration = record.origin.iteration or 0
        parent = iteration_key(self._call, iteration, self._rank)
        if stage in events.PHASES:
            if "restart" not in self._stages:  # the record of its start is lost
                self._stages["restart"] = self._stage(record, "restart")
            parent = self._stages["restart"].key
        key = self._numbered(stage, iteration)
        return Open(stage, key, parent, record.origin, record.wall_ns, mono_ns=record.mono_ns)

    def _stage_ended(self, record: Record, event: events.StageEnded) -> Interval:
        opened = self._stages.pop(event.stage, None) or self._stage(record, event.stage)
        cause: Key | None = None
        if event.stage == "restart":
            opened, cause = self._of_restart(opened)
        elif event.stage == "resume":
            opened.facts["rank.state"] = self._state
        return ended(opened, record, event, cause)

    def _of_restart(self, opened: Open) -> tuple[Open, Key | None]:
        """Return a restart with its reason, and the interruption that it follows."""
        opened.facts, self._kind = {"interruption.kind": self._kind, "rank.state": self._state}, "peer"
        iteration = int(opened.key[2])
        first = self._first.get(iteration)
        return opened, None if first is None else (self._call, "interruption", iteration, first, 0)

    def _interrupted(self, record: Record, interruption: InterruptionRecord) -> Interval:
        origin = record.origin
        iteration = interruption.iteration if interruption.iteration is not None else origin.iteration or 0
        key = self._numbered("interruption", iteration, interruption.rank)
        self._kind = interruption.interruption.value
        facts: dict[str, Fact] = {"rank.initial": interruption.rank, "iteration": iteration}
        facts["interruption.id"] = f"{origin.cycle}.{self._call}.{iteration}.{interruption.rank}.{key[-1]}"
        return instant(record, interruption, key, iteration_key(self._call, iteration, interruption.rank), facts)

    def _closed(self, record: Record, outcome: str, closed_by: str) -> list[Interval]:
        """Return all open intervals, ended with the call. An open restart also gets its cause."""
        intervals: list[Interval] = []
        for name, opened in reversed(self._stages.items()):
            cause = None
            if name == "restart":
                opened, cause = self._of_restart(opened)
            intervals.append(opened.closed(record, outcome, closed_by, cause))
        intervals += [opened.closed(record, outcome, closed_by) for opened in self._iterations.values()]
        if (root := self._root) is not None:
            by = "rank" if closed_by == "call" else closed_by
            intervals.append(root.closed(record, outcome, by))
        self._stages, self._iterations, self._root = {}, {}, None
        return intervals

    def _numbered(self, name: str, iteration: int, rank: int | None = None) -> Key:
        key = (self._call, name, iteration, self._rank if rank is None else rank)
        number = self._counts[iteration][key]
        self._counts[iteration][key] += 1
        return (*key, number)

    def _forget(self, iteration: int) -> None:
        """Forget the iterations well before this one, except the one whose restart still lasts."""
        restart = self._stages.get("restart")
        for known in (self._counts, self._first):
            for old in [old for old in known if old < iteration - KEPT]:
                if restart is None or old != restart.key[2]:
                    del known[old]


def _root_of(call: int) -> Key:
    return ROOT if call == 0 else (*ROOT, call)
