"""What did the launcher do?  Records of agents and of their monitors, gathered by cycle and node.

Each node's agent records its part of a cycle, each worker's monitor what it sees of that worker. `CycleHistory` keeps
these facts, in whatever order files are read, and derives what follows from them: when a cycle failed and which rank
was first, how long each rank was away, which workers the launcher stopped on purpose. Lengths are measured on each
node's own monotonic clock."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

import msgspec

from resilience.core import events, tracebacks
from resilience.core.attribution import Interruption, InterruptionRecord
from resilience.core.records import Record
from resilience.history.phases import TimedPhase

Cycle = tuple[int, int]
"""Attempt and cycle."""

Sign = Literal["heartbeat", "step", "ping", "section", "entry"]
RESTART: tuple[str, ...] = ("detect", "stop", "gate", "rendezvous", "spawn", "import")
"""What a restart by the launcher consists of, in order."""

_FAILED = ("failed", "exhausted")
_BEFORE = ("gate", "rendezvous")  # which come before it is known which cycle they lead to
NODE_LOST = "lost "  # how the fingerprint of a lost node's failure begins


class Stage(NamedTuple):
    """A stage of a cycle that has ended, by the node's monotonic clock and by UTC."""

    phase: str
    ended_ns: int
    ended_wall_ns: int
    duration_s: float
    outcome: str = "completed"

    def timed(self, node: str) -> TimedPhase:
        return TimedPhase(self.phase, node, node, self.ended_wall_ns - round(self.duration_s * 1e9), self.ended_wall_ns)


class Seen(NamedTuple):
    """An interruption that the launcher's side saw."""

    at_ns: int
    record: InterruptionRecord


class Restart(NamedTuple):
    """A rank was away: from the failure, or the decision to start anew, to its first sign of progress."""

    rank: int
    kind: str
    since_ns: int
    until_ns: int
    wall_ns: int
    sign: Sign

    @property
    def duration_s(self) -> float:
        return max(0, self.until_ns - self.since_ns) / 1e9


class Worker:
    """One worker in one cycle. A Wrapper inside counts what happens in its function by itself."""

    def __init__(self) -> None:
        self.pid: int | None = None
        self.started_ns: int | None = None
        self.started_wall_ns = 0
        self.exited_ns: int | None = None
        self.exit: events.WorkerExited | None = None
        self.progress: tuple[int, int, Sign] | None = None  # monotonic, UTC, which
        self.first_step: tuple[int, int] | None = None  # monotonic ns, step
        self.how = ""
        self.evidence: str | None = None  # how its stacks were taken
        self.signals: tuple[str, str] | None = None  # that its monitor sent, and which limit made it
        self.seen: events.WorkerSeen | None = None  # where it was when another rank hung
        self.called_ns: int | None = None  # a Wrapper's function was called

    def is_stopped(self, ran_until: int | None) -> bool:
        """Return True if the agent ended it on purpose. ran_until: when the cycle's run ended, if it has."""
        if self.exit is None or not self.exit.expected:
            return False
        is_late = ran_until is not None and self.exited_ns is not None and self.exited_ns > ran_until
        return self.exit.code != 0 or is_late

    def progressed(self, at_ns: int, wall_ns: int, sign: Sign) -> None:
        if self.progress is None:
            self.progress = (at_ns, wall_ns, sign)


class NodeCycle:
    """One node's part of one cycle."""

    def __init__(self) -> None:
        self.started: events.CycleStarted | None = None
        self.ended: events.CycleEnded | None = None
        self.ended_ns = 0
        self.ended_wall_ns = 0
        self.run_began_ns: int | None = None
        self.met: events.RendezvousCompleted | None = None
        self.stages: list[Stage] = []
        self.workers: dict[int, Worker] = {}
        self.seen: list[Seen] = []
        self.decided: events.RestartDecided | None = None
        self.is_cut_off = False  # the job's store did not answer this node's agent any more
        self.mover: int | None = None  # of the failure that was decided on: the rank that ended first
        self.handled: dict[tuple[int, int | None], int] = {}  # rank, pid: in which iteration a Wrapper saw it die
        self._batch: list[tuple[int, int]] = []  # sequence, rank: ends that were found together

    def worker(self, rank: int) -> Worker:
        return self.workers.setdefault(rank, Worker())

    @property
    def is_at_work(self) -> bool:
        """Whether all workers have been started, and have shown progress."""
        started = [worker for worker in self.workers.values() if worker.started_ns is not None]
        is_spawned = any(stage.phase == "spawn" for stage in self.stages)
        return is_spawned and bool(started) and all(worker.progress is not None for worker in started)

    def wall_of(self, mono_ns: int) -> int:
        """Return a time of the node's monotonic clock in UTC, by the end of the run, or of the cycle."""
        ran = next((stage for stage in self.stages if stage.phase == "run"), None)
        known = (self.ended_ns, self.ended_wall_ns) if ran is None else (ran.ended_ns, ran.ended_wall_ns)
        return known[1] - (known[0] - mono_ns)

    @property
    def is_failed(self) -> bool:
        return self.ended is not None and self.ended.outcome in _FAILED

    @property
    def restarts_left(self) -> int | None:
        """What the job's budget has left, as far as this node knows."""
        if self.decided is not None:
            return self.decided.restarts_left
        return None if self.started is None else max(0, self.started.max_restarts - self.started.restarts_used)

    @property
    def stopped(self) -> set[int]:
        """Ranks that the agent ended on purpose. One that ended with status 0 while the cycle ran did so by itself."""
        ran_until = next((stage.ended_ns for stage in self.stages if stage.phase == "run"), None)
        return {rank for rank, worker in self.workers.items() if worker.is_stopped(ran_until)}

    @property
    def silent_ns(self) -> int:
        """For how long the rank had been silent whose hang ended the cycle, 0 if no hang did."""
        if self.ended is None or not self.is_failed:
            return 0
        own = [
            seen.record.silent_for_s
            for seen in sorted(self.seen, key=lambda seen: seen.at_ns)
            if self.is_own(seen.record)
        ]
        known = self.ended.silent_for_s if self.ended.silent_for_s is not None else next(iter(own), None)
        return round(max(0.0, known or 0.0) * 1e9)

    @property
    def reached(self) -> int | None:
        """The highest step of the cycle that is known to have begun when it failed."""
        steps = [seen.record.step for seen in self.seen]
        steps += [None if self.ended is None else self.ended.step]
        return max((step for step in steps if step is not None), default=None)

    @property
    def failed_at(self) -> tuple[int, str] | None:
        """When and how this node knew that the cycle had failed; without a fault of its own from the others."""
        own = [(seen.at_ns, seen.record.interruption.value) for seen in self.seen if self.is_own(seen.record)]
        own += [
            (worker.exited_ns, Interruption.TERMINATED.value)
            for rank, worker in self.workers.items()
            if worker.exited_ns is not None and worker.exit is not None and not worker.exit.expected
            if (rank, worker.pid) not in self.handled or rank == self.mover
        ]
        if own:
            return min(own)
        ran = [stage.ended_ns for stage in self.stages if stage.phase == "run"]
        return (ran[-1], "peer") if ran else (self.ended_ns, "peer") if self.ended is not None else None

    def is_own(self, record: InterruptionRecord) -> bool:
        """Whether this record is the launcher's affair, as this node saw it."""
        return self.is_left(record, self.mover)

    def is_left(self, record: InterruptionRecord, mover: int | None) -> bool:
        """Whether no Wrapper has coped with what is on record. mover: whose end the launcher decided on."""
        return (record.rank, record.pid) not in self.handled or record.rank == mover

    def exited(self, sequence: int, event: events.WorkerExited) -> None:
        if event.expected:
            if self._batch and self._batch[-1][0] == sequence - 1:
                self._batch[-1] = (sequence, self._batch[-1][1])
            return
        if self._batch and self._batch[-1][0] != sequence - 1:
            self._batch.clear()
        self._batch.append((sequence, event.worker_rank))

    def decide(self, event: events.RestartDecided) -> None:
        self.decided = event
        if self._batch and not event.fingerprint.startswith(NODE_LOST):
            self.mover = self._batch[0][1]


class CycleHistory:
    """Facts of a job's cycles, by node."""

    def __init__(self) -> None:
        self.nodes: dict[str, dict[Cycle, NodeCycle]] = {}
        self.began: dict[tuple[str, int], int] = {}  # node, attempt -> monotonic ns of its agent's first record
        self.over: dict[tuple[str, int], events.JobEnded] = {}  # node, attempt
        self._before: dict[str, list[Stage]] = {}
        self._met: dict[str, events.RendezvousCompleted] = {}

    def take(self, record: Record, at_ns: int) -> None:
        """Add what an agent, or a monitor of the launcher's, says. Only the order within each file matters.

        at_ns: when it said so, UTC."""
        origin, event = record.origin, record.event
        if origin.role == "agent":
            self.began.setdefault((origin.node, origin.attempt), record.mono_ns)
            self._take_of_agent(record, at_ns)
        if isinstance(event, events.Interrupted):
            self._part(record).seen.append(Seen(record.mono_ns, _read(event.record, record, at_ns)))
        elif origin.initial_rank is not None:
            self._take_of_monitor(record, origin.initial_rank, at_ns)

    def take_of_wrapper(self, record: Record, rank: int, at_ns: int) -> None:
        """Add what a Wrapper in a worker, or its monitor, says."""
        match record.event:
            case events.CallStarted():
                worker = self._part(record).worker(rank)
                worker.called_ns = worker.called_ns or record.mono_ns
            case events.StageStarted(stage="run"):
                self._part(record).worker(rank).progressed(record.mono_ns, at_ns, "entry")
            case events.Interrupted(seen) if seen.interruption is Interruption.TERMINATED:
                self._part(record).handled[seen.rank, seen.pid] = -1 if seen.iteration is None else seen.iteration

    def parts(self, place: Cycle) -> dict[str, NodeCycle]:
        """Return all nodes' parts of a cycle."""
        return {node: parts[place] for node, parts in self.nodes.items() if place in parts}

    def part(self, node: str, place: Cycle) -> NodeCycle:
        """Return one node's part of a cycle, an empty one if nothing is known of it."""
        return self.nodes.get(node, {}).get(place) or NodeCycle()

    def before(self, node: str, place: Cycle) -> Cycle | None:
        """Return the cycle that a node was in before, and that has failed; None if its agent began with this one."""
        parts = self.nodes.get(node, {})
        this = parts.get(place)
        if this is None or this.started is None or this.started.why == "first":
            return None
        earlier = [
            other
            for other, part in parts.items()
            if other[0] == place[0] and other < place and part.started is not None
        ]
        last = max(earlier, default=None)
        return None if last is None or parts[last].failed_at is None else last

    def waiting(self, node: str) -> list[Stage]:
        """Return phases of a node that have not led to a cycle yet."""
        return self._before.get(node, [])

    def mover(self, place: Cycle) -> int | None:
        """Return whose end the launcher decided on. An agent that decides late may name a rank without which a Wrapper
        has gone on since; then it is the last one that ended."""
        parts = self.parts(place).values()
        mover = next((part.mover for part in parts if part.mover is not None), None)
        ends = {
            rank: iteration
            for part in parts
            for (rank, _), iteration in part.handled.items()
            if rank not in part.stopped
        }
        is_late = mover in ends and ends[mover] < max(ends.values())
        return max(ends, key=lambda rank: ends[rank]) if is_late else mover

    def following(self, place: Cycle) -> Cycle | None:
        """Return the next cycle of the attempt that began."""
        return next((other for other in self.places if other[0] == place[0] and other > place), None)

    def restart_phases(self, place: Cycle) -> Iterator[TimedPhase]:
        """Yield the phases of the restart that a cycle ended with, on all nodes."""
        later = self.following(place)
        parts, following = self.parts(place), {} if later is None else self.parts(later)
        for node in sorted(parts.keys() | following.keys()):
            yield from phases_of(node, parts.get(node), following.get(node))

    def phases(self) -> Iterator[TimedPhase]:
        """Yield the phases of all starts and restarts."""
        for node, parts in self.nodes.items():
            for part in parts.values():
                yield from phases_of(node, part, part)

    def node_of(self) -> dict[int, str]:
        """Return on which node each rank's last worker was started."""
        last: dict[int, tuple[Cycle, str]] = {}
        for node, parts in self.nodes.items():
            for place, part in parts.items():
                for rank, worker in part.workers.items():
                    if worker.started_ns is not None and (rank not in last or place > last[rank][0]):
                        last[rank] = (place, node)
        return {rank: node for rank, (_, node) in last.items()}

    def last_parts(self) -> list[NodeCycle]:
        """Return all nodes' parts of the last cycle."""
        places = self.places
        return list(self.parts(places[-1]).values()) if places else []

    def last_workers(self) -> dict[int, Worker]:
        """Return the workers of the last cycle, by rank; one that another node has taken over counts there."""
        return {rank: worker for part in self.last_parts() for rank, worker in part.workers.items()}

    @property
    def stopped(self) -> dict[Cycle, set[int]]:
        """Ranks that the launcher ended on purpose, by cycle."""
        return {place: {rank for part in self.parts(place).values() for rank in part.stopped} for place in self.places}

    def world_size(self, place: Cycle) -> int | None:
        """Return how many ranks a cycle has, as its nodes met, or as workers were started."""
        parts = self.parts(place).values()
        told = [part.met.world_size for part in parts if part.met is not None]
        return max([*told, *(rank + 1 for part in parts for rank in part.workers)], default=None)

    @property
    def largest_world(self) -> int | None:
        """How many ranks the largest cycle had."""
        sizes = (self.world_size(place) for place in self.places)
        return max((size for size in sizes if size is not None), default=None)

    @property
    def places(self) -> list[Cycle]:
        """All cycles that an agent has told of, in order."""
        return sorted({place for parts in self.nodes.values() for place, part in parts.items() if part.started})

    def _part(self, record: Record) -> NodeCycle:
        origin = record.origin
        return self.nodes.setdefault(origin.node, {}).setdefault((origin.attempt, origin.cycle), NodeCycle())

    def _take_of_agent(self, record: Record, at_ns: int) -> None:
        event, node = record.event, record.origin.node
        match event:
            case events.CyclePhaseEnded(phase):
                stage = Stage(phase, record.mono_ns, at_ns, max(0.0, event.duration_s), event.outcome)
                (self._before.setdefault(node, []) if phase in _BEFORE else self._part(record).stages).append(stage)
            case events.CyclePhaseStarted(phase="run"):
                self._part(record).run_began_ns = record.mono_ns
            case events.CycleStarted():
                part = self._part(record)
                part.started, part.met = event, self._met.pop(node, None)
                part.stages[:0] = self._before.pop(node, [])
            case events.CycleEnded():
                part = self._part(record)
                part.ended, part.ended_ns, part.ended_wall_ns = event, record.mono_ns, at_ns
            case events.RendezvousCompleted():
                self._met[node] = event
            case events.WorkerStarted():
                worker = self._part(record).worker(event.worker_rank)
                worker.how = event.how
                worker.pid, worker.started_ns, worker.started_wall_ns = event.worker_pid, record.mono_ns, at_ns
            case events.WorkerExited():
                worker = self._part(record).worker(event.worker_rank)
                worker.exit, worker.exited_ns = event, record.mono_ns
                self._part(record).exited(record.sequence, event)
            case events.RestartDecided():
                self._part(record).decide(event)
            case events.StoreLost():
                self._part(record).is_cut_off = True
            case events.JobEnded():
                self.over[node, record.origin.attempt] = event

    def _take_of_monitor(self, record: Record, rank: int, at_ns: int) -> None:
        event = record.event
        match event:
            case events.WorkerProgressed():
                ago = round(event.ago_s * 1e9)
                worker = self._part(record).worker(rank)
                worker.progressed(record.mono_ns - ago, at_ns - ago, event.sign)
                if event.step is not None and worker.first_step is None:
                    worker.first_step = (record.mono_ns - ago, event.step)
            case events.EvidenceCaptured(method):
                self._part(record).worker(rank).evidence = method
            case events.WorkerSeen():
                self._part(record).worker(rank).seen = event
            case events.RankSignalled():
                self._part(record).worker(rank).signals = (", ".join(event.signals), event.reason)


def restarts_of(before: NodeCycle, this: NodeCycle) -> Iterator[Restart]:
    """Yield how long each rank of a cycle was away, that had begun in the cycle before."""
    since = before.failed_at
    if since is None or this.started is None:
        return
    at_ns, kind = since
    if this.started.why != "failure":
        kind = this.started.why
    for rank, worker in sorted(this.workers.items()):
        if worker.progress is not None:
            until_ns, wall_ns, sign = worker.progress
            yield Restart(rank, kind, at_ns, until_ns, wall_ns, sign)
        elif this.ended is not None and worker.started_ns is not None:
            yield Restart(rank, kind, at_ns, worker.started_ns, worker.started_wall_ns, "entry")


def phases_of(node: str, before: NodeCycle | None, this: NodeCycle | None) -> Iterator[TimedPhase]:
    """Yield the phases of a restart on one node: the end of one cycle and the start of the next one, or one of both.

    A node that knows no fault of its own has noticed when its workers were to be stopped."""
    for stage in () if before is None else before.stages:
        since = None if before is None else before.failed_at
        if stage.phase == "run" and since is not None:
            ago = max(0, stage.ended_ns - since[0])
            yield TimedPhase("detect", node, node, stage.ended_wall_ns - ago, stage.ended_wall_ns)
        elif stage.phase == "stop":
            yield stage.timed(node)
    if this is None:
        return
    yield from (stage.timed(node) for stage in this.stages if stage.phase in ("gate", "rendezvous", "spawn"))
    for rank, worker in sorted(this.workers.items()):
        if worker.progress is not None and worker.started_ns is not None:
            until_ns, wall_ns, _ = worker.progress
            yield TimedPhase("import", rank, node, wall_ns - max(0, until_ns - worker.started_ns), wall_ns)


def _read(seen: InterruptionRecord, record: Record, at_ns: int) -> InterruptionRecord:
    """The record with what its place adds: the exception of a program that is over stands in its last lines."""
    exception = seen.exception
    is_over = seen.interruption is Interruption.TERMINATED or seen.stage == "ending"
    if exception is None and is_over and seen.log_tail:
        exception = tracebacks.parse(seen.log_tail)
    return msgspec.structs.replace(
        seen,
        exception=exception,
        node=seen.node or record.origin.node,
        detected_wall_ns=at_ns if seen.detected_wall_ns is None else seen.detected_wall_ns - (record.wall_ns - at_ns),
    )
