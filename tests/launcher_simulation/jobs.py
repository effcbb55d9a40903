"""How does a job of several nodes behave?  Virtual agents over one memory store, driven by a schedule.

Each agent runs the protocols of `core.supervision` and `core.rendezvous`. Their operations are performed one at a time,
each after a delay drawn from the schedule's seed: that is the interleaving. Before any of them a fault may strike. No
threads, no processes, no waiting. The `Referee` is told what really happens, and raises where an invariant breaks."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable
from heapq import heappop, heappush
from random import Random
from typing import Any

import msgspec

from resilience.core.agent_liveness import LOOKS, count_every, key
from resilience.core.agent_protocol import (
    AwaitKey,
    Counts,
    Delete,
    Emit,
    HighestStep,
    IsInterrupted,
    Operation,
    ReadClock,
    Sleep,
)
from resilience.core.control import Request
from resilience.core.restart import Add, Check, CompareSet, Read, Set
from resilience.core.terms import agree
from resilience.errors import StoreError
from tests.launcher_simulation.agents import Agent, Crew, StartWorkers, StopCounting, StopWorkers, Wake
from tests.launcher_simulation.referee import Referee, broken
from tests.launcher_simulation.schedules import (
    Asks,
    Breaks,
    Crash,
    Delay,
    Fails,
    Freeze,
    Hangs,
    Partition,
    PartitionBefore,
    Pause,
    Repeat,
    Schedule,
    Sick,
    Signalled,
    StoreDies,
)
from tests.restart_simulation.store import MemoryStore

Seconds = float
Trace = Callable[[Seconds, str, object], None]

# How long one operation takes: mostly a fraction of a millisecond, sometimes half a second.
DELAYS = tuple(10 ** (-4 + 3.7 * step / 255) for step in range(256))
NUMBERS = {"SIGTERM": 15, "SIGINT": 2}
PROGRESS = 2.0  # seconds that a cycle's workers need for a step
HANG_LIMIT = 60.0  # seconds after which a monitor ends a worker that makes no progress
OF_THE_STORE = (Read, Counts, Add, Set, CompareSet, Check, Delete)
MOST_AGENTS = 20  # an excluded node is not started for ever
MOST_ANSWERS = 1000  # that an agent gets at once
LIMIT = 2000.0  # seconds that a schedule may take, and as many for each of its faults


class Clock:
    """Seconds since the job began."""

    now: Seconds = 0.0


class Blocked(msgspec.Struct):
    """An operation whose answer does not come. has_arrived: it has taken effect."""

    operation: Operation
    has_arrived: bool = False
    answer: Any = None


class Report(msgspec.Struct, frozen=True):
    """What a schedule came to. ends: how each agent ended, in the order in which they started."""

    cycles: int
    steps: int
    seconds: Seconds
    ends: tuple[str, ...]


class Job:
    """One run of one schedule. `run` raises InternalError where an invariant breaks."""

    def __init__(self, schedule: Schedule, trace: Trace | None = None) -> None:
        self.schedule = schedule
        self.clock = Clock()
        self.rng = Random(-1 - schedule.seed)
        self.store = MemoryStore()
        self.referee = Referee(self)
        self.agents: list[Agent] = []
        self.crews: dict[int, dict[Agent, Crew]] = defaultdict(dict)  # by cycle
        self.broken_cycles: set[int] = set()  # a worker has failed, or its node is gone
        self.store_dies_at = self.frozen_until = 0.0
        self.is_store_dead = False
        self._blocked: dict[Agent, Blocked] = {}
        self._progress: dict[int, int] = defaultdict(lambda: -1)  # by node: its workers' highest step
        self._agenda: list[tuple[Seconds, int, Callable[..., None], tuple[Any, ...]]] = []
        self._count = 0
        self._trace = trace
        self._faults: dict[tuple[int, int], list[Any]] = defaultdict(list)  # by node and operation
        self._of_cycle: dict[tuple[int, int], Any] = {}  # by node and cycle
        self._sick = {(fault.node, fault.cycle) for fault in schedule.faults if isinstance(fault, Sick)}
        self._operations: dict[int, int] = defaultdict(int)  # by node

    def run(self) -> Report:
        """Run until nothing is left to happen, then settle."""
        steps, limit = 0, LIMIT * (1 + len(self.schedule.faults))
        self._begin()
        while self._agenda:
            at, _, act, arguments = heappop(self._agenda)
            self.clock.now = at
            act(*arguments)
            steps += 1
            if at > limit or steps > 100_000:
                running = ", ".join(agent.id for agent in self.agents if agent.is_alive)
                raise broken("every schedule ends", f"not after {at:.0f} s and {steps} steps; {running} go on")
        self.referee.settle()
        return Report(
            len(self.crews),
            steps,
            self.clock.now,
            tuple("killed" if agent.verdict is None else agent.verdict.outcome for agent in self.agents),
        )

    def note(self, agent: object, what: object) -> None:
        if self._trace is not None:
            self._trace(self.clock.now, str(agent), what)

    def after(self, delay: Seconds, act: Callable[..., None], *arguments: Any) -> None:
        self._count += 1
        heappush(self._agenda, (self.clock.now + delay, self._count, act, arguments))

    # -- the schedule -----------------------------------------------------------------------------

    def _begin(self) -> None:
        for node, comes in enumerate(self.schedule.comes):
            self.after(comes, self._start, node, 0)
        for fault in self.schedule.faults:
            match fault:
                case Crash(node, 0, at) if at is not None:
                    self.after(at, self._at_node, node, self._kill)
                case Signalled(node, name, at) if at is not None:
                    self.after(at, self._at_node, node, self._signal, name)
                case Crash(node, number) | Signalled(node, operation=number):
                    self._faults[node, number].append(fault)
                case Delay(node, number) | Repeat(node, number) | Pause(node, number) | PartitionBefore(node, number):
                    self._faults[node, number].append(fault)
                case Partition(node, at, duration):
                    self.after(at, self._at_node, node, self._cut_line, duration)
                case Freeze(at, duration):
                    self.after(at, self._freeze, duration)
                case StoreDies(at):
                    self.after(at, self._kill_store)
                case Breaks(node, at):
                    self.after(at, self._at_node, node, self._break)
                case Asks(node, action, at):
                    self.after(at, self._at_node, node, self._ask, action)
                case Fails(node, cycle) | Hangs(node, cycle):
                    self._of_cycle[node, cycle] = fault

    def _at_node(self, node: int, act: Callable[..., None], *arguments: Any) -> None:
        for agent in self.agents:
            if agent.node == node and agent.is_alive:
                act(agent, *arguments)

    def is_sick(self, agent: Agent) -> bool:
        return (agent.node, agent.rendezvous.cycle + 1) in self._sick

    def step(self, agent: Agent) -> int:
        """Return the highest step that a worker of this node has reported."""
        return self._progress[agent.node] if self.schedule.reports_steps else -1

    # -- agents ----------------------------------------------------------------------------------

    def _start(self, node: int, number: int) -> None:
        agent = Agent(self, node, number)
        self.note(agent, "starts")
        self.agents.append(agent)
        if not self.is_store_dead:
            self.store.perform(Add(key(agent.id), 1))
            agent.counted = 1
            self._agree_on_terms(agent)
        agent.lease.look(agent.counted, self.clock.now)
        self.after(self._pause, self._count_for, agent, self.clock.now)
        self._go_on(agent, None)

    def _agree_on_terms(self, agent: Agent) -> None:
        """As an agent starts, before its first fault: all agents of a schedule have the same settings."""
        protocol, answer = agree(agent.rendezvous.node, agent.rendezvous.terms), None
        with contextlib.suppress(StopIteration):
            while True:
                answer = self.store.perform(protocol.send(answer))

    @property
    def _pause(self) -> Seconds:
        """Return the seconds between two counts of an agent."""
        return count_every(self.schedule.terms.interval, self.schedule.terms.lost_after)

    def _kill(self, agent: Agent) -> None:
        self.note(agent, "is killed")
        self._ends(agent)
        agent.protocol.close()
        if agent.workers is not None:
            self.after(0.5 * self.rng.random(), self._workers_are_gone, agent)
            self._breaks(agent.workers.cycle)
        self._comes_back(agent)

    def _comes_back(self, agent: Agent) -> None:
        """The infrastructure starts an agent anew that was killed, or whose node was excluded."""
        if self.schedule.comes_back is not None and not agent.is_host and len(self.agents) < MOST_AGENTS:
            number = sum(other.node == agent.node for other in self.agents)
            self.after(self.schedule.comes_back, self._start, agent.node, number)

    def _ends(self, agent: Agent) -> None:
        agent.is_alive = False
        agent.token += 1
        self._blocked.pop(agent, None)
        self.referee.ended(agent)
        if agent.is_host:
            self._kill_store()

    def _signal(self, agent: Agent, name: str) -> None:
        self.note(agent, f"gets {name}")
        self.referee.signalled.setdefault(agent, self.clock.now)
        agent.signals.append((NUMBERS[name], name))
        agent.first_signal = agent.first_signal or (NUMBERS[name], name)
        self._wake(agent)

    def _break(self, agent: Agent) -> None:
        agent.is_broken = True
        self._wake(agent)

    def _ask(self, agent: Agent, action: str) -> None:
        if agent.workers is not None and agent.workers.is_living:
            self.note(agent, f"is asked for {action}")
            self.referee.asked(agent, action)
            agent.requests.append(Request(action, "a rank says so"))
            self._wake(agent)

    # -- counts and leases ------------------------------------------------------------------------

    def _is_reachable(self, agent: Agent) -> bool:
        now = self.clock.now
        return not self.is_store_dead and self.frozen_until <= now and agent.reachable_from <= now

    def _count_for(self, agent: Agent, last: Seconds) -> None:
        """The thread that counts for an agent; last: when it last did, or tried to."""
        now = self.clock.now
        if not agent.is_alive or not agent.is_counting:
            return None
        if agent.paused_until > now:
            return self.after(agent.paused_until - now, self._count_for, agent, agent.paused_until)
        if self._is_reachable(agent) and not agent.is_cut_off:
            self.store.perform(Add(key(agent.id), 1))
            agent.counted += 1
            agent.lease.look(agent.counted, now)
        else:  # the thread that watches the lease has looked meanwhile
            pause, was_cut_off = agent.lease.seconds / LOOKS, agent.is_cut_off
            number = 1
            while last + number * pause <= now:
                agent.lease.look(agent.counted, last + number * pause)
                number += 1
            if agent.is_cut_off and not was_cut_off:
                self._cut_off(agent)
        return self.after(self._pause, self._count_for, agent, now)

    def _cut_off(self, agent: Agent) -> None:
        """All connections of an agent are ended: what it waits for fails. What it has sent may arrive yet."""
        self.note(agent, "is cut off")
        time_left = agent.lease.time_left(self.clock.now)
        if agent.is_stopping and time_left is not None and not agent.supervision.is_job_over:
            self.after(time_left, self._has_no_time_left, agent)
        blocked = self._blocked.pop(agent, None)
        if blocked is None and agent.sent is not None:
            blocked = Blocked(agent.sent)
        if blocked is not None:
            if not blocked.has_arrived and not self.is_store_dead and self.rng.random() < 0.5:
                late = max(agent.reachable_from, self.frozen_until) - self.clock.now
                self.after(max(0.0, late) + self._delay(), self._arrives_late, agent, blocked.operation)
            self._go_on(agent, None, StoreError("the line is cut"))

    def _arrives_late(self, agent: Agent, operation: Operation) -> None:
        if not self.is_store_dead:
            self.note(agent, f"late: {operation}")
            self._take_effect(agent, operation)

    def _cut_line(self, agent: Agent, duration: Seconds) -> None:
        if agent.is_host:
            return
        self.note(agent, f"does not reach the store for {duration:.1f} s")
        self.referee.stalls(agent, duration)
        agent.reachable_from = self.clock.now + duration
        self.after(duration, self._answer_blocked)

    def _freeze(self, duration: Seconds) -> None:
        self.note("the store", f"stands still for {duration:.1f} s")
        self.frozen_until = max(self.frozen_until, self.clock.now + duration)
        self.referee.store_stalls(duration)
        self.after(duration, self._answer_blocked)

    def _kill_store(self) -> None:
        if not self.is_store_dead:
            self.note("the store", "is gone")
            self.is_store_dead = True
            self._answer_blocked()

    def _answer_blocked(self) -> None:
        for agent, blocked in list(self._blocked.items()):
            if self.is_store_dead:
                del self._blocked[agent]
                self.after(0.0, self._go_on_later, agent, agent.token, None, StoreError("connection reset"))
            elif self._is_reachable(agent):
                del self._blocked[agent]
                answer = blocked.answer if blocked.has_arrived else self._take_effect(agent, blocked.operation)
                self.after(self._delay(), self._go_on_later, agent, agent.token, answer, None)

    # -- performing operations --------------------------------------------------------------------

    def _delay(self) -> Seconds:
        return DELAYS[self.rng.getrandbits(8)] * self.schedule.latency

    def _go_on_later(self, agent: Agent, token: int, answer: Any, raised: Exception | None) -> None:
        if agent.token == token:
            self._go_on(agent, answer, raised)

    def _go_on(self, agent: Agent, answer: Any, raised: Exception | None = None) -> None:
        """Give an agent its answer, or raise in it, and put down what it asks for next."""
        agent.token += 1
        agent.is_watching = agent.is_stopping = False
        agent.sent = None
        protocol, now = agent.protocol, self.clock.now
        if agent.paused_until > now:
            return self.after(agent.paused_until - now, self._go_on_later, agent, agent.token, answer, raised)
        try:
            operation = protocol.send(answer) if raised is None else protocol.throw(raised)
            for _ in range(MOST_ANSWERS):
                if type(operation) in OF_THE_STORE:
                    return self._send(agent, operation)
                match operation:
                    case ReadClock():
                        answer = now
                    case IsInterrupted():
                        answer = agent.is_interrupted
                    case Sleep(seconds):
                        return self.after(seconds, self._go_on_later, agent, agent.token, None, None)
                    case Wake() if agent.signals or (agent.workers is not None and agent.workers.has_news):
                        answer = None
                    case Wake(seconds):
                        agent.is_watching = True
                        return self.after(seconds, self._go_on_later, agent, agent.token, None, None)
                    case HighestStep():
                        answer = self.step(agent)
                    case Emit(event):
                        self.note(agent, event)
                        answer = None
                    case StartWorkers():
                        answer = self._start_workers(agent)
                    case StopCounting():
                        agent.is_counting, answer = False, None
                    case AwaitKey(name, limit):
                        agent.awaited = name
                        if self._tells(agent, name):
                            answer = True
                        elif limit > 0 and not agent.is_interrupted:
                            agent.is_watching = True
                            return self.after(limit, self._go_on_later, agent, agent.token, False, None)
                        else:
                            answer = False
                    case StopWorkers(limit):
                        return self._stop_workers(agent, operation, limit)
                    case _:
                        raise TypeError(f"{operation} is no operation of an agent")
                operation = protocol.send(answer)
            raise broken("every schedule ends", f"{agent} asks for {operation}, and for nothing that takes time")
        except StopIteration:
            self.note(agent, f"ends: {agent.verdict}")
            if agent.verdict is not None and agent.verdict.outcome == "excluded":
                self._comes_back(agent)
            return self._ends(agent)

    def _tells(self, agent: Agent, name: str) -> bool:
        """Whether an agent is told of a key that is there. Some hints are lost."""
        return name in self.store.data and self._is_reachable(agent) and self.rng.random() < 0.9

    def _tell(self, name: str) -> None:
        """A key was written: the agents that wait for it go on."""
        for agent in self.agents:
            if agent.is_alive and agent.awaited == name and self._tells(agent, name):
                self.after(self._delay(), self._wake_now, agent, agent.token)

    def _wake(self, agent: Agent) -> None:
        """Something has happened at an agent: it goes on if it waits for that."""
        self.after(0.0, self._wake_now, agent, agent.token)

    def _wake_now(self, agent: Agent, token: int) -> None:
        if agent.token == token and agent.is_alive and agent.is_watching:
            self._go_on(agent, agent.awaited in self.store.data)

    def _send(self, agent: Agent, operation: Operation) -> None:
        """An agent asks the store for something, unless a fault strikes first."""
        self._operations[agent.node] += 1
        delay, times = self._delay(), 1
        faults = self._faults.pop((agent.node, self._operations[agent.node]), ())
        for fault in faults:
            match fault:
                case Crash():
                    return self._kill(agent)
                case Signalled(_, name):
                    self._signal(agent, name)
                case Delay(_, _, duration):
                    self.note(agent, f"its next operation takes {duration:.1f} s longer")
                    self.referee.delays(agent, duration)
                    delay += duration
                case Repeat():
                    times = 2
                case Pause(_, _, duration, frozen):
                    self.note(agent, f"stops for {duration:.1f} s")
                    self.referee.stalls(agent, duration, stops=True, frozen=frozen)
                    agent.paused_until = self.clock.now + duration
                    delay += duration
                case PartitionBefore(_, _, duration):
                    self._cut_line(agent, duration)
        agent.sent = operation
        return self.after(delay, self._arrives, agent, agent.token, operation, times)

    def _arrives(self, agent: Agent, token: int, operation: Operation, times: int) -> None:
        if agent.token != token:
            return None
        if agent.paused_until > self.clock.now:
            return self.after(agent.paused_until - self.clock.now, self._arrives, agent, token, operation, times)
        if self.is_store_dead or agent.is_cut_off:
            return self._go_on(agent, None, StoreError("the store is out of reach"))
        if not self._is_reachable(agent):
            blocked = self._blocked[agent] = Blocked(operation)
            if (
                agent.reachable_from > self.clock.now
                and self.frozen_until <= self.clock.now
                and self.rng.random() < 0.5
            ):
                blocked.has_arrived, blocked.answer = True, self._take_effect(agent, operation)
            return None
        for _ in range(times - 1):
            self.note(agent, "twice:")
            self._take_effect(agent, operation)
        return self._go_on(agent, self._take_effect(agent, operation))

    def _take_effect(self, agent: Agent, operation: Operation) -> Any:
        self.note(agent, operation)
        if isinstance(operation, Counts):
            return [int(self.store.data[name]) for name in operation.keys]
        if isinstance(operation, Delete):
            return self.store.data.pop(operation.key, None)
        if not isinstance(operation, Set | CompareSet):
            return self.store.perform(operation)
        before = self.store.data.get(operation.key)
        answer = self.store.perform(operation)
        if before is None:
            self._tell(operation.key)
        self.referee.wrote(agent, operation.key, before, self.store.data[operation.key])
        return answer

    # -- workers ----------------------------------------------------------------------------------

    def _start_workers(self, agent: Agent) -> None:
        cycle = agent.rendezvous.cycle
        fault = self._of_cycle.get((agent.node, cycle))
        is_same = isinstance(fault, Fails) and fault.same
        agent.workers = crew = Crew(cycle, "same", "exception") if is_same else Crew(cycle, f"exit:{cycle}", "exit")
        agent.requests.clear()
        self.crews[cycle][agent] = crew
        self.note(agent, f"starts workers of cycle {cycle}")
        self.referee.started(agent, cycle)
        self.after(PROGRESS, self._progresses, agent, crew)
        if isinstance(fault, Fails):
            self.after(fault.after, self._fails, agent, crew)
        elif isinstance(fault, Hangs):
            crew.is_hung = True
            self.after(HANG_LIMIT, self._fails, agent, crew)
            self._breaks(cycle)
        else:
            self.after(self.schedule.work * self.rng.uniform(1.0, 1.05), self._may_be_through, agent, crew, 0.0)
        if cycle in self.broken_cycles:
            self._is_drawn_in(agent, crew)

    def _progresses(self, agent: Agent, crew: Crew) -> None:
        if crew.is_living and agent.workers is crew and not crew.is_hung:
            self._progress[agent.node] = max(self._progress[agent.node], crew.cycle)

    def _fails(self, agent: Agent, crew: Crew) -> None:
        """A worker of a node ends badly."""
        if agent.workers is crew and crew.is_living:
            self.note(agent, "a worker fails")
            crew.end(is_well=False)
            self._breaks(crew.cycle)
            self._wake(agent)

    def _breaks(self, cycle: int) -> None:
        """Workers of a cycle that need each other will not come to their end."""
        if cycle in self.broken_cycles or self.schedule.rules.policy == "min-healthy":
            return
        self.broken_cycles.add(cycle)
        for agent, crew in self.crews[cycle].items():
            self._is_drawn_in(agent, crew)

    def _is_drawn_in(self, agent: Agent, crew: Crew) -> None:
        """A worker that waits for one that is gone fails in turn, or hangs until its monitor ends it."""
        self.after(2.0 * self.rng.random() if self.rng.random() < 0.5 else HANG_LIMIT, self._fails, agent, crew)

    def _may_be_through(self, agent: Agent, crew: Crew, waited: Seconds) -> None:
        """A worker ends well once all nodes of its cycle have run, unless one has failed."""
        if agent.workers is not crew or not crew.is_living or crew.cycle in self.broken_cycles:
            return None
        is_alone = self.schedule.rules.policy == "min-healthy"
        if not is_alone and len(self.crews[crew.cycle]) < len(agent.rendezvous.membership.seats):
            if waited >= HANG_LIMIT:
                return self._fails(agent, crew)
            return self.after(1.0, self._may_be_through, agent, crew, waited + 1.0)
        self.note(agent, "its workers are through")
        crew.end(is_well=True)
        return self._wake(agent)

    def _stop_workers(self, agent: Agent, operation: StopWorkers, limit: Seconds) -> None:
        crew = agent.workers
        assert crew is not None
        self.referee.obeys(agent, operation.verdict)
        takes = min(limit, 3.0 * self.rng.random()) if crew.is_living else 0.0
        if crew.is_hung and crew.is_living:
            takes = limit
        agent.is_stopping = True
        self.after(takes, self._has_stopped, agent, crew, agent.token)

    def _has_stopped(self, agent: Agent, crew: Crew, token: int) -> None:
        if agent.workers is crew:
            self._workers_are_gone(agent)
        self._go_on_later(agent, token, None, None)

    def _has_no_time_left(self, agent: Agent) -> None:
        """The others may go on without a node that is cut off: whatever its workers do, they are killed."""
        if agent.is_alive and agent.is_stopping and agent.workers is not None:
            self._has_stopped(agent, agent.workers, agent.token)

    def _workers_are_gone(self, agent: Agent) -> None:
        if agent.workers is not None:
            self.note(agent, "its workers are gone")
            agent.workers.is_living = False
            agent.workers = None
            self.referee.workers_gone(agent)
