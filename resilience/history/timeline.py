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

from collections import Counter

import msgspec

from resilience.core import events
from resilience.core.attribution import InterruptionRecord
from resilience.core.identity import JOB, ROOT, Key, Origin, iteration_key, node_key, restart_key
from resilience.core.records import Record
from resilience.history.cycles import Cycle, NodeCycle, Stage, restarts_of
from resilience.history.history import History

Fact = str | int | float | bool
NOTED = 64  # events noted on one interval
_LAST = ("completed", "preempted", "shutdown", "exhausted", "excluded")  # outcomes that no restart follows
_LEADING = ("gate", "rendezvous")  # phases that end before it is known which cycle they lead to


class Noted(msgspec.Struct, frozen=True):
    """An event that has no interval of its own. at_ns: UTC."""

    event: events.Event
    at_ns: int


class Interval(msgspec.Struct, frozen=True):
    """Something that went on for a time, or an instant. Times are UTC nanoseconds.

    origin: of the record that tells the end, in the cycle that the interval belongs to. parent: what it is part of, in
    the same cycle. key and parent begin with "job" where it is part of the whole attempt instead of a cycle. outcome:
    "" of an instant, "open" where no end is on record. closed_by: "rank" or "monitor" as recorded, "call" where it was
    still open as the call ended, "reader" where no end is on record. facts: what else is known. cause: the interruption
    that a restart follows. previous: the same in the iteration or cycle before, with its cycle."""

    name: str
    key: Key
    parent: Key | None
    origin: Origin
    start_ns: int
    end_ns: int
    outcome: str = ""
    closed_by: str = "rank"
    facts: dict[str, Fact] = {}
    record: InterruptionRecord | None = None
    noted: tuple[Noted, ...] = ()
    cause: Key | None = None
    previous: tuple[Cycle, Key] | None = None


class _Open(msgspec.Struct):
    """An interval that has begun."""

    name: str
    key: Key
    parent: Key | None
    origin: Origin
    start_ns: int
    facts: dict[str, Fact] = {}
    noted: list[Noted] = []
    previous: tuple[Cycle, Key] | None = None

    def note(self, event: events.Event, at_ns: int) -> None:
        if len(self.noted) < NOTED:
            self.noted.append(Noted(event, at_ns))

    def ended(
        self,
        origin: Origin,
        start_ns: int,
        end_ns: int,
        outcome: str,
        closed_by: str = "rank",
        facts: dict[str, Fact] | None = None,
        cause: Key | None = None,
    ) -> Interval:
        known = self.facts | (facts or {})
        noted = tuple(self.noted)
        return Interval(
            self.name,
            self.key,
            self.parent,
            origin,
            start_ns,
            end_ns,
            outcome,
            closed_by,
            known,
            None,
            noted,
            cause,
            self.previous,
        )


class Timeline:
    """The intervals of a job. history: that takes every record; a new one by default.

    is_launched: the launcher's cycles hold the calls."""

    def __init__(self, history: History | None = None, is_launched: bool = False) -> None:
        self.history = History(has_details=False) if history is None else history
        self._ranks: dict[tuple[int, int, int, int], _Rank] = {}
        self._nodes: dict[str, _Node] = {}
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
            of_rank = self._ranks[key] = _Rank(key, self._is_launched)
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

    def _node(self, name: str) -> _Node:
        node = self._nodes.get(name)
        if node is None:
            node = self._nodes[name] = _Node(name, self.history)
        return node


# -- a rank in a wrapped function ------------------------------------------------------------------


class _Rank:
    """One rank in one call. call: attempt, cycle, call and initial rank."""

    def __init__(self, call: tuple[int, int, int, int], is_launched: bool) -> None:
        self._call, self._rank = call[2], call[3]
        self._cycle = call[:2]
        self._is_launched = is_launched
        self._root: _Open | None = None
        self._iterations: dict[int, _Open] = {}
        self._stages: dict[str, _Open] = {}
        self._counts: Counter[Key] = Counter()
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
            case events.IterationEnded():
                begun = self._iterations.pop(record.origin.iteration or 0, None)
                return [_ended(begun or self._iteration(record), record, event)]
            case events.StageStarted(stage):
                before = self._stages.pop(stage, None)  # whose end is lost
                self._stages[stage] = self._stage(record, stage)
                if before is not None:
                    return [before.ended(before.origin, before.start_ns, record.wall_ns, "lost", "reader")]
            case events.StageEnded():
                return [self._stage_ended(record, event)]
            case events.Interrupted():
                return [self._interrupted(record, event.record)]
            case events.RankFellSilent():
                parent = iteration_key(self._call, record.origin.iteration or 0, self._rank)
                key = self._numbered("hang", record.origin.iteration or 0)
                return [_hang(record, event, key, parent)]
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
        if isinstance(event, events.OutcomeSeen):
            if event.by is not None and record.origin.iteration is not None:
                self._first[iteration] = event.by
        elif iteration in self._iterations:
            self._iterations[iteration].note(event, record.wall_ns)

    def _call_started(self, record: Record, event: events.CallStarted) -> list[Interval]:
        if self._rank != 0 or self._is_launched:
            return []
        key = _root_of(self._call)
        facts: dict[str, Fact] = {"function": event.function, "world_size.initial": event.world_size}
        parent = None if self._call == 0 else ROOT  # one root of a trace: later calls are part of the first one
        self._root = _Open("inprocess.call", key, parent, record.origin, record.wall_ns, facts)
        return [_anchor(self._root)]

    def _iteration(self, record: Record) -> _Open:
        origin, iteration = record.origin, record.origin.iteration or 0
        parent = node_key(origin.node) if self._is_launched else _root_of(self._call)
        key = iteration_key(self._call, iteration, self._rank)
        before = (self._cycle, iteration_key(self._call, iteration - 1, self._rank)) if iteration else None
        return _Open("inprocess.iteration", key, parent, origin, record.wall_ns, previous=before)

    def _stage(self, record: Record, stage: str) -> _Open:
        iteration = record.origin.iteration or 0
        parent = iteration_key(self._call, iteration, self._rank)
        if stage in events.PHASES:
            if "restart" not in self._stages:  # the record of its beginning is lost
                self._stages["restart"] = self._stage(record, "restart")
            parent = self._stages["restart"].key
        return _Open(stage, self._numbered(stage, iteration), parent, record.origin, record.wall_ns)

    def _stage_ended(self, record: Record, event: events.StageEnded) -> Interval:
        opened = self._stages.pop(event.stage, None) or self._stage(record, event.stage)
        cause: Key | None = None
        if event.stage == "restart":
            opened, cause = self._of_restart(opened)
        elif event.stage == "resume":
            opened.facts["rank.state"] = self._state
        return _ended(opened, record, event, cause)

    def _of_restart(self, opened: _Open) -> tuple[_Open, Key | None]:
        """A restart with why it came about, and what it follows."""
        opened.facts, self._kind = {"interruption.kind": self._kind}, "peer"
        iteration = int(opened.key[2])
        first = self._first.get(iteration)
        return opened, None if first is None else (self._call, "interruption", iteration, first, 0)

    def _interrupted(self, record: Record, seen: InterruptionRecord) -> Interval:
        origin = record.origin
        iteration = seen.iteration if seen.iteration is not None else origin.iteration or 0
        key = self._numbered("interruption", iteration, seen.rank)
        self._kind = seen.interruption.value
        facts: dict[str, Fact] = {"rank.initial": seen.rank, "iteration": iteration}
        facts["interruption.id"] = f"{origin.cycle}.{self._call}.{iteration}.{seen.rank}.{key[-1]}"
        return _instant(record, seen, key, iteration_key(self._call, iteration, seen.rank), facts)

    def _closed(self, record: Record, outcome: str, closed_by: str) -> list[Interval]:
        """What is open ends with the call; of the restart, what it follows is known."""
        found: list[Interval] = []
        for name, opened in reversed(self._stages.items()):
            cause = None
            if name == "restart":
                opened, cause = self._of_restart(opened)
            found.append(opened.ended(opened.origin, opened.start_ns, record.wall_ns, outcome, closed_by, None, cause))
        for opened in self._iterations.values():
            found.append(opened.ended(opened.origin, opened.start_ns, record.wall_ns, outcome, closed_by))
        if (root := self._root) is not None:
            by = "rank" if closed_by == "call" else closed_by
            found.append(root.ended(root.origin, root.start_ns, record.wall_ns, outcome, by))
        self._stages, self._iterations, self._root = {}, {}, None
        return found

    def _numbered(self, name: str, iteration: int, rank: int | None = None) -> Key:
        key = (self._call, name, iteration, self._rank if rank is None else rank)
        number = self._counts[key]
        self._counts[key] += 1
        return (*key, number)


def _root_of(call: int) -> Key:
    return ROOT if call == 0 else (*ROOT, call)


# -- a node of the launcher ------------------------------------------------------------------------


class _Node:
    """What one node's agent and the launcher's monitors there record."""

    def __init__(self, name: str, history: History) -> None:
        self._name = name
        self._history = history
        self._parts: dict[Cycle, _Part] = {}
        self._began: dict[int, int] = {}  # attempt -> UTC of its first record
        self._before: dict[Cycle, Cycle] = {}  # cycle -> the one whose restart led to it
        self._last: Cycle | None = None  # that began; None once the job has ended
        self._at_ns = 0  # of the agent's last record
        self._phase: _Open | None = None

    def take(self, record: Record) -> list[Interval]:
        origin, event = record.origin, record.event
        place = (origin.attempt, origin.cycle)
        if isinstance(event, events.Interrupted):
            return [self._interrupted(record, event.record)]
        if origin.role != "agent":
            return self._of_monitor(record, place)
        self._at_ns = record.wall_ns
        self._began.setdefault(origin.attempt, record.wall_ns)
        match event:
            case events.CyclePhaseStarted(phase):
                key = (*node_key(self._name), phase, "open")
                self._phase = _Open(phase, key, node_key(self._name), origin, record.wall_ns)
            case events.CyclePhaseEnded(phase):
                self._phase = None
                return self._phase_ended(place, phase, origin)
            case events.CycleStarted():
                return self._cycle_started(place, record, event)
            case events.CycleEnded():
                return self._cycle_ended(place, record, event)
            case events.JobEnded():
                return self._job_ended(record, event)
            case events.WorkerStarted(worker_rank=rank):
                self._part(place).note(record)
                return self._imported(place, rank)
            case _:
                self._part(place).note(record)
        return []

    def entered(self, record: Record) -> list[Interval]:
        """A worker entered its wrapped function."""
        rank = record.origin.initial_rank
        return [] if rank is None else self._progressed(record, rank)

    def left_open(self) -> list[Interval]:
        if self._last is None:
            return []
        place, at = self._last, self._at_ns
        part, facts = self._part(place), self._facts(place)
        found: list[Interval] = []
        if self._phase is not None:
            found.append(self._phase.ended(self._phase.origin, self._phase.start_ns, at, "open", "reader"))
        if facts.ended is not None:
            found += self._given_up(place, at, "open", "reader")
        else:
            found += self._restart(place, at, "open", "reader")
            found += [
                opened.ended(opened.origin, opened.start_ns, at, "open", "reader")
                for opened in (part.node, part.cycle)
                if opened is not None
            ]
        self._last = self._phase = None
        return found

    # -- the agent's cycle ---------------------------------------------------------------------

    def _phase_ended(self, place: Cycle, phase: str, origin: Origin) -> list[Interval]:
        if phase == "run":
            return [self._stage(self._facts(place).stages[-1], node_key(self._name), origin)]
        if phase == "spawn":
            spawned = self._facts(place).stages[-1]
            leads = self._stage(spawned, self._leading_to(place), self._origin_of(place, origin))
            return [leads, *self._restarted(place)]
        return []  # gate and rendezvous: with the cycle that they lead to; stop: with the cycle's end

    def _cycle_started(self, place: Cycle, record: Record, event: events.CycleStarted) -> list[Interval]:
        self._last = place
        origin, part, facts = record.origin, self._part(place), self._facts(place)
        before = self._history.cycles.before(self._name, place)
        if before is not None:
            self._before[place] = before
        about: dict[str, Fact] = {"why": event.why}
        if facts.met is not None:
            about |= {"world_size": facts.met.world_size, "nodes": facts.met.nodes}
        part.node = _Open("launcher.node", node_key(self._name), ROOT, origin, record.wall_ns, about)
        part.node.note(event, record.wall_ns)
        leads = self._origin_of(place, origin)
        found = [
            self._stage(stage, self._leading_to(place), leads) for stage in facts.stages if stage.phase in _LEADING
        ]
        if facts.met is None or facts.met.group_rank == 0:
            earlier = None if before is None else (before, ROOT)
            part.cycle = _Open("launcher.cycle", ROOT, None, origin, record.wall_ns, about, previous=earlier)
            found.append(_anchor(part.cycle))
        return found

    def _cycle_ended(self, place: Cycle, record: Record, event: events.CycleEnded) -> list[Interval]:
        origin, part = record.origin, self._part(place)
        found = self._restart(place, record.wall_ns, "interrupted", "rank")
        parent = node_key(self._name) if event.outcome in _LAST else restart_key(self._name)
        stops = [stage for stage in self._facts(place).stages if stage.phase == "stop"]
        found += [self._stage(stage, parent, origin) for stage in stops]
        start = record.wall_ns - round(max(0.0, event.duration_s) * 1e9)
        self._began[origin.attempt] = min(start, self._began[origin.attempt])
        facts: dict[str, Fact] = {"detail": event.detail} if event.detail else {}
        for opened in (part.node, part.cycle):
            if opened is not None:
                found.append(opened.ended(origin, start, record.wall_ns, event.outcome, "rank", facts))
        return found

    def _job_ended(self, record: Record, event: events.JobEnded) -> list[Interval]:
        origin, last = record.origin, self._last
        self._last = None
        if last is not None and last[0] != origin.attempt:
            last = None
        if last is None:
            waited = self._history.cycles.waiting(self._name)
            found = [self._stage(stage, JOB, origin) for stage in waited]
        else:
            found = self._given_up(last, record.wall_ns, "failed", "rank")
        met = None if last is None else self._facts(last).met
        if met is None or met.group_rank == 0:
            facts: dict[str, Fact] = {"exit_code": event.exit_code, "is_clean": event.is_clean}
            began = min(self._began[origin.attempt], record.wall_ns)
            ended = (origin, began, record.wall_ns, event.outcome, "rank", facts)
            found.append(Interval("resilience.job", JOB, None, *ended))
        return found

    def _given_up(self, place: Cycle, at_ns: int, outcome: str, closed_by: str) -> list[Interval]:
        """The restart after the last cycle, that led to no other one."""
        part, ended = self._part(place), self._facts(place).ended
        if part.node is None or ended is None or ended.outcome in _LAST:
            return []
        waited = self._history.cycles.waiting(self._name)
        found = [self._stage(stage, restart_key(self._name), part.node.origin) for stage in waited]
        return [*found, *self._restart_of(place, None, at_ns, outcome, closed_by, part.node.origin)]

    # -- workers and monitors ------------------------------------------------------------------

    def _of_monitor(self, record: Record, place: Cycle) -> list[Interval]:
        event, rank = record.event, record.origin.initial_rank
        if rank is None:
            return []
        if isinstance(event, events.RankFellSilent):
            parent = node_key(self._name)
            key = self._part(place).numbered((*parent, "hang", rank))
            return [_hang(record, event, key, parent)]
        return self._progressed(record, rank) if isinstance(event, events.WorkerProgressed) else []

    def _progressed(self, record: Record, rank: int) -> list[Interval]:
        place = (record.origin.attempt, record.origin.cycle)
        self._part(place).speakers.setdefault(rank, record.origin)
        return self._imported(place, rank)

    def _imported(self, place: Cycle, rank: int) -> list[Interval]:
        """The start-up of a worker, once it shows progress; the agent's record of its start may come later."""
        part, worker = self._part(place), self._facts(place).workers.get(rank)
        if worker is None or worker.progress is None or worker.started_ns is None or rank in part.imported:
            return []
        part.imported.add(rank)
        until_ns, end, sign = worker.progress
        start = end - max(0, until_ns - worker.started_ns)
        origin, key = self._origin_of(place, part.speakers[rank]), (*node_key(self._name), "import", place[1], rank)
        facts: dict[str, Fact] = {"sign": sign}
        imported = Interval("import", key, self._leading_to(place), origin, start, end, "completed", facts=facts)
        return [imported, *self._restarted(place)]

    def _interrupted(self, record: Record, seen: InterruptionRecord) -> Interval:
        origin, parent = record.origin, node_key(self._name)
        part = self._part((origin.attempt, origin.cycle))
        key = part.numbered((*parent, "interruption", origin.role, seen.rank))
        part.interruptions.append((record.mono_ns, seen, key))
        return _instant(record, seen, key, parent, {"rank.initial": seen.rank})

    # -- restarts ------------------------------------------------------------------------------

    def _leading_to(self, place: Cycle) -> Key:
        """What the phases are part of that lead to a cycle: the restart after the one before, or the first start."""
        return restart_key(self._name) if place in self._before else node_key(self._name)

    def _origin_of(self, place: Cycle, origin: Origin) -> Origin:
        """The origin in the cycle that a phase belongs to which leads to the cycle `place`."""
        cycle = self._before[place][1] if place in self._before else place[1]
        return msgspec.structs.replace(origin, cycle=cycle)

    def _restarted(self, place: Cycle) -> list[Interval]:
        """The restart that led to a cycle, once all workers of the node have shown progress."""
        return self._restart(place, None, "completed", "rank") if self._facts(place).is_at_work else []

    def _restart(self, place: Cycle, at_ns: int | None, outcome: str, closed_by: str) -> list[Interval]:
        """The restart that led to a cycle, unless it is over."""
        part = self._part(place)
        if place not in self._before or part.is_restarted or part.node is None:
            return []
        part.is_restarted = True
        origin = self._origin_of(place, part.node.origin)
        return self._restart_of(self._before[place], self._facts(place), at_ns, outcome, closed_by, origin)

    def _restart_of(
        self, failed: Cycle, this: NodeCycle | None, at_ns: int | None, outcome: str, closed_by: str, origin: Origin
    ) -> list[Interval]:
        """The restart after the cycle `failed`, and its first phase. at_ns: its end, where no worker shows one."""
        before = self._facts(failed)
        since = before.failed_at
        if since is None:
            return []
        key, found = restart_key(self._name), []
        mono_ns, kind = since
        restarts = [] if this is None else list(restarts_of(before, this))
        kind = restarts[0].kind if restarts else kind
        start = before.wall_of(mono_ns)
        ends = [start + max(0, restart.until_ns - mono_ns) for restart in restarts]
        end = max([*ends, *([] if at_ns is None or ends else [at_ns])], default=start)
        for stage in before.stages:
            if stage.phase == "run":
                detect = ("detect", (*key, "detect"), key, origin, start, max(start, stage.ended_wall_ns), "completed")
                found.append(Interval(*detect))
        facts: dict[str, Fact] = {"interruption.kind": kind}
        cause = self._part(failed).cause(before)
        opened = _Open("restart", key, node_key(self._name), origin, start, facts)
        return [*found, opened.ended(origin, start, max(start, end), outcome, closed_by, None, cause)]

    # -- shared --------------------------------------------------------------------------------

    def _stage(self, stage: Stage, parent: Key, origin: Origin) -> Interval:
        start = stage.ended_wall_ns - round(stage.duration_s * 1e9)
        within = (*JOB, self._name) if parent == JOB else node_key(self._name)
        key = self._part((origin.attempt, origin.cycle)).numbered((*within, stage.phase))
        return Interval(stage.phase, key, parent, origin, start, stage.ended_wall_ns, stage.outcome)

    def _part(self, place: Cycle) -> _Part:
        part = self._parts.get(place)
        if part is None:
            part = self._parts[place] = _Part()
        return part

    def _facts(self, place: Cycle) -> NodeCycle:
        return self._history.cycles.part(self._name, place)


class _Part:
    """What is kept of one node's cycle beside its history."""

    def __init__(self) -> None:
        self.cycle: _Open | None = None
        self.node: _Open | None = None
        self.is_restarted = False  # the restart that led to it is over
        self.imported: set[int] = set()
        self.speakers: dict[int, Origin] = {}  # rank -> who told of its first progress
        self.interruptions: list[tuple[int, InterruptionRecord, Key]] = []
        self._counts: Counter[Key] = Counter()

    def note(self, record: Record) -> None:
        if self.node is not None:
            self.node.note(record.event, record.wall_ns)

    def numbered(self, key: Key) -> Key:
        number = self._counts[key]
        self._counts[key] += 1
        return (*key, number)

    def cause(self, facts: NodeCycle) -> Key | None:
        """The interruption that ended the cycle on this node, None if another node had it."""
        own = [entry for entry in self.interruptions if facts.is_own(entry[1])]
        of_mover = [entry for entry in own if entry[1].rank == facts.mover]
        first = min(of_mover or own, key=lambda entry: entry[0], default=None)
        return None if first is None else first[2]


# -- shared ----------------------------------------------------------------------------------------


def _ended(
    opened: _Open, record: Record, event: events.IterationEnded | events.StageEnded, cause: Key | None = None
) -> Interval:
    ago = event.ended_ago_s if isinstance(event, events.StageEnded) else 0.0
    end = record.wall_ns - round(ago * 1e9)
    start = end - round(max(0.0, event.duration_s) * 1e9)
    origin = msgspec.structs.replace(record.origin, iteration=opened.origin.iteration)
    return opened.ended(origin, start, end, event.outcome, event.closed_by, None, cause)


def _anchor(opened: _Open) -> Interval:
    """Says that an interval has begun, so that what hangs in it has something to be shown under."""
    at, key = opened.start_ns, (*opened.key, "anchor")
    return Interval(f"{opened.name}.start", key, opened.key, opened.origin, at, at, facts=dict(opened.facts))


def _hang(record: Record, event: events.RankFellSilent, key: Key, parent: Key) -> Interval:
    start = record.wall_ns - round(max(0.0, event.silent_for_s) * 1e9)
    facts: dict[str, Fact] = {"detector": event.limit, "timeout_s": event.allowed_s, "severity": event.severity}
    kind, _, name = event.limit.partition(":")
    if name and kind in ("section", "silence"):
        facts["section"] = name
    return Interval("monitor.hang", key, parent, record.origin, start, record.wall_ns, facts=facts)


def _instant(record: Record, seen: InterruptionRecord, key: Key, parent: Key, facts: dict[str, Fact]) -> Interval:
    at = record.wall_ns if seen.detected_wall_ns is None else min(seen.detected_wall_ns, record.wall_ns)
    return Interval("interruption", key, parent, record.origin, at, at, facts=facts, record=seen)
