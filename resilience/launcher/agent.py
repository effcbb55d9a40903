"""Runs one node's workers, cycle after cycle, until the job is over.

A cycle: health gate, rendezvous, spawn, run, stop. While workers run the agent waits for whatever comes
first (a worker's end, a word of a monitor, a signal, another agent's verdict, a node that wants to join)
and asks what follows; every agent of a cycle obeys the one verdict that stands in the rendezvous. Built on
torchelastic's LocalElasticAgent for the environment of workers, events and metrics. What a verdict is
stands in `core.cycle`, who meets whom in `rendezvous`, how workers start in `workers`."""

from __future__ import annotations

import select
import signal
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch.distributed.elastic.agent.server.api import (
    DEFAULT_ROLE,
    RunResult,
    Worker,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsSpecs
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousTimeoutError,
)

from resilience.adapters.background import READ_LIMIT
from resilience.core import cycle, events
from resilience.core.cycle import Verdict
from resilience.core.group_ranks import worker_ranks
from resilience.errors import LaunchError, StoreError
from resilience.launcher import worker_env, workers
from resilience.launcher.output import RunFolderLogs
from resilience.launcher.running import Ended, Running

if TYPE_CHECKING:
    from resilience.launcher.node import Node

SETTLE = 2 * READ_LIMIT + 0.5  # seconds for the monitors of dead workers to tell what they know: a few milliseconds
# where the disk is quick; only one that hangs, or a monitor that is stopped, takes all of it


class Agent(LocalElasticAgent):
    """The agent of one node. `run` returns when the job is over here; `verdict` then says how."""

    def __init__(self, spec: WorkerSpec, logs_specs: LogsSpecs, node: Node, **kwargs: Any) -> None:
        super().__init__(spec, logs_specs, **kwargs)
        self.verdict = Verdict(outcome="failed", node=node.name, exit_code=cycle.FAILED, detail="nothing ran")
        self.is_clean = False  # a preemption, and all workers here ended with exit status 0
        self._node = node
        self._running: Running | None = None
        self._look_at = 0.0

    # -- the cycle ------------------------------------------------------------------------------

    def _invoke_run(self, role: str = DEFAULT_ROLE) -> RunResult:
        why: events.CycleReason = "first"
        while True:
            self.verdict = self._cycle(why)
            if self.verdict.again is None:
                return self._result()
            why = self.verdict.again

    def _cycle(self, why: events.CycleReason) -> Verdict:
        node, account, group = self._node, self._node.account, self._worker_group
        account.cycle(node.handler.cycle + 1)
        try:
            with account.phase("gate"):
                refusal = node.gate()
            if refusal is not None:
                return refusal
            try:
                with account.phase("rendezvous"):
                    self._rendezvous(group)
            except RendezvousClosedError as error:
                return node.closed(str(error))
            except RendezvousTimeoutError as error:
                return node.late(str(error))
            account.cycle(node.handler.cycle)
            verdict = node.began(group)
        except (StoreError, RendezvousConnectionError) as error:
            return node.cut_off(str(error))
        if verdict is not None:
            return verdict
        account.emit(events.CycleStarted(why, node.restarts_used, group.spec.max_restarts))
        return self._run_workers(group)

    def _run_workers(self, group: WorkerGroup) -> Verdict:
        node, account = self._node, self._node.account
        verdict = Verdict(outcome="failed", node=node.name, exit_code=cycle.FAILED, detail="the agent failed")
        try:
            with account.phase("spawn"):
                self._start_workers(group)
            with account.phase("run"):
                verdict = self._watch()
        except (StoreError, RendezvousConnectionError) as error:
            verdict = node.cut_off(str(error))
        except LaunchError as error:
            verdict = Verdict("failed", node.name, exit_code=cycle.FAILED, detail=str(error))
        finally:
            with account.phase("stop"):
                self._end_workers(verdict)
            account.cycle_ended(verdict)
        return verdict

    def _assign_worker_ranks(
        self, store: Any, group_rank: int, group_world_size: int, spec: WorkerSpec
    ) -> list[Worker]:
        """Everybody knows all seats, so nobody has to be waited for: not for an agent that is lost by now."""
        seats = self._node.handler.formation.seats
        ranks = worker_ranks(seats, group_rank)
        return [
            Worker(
                local_rank=local_rank,
                global_rank=ranks.first + local_rank,
                role_rank=ranks.first_of_role + local_rank,
                world_size=ranks.size,
                role_world_size=ranks.size_of_role,
            )
            for local_rank in range(spec.local_world_size)
        ]

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        node = self._node
        if isinstance(self._logs_specs, RunFolderLogs):
            self._logs_specs.cycle = node.handler.cycle
        node.warm_start.prepare()
        made = worker_env.specification(self, worker_group, node)
        context = workers.start(made)
        self._running = running = Running(context, worker_group.workers)
        for worker in worker_group.workers:
            worker.id = context.pids()[worker.local_rank]
            node.witnesses.watch(worker, running.files(worker.local_rank))
            node.account.emit(
                events.WorkerStarted(worker.local_rank, worker.global_rank, worker.id, context.how, context.reason)
            )
        worker_group.state = WorkerState.HEALTHY
        return dict(context.pids())

    def _end_workers(self, verdict: Verdict) -> None:
        running, node = self._running, self._node
        if running is None:
            return
        if verdict.outcome == "preempted":
            for ended in node.let_finish(running, verdict):
                self._tell(ended, expected=True)
        if verdict.failure is not None and verdict.failure.is_hang:
            for ended in node.witnesses.look_at_workers(running):
                self._tell(ended, expected=True)
        node.monitors.dismiss(verdict.detail or verdict.outcome)
        limit = node.stop_limit(verdict, self._shutdown_timeout)
        for ended in running.stop(signal.SIGTERM, limit, lambda: node.is_urgent(verdict)):
            self._tell(ended, expected=True)
        self.is_clean = verdict.outcome == "preempted" and running.ended_well
        if running.stuck:
            node.soil(running.stuck)
        self._running = None
        self._worker_group.state = WorkerState.STOPPED

    def _shutdown(self, *args: Any, **kwargs: Any) -> None:
        """torchelastic's last act, whatever happened: nothing is left running."""
        if self._running is not None:
            self._end_workers(self.verdict)
        super()._shutdown(*args, **kwargs)

    # -- while workers run ----------------------------------------------------------------------

    def _watch(self) -> Verdict:
        """Wait for what ends the cycle."""
        node = self._node
        assert self._running is not None
        while True:
            self._wait()
            node.reap(self._running)
            verdict = self._requested() or self._failed(self._running.collect()) or self._stuck() or self._look_around()
            if verdict is not None:
                return verdict

    def _wait(self) -> None:
        """Sleep until something may have happened, at most for the monitoring interval."""
        assert self._running is not None
        poll = select.poll()
        for fd in (*self._running.descriptors, *self._node.descriptors):
            poll.register(fd, select.POLLIN)
        poll.poll(self._worker_group.spec.monitor_interval * 1000)

    def _requested(self) -> Verdict | None:
        """What a signal or a rank asks for."""
        self._node.witnesses.hear()
        return self._node.request()

    def _failed(self, ended: Sequence[Ended]) -> Verdict | None:
        """What a failure brings about, if there is one among those that ended."""
        failures = [end for end in ended if self._node.witnesses.has_failed(end)]
        for end in ended:
            self._tell(end, expected=end not in failures)
        if not failures:
            return None
        stopping = self._node.stopping
        if any(map(stopping.may_be_preemption, failures)) and stopping.await_signal():
            return self._requested()
        deadline = time.monotonic() + SETTLE
        for end in failures:
            self._node.witnesses.await_record(end, deadline)
            self._node.witnesses.record_of(end)
        return self._node.after_failure(failures)

    def _stuck(self) -> Verdict | None:
        """What a worker brings about that was killed for a hang and does not end."""
        assert self._running is not None
        stuck = self._running.give_up(self._node.witnesses.unkillable(self._running.pids()))
        return self._node.after_failure(stuck) if stuck else None

    def _look_around(self) -> Verdict | None:
        """What others did, looked at once an interval."""
        assert self._running is not None
        now = time.monotonic()
        if now < self._look_at and not self._node.is_told:
            return None
        self._look_at = now + self._worker_group.spec.monitor_interval
        return self._node.look(self._running)

    def _tell(self, ended: Ended, expected: bool) -> None:
        self._node.witnesses.reaped(ended)
        code, number = (ended.code, None) if ended.code >= 0 else (None, ended.how)
        self._node.account.emit(events.WorkerExited(ended.local_rank, ended.rank, ended.pid, code, number, expected))

    def _result(self) -> RunResult:
        """The verdict in torchelastic's words, for its events and metrics."""
        if self.verdict.outcome == "completed":
            values = {worker.global_rank: None for worker in self._worker_group.workers}
            return RunResult(state=WorkerState.SUCCEEDED, return_values=values)
        return RunResult(state=WorkerState.FAILED)
