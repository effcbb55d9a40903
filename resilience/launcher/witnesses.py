"""What do the rank monitors report about one cycle's workers?

The agent's loop collects it, and asks when something has happened: what happened to a worker, where the others were,
which workers know that they must stop, what a rank requests. `cycle_supervisor` decides what follows."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING

import msgspec
from torch.distributed.elastic.agent.server.api import Worker

from resilience.core.control import Request
from resilience.facts import events
from resilience.facts.interruptions import Detector, Exit, Hang, Interruption, InterruptionRecord
from resilience.facts.limits import Limits
from resilience.launcher.monitors import MonitorGone
from resilience.launcher.worker.unkillable import Killed
from resilience.monitor import messages
from resilience.system.background import READ_LIMIT, WRITER
from resilience.telemetry import rank_snapshot

if TYPE_CHECKING:
    from resilience.launcher.event_reporter import NodeEvents
    from resilience.launcher.monitors import Monitors
    from resilience.launcher.worker.worker_processes import EndedWorker, RunningWorkers

LOOK = 0.002  # seconds between polls while the agent waits for a monitor's report
LOOK_LIMIT = 1.0  # seconds to record where workers are before they are stopped; it takes 0.1 s


class _Hang:
    """A hung worker that has not been killed yet. waits_for: pids of others whose position is not on record yet."""

    def __init__(self, local_rank: int, record: InterruptionRecord, waits_for: set[int]) -> None:
        self.local_rank = local_rank
        self.record = record
        self.waits_for = waits_for
        self.began = time.monotonic()


class _Round:
    """One look at the workers, because some of them are suspected. at: its start, in monotonic seconds. waits_for: pids
    that have not answered. hangs: how the others hang, by pid. suspects: pids of the suspected, by local rank."""

    def __init__(self, at: float, waits_for: set[int]) -> None:
        self.at = at
        self.waits_for = waits_for
        self.hangs: dict[int, Hang | None] = {}
        self.suspects: dict[int, int] = {}


class Witnesses:
    """The reports of one node's monitors since the cycle began. Main thread only."""

    def __init__(self, reporter: NodeEvents, monitors: Monitors, limits: Limits) -> None:
        self._reporter = reporter
        self._monitors = monitors
        self._limits = limits
        self._step = -1  # the highest step that any worker here has reported, in any cycle
        self._known_ranks: set[int] = set()  # ranks that this node had in any cycle
        self.is_cold = True  # some node of this cycle has not run the job before
        self.forget()

    def forget(self) -> None:
        """Begin a cycle: forget the reports of the previous one."""
        self.requests: list[Request] = []
        self.sigterms: dict[int, float] = {}  # by local rank: when a worker caught a SIGTERM and survived
        self.condemned: set[int] = set()  # local ranks of these that must end, because only they were signalled
        self._records: dict[int, InterruptionRecord] = {}  # by the worker's pid
        self._gone: set[int] = set()
        self._killed = Killed(self._limits.grace)
        self._ranks: dict[int, int] = {}  # of the workers, by local rank
        self._pids: dict[int, int] = {}  # global ranks of the workers by pid; requests of earlier workers are void
        self._size = 0  # ranks of the job in this cycle
        self._hangs: dict[int, _Hang] = {}  # by the worker's pid
        self._recorded: set[int] = set()  # workers whose position is on record
        self._round: _Round | None = None
        self._stop_answers: dict[int, bool] = {}  # by pid: whether a worker's program checks for a stop request

    def watch(self, worker: Worker, files: tuple[str, str, str]) -> None:
        """Let a worker's monitor watch it. files: of its stdout, stderr and error report."""
        origin = msgspec.structs.replace(
            self._reporter.origin,
            role="rank",
            pid=worker.id,
            initial_rank=worker.global_rank,
            rank=worker.global_rank,
            world_size=worker.world_size,
        )
        self._ranks[worker.local_rank] = worker.global_rank
        self._known_ranks.add(worker.global_rank)
        self._pids[worker.id] = worker.global_rank
        self._size = worker.world_size
        output = tuple(file for file in files[:2] if file)
        self._monitors.assign(worker.local_rank, worker.id, origin, self._limits, output, self.is_cold)

    def reaped(self, ended: EndedWorker) -> None:
        """Tell a worker's monitor how the worker ended; the monitor may have connected too late to see that."""
        self._monitors.reaped(ended.local_rank, ended.pid, exit_of(ended))

    def hear(self) -> None:
        """Process the monitors' messages."""
        for local_rank, message in self._monitors.poll(0.0):
            match message:
                case messages.Found(record, is_ended):
                    self._killed.note(record)
                    if not is_ended:
                        self._record_others(local_rank, record)
                    if self._records.setdefault(record.pid or -1, record) is record:
                        self._reporter.console.found(record)
                case messages.Suspected(rank, suspicion):
                    self._reporter.console.suspected(rank, suspicion)
                case messages.SeeksOthers(worker_pid) if worker_pid in self._pids:
                    self._look_for(local_rank, worker_pid)
                case messages.Gone(worker_pid):
                    self._gone.add(worker_pid)
                    self._mark_recorded(worker_pid)
                case MonitorGone(monitor_pid, why, is_replaced=is_replaced):
                    lost = events.MonitorLost(monitor_pid, why, is_replaced)
                    self._reporter.emit_of(self._ranks.get(local_rank), lost)
                case messages.WillStop(worker_pid, is_heard):
                    self._stop_answers[worker_pid] = is_heard
                case messages.Looked(worker_pid, True, hang):
                    self._mark_seen(worker_pid, hang)
                case messages.Looked(worker_pid):
                    self._recorded.add(worker_pid)
                    self._mark_recorded(worker_pid)
                case messages.Requested("Stop", description, _, pid) if pid in self._pids:
                    self._reporter.emit(events.ControlRequested("Stop", description, local_rank))
                    self.sigterms.setdefault(local_rank, time.monotonic())
                case messages.Requested(action, description, _, pid) if pid in self._pids:
                    self._reporter.emit(events.ControlRequested(action, description, local_rank))
                    self.requests.append(Request(action, description))
                case messages.SeeksOthers() | messages.Requested():
                    pass  # of a worker of an earlier cycle
                case messages.Ready() | messages.Alive() | messages.Connected():
                    pass  # `launcher.monitors` has handled it
        # Afterwards: if this process stood still, the answers have come meanwhile.
        if self._round is not None and time.monotonic() >= self._round.at + LOOK_LIMIT:
            self._end_round(self._round)

    # -- before a worker is ended for a hang ------------------------------------------------------

    def _record_others(self, local_rank: int, record: InterruptionRecord) -> None:
        """Record where the other workers are before the monitor kills a hung one. What they do afterwards is no
        evidence. The monitor waits for this, but not long."""
        pid = record.pid or -1
        if pid not in self._pids or pid in self._hangs:
            return
        if not self._hangs:  # else the recording runs already
            self._recorded.clear()
            self._monitors.look(but=local_rank)
        others = set(self._pids) - {pid, *self._hangs} - self._gone - self._recorded
        self._hangs[pid] = _Hang(local_rank, record, others)
        self._mark_recorded(-1)

    def _mark_recorded(self, worker_pid: int) -> None:
        """Note that a worker's position is on record, or that the worker is gone."""
        for pid, hang in list(self._hangs.items()):
            hang.waits_for.discard(worker_pid)
            if not hang.waits_for or worker_pid == pid:
                self._release(pid, hang)

    def _release(self, pid: int, hang: _Hang) -> None:
        """Let the monitor kill the hung worker: nothing more can be recorded."""
        del self._hangs[pid]
        self._monitors.others_seen(hang.local_rank, pid)
        missing = tuple(sorted(self._pids[worker_pid] for worker_pid in hang.waits_for))
        elsewhere = self._size - len(self._pids)
        took = time.monotonic() - hang.began
        self._reporter.emit(events.OthersSeen(hang.record.rank, missing, elsewhere, took))

    # -- when a worker is suspected ---------------------------------------------------------------

    def _look_for(self, local_rank: int, pid: int) -> None:
        """Look at the other workers, because this one is suspected. Ranks that wait for it become suspects too, so one
        look serves all that are suspected meanwhile."""
        if self._round is None:
            self._round = _Round(time.monotonic(), set(self._pids) - {pid} - self._gone)
            self._monitors.look(but=local_rank, is_suspicion=True)
        self._round.suspects[local_rank] = pid
        if not self._round.waits_for:
            self._end_round(self._round)

    def _mark_seen(self, worker_pid: int, hang: Hang | None) -> None:
        if self._round is None or worker_pid not in self._round.waits_for:
            return
        self._round.waits_for.discard(worker_pid)
        self._round.hangs[worker_pid] = hang
        if not self._round.waits_for:
            self._end_round(self._round)

    def _end_round(self, look: _Round) -> None:
        """Tell the monitors of the suspects where the others are."""
        self._round = None
        elsewhere = self._size - len(self._pids)
        for local_rank, pid in look.suspects.items():
            hangs = {self._pids[other]: hang for other, hang in look.hangs.items() if other != pid}
            # The first suspect was not asked. Suspects that ask wait for nobody.
            hangs |= {self._pids[other]: None for other in look.suspects.values() if other != pid}
            missing = tuple(sorted(self._pids[other] for other in look.waits_for - {pid}))
            self._monitors.others_found(local_rank, messages.OthersPositions(pid, hangs, missing, elsewhere))

    # -- what became of a worker ------------------------------------------------------------------

    def has_failed(self, ended: EndedWorker) -> bool:
        """Return True if a worker failed, or if its monitor killed it for a hang: then its exit status does not count,
        because a signal handler of the program may choose it."""
        return ended.code != 0 or self.is_ended_for_hang(ended)

    def is_ended_for_hang(self, ended: EndedWorker) -> bool:
        """Return True if a worker's monitor killed it for a hang."""
        self.hear()  # a monitor reports a hang before it sends the first signal
        return ended.pid in self._killed

    def await_record(self, ended: EndedWorker, deadline: float, is_cut_off: Callable[[], bool]) -> None:
        """Wait for the final report of a dead worker's monitor, until `deadline` (monotonic seconds), or until this
        node is cut off from the job's store: then its workers must end soon."""
        while ended.pid not in self._gone and time.monotonic() < deadline and not is_cut_off():
            self.hear()
            if self._monitors.is_monitored(ended.local_rank):
                time.sleep(LOOK)
            else:
                return

    def record_of(self, ended: EndedWorker) -> InterruptionRecord:
        """Return the record of a worker's failure: its monitor's; without one, record what the exit status shows."""
        monitor_record = self._records.get(ended.pid)
        if monitor_record is not None:
            return monitor_record
        record = InterruptionRecord(
            rank=ended.rank,
            interruption=Interruption.TERMINATED,
            message=f"process {ended.pid} ended ({ended.how})",
            exit=exit_of(ended),
            detector=Detector("exit"),
            node=self._reporter.node,
            pid=ended.pid,
            detected_wall_ns=time.time_ns(),
        )
        self._records[ended.pid] = record
        self._reporter.emit(events.RankInterrupted(record))
        return record

    def is_killed(self, pid: int) -> bool:
        """Return True if a worker is being killed for a hang."""
        return pid in self._killed

    def killed(self, pid: int) -> None:
        """Note that the agent kills a worker that hangs in the kernel."""
        self._killed.add(pid)

    def unkillable(self, pids: Sequence[int]) -> list[int]:
        """Return the workers among these that were killed for a hang and do not end."""
        return self._killed.survivors(pids)

    def highest_step(self) -> int:
        """Return the highest step that a worker here has reported in this attempt, -1 if none."""
        self.step_of_cycle()
        return self._step

    def step_of_cycle(self) -> int:
        """Return the highest step that a worker here has reported in this cycle, -1 if none, from records and
        snapshots."""
        origin = self._reporter.origin
        snapshots: list[rank_snapshot.RankSnapshot] = []
        with contextlib.suppress(OSError):  # the disk failed or does not answer
            folder, node, ranks = self._reporter.folder, self._reporter.node, set(self._known_ranks)
            snapshots = WRITER.ask(lambda: rank_snapshot.read_of(folder, node, ranks), READ_LIMIT)
        known = [snapshot for snapshot in snapshots if snapshot.origin.attempt == origin.attempt]
        steps = [snapshot.step for snapshot in known if snapshot.origin.cycle == origin.cycle]
        steps += [record.step for record in self._records.values()]
        self._step = max(
            [self._step, *(step for step in [*steps, *(snapshot.step for snapshot in known)] if step is not None)]
        )
        return max((step for step in steps if step is not None), default=-1)

    # -- before workers are ended -----------------------------------------------------------------

    def record_positions(self, running: RunningWorkers) -> list[EndedWorker]:
        """Record where the workers here are before they are stopped, after a rank of another node hung: this shows
        which rank waited for which. Return workers that have ended meanwhile. Do nothing if a hang on this node
        already led to a recording."""
        if self._recorded | self._gone >= set(running.pids()):
            return []
        self._monitors.look()
        ended: list[EndedWorker] = []
        deadline = time.monotonic() + LOOK_LIMIT
        while not self._recorded | self._gone >= set(running.pids()) and time.monotonic() < deadline:
            time.sleep(LOOK)
            self.hear()
            ended += running.collect()
        return ended

    def ask_to_stop(self) -> None:
        """Tell all programs that the job was asked to stop."""
        self._stop_answers.clear()
        self._monitors.request_stop()

    @property
    def is_stop_heard(self) -> bool:
        """Return True if any program is known to check for a stop request."""
        return any(self._stop_answers.values())

    def have_answered(self, pids: Collection[int]) -> bool:
        """Return True if we know of each of these workers whether it checks for a stop request."""
        return all(pid in self._stop_answers or pid in self._gone for pid in pids)


def exit_of(ended: EndedWorker) -> Exit:
    """Return a worker's end in the form of records."""
    return Exit(code=ended.code) if ended.code >= 0 else Exit(signal=ended.how)
