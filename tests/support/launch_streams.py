"""Record files of launched jobs that never ran: what each node's agent and each rank's monitor would have written.

A job is described by its faults, one a cycle; every cycle but the last one ends by its fault. Each node has
a clock of its own, far from the others'."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from resilience.facts import events
from resilience.facts.identity import Origin
from resilience.facts.interruptions import (
    Detector,
    Exit,
    Interruption,
    InterruptionRecord,
    OpenSection,
    ProcessInfo,
    ThreadStack,
)
from resilience.facts.records import Record, to_line
from tests.support.record_streams import LOADS, STARTED_NS

Kind = Literal[
    "kill",  # SIGKILL from outside
    "raise",  # an exception, told by the last lines on stderr
    "hang",  # no heartbeat: killed by its monitor
    "node",  # a node and its agent are gone
    "membership",  # a node wants to join
    "request",  # a rank asks for a new cycle
    "preempt",  # the scheduler asks the job to stop
    "exhausted",  # killed, and no restart is left
]
TRACEBACK = (
    "Traceback (most recent call last):",
    '  File "/home/me/train.py", line 12, in train',
    '  File "/home/me/data.py", line 34, in next_batch',
    "ValueError: bad batch",
)
REDUCE = (
    '  File "/opt/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", line 3000, in all_reduce',
    "    work.wait()",
)
ECHO = (
    *TRACEBACK[:2],
    *REDUCE,
    "RuntimeError: [gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.1]:4711",
)
LEG_S = {"gate": 0.01, "rendezvous": 0.2, "spawn": 0.05, "stop": 0.03}
STEP_S = 0.1
LAST_STEP = 40  # which every cycle's fault strikes at, counted from its first step


@dataclass(frozen=True)
class Fault:
    """One planned fault. rank: that it strikes."""

    kind: Kind
    rank: int = 0


@dataclass
class Launched:
    """Records by (node, rank), the agent's by (node, None)."""

    files: dict[tuple[str, int | None], list[Record]] = field(default_factory=dict)

    @property
    def records(self) -> list[Record]:
        """All records, file by file, as their names sort."""
        return [record for key in sorted(self.files, key=_name) for record in self.files[key]]

    def of_node(self, node: str) -> list[Record]:
        return [record for record in self.records if record.origin.node == node]

    def interleaved(self, seed: int, node: str | None = None) -> list[Record]:
        """Records in the order of their node's clock, files that tie shuffled."""
        records = [record for record in self.records if node in (None, record.origin.node)]
        random.Random(seed).shuffle(records)
        place = {id(record): number for file in self.files.values() for number, record in enumerate(file)}
        return sorted(records, key=lambda record: (record.mono_ns, place[id(record)]))

    def write(self, folder: Path) -> Path:
        """Write the record files of a run folder; answers the folder."""
        (folder / "records").mkdir(parents=True)
        for key, records in self.files.items():
            (folder / "records" / _name(key)).write_bytes(b"".join(map(to_line, records)))
        return folder


def _name(key: tuple[str, int | None]) -> str:
    return f"{key[0]}-{'agent' if key[1] is None else key[1]}.jsonl"


def launched(
    faults: Sequence[Fault] = (),
    nodes: int = 1,
    ranks: int = 2,
    signs: bool = True,
    is_running: bool = False,
    lost_monitors: Sequence[tuple[int, int]] = (),
) -> Launched:
    """Tell a job of `nodes` with `ranks` each, one fault a cycle. signs: workers tell steps. is_running: the
    last cycle has not ended. lost_monitors: cycle and rank of monitors that are killed before the fault, and
    replaced."""
    return _Teller(nodes, ranks, signs, is_running, lost_monitors).tell(list(faults))


class _Teller:
    def __init__(
        self, nodes: int, ranks: int, signs: bool, is_running: bool, lost_monitors: Sequence[tuple[int, int]] = ()
    ) -> None:
        self._nodes = [f"node{number}" for number in range(nodes)]
        self._per = ranks
        self._size = nodes * ranks
        self._signs = signs
        self._is_running = is_running
        self._lost_monitors = lost_monitors
        self._replaced: dict[int, int] = {}  # rank -> monitors before the present one
        self._cycle = 0
        self._used = 0
        self._now = 0
        self._numbers: dict[tuple[str, int | None, int, int], int] = {}
        self._told = Launched()

    def tell(self, faults: list[Fault]) -> Launched:
        why: events.CycleReason = "first"
        for cycle, fault in enumerate(faults):
            self._cycle = cycle
            self._begin(why)
            why = self._end(fault)
            if why == "first":
                return self._told
        self._cycle = len(faults)
        self._begin(why)
        if not self._is_running:
            self._finish()
        return self._told

    def _place(self, rank: int) -> str:
        return self._nodes[rank // self._per]

    def _ranks(self, node: str) -> range:
        first = self._nodes.index(node) * self._per
        return range(first, first + self._per)

    def _agent(self, node: str, event: Any) -> None:
        self._emit((node, None), event, Origin("job", node, "agent", 10, cycle=self._cycle))

    def _monitor(self, rank: int, event: Any) -> None:
        node = self._place(rank)
        place = {"initial_rank": rank, "rank": rank, "world_size": self._size}
        pid = 500 + rank + 1000 * self._replaced.get(rank, 0)
        origin = Origin("job", node, "monitor", pid, cycle=self._cycle, layer="launcher", **place)  # type: ignore[arg-type]
        self._emit((node, rank), event, origin)

    def _emit(self, key: tuple[str, int | None], event: Any, origin: Origin) -> None:
        numbering = (*key, *((0, 0) if origin.role == "agent" else (origin.cycle, origin.pid)))  # of a monitor: from 0
        number = self._numbers.get(numbering, 0)
        self._numbers[numbering] = number + 1
        self._now += 1000
        own = 10**12 * (1 + int(origin.node.removeprefix("node")))
        record = Record(number, STARTED_NS + self._now, own + self._now, origin, event)
        self._told.files.setdefault(key, []).append(record)

    def _lose_monitor(self, rank: int) -> None:
        node, replaced = self._place(rank), self._replaced.get(rank, 0)
        lost = events.MonitorLost(500 + rank + 1000 * replaced, "its channel closed")
        origin = Origin("job", node, "agent", 10, cycle=self._cycle, initial_rank=rank)
        self._emit((node, None), lost, origin)
        self._wait(0.14)
        self._replaced[rank] = replaced + 1
        self._monitor(rank, events.MonitorStarted(self._pid(rank)))

    def _wait(self, seconds: float) -> None:
        self._now += round(seconds * 1e9)

    def _leg(self, phase: events.CyclePhase) -> None:
        for node in self._nodes:
            self._agent(node, events.CyclePhaseStarted(phase))
        self._wait(LEG_S[phase])
        for node in self._nodes:
            self._agent(node, events.CyclePhaseEnded(phase, "completed", LEG_S[phase]))

    def _begin(self, why: events.CycleReason) -> None:
        self._began = self._now
        self._leg("gate")
        self._leg("rendezvous")
        for group_rank, node in enumerate(self._nodes):
            met = events.RendezvousCompleted(group_rank, len(self._nodes), self._size, "deterministic", "host:1")
            self._agent(node, met)
            self._agent(node, events.CycleStarted(why, self._used, 10))
        for node in self._nodes:
            self._agent(node, events.CyclePhaseStarted("spawn"))
        self._wait(LEG_S["spawn"])
        for rank in range(self._size):
            started = events.WorkerStarted(rank % self._per, rank, self._pid(rank), "warm" if self._cycle else "cold")
            self._agent(self._place(rank), started)
            self._monitor(rank, events.MonitorStarted(self._pid(rank)))
        for node in self._nodes:
            self._agent(node, events.CyclePhaseEnded("spawn", "completed", LEG_S["spawn"]))
            self._agent(node, events.CyclePhaseStarted("run"))
        self._run_began = self._now
        if self._signs:
            self._wait(0.4)
            for rank in range(self._size):
                self._monitor(rank, events.WorkerProgressed("heartbeat", 0.4, None))
                self._monitor(rank, events.WorkerProgressed("step", 0.4, self._first_step))
        for cycle, rank in self._lost_monitors:
            if cycle == self._cycle and rank < self._size:
                self._lose_monitor(rank)

    @property
    def _first_step(self) -> int:
        """The job goes on from its checkpoint, 10 steps before the fault."""
        return self._cycle * (LAST_STEP - 10)

    def _pid(self, rank: int) -> int:
        return 1000 * (self._cycle + 1) + rank

    def _end(self, fault: Fault) -> events.CycleReason:
        """Strike; answers why another cycle begins, "first" if none does."""
        self._wait(LAST_STEP * STEP_S)
        where = self._place(fault.rank)
        outcome: events.CycleOutcome = "failed"
        why: events.CycleReason = "failure"
        gone: set[int] = set()
        detail = ""
        if fault.kind == "hang":
            self._hang(fault.rank)
        if fault.kind in ("kill", "raise", "hang", "exhausted"):
            detail = self._die(fault)
            gone.add(fault.rank)
            if fault.kind == "raise" and self._per > 1:  # a neighbour sees its connection close
                other = next(rank for rank in self._ranks(where) if rank != fault.rank)
                self._wait(0.005)
                self._ended(other, Exit(code=1), ECHO)
                gone.add(other)
            stop = fault.kind == "exhausted"
            self._used += not stop
            decided = events.RestartDecided("stop" if stop else "restart", "print", detail, self._used, 9, 1)
            self._agent(where, decided)
            outcome = "exhausted" if stop else "failed"
        elif fault.kind == "node":
            detail = f"node {where} is lost"
            self._used += 1
            decided = events.RestartDecided("restart", f"lost {where}", detail, self._used, 9, 1, where)
            self._agent(next(node for node in self._nodes if node != where), decided)
        elif fault.kind == "preempt":
            self._agent(where, events.StopRequested(f"SIGTERM to the agent of {where}", 30.0))
            outcome, detail = "preempted", f"SIGTERM to {where}"
        else:
            outcome, why, detail = "interrupted", fault.kind, "somebody wants it"  # type: ignore[assignment]
        ran = (self._now - self._run_began) / 1e9
        staying = [node for node in self._nodes if fault.kind != "node" or node != where]
        for node in staying:
            self._agent(node, events.CyclePhaseEnded("run", "completed", ran))
            self._agent(node, events.CyclePhaseStarted("stop"))
        self._wait(LEG_S["stop"])
        for node in staying:
            for rank in self._ranks(node):
                if rank not in gone:
                    self._monitor(rank, events.RankExited(False, signal="SIGTERM"))
                    self._monitor(rank, events.MonitorEnded())
                    ended = events.WorkerExited(rank % self._per, rank, self._pid(rank), None, "SIGTERM", True)
                    self._agent(node, ended)
            self._agent(node, events.CyclePhaseEnded("stop", "completed", LEG_S["stop"]))
            silent = 2.01 if fault.kind == "hang" else None
            step = self._first_step + LAST_STEP if outcome == "failed" and self._signs else None
            failed = where if fault.rank in gone else ""
            ended = events.CycleEnded(outcome, (self._now - self._began) / 1e9, detail, silent, step, failed)
            self._agent(node, ended)
            if outcome in ("preempted", "exhausted"):
                self._agent(node, events.JobEnded(outcome, 1, detail))
        self._nodes = staying
        self._size = len(self._nodes) * self._per
        return "first" if outcome in ("preempted", "exhausted") else why

    def _hang(self, rank: int) -> None:
        self._wait(2.0)
        self._monitor(rank, events.RankFellSilent("heartbeat", "hard", 2.0, 2.01))
        self._monitor(rank, events.EvidenceCaptured("faulthandler", 1))
        record = InterruptionRecord(
            rank,
            Interruption.HARD_TIMEOUT,
            "no new heartbeat for 2.01 s, limit 2 s",
            detector=Detector("heartbeat", 2.0),
            node=self._place(rank),
            pid=self._pid(rank),
            silent_for_s=2.01,
            step=self._first_step + LAST_STEP,
            stage="run",
            open_sections=(OpenSection("data", 2.01),),
            process=ProcessInfo("S", 0.0, 1.0),
            stacks=(ThreadStack("MainThread", LOADS[1:]),),
            stack_method="faulthandler",
        )
        self._monitor(rank, events.RankInterrupted(record))
        self._monitor(rank, events.RankSignalled(("SIGKILL",), "heartbeat"))
        self._wait(0.01)

    def _die(self, fault: Fault) -> str:
        if fault.kind == "raise":
            return self._ended(fault.rank, Exit(code=1), TRACEBACK)
        return self._ended(fault.rank, Exit(signal="SIGKILL", oom=False), ())

    def _ended(self, rank: int, end: Exit, tail: tuple[str, ...]) -> str:
        self._monitor(rank, events.RankExited(False, end.code, end.signal))
        message = f"process {self._pid(rank)} ended ({end.signal or f'exit code {end.code}'})"
        record = InterruptionRecord(
            rank,
            Interruption.TERMINATED,
            message,
            exit=end,
            detector=Detector("exit"),
            node=self._place(rank),
            pid=self._pid(rank),
            step=self._first_step + LAST_STEP if self._signs else None,
            log_tail=tail,
        )
        self._monitor(rank, events.RankInterrupted(record))
        self._monitor(rank, events.MonitorEnded())
        exited = events.WorkerExited(rank % self._per, rank, self._pid(rank), end.code, end.signal, False)
        self._agent(self._place(rank), exited)
        return message

    def _finish(self) -> None:
        self._wait(2.0)
        ran = (self._now - self._run_began) / 1e9
        for rank in range(self._size):
            self._monitor(rank, events.RankExited(True, code=0))
            self._monitor(rank, events.MonitorEnded())
            self._agent(self._place(rank), events.WorkerExited(rank % self._per, rank, self._pid(rank), 0, None, True))
        for node in self._nodes:
            self._agent(node, events.CyclePhaseEnded("run", "completed", ran))
            self._agent(node, events.CyclePhaseStarted("stop"))
            self._agent(node, events.CyclePhaseEnded("stop", "completed", 0.0))
            self._agent(node, events.CycleEnded("completed", (self._now - self._began) / 1e9))
            self._agent(node, events.JobEnded("completed", 0))
