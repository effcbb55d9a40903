"""What did the launcher do on one node, and when?  The part of `history.timeline` for cycles and their phases."""

from __future__ import annotations

from collections import Counter
from collections.abc import Set

import msgspec

from resilience.facts import events
from resilience.facts.identity import JOB, ROOT, Key, Origin, node_key, restart_key
from resilience.facts.interruptions import InterruptionRecord
from resilience.facts.records import Record
from resilience.history.cycles import Cycle, NodeCycle, Restart, restarts_of
from resilience.history.history import History
from resilience.history.intervals import Fact, Interval, Noted, Open, anchor, hang, instant
from resilience.history.phases import EndedPhase
from resilience.history.processes import AgentProcess

_LEADING = ("gate", "rendezvous")  # phases that end before their cycle is known


class NodeTimeline:
    """The intervals of one node, from the records of its agent and the launcher's monitors there."""

    def __init__(self, name: str, history: History) -> None:
        self._name = name
        self._history = history
        self._parts: dict[Cycle, _OpenCycle] = {}
        self._began: dict[int, int] = {}  # attempt -> UTC of its first record
        self._before: dict[Cycle, Cycle] = {}  # cycle -> the cycle whose restart led to it
        self._last: Cycle | None = None  # the last cycle that began; None once the job has ended
        self._agent: AgentProcess | None = None  # the newest
        self._at_ns = 0  # time of the agent's last record
        self._phase: Open | None = None
        self._last_words: list[Noted] = []  # verdicts on the last cycle, which arrive after its intervals are closed

    def take(self, record: Record) -> list[Interval]:
        origin, event = record.origin, record.event
        place = (origin.attempt, origin.cycle)
        if isinstance(event, events.RankInterrupted):
            return [self._interrupted(record, event.record)]
        if origin.role != "agent":
            return self._of_monitor(record, place)
        agent = self._history.cycles.agents[self._name][-1]
        left = [] if agent is self._agent else self._left()  # the agent before was killed
        self._agent = agent
        return [*left, *self._of_agent(record, place)]

    def _of_agent(self, record: Record, place: Cycle) -> list[Interval]:
        origin, event = record.origin, record.event
        self._at_ns = record.wall_ns
        self._began.setdefault(origin.attempt, record.wall_ns)
        match event:
            case events.CyclePhaseStarted(phase):
                key = (*node_key(self._name), phase, "open")
                self._phase = Open(phase, key, node_key(self._name), origin, record.wall_ns)
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
            case events.IncidentJudged() if event.cycle == place[1]:
                self._last_words.append(Noted(event, record.wall_ns))
            case _:
                self._part(place).note(record)
        return []

    def entered(self, record: Record) -> list[Interval]:
        """Return the intervals that are complete because a worker entered its wrapped function."""
        rank = record.origin.initial_rank
        return [] if rank is None else self._progressed(record, rank)

    def left_open(self) -> list[Interval]:
        intervals = self._left()
        self._last = None
        return intervals

    def _left(self) -> list[Interval]:
        """Return what the agent has left open in its last cycle, once."""
        if self._last is None or self._part(self._last).node is None:
            return []
        place, at = self._last, self._at_ns
        part, facts = self._part(place), self._facts(place)
        intervals: list[Interval] = []
        if (phase := self._phase) is not None:
            if facts.ended is not None and part.node is not None:  # the phase leads to a cycle that has not begun
                phase.parent, phase.origin = restart_key(self._name), part.node.origin
            intervals.append(phase.ended(phase.origin, min(phase.start_ns, at), at, "open", "reader"))
        if facts.ended is not None:
            intervals += self._given_up(place, at, "open", "reader")
        else:
            intervals += self._restart(place, at, "open", "reader")
            intervals += [
                opened.ended(opened.origin, min(opened.start_ns, at), at, "open", "reader")
                for opened in (part.node, part.cycle)
                if opened is not None
            ]
        part.node = part.cycle = self._phase = None
        return intervals

    # -- the agent's cycle ---------------------------------------------------------------------

    def _phase_ended(self, place: Cycle, phase: str, origin: Origin) -> list[Interval]:
        if phase == "run":
            return [self._stage(self._facts(place).stages[-1], node_key(self._name), origin)]
        if phase == "spawn":
            spawned = self._facts(place).stages[-1]
            leads = self._stage(spawned, self._leading_to(place), self._origin_of(place, origin))
            return [leads, *self._restarted(place)]
        return []  # gate and rendezvous are returned when their cycle starts, stop when its cycle ends

    def _cycle_started(self, place: Cycle, record: Record, event: events.CycleStarted) -> list[Interval]:
        is_end_lost = self._last is not None and self._last != place and self._facts(self._last).ended is None
        left = self._left() if is_end_lost else []
        self._last = place
        origin, part, facts = record.origin, self._part(place), self._facts(place)
        before = self._history.cycles.before(self._name, place)
        if before is not None:
            self._before[place] = before
        about: dict[str, Fact] = {"why": event.why}
        if facts.met is not None:
            about |= {"world_size": facts.met.world_size, "nodes": facts.met.nodes}
        leading = [stage for stage in facts.stages if stage.phase in _LEADING]
        start_ns = min((stage.timed(self._name).start_ns for stage in leading), default=record.wall_ns)
        part.node = Open("launcher.node", node_key(self._name), ROOT, origin, start_ns, about)
        part.node.note(event, record.wall_ns)
        leads = self._origin_of(place, origin)
        intervals = [*left, *(self._stage(stage, self._leading_to(place), leads) for stage in leading)]
        if facts.met is None or facts.met.group_rank == 0:
            earlier = None if before is None else (before, ROOT)
            part.cycle = Open("launcher.cycle", ROOT, None, origin, start_ns, about, previous=earlier)
            intervals.append(anchor(part.cycle))
        return intervals

    def _cycle_ended(self, place: Cycle, record: Record, event: events.CycleEnded) -> list[Interval]:
        origin, part = record.origin, self._part(place)
        intervals = self._restart(place, record.wall_ns, "interrupted", "rank")
        parent = node_key(self._name) if self._facts(place).is_last else restart_key(self._name)
        stops = [stage for stage in self._facts(place).stages if stage.phase == "stop"]
        intervals += [self._stage(stage, parent, origin) for stage in stops]
        start = record.wall_ns - round(max(0.0, event.duration_s) * 1e9)
        self._began[origin.attempt] = min(start, self._began[origin.attempt])
        facts: dict[str, Fact] = {"detail": event.detail} if event.detail else {}
        for opened in (part.node, part.cycle):
            if opened is not None:
                intervals.append(opened.ended(origin, start, record.wall_ns, event.outcome, "rank", facts))
        return intervals

    def _job_ended(self, record: Record, event: events.JobEnded) -> list[Interval]:
        origin, last = record.origin, self._last
        self._last = None
        if last is not None and last[0] != origin.attempt:
            last = None
        if last is None:
            waited = self._history.cycles.waiting(self._name)
            intervals = [self._stage(stage, JOB, origin) for stage in waited]
        else:
            intervals = self._given_up(last, record.wall_ns, "failed", "rank")
        met = None if last is None else self._facts(last).met
        if met is None or met.group_rank == 0:
            facts: dict[str, Fact] = {"exit_code": event.exit_code, "is_clean": event.is_clean}
            began = min(self._began[origin.attempt], record.wall_ns)
            ended = (origin, began, record.wall_ns, event.outcome, "rank", facts)
            intervals.append(Interval("resilience.job", JOB, None, *ended, noted=tuple(self._last_words)))
        return intervals

    def _given_up(self, place: Cycle, at_ns: int, outcome: str, closed_by: str) -> list[Interval]:
        """Return the restart after the last cycle, which led to no other cycle."""
        part, facts = self._part(place), self._facts(place)
        if part.node is None or facts.ended is None or facts.is_last:
            return []
        waited = self._history.cycles.waiting(self._name)
        intervals = [self._stage(stage, restart_key(self._name), part.node.origin, closed_by) for stage in waited]
        return [*intervals, *self._restart_of(place, None, at_ns, outcome, closed_by, part.node.origin)]

    # -- workers and monitors ------------------------------------------------------------------

    def _of_monitor(self, record: Record, place: Cycle) -> list[Interval]:
        event, rank = record.event, record.origin.initial_rank
        if rank is None:
            return []
        if isinstance(event, events.RankFellSilent):
            parent = node_key(self._name)
            key = self._part(place).numbered((*parent, "hang", rank))
            return [hang(record, event, key, parent)]
        return self._progressed(record, rank) if isinstance(event, events.WorkerProgressed) else []

    def _progressed(self, record: Record, rank: int) -> list[Interval]:
        place = (record.origin.attempt, record.origin.cycle)
        self._part(place).speakers.setdefault(rank, record.origin)
        return self._imported(place, rank)

    def _imported(self, place: Cycle, rank: int) -> list[Interval]:
        """Return a worker's start-up once it shows progress. The agent's record of its start may come later."""
        part, worker = self._part(place), self._facts(place).workers.get(rank)
        if worker is None or worker.progress is None or worker.started_ns is None or rank in part.imported:
            return []
        part.imported.add(rank)
        until_ns, end, sign = worker.progress
        start = end - max(0, until_ns - worker.started_ns)
        origin, key = self._origin_of(place, part.speakers[rank]), (*node_key(self._name), "import", place[1], rank)
        facts: dict[str, Fact] = {"sign": sign}
        away = self._away(place, frozenset((rank,)))
        imported = Interval("import", key, self._leading_to(place), origin, start, end, "completed", facts=facts)
        imported = msgspec.structs.replace(imported, each_s=tuple(restart.duration_s for restart in away))
        return [imported, *self._restarted(place)]

    def _interrupted(self, record: Record, interruption: InterruptionRecord) -> Interval:
        origin, parent = record.origin, node_key(self._name)
        part = self._part((origin.attempt, origin.cycle))
        key = part.numbered((*parent, "interruption", origin.role, interruption.rank))
        part.interruptions.append((record.mono_ns, interruption, key))
        return instant(record, interruption, key, parent, {"rank.initial": interruption.rank})

    # -- restarts ------------------------------------------------------------------------------

    def _leading_to(self, place: Cycle) -> Key:
        """Return the parent of the phases before a cycle: the restart after the previous cycle, or the first start."""
        return restart_key(self._name) if place in self._before else node_key(self._name)

    def _origin_of(self, place: Cycle, origin: Origin) -> Origin:
        """Return the origin with the cycle that a phase before the cycle `place` belongs to."""
        cycle = self._before[place][1] if place in self._before else place[1]
        return msgspec.structs.replace(origin, cycle=cycle)

    def _restarted(self, place: Cycle) -> list[Interval]:
        """Return the restart that led to a cycle, once all workers of the node have shown progress."""
        return self._restart(place, None, "completed", "rank") if self._facts(place).is_at_work else []

    def _restart(self, place: Cycle, at_ns: int | None, outcome: str, closed_by: str) -> list[Interval]:
        """Return the restart that led to a cycle, unless it is over."""
        part = self._part(place)
        if place not in self._before or part.is_restarted or part.node is None:
            return []
        facts, origin = self._facts(place), self._origin_of(place, part.node.origin)
        away = self._away(place, facts.workers.keys() - part.imported)
        rest = tuple(restart.duration_s for restart in away)
        part.is_restarted = True
        intervals = self._restart_of(self._before[place], facts, at_ns, outcome, closed_by, origin)
        return [
            msgspec.structs.replace(interval, each_s=rest if interval.name == "restart" else ())
            for interval in intervals
        ]

    def _away(self, place: Cycle, ranks: Set[int]) -> list[Restart]:
        """Return how long these ranks were away before a cycle, unless its restart is over."""
        if place not in self._before or self._part(place).is_restarted:
            return []
        restarts = restarts_of(self._facts(self._before[place]), self._facts(place))
        return [restart for restart in restarts if restart.rank in ranks]

    def _restart_of(
        self, failed: Cycle, this: NodeCycle | None, at_ns: int | None, outcome: str, closed_by: str, origin: Origin
    ) -> list[Interval]:
        """Return the restart after the cycle `failed`, and its first phase. at_ns: its end if no worker shows one."""
        before = self._facts(failed)
        since = before.restarts_since
        if since is None:
            return []
        key, intervals = restart_key(self._name), []
        mono_ns, kind = since
        restarts = [] if this is None else list(restarts_of(before, this))
        kind = restarts[0].kind if restarts else kind
        start = before.wall_of(mono_ns)
        ends = [start + max(0, restart.until_ns - mono_ns) for restart in restarts]
        end = max([*ends, *([] if at_ns is None or ends else [at_ns])], default=start)
        for stage in before.stages:
            if stage.phase == "run":
                rest = (origin, start, max(start, stage.ended_wall_ns), "completed", closed_by)
                intervals.append(Interval("detect", (*key, "detect"), key, *rest))
        facts: dict[str, Fact] = {"interruption.kind": kind}
        cause = self._part(failed).cause(before) or self._failed_elsewhere(before)
        opened = Open("restart", key, node_key(self._name), origin, start, facts)
        return [*intervals, opened.ended(origin, start, max(start, end), outcome, closed_by, None, cause)]

    def _failed_elsewhere(self, facts: NodeCycle) -> Key | None:
        """Return the failed node's part of the cycle. Only that node has a record of the rank's interruption."""
        failed = "" if facts.ended is None else facts.ended.failed_node
        return node_key(failed) if failed not in ("", self._name) else None

    # -- shared --------------------------------------------------------------------------------

    def _stage(self, stage: EndedPhase, parent: Key, origin: Origin, closed_by: str = "rank") -> Interval:
        start = stage.ended_wall_ns - round(stage.duration_s * 1e9)
        within = (*JOB, self._name) if parent == JOB else node_key(self._name)
        key = self._part((origin.attempt, origin.cycle)).numbered((*within, stage.phase))
        return Interval(stage.phase, key, parent, origin, start, stage.ended_wall_ns, stage.outcome, closed_by)

    def _part(self, place: Cycle) -> _OpenCycle:
        part = self._parts.get(place)
        if part is None:
            part = self._parts[place] = _OpenCycle()
        return part

    def _facts(self, place: Cycle) -> NodeCycle:
        return self._history.cycles.part(self._name, place)


class _OpenCycle:
    """What is kept about one node's cycle besides its history."""

    def __init__(self) -> None:
        self.cycle: Open | None = None
        self.node: Open | None = None
        self.is_restarted = False  # the restart that led to it is over
        self.imported: set[int] = set()
        self.speakers: dict[int, Origin] = {}  # rank -> origin of the record of its first progress
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
        """Return the interruption that ended the cycle on this node, None if it was on another node."""
        own = [entry for entry in self.interruptions if facts.is_own(entry[1])]
        of_mover = [entry for entry in own if entry[1].rank == facts.mover]
        first = min(of_mover or own, key=lambda entry: entry[0], default=None)
        return None if first is None else first[2]
