"""Record files of jobs that never ran: every record a rank and its monitor would have written.

A job is described by its faults; `job` tells it as the ranks would, in the order of each rank's file, and
keeps the truth beside it. Chance is seeded: which peers notice a fault by a broken connection, and in
which order ranks' files are read (`interleaved`)."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from resilience.facts import events
from resilience.facts.deadlines import silence_in_words
from resilience.facts.identity import Origin
from resilience.facts.interruptions import (
    Detector,
    ExceptionInfo,
    Exit,
    Frame,
    Interruption,
    InterruptionRecord,
    OpenSection,
    ProcessInfo,
    ThreadStack,
)
from resilience.facts.records import Record, to_line

Kind = Literal[
    "exception",
    "everywhere",  # the same exception on all active ranks
    "left",
    "exit",
    "kill",
    "oom",
    "term",
    "hang",  # in user code; the rank itself is reported
    "waited_for",  # the same, but a rank that waits for it is reported first
    "stopped",
    "native",  # holds the interpreter, is killed
    "busy",
    "stuck_abort",  # an exception elsewhere, and this rank cannot be freed
    "finalize",  # an exception elsewhere, and this rank's finalize hook fails
    "communication",
    "skipped",  # waits in another collective than the others
    "monitor",  # the monitor dies, the rank goes on
]

SILENT = ("hang", "busy", "waited_for", "communication", "skipped", "stopped", "native")
STARTED_NS = 1_700_000_000_000_000_000
TRAIN = Frame("/home/me/train.py", 12, "train")
LOAD = Frame("/home/me/data.py", 34, "next_batch")
OTHER = Frame("/home/me/train.py", 99, "evaluate")
WRAPPED = Frame("/opt/lib/python3.11/site-packages/resilience/inprocess/_runtime/call.py", 200, "_call_function")
TORCH = Frame("/opt/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", 3000, "all_reduce")
WAITS = (WRAPPED, TRAIN, TORCH)
LOADS = (WRAPPED, TRAIN, LOAD)
GONE = "[gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.1]:4711"
PHASE_S = {"detect": 0.0, "abort": 0.004, "agree": 0.002, "finalize": 0.001, "check": 0.001, "collect": 0.001}


@dataclass(frozen=True)
class LateHang:
    """A rank that goes on after the fault of another one, waits for a lock, and exceeds a limit `after_s` after that
    fault: then it has given no sign of life for `silent_s`."""

    rank: int
    after_s: float
    silent_s: float


@dataclass(frozen=True)
class Fault:
    """One planned fault. rank: initial rank. iteration: in which it strikes."""

    kind: Kind
    rank: int
    iteration: int
    step: int = 10
    late: LateHang | None = None


@dataclass
class Job:
    """The records of a job by initial rank, and what is true of it."""

    files: dict[int, list[Record]] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)
    iterations: int = 0

    @property
    def records(self) -> list[Record]:
        """All records, file by file."""
        return [record for rank in sorted(self.files) for record in self.files[rank]]

    def interleaved(self, seed: int) -> list[Record]:
        """All records in the order of this host's clock, files that tie shuffled."""
        records = self.records
        random.Random(seed).shuffle(records)
        place = {id(record): number for file in self.files.values() for number, record in enumerate(file)}
        return sorted(records, key=lambda record: (record.mono_ns, place[id(record)]))

    def write(self, folder: Path) -> Path:
        """Write the record files of a run folder; answers the folder."""
        (folder / "records").mkdir(parents=True)
        for rank, records in self.files.items():
            path = folder / "records" / f"{records[0].origin.node}-{rank}.jsonl"
            path.write_bytes(b"".join(map(to_line, records)))
        return folder


def job(
    faults: Sequence[Fault] = (),
    world: int = 4,
    spares: int = 0,
    seed: int = 0,
    job_id: str = "job",
    started_ns: int = STARTED_NS,
) -> Job:
    """Tell a job of `world` active ranks and `spares`, one fault an iteration, to its end."""
    return _Teller(world, spares, seed, job_id, started_ns).tell(list(faults))


class _Teller:
    """Tells a job. Every rank has a clock of its own that only goes forward."""

    def __init__(self, world: int, spares: int, seed: int, job_id: str, started_ns: int) -> None:
        self._started_ns = started_ns
        self._chance = random.Random(seed)
        self._job_id = job_id
        self._size = world + spares
        self._want = world
        self._members = list(range(self._size))
        self._iteration: int | None = None
        self._now = dict.fromkeys(self._members, 0)
        self._numbers: dict[tuple[int, str], int] = {}
        self._began: dict[int, int] = {}  # rank -> when its restart began
        self._kind: dict[int, str] = {}
        self._run_began: dict[int, int] = {}
        self._iteration_began: dict[int, int] = {}
        self._step = 0
        self._job = Job(files={rank: [] for rank in self._members})
        self._unmonitored: set[int] = set()

    def tell(self, faults: list[Fault]) -> Job:
        for rank in self._members:
            self._emit(rank, events.MonitorStarted(rank_pid=100 + rank), "monitor")
            self._emit(
                rank, events.CallStarted("train.main", self._size, "0.1.0", "2.13.0", "3.11.7", "host", "forked")
            )
        self._job.faults = faults
        for fault in sorted(faults, key=lambda fault: fault.iteration):
            if fault.kind == "monitor":
                if self._iteration is None:
                    self._begin(0)
                self._lose_monitor(fault.rank)
                continue
            while self._iteration is None or self._iteration < fault.iteration:
                self._begin(0 if self._iteration is None else self._iteration + 1)
            self._strike(fault)
        if self._iteration is None or self._began:
            self._begin(0 if self._iteration is None else self._iteration + 1)
        self._finish()
        self._job.iterations = (self._iteration or 0) + 1
        return self._job

    # -- the quiet parts ------------------------------------------------------------------------

    @property
    def _active(self) -> list[int]:
        return self._members[: self._want]

    def _emit(self, rank: int, event: Any, role: Literal["rank", "monitor"] = "rank", after: float = 1e-5) -> Record:
        self._now[rank] += round(after * 1e9)
        number = self._numbers.get((rank, role), 0)
        self._numbers[rank, role] = number + 1
        place = self._members.index(rank) if rank in self._members else None
        origin = Origin(
            job_id=self._job_id,
            node="node",
            role=role,
            pid=(100 if role == "rank" else 500) + rank,
            iteration=self._iteration,
            initial_rank=rank,
            rank=place,
            world_size=len(self._members),
        )
        mono = self._now[rank]
        record = Record(number, self._started_ns + mono, 10**12 + mono, origin, event)
        self._job.files[rank].append(record)
        return record

    def _meet(self) -> None:
        """A barrier: nobody leaves before the last has come."""
        latest = max(self._now[rank] for rank in self._members)
        for rank in self._members:
            self._now[rank] = latest + self._chance.randrange(1, 1000)

    def _begin(self, iteration: int) -> None:
        self._meet()
        self._iteration = iteration
        for rank in self._members:
            state: Literal["active", "inactive"] = "active" if rank in self._active else "inactive"
            self._iteration_began[rank] = self._now[rank]
            self._emit(rank, events.IterationStarted(len(self._active), state))
            if rank in self._began:
                self._emit(rank, events.StageEnded("regroup", "completed", 0.003))
                self._emit(rank, events.StageStarted("resume"))
            self._emit(rank, events.StageStarted("initialize"))
            self._emit(rank, events.StageEnded("initialize", "completed", 1e-5))
            self._run_began[rank] = self._now[rank]
            self._emit(rank, events.StageStarted("run"))
            if rank in self._began:
                took = (self._now[rank] - self._began.pop(rank)) / 1e9
                self._emit(rank, events.StageEnded("resume", "completed", 1e-4))
                self._emit(rank, events.StageEnded("restart", "completed", took))
                sign: Literal["step", "entry"] = "step" if rank in self._active else "entry"
                step = self._step if rank in self._active else None
                self._emit(rank, events.RestartEnded(self._kind[rank], took, sign, step))

    def _finish(self) -> None:
        for rank in self._members:
            took = (self._now[rank] - self._run_began[rank]) / 1e9
            self._emit(rank, events.StageEnded("run", "completed", took + 1), after=1.0)
        self._meet()
        for rank in self._members:
            took = (self._now[rank] - self._iteration_began[rank]) / 1e9
            self._emit(rank, events.IterationEnded("completed", took))
            self._emit(rank, events.CallEnded("completed", (self._iteration or 0) + 1, self._now[rank] / 1e9))
            if rank not in self._unmonitored:
                self._emit(rank, events.RankExited(goodbye=True, code=0), "monitor")
                self._emit(rank, events.MonitorEnded(), "monitor")

    # -- faults ---------------------------------------------------------------------------------

    def _strike(self, fault: Fault) -> None:
        before = self._step
        self._step = max(fault.step // 5 * 5, before)  # the checkpoint that the restart goes on from
        for rank in self._members:
            self._now[rank] += 10**9
        culprit = fault.rank
        others = [rank for rank in self._active if rank != culprit]
        echo = [rank for rank in others if self._chance.random() < 0.3]
        match fault.kind:
            case "exception":
                self._interrupted(culprit, self._raised("ValueError", "bad batch", fault))
            case "everywhere":
                for rank in self._active:
                    self._interrupted(rank, self._raised("ValueError", "bad batch", fault))
                echo = []
            case "left":
                self._interrupted(culprit, self._raised("SystemExit", "3", fault, Interruption.BASE_EXCEPTION))
            case "exit" | "kill" | "oom" | "term":
                self._die(culprit, fault)
            case "hang" | "busy":
                self._silent(culprit, fault, Interruption.SOFT_TIMEOUT)
            case "waited_for":
                culprit = others[0]
                self._silent(culprit, fault, Interruption.SOFT_TIMEOUT, waits=True)
            case "communication" | "skipped":
                self._silent(culprit, fault, Interruption.SOFT_TIMEOUT, waits=True)
            case "stopped" | "native":
                self._silent(culprit, fault, Interruption.HARD_TIMEOUT)
                self._emit(culprit, events.RankSignalled(("SIGTERM", "SIGCONT", "SIGKILL"), "watchdog"), "monitor")
                self._die(culprit, fault)
            case "stuck_abort" | "finalize":
                culprit = others[0]
                self._interrupted(culprit, self._raised("ValueError", "bad batch", fault))
        self._restart(fault, culprit, echo)

    def _restart(self, fault: Fault, first: int, echo: list[int]) -> None:
        gone = (
            {fault.rank} if fault.kind in ("exit", "kill", "oom", "term", "stopped", "native", "stuck_abort") else set()
        )
        leaves = {fault.rank} if fault.kind in ("left", "finalize") else set()
        for rank in self._members:
            if rank in gone and fault.kind != "stuck_abort":
                continue
            if rank in echo and rank != first:
                self._interrupted(rank, self._raised("RuntimeError", GONE, fault))
            if fault.late is not None and rank == fault.late.rank:
                self._hang_late(fault.late)
            self._learn(rank, first, fault)
            if fault.kind == "stuck_abort" and rank == fault.rank:
                self._emit(rank, events.AbortStuck(2.0, "torch/distributed new_group"))
                self._emit(rank, events.RankSignalled(("SIGTERM", "SIGCONT", "SIGKILL"), "abort"), "monitor")
                self._die(rank, fault)
                continue
            for name, took in PHASE_S.items():
                if name == "finalize" and fault.kind == "finalize" and rank == fault.rank:
                    self._emit(rank, events.HookFailed("finalize", "OSError: no such file"))
                    self._interrupted(rank, self._raised("OSError", "no such file", fault, stage="finalize"))
                self._emit(rank, events.StageStarted(name), after=0.0)  # type: ignore[arg-type]
                self._emit(rank, events.StageEnded(name, "completed", took), after=took)  # type: ignore[arg-type]
            if rank in leaves:
                took = (self._now[rank] - self._began.pop(rank)) / 1e9
                self._emit(rank, events.StageEnded("restart", "left", took))
            else:
                self._emit(rank, events.StageStarted("regroup"), after=0.0)
            took = (self._now[rank] - self._iteration_began[rank]) / 1e9
            self._emit(rank, events.IterationEnded("left" if rank in leaves else "interrupted", took))
            if rank in leaves:
                self._emit(rank, events.CallEnded("left", (self._iteration or 0) + 1, 1.0, "SystemExit: 3"))
                self._emit(rank, events.RankLeft("SystemExit: 3"))
                self._emit(rank, events.RankExited(goodbye=True, code=3), "monitor")
                self._emit(rank, events.MonitorEnded(), "monitor")
        self._meet()
        for rank in gone:
            self._emit(rank, events.RankStoodInFor(rank, "excluded", 0.01), "monitor")
            self._emit(rank, events.MonitorEnded(), "monitor")
        self._members = [rank for rank in self._members if rank not in gone | leaves]

    def _learn(self, rank: int, first: int, fault: Fault) -> None:
        """A live rank learns that its iteration is interrupted, and leaves the function."""
        stack: tuple[Frame, ...] = WAITS
        if fault.kind in ("hang", "busy", "waited_for") and rank == fault.rank:
            stack = LOADS
        if fault.kind == "skipped" and rank == fault.rank:
            stack = (WRAPPED, OTHER, TORCH)
        if rank not in self._active:
            stack = (WRAPPED,)
        silent = 3.01 if fault.kind in SILENT else None
        self._emit(rank, events.IterationDecided(first, stack, fault.step, silent), after=0.002)
        self._emit(rank, events.AbortCut(3, 1, "epoll", 0.001))
        took = (self._now[rank] - self._run_began[rank]) / 1e9
        self._emit(rank, events.StageEnded("run", "failed" if rank == first else "interrupted", took))
        if rank not in self._began:
            self._began[rank] = self._now[rank]
            self._kind[rank] = "peer"
            self._emit(rank, events.StageStarted("restart"))
        self._emit(rank, events.InterruptDelivered(0.002, 1))

    def _interrupted(self, rank: int, record: InterruptionRecord, role: Literal["rank", "monitor"] = "rank") -> None:
        at = self._started_ns + self._now[rank]
        known = {"rank": rank, "pid": 100 + rank, "node": "node", "iteration": self._iteration, "detected_wall_ns": at}
        values = {name: getattr(record, name) for name in record.__struct_fields__} | known
        self._emit(rank, events.RankInterrupted(InterruptionRecord(**values)), role)
        if role == "rank" and rank not in self._began:
            self._began[rank] = self._now[rank]
            self._kind[rank] = record.interruption.value
            self._emit(rank, events.StageStarted("restart"))

    def _raised(
        self,
        name: str,
        message: str,
        fault: Fault,
        kind: Interruption = Interruption.EXCEPTION,
        stage: str = "run",
    ) -> InterruptionRecord:
        leaf = TORCH if message == GONE else LOAD
        error = ExceptionInfo(name, message, f"{name}-{leaf.function}", (WRAPPED, TRAIN, leaf))
        return InterruptionRecord(
            0, kind, f"{name}: {message}", exception=error, detector=Detector("exception"), step=fault.step, stage=stage
        )

    def _silent(self, rank: int, fault: Fault, kind: Interruption, waits: bool = False) -> None:
        limit = {"busy": "step"}.get(fault.kind, "watchdog")
        for other in self._members:
            self._now[other] += 3 * 10**9
        severity: Literal["soft", "hard"] = "soft" if kind is Interruption.SOFT_TIMEOUT else "hard"
        self._emit(rank, events.RankFellSilent(limit, severity, 3.0, 3.01), "monitor")
        self._emit(rank, events.EvidenceCaptured("faulthandler", 2), "monitor")
        state = {"stopped": "T", "busy": "R", "native": "R"}.get(fault.kind, "S")
        frames = WAITS if waits else () if fault.kind == "stopped" else LOADS
        record = InterruptionRecord(
            rank,
            kind,
            silence_in_words(limit, 3.01, 3.0),
            detector=Detector(limit, 3.0),
            silent_for_s=3.01,
            last_heartbeat_age_s=3.0,
            step=fault.step,
            stage="run",
            open_sections=() if waits else (OpenSection("data", 3.0),),
            process=ProcessInfo(state, 3.0 if state == "R" else 0.01, 3.0),
            stacks=(ThreadStack("Current thread", frames),) if frames else (),
            stack_method="faulthandler" if frames else "none: the process is stopped",
        )
        self._interrupted(rank, record, "monitor")

    def _hang_late(self, late: LateHang) -> None:
        self._now[late.rank] += round(late.after_s * 1e9)
        record = InterruptionRecord(
            late.rank,
            Interruption.SOFT_TIMEOUT,
            silence_in_words("watchdog", late.silent_s, None),
            detector=Detector("watchdog", late.silent_s),
            silent_for_s=late.silent_s,
            stage="run",
            process=ProcessInfo("S", 0.01, late.silent_s),
            stacks=(ThreadStack("Current thread", LOADS),),
            stack_method="faulthandler",
            hang="on_lock",
        )
        self._interrupted(late.rank, record, "monitor")

    def _die(self, rank: int, fault: Fault) -> None:
        end = {"exit": Exit(code=1), "term": Exit(signal="SIGTERM"), "oom": Exit(signal="SIGKILL", oom=True)}.get(
            fault.kind, Exit(signal="SIGKILL", oom=False)
        )
        self._emit(rank, events.RankExited(False, end.code, end.signal, noticed_by="mutex"), "monitor", after=0.001)
        record = InterruptionRecord(
            rank, Interruption.TERMINATED, "process ended", exit=end, detector=Detector("exit"), step=fault.step
        )
        self._interrupted(rank, record, "monitor")
        took = (self._now[rank] - self._run_began[rank]) / 1e9
        if fault.kind != "stuck_abort":
            self._emit(rank, events.StageEnded("run", "lost", took, closed_by="monitor"), "monitor")
        if rank in self._began:
            since = self._began.pop(rank)
            self._emit(
                rank,
                events.StageEnded("restart", "lost", (self._now[rank] - since) / 1e9, closed_by="monitor"),
                "monitor",
            )
        took = (self._now[rank] - self._iteration_began[rank]) / 1e9
        self._emit(rank, events.IterationEnded("lost", took, closed_by="monitor"), "monitor")

    def _lose_monitor(self, rank: int) -> None:
        self._unmonitored.add(rank)
        record = InterruptionRecord(rank, Interruption.MONITOR_PROCESS_EXCEPTION, "monitor process is gone")
        self._emit(rank, events.MonitorLost(500 + rank, "its channel closed"))
        values = {name: getattr(record, name) for name in record.__struct_fields__}
        values |= {"iteration": self._iteration, "detected_wall_ns": self._started_ns + self._now[rank]}
        self._emit(rank, events.RankInterrupted(InterruptionRecord(**values)))
