"""What did the launcher do?  Collects the records of agents and of their monitors by cycle and node.

Each node's agent records its part of a cycle; each worker's monitor records what it observes of that worker.
`CycleHistory` keeps these facts, in any order of files, and derives the rest: when a cycle failed and which rank failed
first, how long each rank was away, which workers the launcher stopped on purpose. Durations use each node's own
monotonic clock."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from resilience.facts import events, tracebacks
from resilience.facts.identity import Origin
from resilience.facts.interruptions import Interruption, InterruptionRecord
from resilience.facts.records import Record
from resilience.history.phases import EndedPhase, RankRestart, TimedPhase
from resilience.history.processes import AgentProcess, Worker

Cycle = tuple[int, int]
"""Attempt and cycle."""

RESTART: tuple[str, ...] = ("detect", "stop", "gate", "rendezvous", "spawn", "import")
"""The phases of a restart by the launcher, in order."""

_FAILED = ("failed", "exhausted")
LAST_OUTCOMES = ("completed", "exhausted", "preempted", "shutdown", "excluded")  # of a cycle that no other one follows
_BEFORE = ("gate", "rendezvous")  # phases that end before their cycle is known


class Seen(NamedTuple):
    """An interruption that the launcher or its monitors recorded."""

    at_ns: int
    record: InterruptionRecord


class Restart(NamedTuple):
    """A rank's absence: from the failure, or the decision to restart, to its first progress. If a Wrapper detected the
    failure before the launcher did, it counts from then on."""

    rank: int
    kind: str
    since_ns: int
    until_ns: int

    @property
    def duration_s(self) -> float:
        return max(0, self.until_ns - self.since_ns) / 1e9


class LostMonitor(msgspec.Struct):
    """What happened to the monitors of one worker, without those that the agent replaced because they did not answer.
    pid, reason, at_ns: of the first one that was lost; at_ns is UTC. last_ns: when the last one was lost, in monotonic
    time. count: of lost monitors."""

    pid: int
    reason: str
    at_ns: int
    last_ns: int
    count: int = 1


class NodeCycle:
    """One node's part of one cycle."""

    def __init__(self) -> None:
        self.agent: AgentProcess | None = None  # which started it
        self.last_ns = 0  # the agent's last record of it, in monotonic time
        self.began_ns = self.began_wall_ns = 0  # when it started, in monotonic time and in UTC
        self.started: events.CycleStarted | None = None
        self.ended: events.CycleEnded | None = None
        self.ended_ns = 0
        self.ended_wall_ns = 0
        self.run_began_ns: int | None = None
        self.met: events.RendezvousCompleted | None = None
        self.stages: list[EndedPhase] = []
        self.workers: dict[int, Worker] = {}
        self.seen: list[Seen] = []
        self.lost_monitors: dict[int, LostMonitor] = {}  # by rank
        self.watched_ns: dict[int, int] = {}  # rank -> when its last monitor began to watch it, in monotonic time
        self.others: events.OthersSeen | None = None  # which ranks were looked at before a hung one was stopped
        self.decided: events.RestartDecided | None = None
        self.is_asked_to_stop = False  # the whole job, or this node alone
        self.is_cut_off = False  # the job's store no longer answered this node's agent
        self.has_lost_cycle_store = False  # the process that hosted the workers' store has ended
        self.mover: int | None = None  # the rank that ended first in the failure that was decided on
        self.handled: dict[tuple[int, int | None], int] = {}  # (rank, pid) -> iteration in which a Wrapper saw it die
        self._batch: list[tuple[int, int]] = []  # (sequence, rank) of ends that were collected together

    def worker(self, rank: int) -> Worker:
        worker = self.workers.get(rank)
        if worker is None:
            worker = self.workers[rank] = Worker()
        return worker

    @property
    def is_at_work(self) -> bool:
        """Return True if all workers have been started and have shown progress."""
        started = [worker for worker in self.workers.values() if worker.started_ns is not None]
        is_spawned = any(stage.phase == "spawn" for stage in self.stages)
        return is_spawned and bool(started) and all(worker.progress is not None for worker in started)

    def wall_of(self, mono_ns: int) -> int:
        """Convert a monotonic time of the node to UTC. The reference is the end of the run, or of the cycle, or its
        start."""
        ran = next((stage for stage in self.stages if stage.phase == "run"), None)
        known = (self.began_ns, self.began_wall_ns) if self.ended is None else (self.ended_ns, self.ended_wall_ns)
        known = known if ran is None else (ran.ended_ns, ran.ended_wall_ns)
        return known[1] - (known[0] - mono_ns)

    @property
    def is_failed(self) -> bool:
        return self.ended is not None and self.ended.outcome in _FAILED

    @property
    def is_last(self) -> bool:
        """Return True if the node does not take part in another cycle."""
        return self.ended is not None and self.ended.outcome in LAST_OUTCOMES

    @property
    def restarts_left(self) -> int | None:
        """Return how many restarts the job's budget has left, as far as this node knows."""
        if self.decided is not None:
            return self.decided.restarts_left
        return None if self.started is None else max(0, self.started.max_restarts - self.started.restarts_used)

    @property
    def lost_node(self) -> str | None:
        """Return the node whose loss this node decided on."""
        return None if self.decided is None else self.decided.lost_node

    @property
    def stopped(self) -> set[int]:
        """Return the ranks that the agent ended on purpose. A rank that exited with status 0 during the run ended by
        itself."""
        return {rank for rank, worker in self.workers.items() if worker.is_stopped(self._ran_until)}

    @property
    def has_lost_its_agent(self) -> bool:
        """True if a monitor says that it ended a worker because the agent was gone. If the agent is lost later than
        another limit fired, none says so."""
        return any(worker.lost_its_agent for worker in self.workers.values())

    @property
    def is_undecided(self) -> bool:
        """True if all workers have ended and no agent has recorded what follows. A living agent soon does."""
        is_recorded = self.ended is not None or self.decided is not None
        return bool(self.workers) and not is_recorded and all(worker.has_ended for worker in self.workers.values())

    def has_completed(self, worker: Worker) -> bool:
        """Return True if this worker exited with status 0, and not because the agent ended it."""
        return worker.has_completed and not worker.is_stopped(self._ran_until)

    def worked_until(self, worker: Worker, end: int) -> int:
        """Return until when a worker was at work in a cycle that ended at `end`: one that has finished is idle."""
        is_done = worker.exit is not None and worker.exit.expected and worker.exited_ns is not None
        return min(end, worker.exited_ns) if is_done and worker.exited_ns is not None else end

    @property
    def run_began_wall_ns(self) -> int:
        """Return when the node began to run its workers, in UTC; if it has not, when the cycle started."""
        return self.began_wall_ns + (self.began_ns if self.run_began_ns is None else self.run_began_ns) - self.began_ns

    @property
    def _ran_until(self) -> int | None:
        return next((stage.ended_ns for stage in self.stages if stage.phase == "run"), None)

    @property
    def silent_ns(self) -> int:
        """Return how long the rank whose hang ended the cycle had been silent, 0 if no hang ended it."""
        if self.ended is None or not self.is_failed:
            return 0
        own = [
            sighting.record.silent_for_s
            for sighting in sorted(self.seen, key=lambda sighting: sighting.at_ns)
            if self.is_own(sighting.record)
        ]
        known = self.ended.silent_for_s if self.ended.silent_for_s is not None else next(iter(own), None)
        return round(max(0.0, known or 0.0) * 1e9)

    @property
    def reached(self) -> int | None:
        """Return the highest step of the cycle that is known to have begun before it failed."""
        steps = [sighting.record.step for sighting in self.seen]
        steps += [None if self.ended is None else self.ended.step]
        return max((step for step in steps if step is not None), default=None)

    @property
    def failed_at(self) -> tuple[int, str] | None:
        """Return when and how this node learned that the cycle had failed: by its own fault, else from its peers."""
        own = self._own_fault
        if own is not None:
            return own[:2]
        return None if self.run_over_ns is None else (self.run_over_ns, "peer")

    @property
    def run_over_ns(self) -> int | None:
        """Return when this node ended its workers' run, or the cycle without one."""
        ran = [stage.ended_ns for stage in self.stages if stage.phase == "run"]
        return ran[-1] if ran else self.ended_ns if self.ended is not None else None

    @property
    def restarts_since(self) -> tuple[int, str] | None:
        """Return since when the node restarts, and how it learned of the failure. If a Wrapper had already interrupted
        the iteration of the rank that failed, the restart began with that: the rank was only ended later. If the others
        had gone on without this rank before it ended, its end is a new failure."""
        own = self._own_fault
        if own is None:
            return self.failed_at
        at_ns, kind, rank = own
        failed = self.workers.get(rank)
        if failed is None or failed.began is None:
            return at_ns, kind
        iteration, ended_ns = failed.began[0], at_ns if failed.died_ns is None else failed.died_ns
        began = [worker.began for worker in self.workers.values() if worker.began is not None]
        if any(place > iteration and began_ns < ended_ns for place, began_ns in began):
            return at_ns, kind
        interrupted = [worker.interrupted for worker in self.workers.values() if worker.interrupted is not None]
        return min([at_ns, *(first_ns for place, first_ns in interrupted if place == iteration)]), kind

    @property
    def _own_fault(self) -> tuple[int, str, int] | None:
        """Return when and how the node's first own fault was noticed that the launcher must handle, and its rank."""
        own = [
            (sighting.at_ns, sighting.record.interruption.value, sighting.record.rank)
            for sighting in self.seen
            if self.is_own(sighting.record)
        ]
        own += [
            (worker.exited_ns, Interruption.TERMINATED.value, rank)
            for rank, worker in self.workers.items()
            if worker.exited_ns is not None and worker.exit is not None and not worker.exit.expected
            if (rank, worker.pid) not in self.handled or rank == self.mover
        ]
        return min(own, default=None)

    def is_own(self, record: InterruptionRecord) -> bool:
        """Return True if the launcher, not a Wrapper, must handle this record, as far as this node knows."""
        return self.is_left(record, self.mover)

    def is_left(self, record: InterruptionRecord, mover: int | None) -> bool:
        """Return True if no Wrapper has handled this record. mover: the rank whose end the launcher decided on."""
        return (record.rank, record.pid) not in self.handled or record.rank == mover

    def is_watched_again(self, rank: int) -> bool:
        """Return True if another monitor took over after the last one of this rank was lost."""
        return self.watched_ns.get(rank, 0) > self.lost_monitors[rank].last_ns

    def lost_monitor(self, rank: int, event: events.MonitorLost, mono_ns: int, at_ns: int) -> None:
        known = self.lost_monitors.get(rank)
        if known is None:
            self.lost_monitors[rank] = LostMonitor(event.monitor_pid, event.reason, at_ns, mono_ns)
            return
        known.last_ns = max(known.last_ns, mono_ns)
        known.count += event.monitor_pid != 0  # 0: no other one could be started in its place

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
        if self._batch and self.lost_node is None:
            self.mover = self._batch[0][1]


class CycleHistory:
    """The facts of a job's cycles, by node."""

    def __init__(self) -> None:
        self.nodes: dict[str, dict[Cycle, NodeCycle]] = {}
        self.agents: dict[str, list[AgentProcess]] = {}  # by node, in their order
        self.over: dict[tuple[str, int], events.JobEnded] = {}  # node, attempt: the end that its last agent recorded
        self._places: set[Cycle] = set()  # that an agent recorded
        self._before: dict[str, list[EndedPhase]] = {}
        self._met: dict[str, events.RendezvousCompleted] = {}

    def take(self, record: Record, at_ns: int) -> None:
        """Add a record of an agent or of one of its monitors. Only the order within each file matters.

        at_ns: time of the record, UTC."""
        origin, event = record.origin, record.event
        if origin.role == "agent":
            agent = self._agent_of(record)
            self._take_of_agent(record, agent, at_ns)
            part = self.nodes.get(origin.node, {}).get((origin.attempt, origin.cycle))
            if part is not None and part.agent is agent:
                part.last_ns = max(part.last_ns, record.mono_ns)
        if isinstance(event, events.RankInterrupted):
            self._part(record).seen.append(Seen(record.mono_ns, _read(event.record, record, at_ns)))
        elif origin.initial_rank is not None:
            self._take_of_monitor(record, origin.initial_rank, at_ns)

    def take_of_wrapper(self, record: Record, rank: int, at_ns: int) -> None:
        """Add a record of a Wrapper in a worker, or of the Wrapper's monitor."""
        match record.event:
            case events.CallStarted():
                worker = self._part(record).worker(rank)
                worker.called_ns = worker.called_ns or record.mono_ns
            case events.StageStarted(stage="run"):
                self._part(record).worker(rank).progressed(record.mono_ns, at_ns, "entry")
            case events.IterationStarted():
                self._part(record).worker(rank).began = (_iteration_of(record.origin), record.mono_ns)
            case events.CallEnded():
                self._part(record).worker(rank).began = None
            case events.RankInterrupted(interruption) if interruption.interruption is Interruption.TERMINATED:
                part = self._part(record)
                part.handled[interruption.rank, interruption.pid] = (
                    -1 if interruption.iteration is None else interruption.iteration
                )
                part.worker(rank).died_ns = record.mono_ns
            case events.RankInterrupted():
                self._part(record).worker(rank).was_interrupted(_iteration_of(record.origin), record.mono_ns)
            case _:  # no other event matters here
                pass

    def parts(self, place: Cycle) -> dict[str, NodeCycle]:
        """Return all nodes' parts of a cycle."""
        return {node: parts[place] for node, parts in self.nodes.items() if place in parts}

    def is_over(self, attempt: int) -> bool:
        """Return True if the job has ended on every node of the attempt's newest cycle that was not lost in it; before
        the first cycle, on every node. Nodes that were lost before, or that never had a place, do not count."""
        newest = max((place for place in self._places if place[0] == attempt), default=None)
        parts = {} if newest is None else self.parts(newest)
        lost = {part.lost_node for part in parts.values()}
        nodes = {node for node, part in parts.items() if part.started is not None and node not in lost}
        nodes = nodes or {node for node, agents in self.agents.items() if agents[-1].attempt == attempt}
        return all((node, attempt) in self.over for node in nodes)

    def ends(self, attempt: int) -> list[events.JobEnded]:
        """Return how the job ended on the nodes of the attempt's newest cycle. Nodes that left earlier do not know it;
        theirs count once the job is over, if no other node recorded an end."""
        newest = max((place for place in self._places if place[0] == attempt), default=None)
        ends = {node: event for (node, number), event in self.over.items() if number == attempt}
        stayed = [] if newest is None else [ends[node] for node in sorted(self.parts(newest)) if node in ends]
        return stayed or ([ends[node] for node in sorted(ends)] if self.is_over(attempt) else [])

    def end(self, attempt: int) -> events.JobEnded | None:
        """Return how the job ended in the attempt, None if no end is on record. A node that completed decides, since
        nodes may continue without the others; among failures, the highest exit code decides."""
        ends = self.ends(attempt)
        completed = [event for event in ends if event.outcome == "completed"]
        return max(completed or ends, key=lambda event: event.exit_code, default=None)

    def part(self, node: str, place: Cycle) -> NodeCycle:
        """Return one node's part of a cycle, an empty part if nothing is known."""
        return self.nodes.get(node, {}).get(place) or NodeCycle()

    def before(self, node: str, place: Cycle) -> Cycle | None:
        """Return the cycle from which a node was restarted into this one: the job's previous cycle, if it failed and
        the same agent took part in it. Otherwise None: the agent began with this cycle, or waited for a place."""
        this, last = self.part(node, place), self.part(node, (place[0], place[1] - 1))
        if this.started is None or this.started.why == "first" or last.started is None or last.agent is not this.agent:
            return None
        return None if last.failed_at is None else (place[0], place[1] - 1)

    def free_since(self, place: Cycle) -> int | None:
        """Return since when the nodes that were not in the job's previous cycle could be in this one: since the
        previous one failed, in UTC nanoseconds. None: there was none, or its end is not known here."""
        last = max((earlier for earlier in self._places if earlier[0] == place[0] and earlier < place), default=None)
        parts = () if last is None else self.parts(last).values()
        return min((part.wall_of(part.failed_at[0]) for part in parts if part.failed_at is not None), default=None)

    def over_since(self, place: Cycle) -> int | None:
        """Return when a node first ended its workers' run, in UTC nanoseconds. From then on the launcher ends them, and
        the cycle's store."""
        parts = self.parts(place).values()
        return min((part.wall_of(part.run_over_ns) for part in parts if part.run_over_ns is not None), default=None)

    def waited_since(self, node: str, place: Cycle) -> int | None:
        """Return since when a node that was not restarted waited for a cycle that had a place for it, in its monotonic
        time. Earlier, its agent did not run, or had other workers, or the job needed no further node."""
        part = self.part(node, place)
        if part.agent is None:
            return None
        known = [part.agent.began_ns]
        known += [
            earlier.last_ns if earlier.failed_at is None else earlier.failed_at[0]
            for number, earlier in self.nodes[node].items()
            if number < place and earlier.agent is part.agent
        ]
        free = self.free_since(place)
        known += [] if free is None else [part.began_ns - (part.began_wall_ns - free)]
        return min(part.began_ns, max(known))

    def is_present(self, node: str, place: Cycle) -> bool:
        """Return True if no later cycle of the node began, and no later agent."""
        agents, part = self.agents.get(node), self.part(node, place)
        if agents is None:
            return False
        later = (number for number, other in self.nodes.get(node, {}).items() if number > place and other.started)
        return part.agent is agents[-1] and next(later, None) is None

    def waiting(self, node: str) -> list[EndedPhase]:
        """Return phases of a node that have not led to a cycle yet."""
        return self._before.get(node, [])

    def mover(self, place: Cycle) -> int | None:
        """Return the rank whose end the launcher decided on. A late agent may name a rank whose death a Wrapper has
        already handled; then the last rank that ended is returned."""
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
        """Return the next cycle of the same attempt that began."""
        return next((later for later in self.places if later[0] == place[0] and later > place), None)

    def restarts_after(self, place: Cycle) -> Iterator[RankRestart]:
        """Yield the restarts of ranks after a cycle, on all nodes that were in it and in the next one."""
        later = self.following(place) or place
        for node, part in self.parts(later).items():
            if self.before(node, later) == place:
                restarts = restarts_of(self.part(node, place), part)
                yield from (RankRestart(place, restart.rank, restart.duration_s) for restart in restarts)

    def restart_phases(self, place: Cycle) -> Iterator[TimedPhase]:
        """Yield the phases of the restart that a cycle ended with, on all nodes. The last cycle's end is no restart."""
        later = self.following(place)
        parts = {node: part for node, part in self.parts(place).items() if not part.is_last}
        following = {} if later is None else self.parts(later)
        for node in sorted(parts.keys() | following.keys()):
            since = None if later is None else self._counts_from(node, later)
            yield from phases_of(node, parts.get(node), following.get(node), since)

    def phases(self) -> Iterator[TimedPhase]:
        """Yield the phases of all starts and restarts."""
        for node, parts in self.nodes.items():
            for place, part in parts.items():
                yield from phases_of(node, part, part, self._counts_from(node, place))

    def _counts_from(self, node: str, place: Cycle) -> int | None:
        """Return the UTC time from which a node's phases before a cycle count, None for all of them."""
        return self.free_since(place) if self.before(node, place) is None else None

    def node_of(self) -> dict[int, str]:
        """Return the node on which each rank's last worker was started."""
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
        """Return the workers of the last cycle, by rank. A rank that moved to another node counts there."""
        return {rank: worker for part in self.last_parts() for rank, worker in part.workers.items()}

    @property
    def stopped(self) -> dict[Cycle, set[int]]:
        """Return the ranks that the launcher ended on purpose, by cycle."""
        return {place: {rank for part in self.parts(place).values() for rank in part.stopped} for place in self.places}

    def world_size(self, place: Cycle) -> int | None:
        """Return the number of ranks in a cycle, from its rendezvous or from the started workers."""
        parts = self.parts(place).values()
        sizes = [part.met.world_size for part in parts if part.met is not None]
        return max([*sizes, *(rank + 1 for part in parts for rank in part.workers)], default=None)

    @property
    def largest_world(self) -> int | None:
        """Return the number of ranks in the largest cycle."""
        sizes = (self.world_size(place) for place in self.places)
        return max((size for size in sizes if size is not None), default=None)

    @property
    def places(self) -> list[Cycle]:
        """Return all cycles that an agent recorded, in order."""
        return sorted(self._places)

    def _part(self, record: Record) -> NodeCycle:
        origin = record.origin
        parts, place = self.nodes.setdefault(origin.node, {}), (origin.attempt, origin.cycle)
        part = parts.get(place)
        if part is None:
            part = parts[place] = NodeCycle()
        return part

    def _agent_of(self, record: Record) -> AgentProcess:
        node = record.origin.node
        agents = self.agents.setdefault(node, [])
        if not agents or not agents[-1].is_of(record):
            agents.append(AgentProcess(record))
            self.over.pop((node, record.origin.attempt), None)  # the end of the process before was not the job's
            self._before.pop(node, None)
            self._met.pop(node, None)
        agents[-1].took(record)
        return agents[-1]

    def _take_of_agent(self, record: Record, agent: AgentProcess, at_ns: int) -> None:
        event, node = record.event, record.origin.node
        match event:
            case events.CyclePhaseEnded(phase):
                stage = EndedPhase(phase, record.mono_ns, at_ns, max(0.0, event.duration_s), event.outcome)
                (self._before.setdefault(node, []) if phase in _BEFORE else self._part(record).stages).append(stage)
            case events.CyclePhaseStarted(phase="run"):
                self._part(record).run_began_ns = record.mono_ns
            case events.CycleStarted():
                part = self._part(record)
                part.started, part.agent, part.met = event, agent, self._met.pop(node, None)
                part.began_ns, part.began_wall_ns = record.mono_ns, at_ns
                self._places.add((record.origin.attempt, record.origin.cycle))
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
                worker.ended_wall_ns = worker.ended_wall_ns or at_ns
                self._part(record).exited(record.sequence, event)
            case events.RestartDecided():
                self._part(record).decide(event)
            case events.OthersSeen():
                part = self._part(record)
                part.others = part.others or event
            case events.StopRequested():
                known = self.nodes.get(node, {}).get((record.origin.attempt, record.origin.cycle))
                if known is not None:  # a node that waits for a place has none
                    known.is_asked_to_stop = True
            case events.StoreLost():
                self._part(record).is_cut_off = True
            case events.MonitorLost(is_replaced=False) if record.origin.initial_rank is not None:
                self._part(record).lost_monitor(record.origin.initial_rank, event, record.mono_ns, at_ns)
            case events.StoreProcessLost(is_cycle_store=True):
                self._part(record).has_lost_cycle_store = True
            case events.JobEnded():
                self.over[node, record.origin.attempt] = event
            case _:  # no other event matters here
                pass

    def _take_of_monitor(self, record: Record, rank: int, at_ns: int) -> None:
        event = record.event
        match event:
            case events.WorkerProgressed():
                ago = round(event.ago_s * 1e9)
                worker = self._part(record).worker(rank)
                worker.progressed(record.mono_ns - ago, at_ns - ago, event.sign)
                if event.step is not None and worker.first_step is None:
                    worker.first_step = (record.mono_ns - ago, event.step)
            case events.MonitorStarted():
                watched = self._part(record).watched_ns
                watched[rank] = max(record.mono_ns, watched.get(rank, 0))
            case events.EvidenceCaptured(method):
                self._part(record).worker(rank).evidence = method
            case events.WorkerSeen(is_suspicion=False):
                self._part(record).worker(rank).looked_at(event, at_ns, record.mono_ns)
            case events.RankExited():
                worker = self._part(record).worker(rank)
                worker.left, worker.ended_wall_ns = event, worker.ended_wall_ns or at_ns
            case events.RankSignalled():
                self._part(record).worker(rank).signalled(event, at_ns)
            case _:  # no other event matters here
                pass


def restarts_of(before: NodeCycle, this: NodeCycle) -> Iterator[Restart]:
    """Yield each rank's absence between the failed cycle `before` and this cycle."""
    since = before.restarts_since
    if since is None or this.started is None:
        return
    at_ns, kind = since
    if this.started.why != "failure":
        kind = this.started.why
    for rank, worker in sorted(this.workers.items()):
        if worker.progress is not None:
            yield Restart(rank, kind, at_ns, worker.progress[0])
        elif this.ended is not None and worker.started_ns is not None:
            yield Restart(rank, kind, at_ns, worker.started_ns)


def phases_of(
    node: str, before: NodeCycle | None, this: NodeCycle | None, since_ns: int | None = None
) -> Iterator[TimedPhase]:
    """Yield the phases of a restart on one node: the end of one cycle, the start of the next one, or both.

    A node without a fault of its own learned of the failure when it had to stop its workers. since_ns: the phases
    before this time, UTC, are no part of the restart: the node waited for a place in a job that needed no other one."""
    for stage in () if before is None else before.stages:
        since = None if before is None else before.restarts_since
        if stage.phase == "run" and since is not None:
            ago = max(0, stage.ended_ns - since[0])
            yield TimedPhase("detect", node, node, stage.ended_wall_ns - ago, stage.ended_wall_ns)
        elif stage.phase == "stop":
            yield stage.timed(node)
    if this is None:
        return
    for stage in this.stages:
        if stage.phase in ("gate", "rendezvous", "spawn") and (since_ns is None or stage.ended_wall_ns > since_ns):
            timed = stage.timed(node)
            start_ns = timed.start_ns if since_ns is None else max(timed.start_ns, since_ns)
            yield msgspec.structs.replace(timed, start_ns=start_ns)
    for rank, worker in sorted(this.workers.items()):
        if worker.progress is not None and worker.started_ns is not None:
            until_ns, wall_ns, _ = worker.progress
            yield TimedPhase("import", rank, node, wall_ns - max(0, until_ns - worker.started_ns), wall_ns)


def _iteration_of(origin: Origin) -> tuple[int, int]:
    """Return call and iteration, -1 before the first iteration of the call."""
    return origin.call, -1 if origin.iteration is None else origin.iteration


def _read(interruption: InterruptionRecord, record: Record, at_ns: int) -> InterruptionRecord:
    """Return the record with missing facts filled in: a program that ends with a code has shown the cause."""
    exception, end = interruption.exception, interruption.exit
    is_over = interruption.stage == "ending" if end is None else end.signal is None and bool(end.code)
    if exception is None and is_over and interruption.log_tail:
        exception = tracebacks.parse(interruption.log_tail)
    return msgspec.structs.replace(
        interruption,
        exception=exception,
        node=interruption.node or record.origin.node,
        detected_wall_ns=at_ns
        if interruption.detected_wall_ns is None
        else interruption.detected_wall_ns - (record.wall_ns - at_ns),
    )
