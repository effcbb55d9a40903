"""What do the rank monitors tell of one cycle's workers?

Collected while the agent's loop turns, and asked when something has happened: what became of a worker, where the
others were, who knows that it is to stop, what a rank wants. What follows from any of it is `node`'s."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import msgspec
from torch.distributed.elastic.agent.server.api import Worker

from resilience.adapters.background import READ_LIMIT, WRITER
from resilience.core import events
from resilience.core.attribution import Detector, Exit, Interruption, InterruptionRecord
from resilience.core.control import Request
from resilience.core.watch import Limits
from resilience.launcher.monitors import Lost
from resilience.launcher.stuck import Killed
from resilience.monitor import messages
from resilience.telemetry import signs

if TYPE_CHECKING:
    from resilience.launcher.account import Account
    from resilience.launcher.monitors import Monitors
    from resilience.launcher.running import Ended, Running

LOOK = 0.002  # seconds between looks for what a monitor is to tell
LOOK_LIMIT = 1.0  # seconds for a look at workers that are about to be stopped; it needs 0.1


class _Hang:
    """A worker that hangs and has not been ended yet. waits_for: pids of others that have not been looked at."""

    def __init__(self, local_rank: int, record: InterruptionRecord, waits_for: set[int]) -> None:
        self.local_rank = local_rank
        self.record = record
        self.waits_for = waits_for
        self.began = time.monotonic()


class Witnesses:
    """The monitors of one node, and what they have told since its cycle began. Main thread only."""

    def __init__(self, account: Account, monitors: Monitors, limits: Limits) -> None:
        self._account = account
        self._monitors = monitors
        self._limits = limits
        self._step = -1  # the highest that any worker here has told, in any cycle
        self._had: set[int] = set()  # ranks that this node had in any cycle
        self.is_cold = True  # a node of this cycle has not run the job before
        self.forget()

    def forget(self) -> None:
        """A cycle begins."""
        self.requests: list[Request] = []
        self.sigterms: dict[int, float] = {}  # by local rank: when a worker caught a SIGTERM, and lives
        self.condemned: set[int] = set()  # of these: local ranks that are to end, because it was meant for them alone
        self._records: dict[int, InterruptionRecord] = {}  # by the worker's pid
        self._gone: set[int] = set()
        self._killed = Killed(self._limits.grace)
        self._ranks: dict[int, int] = {}  # of the workers, by local rank
        self._pids: dict[int, int] = {}  # global ranks of the workers; what those of the cycle before asked for is over
        self._size = 0  # ranks of the job in this cycle
        self._hangs: dict[int, _Hang] = {}  # by the worker's pid
        self._looked: set[int] = set()  # workers of which it is on record where they were
        self._told: dict[int, bool] = {}  # workers that know they are to stop, and whether they look

    def watch(self, worker: Worker, files: tuple[str, str, str]) -> None:
        """Have a worker watched by its rank's monitor. files: of its stdout, stderr and error report."""
        origin = msgspec.structs.replace(
            self._account.origin,
            role="rank",
            pid=worker.id,
            initial_rank=worker.global_rank,
            rank=worker.global_rank,
            world_size=worker.world_size,
        )
        self._ranks[worker.local_rank] = worker.global_rank
        self._had.add(worker.global_rank)
        self._pids[worker.id] = worker.global_rank
        self._size = worker.world_size
        output = tuple(file for file in files[:2] if file)
        self._monitors.assign(worker.local_rank, worker.id, origin, self._limits, output, self.is_cold)

    def reaped(self, ended: Ended) -> None:
        """Tell a worker's monitor how it ended, for it may have come too late to see it."""
        self._monitors.reaped(ended.local_rank, ended.pid, exit_of(ended))

    def hear(self) -> None:
        """Take what the monitors say."""
        for local_rank, message in self._monitors.poll(0.0):
            match message:
                case messages.Found(record, is_ended):
                    self._killed.note(record)
                    if not is_ended:
                        self._look_at_others(local_rank, record)
                    if self._records.setdefault(record.pid or -1, record) is record:
                        self._account.console.found(record)
                case messages.Suspected(rank, suspicion):
                    self._account.console.suspected(rank, suspicion)
                case messages.Gone(worker_pid):
                    self._gone.add(worker_pid)
                    self._seen(worker_pid)
                case Lost(monitor_pid, why):
                    self._account.emit_of(self._ranks.get(local_rank), events.MonitorLost(monitor_pid, why))
                case messages.Stopping(worker_pid, is_heard):
                    self._told[worker_pid] = is_heard
                case messages.Looked(worker_pid):
                    self._looked.add(worker_pid)
                    self._seen(worker_pid)
                case messages.Requested("Stop", description, _, pid) if pid in self._pids:
                    self._account.emit(events.ControlRequested("Stop", description, local_rank))
                    self.sigterms.setdefault(local_rank, time.monotonic())
                case messages.Requested(action, description, _, pid) if pid in self._pids:
                    self._account.emit(events.ControlRequested(action, description, local_rank))
                    self.requests.append(Request(action, description))

    # -- before a worker is ended for a hang ------------------------------------------------------

    def _look_at_others(self, local_rank: int, record: InterruptionRecord) -> None:
        """A worker hangs, and its monitor is about to end it: have it put on record first where the others are. What
        they do afterwards is no evidence. The monitor waits for that, but not for long."""
        pid = record.pid or -1
        if pid not in self._pids or pid in self._hangs:
            return
        if not self._hangs:  # else the others are being looked at
            self._looked.clear()
            self._monitors.look(but=local_rank)
        others = set(self._pids) - {pid, *self._hangs} - self._gone - self._looked
        self._hangs[pid] = _Hang(local_rank, record, others)
        self._seen(-1)

    def _seen(self, worker_pid: int) -> None:
        """A worker was looked at, or cannot be any more."""
        for pid, hang in list(self._hangs.items()):
            hang.waits_for.discard(worker_pid)
            if not hang.waits_for or worker_pid == pid:
                self._tell_seen(pid, hang)

    def _tell_seen(self, pid: int, hang: _Hang) -> None:
        """Nothing more is to be seen: let the worker that hangs be ended."""
        del self._hangs[pid]
        self._monitors.others_seen(hang.local_rank, pid)
        missing = tuple(sorted(self._pids[other] for other in hang.waits_for))
        elsewhere = self._size - len(self._pids)
        took = time.monotonic() - hang.began
        self._account.emit(events.OthersSeen(hang.record.rank, missing, elsewhere, took))

    # -- what became of a worker ------------------------------------------------------------------

    def has_failed(self, ended: Ended) -> bool:
        """Return True if a worker ended badly, or was ended by its monitor for a hang: then its exit status, which
        a signal handler of the program may choose, does not count."""
        return ended.code != 0 or self.is_ended_for_hang(ended)

    def is_ended_for_hang(self, ended: Ended) -> bool:
        """Return True if its monitor ended a worker for a hang."""
        self.hear()  # a monitor tells of a hang before it sends the first signal
        return ended.pid in self._killed

    def await_record(self, ended: Ended, deadline: float) -> None:
        """Wait until a dead worker's monitor has told what it knows, or until `deadline` (monotonic seconds)."""
        while ended.pid not in self._gone and time.monotonic() < deadline:
            self.hear()
            if self._monitors.is_monitored(ended.local_rank):
                time.sleep(LOOK)
            else:
                return

    def record_of(self, ended: Ended) -> InterruptionRecord:
        """Return what is known of a worker's failure: its monitor's record; without one, the agent states what
        the exit status says."""
        known = self._records.get(ended.pid)
        if known is not None:
            return known
        record = InterruptionRecord(
            rank=ended.rank,
            interruption=Interruption.TERMINATED,
            message=f"process {ended.pid} ended ({ended.how})",
            exit=exit_of(ended),
            detector=Detector("exit"),
            node=self._account.node,
            pid=ended.pid,
            detected_wall_ns=time.time_ns(),
        )
        self._records[ended.pid] = record
        self._account.emit(events.Interrupted(record))
        return record

    def unkillable(self, pids: Sequence[int]) -> list[int]:
        """Return which of these workers were killed for a hang and will not end."""
        return self._killed.survivors(pids)

    def highest_step(self) -> int:
        """Return the highest step that a worker here has told, in this attempt, by records or by its present signs."""
        origin = self._account.origin
        shown: list[signs.Signs] = []
        with contextlib.suppress(OSError):  # the disk does not answer
            folder, node, ranks = self._account.folder, self._account.node, set(self._had)
            shown = WRITER.ask(lambda: signs.read_of(folder, node, ranks), READ_LIMIT)
        steps = [each.step for each in shown if each.origin.attempt == origin.attempt]
        steps += [record.step for record in self._records.values()]
        self._step = max([self._step, *(step for step in steps if step is not None)])
        return self._step

    # -- before workers are ended -----------------------------------------------------------------

    def look_at_workers(self, running: Running) -> list[Ended]:
        """A rank of another node hung: before the workers here are stopped, have it put on record where they are, which
        tells who waited for whom. Answers who has left meanwhile. Where all were looked at before a rank of this node
        was ended, it is on record already."""
        if self._looked | self._gone >= set(running.pids()):
            return []
        self._monitors.look()
        ended: list[Ended] = []
        deadline = time.monotonic() + LOOK_LIMIT
        while not self._looked | self._gone >= set(running.pids()) and time.monotonic() < deadline:
            time.sleep(LOOK)
            self.hear()
            ended += running.collect()
        return ended

    def ask_to_stop(self) -> None:
        """Let all programs know that the job is asked to stop."""
        self._told.clear()
        self._monitors.request_stop()

    @property
    def is_stop_heard(self) -> bool:
        """Whether any program is known to look for that."""
        return any(self._told.values())

    def have_answered(self, pids: Collection[int]) -> bool:
        """Whether it is known of all these workers if they look."""
        return all(pid in self._told or pid in self._gone for pid in pids)


def exit_of(ended: Ended) -> Exit:
    """Return a worker's end in the words of records."""
    return Exit(code=ended.code) if ended.code >= 0 else Exit(signal=ended.how)
