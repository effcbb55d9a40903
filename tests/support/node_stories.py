"""Records of launched jobs whose nodes come and go: each node's part of a cycle is written by itself, at given times.

`tests.support.launch_streams` has whole jobs whose nodes stay together. Here a node may join late, wait, be lost or
come back, and each agent is a process of its own. Times are seconds of the job; each node has its own clock."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from resilience.facts import events
from resilience.facts.identity import Origin, Role
from resilience.facts.records import Record
from tests.support.agreement import written
from tests.support.record_streams import STARTED_NS

CAME_S, SPAWNED_S, STEPPED_S, STOPPED_S = 0.01, 0.2, 1.0, 0.1
"""How long the preflight checks, the start of the workers, the way to the first step and the stop take."""


class NodeStory:
    """Writes the records of agents and their monitors. agents: pid of each node's agent, 10 unless set."""

    def __init__(self) -> None:
        self.files: dict[tuple[str, int | None], list[Record]] = {}
        self.agents: dict[str, int] = {}
        self._numbers: dict[tuple[str, int | None, Role, int], int] = {}
        self.booted: dict[str, float] = {}  # node -> seconds of the job at which its monotonic clock began again

    @property
    def records(self) -> list[Record]:
        return [record for key in sorted(self.files, key=str) for record in self.files[key]]

    def of_node(self, node: str) -> list[Record]:
        """The records of one node, in the order of time."""
        return sorted((record for record in self.records if record.origin.node == node), key=lambda r: r.wall_ns)

    def write(self, folder: Path) -> Path:
        return written(self.records, folder)

    def put(
        self,
        node: str,
        rank: int | None,
        role: Role,
        pid: int,
        at: float,
        event: events.Event,
        cycle: int,
        layer: Literal["inprocess", "launcher"] = "launcher",
    ) -> None:
        origin = Origin("job", node, role, pid, cycle=cycle)
        if rank is not None:
            origin = Origin(
                "job", node, role, pid, cycle=cycle, initial_rank=rank, rank=rank, world_size=2, layer=layer
            )
        number = self._numbers.get((node, rank, role, pid), 0)
        self._numbers[node, rank, role, pid] = number + 1
        began = 10**12 * (1 + ord(node[-1]) - ord("a"))
        if node in self.booted and at >= self.booted[node]:
            began = 10**9 - round(self.booted[node] * 1e9)
        wall_ns, mono_ns = STARTED_NS + round(at * 1e9), began + round(at * 1e9)
        self.files.setdefault((node, rank), []).append(Record(number, wall_ns, mono_ns, origin, event))

    def new_agent(self, node: str, pid: int, boot_at: float | None = None) -> None:
        """From now on another process is the node's agent, perhaps with the same pid. boot_at: when the host booted."""
        self.agents[node] = pid
        self._numbers.pop((node, None, "agent", pid), None)
        if boot_at is not None:
            self.booted[node] = boot_at

    def agent(self, node: str, at: float, event: events.Event, cycle: int = 0) -> None:
        self.put(node, None, "agent", self.agents.get(node, 10), at, event, cycle)

    def monitor(self, node: str, rank: int, at: float, event: events.Event, cycle: int = 0) -> None:
        self.put(node, rank, "monitor", 500 + rank + 100 * cycle, at, event, cycle)

    def wrapper(self, node: str, rank: int, at: float, event: events.Event, cycle: int = 0) -> None:
        self.put(node, rank, "rank", 1000 * (cycle + 1) + rank, at, event, cycle, "inprocess")

    def join(
        self,
        nodes: Iterable[str],
        came: float,
        met: float,
        cycle: int = 0,
        why: events.CycleReason = "first",
        size: int = 2,
        group: int = 0,
    ) -> None:
        """These nodes pass their checks at `came` and begin a cycle at `met`. group: the first one's group rank."""
        for number, node in enumerate(nodes):
            before = cycle if why == "first" and cycle == 0 else 0 if why == "first" else cycle - 1
            for phase, since, until in (("gate", came, came + CAME_S), ("rendezvous", came + CAME_S, met)):
                self.agent(node, since, events.CyclePhaseStarted(phase), before)  # type: ignore[arg-type]
                ended = events.CyclePhaseEnded(phase, "completed", until - since)  # type: ignore[arg-type]
                self.agent(node, until, ended, before)
            self.agent(node, met, events.RendezvousCompleted(group + number, size, size, "deterministic", "h:1"), cycle)
            self.agent(node, met, events.CycleStarted(why, cycle, 10), cycle)

    def spawn(
        self, node: str, at: float, ranks: Iterable[int], step: int | None = 0, cycle: int = 0, signs: bool = True
    ) -> None:
        """The node starts its workers, each of which makes its first step a second later, if it gives signs at all."""
        self.agent(node, at, events.CyclePhaseStarted("spawn"), cycle)
        for local_rank, rank in enumerate(ranks):
            pid = 1000 * (cycle + 1) + rank
            self.agent(node, at + 0.1, events.WorkerStarted(local_rank, rank, pid, "cold"), cycle)
            self.monitor(node, rank, at + 0.1, events.MonitorStarted(pid), cycle)
        self.agent(node, at + SPAWNED_S, events.CyclePhaseEnded("spawn", "completed", SPAWNED_S), cycle)
        self.agent(node, at + SPAWNED_S, events.CyclePhaseStarted("run"), cycle)
        for rank in ranks if signs else ():
            stepped = events.WorkerProgressed("step", STEPPED_S, step)
            self.monitor(node, rank, at + 0.1 + STEPPED_S, stepped, cycle)

    def start(self, nodes: str, at: float, step: int | None = 0, cycle: int = 0) -> None:
        """Each of these nodes starts one worker, in order of rank."""
        for rank, node in enumerate(nodes):
            self.spawn(node, at, [rank], step, cycle)

    def exited(
        self, node: str, at: float, rank: int, code: int | None = 0, expected: bool = True, cycle: int = 0
    ) -> None:
        signal = None if code is not None else "SIGTERM" if expected else "SIGKILL"
        pid = 1000 * (cycle + 1) + rank
        self.agent(node, at, events.WorkerExited(0, rank, pid, code, signal, expected), cycle)

    def stop(
        self,
        node: str,
        at: float,
        outcome: events.CycleOutcome = "completed",
        cycle: int = 0,
        ran: float = 1.0,
        **facts: object,
    ) -> None:
        """The run of the cycle ends at `at`. facts: of CycleEnded."""
        self.agent(node, at, events.CyclePhaseEnded("run", "completed", ran), cycle)
        self.agent(node, at, events.CyclePhaseStarted("stop"), cycle)
        self.agent(node, at + STOPPED_S, events.CyclePhaseEnded("stop", "completed", STOPPED_S), cycle)
        self.agent(node, at + STOPPED_S, events.CycleEnded(outcome, ran, **facts), cycle)  # type: ignore[arg-type]

    def finish(self, nodes: str, at: float, cycle: int = 0) -> None:
        """The workers of these nodes complete, in order of rank, and the job ends."""
        for rank, node in enumerate(nodes):
            self.exited(node, at, rank, cycle=cycle)
            self.stop(node, at, cycle=cycle)
            self.agent(node, at + 1.0, events.JobEnded("completed", 0), cycle)

    def break_off(
        self, nodes: str, at: float, failed: str, cycle: int = 0, silently: bool = False, step: int = 0
    ) -> None:
        """The worker of the node `failed` ends, the others are stopped. silently: the node is lost with its agent."""
        for rank, node in enumerate(nodes):
            if node == failed and silently:
                continue
            self.exited(node, at, rank, 1 if node == failed else None, node != failed, cycle)
            self.stop(node, at, "failed", cycle, step=step or round(at), failed_node=failed)
