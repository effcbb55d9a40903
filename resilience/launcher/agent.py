"""Runs one node's workers, cycle after cycle, until the job is over.

A cycle: preflight checks, rendezvous, spawn, run, stop. While workers run, the agent waits for the next event (a
worker exits, a monitor reports, a signal arrives, another agent writes a verdict, a node wants to join) and asks what
follows. Every agent of a cycle obeys the first verdict written to the rendezvous. Built on torchelastic's
LocalElasticAgent, which provides the workers' environment, events and metrics. Verdicts are in `core.cycle`, the
meeting of agents is in `rendezvous`, and the start of workers is in `workers`."""

from __future__ import annotations

import errno
import select
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch.distributed.elastic.agent.server import api
from torch.distributed.elastic.agent.server.api import (
    DEFAULT_ROLE,
    RunResult,
    Worker,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.events import Event, EventSource, record
from torch.distributed.elastic.multiprocessing import LogsSpecs
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousTimeoutError,
)

from resilience.core import cycle
from resilience.core.cycle import CycleDecision
from resilience.core.group_ranks import worker_ranks
from resilience.errors import LaunchError, StoreError
from resilience.facts import events
from resilience.launcher import worker_env
from resilience.launcher.failed_workers import FailedWorker
from resilience.launcher.output.destinations import RunFolderLogs
from resilience.launcher.worker import worker_processes, workers
from resilience.launcher.worker.worker_processes import EndedWorker, RunningWorkers
from resilience.system import descriptors
from resilience.system.background import READ_LIMIT

if TYPE_CHECKING:
    from resilience.launcher.cycle_supervisor import CycleSupervisor

SETTLE = 2 * READ_LIMIT + 0.5  # seconds for the monitors of dead workers to report: a few milliseconds
# on a fast disk; only a hung disk or a stopped monitor takes all of it
SHORTAGE_LIMIT = (
    3.0  # seconds for descriptors or processes to come free; what holds them for a moment takes milliseconds
)
SHORTAGE_PAUSE = 0.3  # each attempt may start some of the workers, and end them


class Agent(LocalElasticAgent):
    """The agent of one node. `run` returns when the job is over here; `verdict` then says how."""

    def __init__(self, spec: WorkerSpec, logs_specs: LogsSpecs, supervisor: CycleSupervisor, **kwargs: Any) -> None:
        super().__init__(spec, logs_specs, **kwargs)
        self.verdict = CycleDecision(
            outcome="failed", node=supervisor.name, exit_code=cycle.FAILED, detail="nothing ran"
        )
        self.worker_open_files = descriptors.raise_limit()  # the agent itself needs several for each worker
        self.is_clean = False  # the job was preempted, and all workers here exited with status 0
        self.failed: dict[
            int, FailedWorker
        ] = {}  # workers that failed here by themselves in the present cycle, by rank
        self._supervisor = supervisor
        self._running: RunningWorkers | None = None
        self._next_look_at = 0.0

    # -- the cycle ------------------------------------------------------------------------------

    def _invoke_run(self, role: str = DEFAULT_ROLE) -> RunResult:
        reason: events.CycleReason = "first"
        while True:
            self.verdict = self._cycle(reason)
            if self.verdict.again is None:
                return self._result()
            reason = self.verdict.again

    def _cycle(self, reason: events.CycleReason) -> CycleDecision:
        supervisor, reporter, group = self._supervisor, self._supervisor.reporter, self._worker_group
        reporter.cycle(supervisor.handler.cycle + 1)
        try:
            with reporter.phase("gate"):
                refusal = supervisor.run_preflight()
            if refusal is not None:
                return refusal
            try:
                with reporter.phase("rendezvous"):
                    self._rendezvous(group)
            except RendezvousClosedError as error:
                return supervisor.closed(str(error))
            except RendezvousTimeoutError as error:
                return supervisor.late(str(error))
            reporter.cycle(supervisor.handler.cycle)
            verdict = supervisor.began(group)
        except (StoreError, RendezvousConnectionError) as error:
            return supervisor.cut_off(str(error))
        except LaunchError as error:
            return supervisor.unhealthy(str(error))
        if verdict is not None:
            return verdict
        reporter.emit(events.CycleStarted(reason, supervisor.restarts_used, group.spec.max_restarts))
        supervisor.report_unlearned_limits(group)
        return self._run_workers(group)

    def _run_workers(self, group: WorkerGroup) -> CycleDecision:
        supervisor, reporter = self._supervisor, self._supervisor.reporter
        verdict = CycleDecision(
            outcome="failed", node=supervisor.name, exit_code=cycle.FAILED, detail="the agent failed"
        )
        try:
            try:
                with reporter.phase("spawn"):
                    self._start_workers(group)
                with reporter.phase("run"):
                    verdict = self._watch()
            except LaunchError as error:
                verdict = supervisor.cannot_start_workers(error)
        except (StoreError, RendezvousConnectionError) as error:
            verdict = supervisor.cut_off(str(error))
        finally:
            with reporter.phase("stop"):
                self._end_workers(verdict)
                worker_env.end_file_timers(self)
            reporter.cycle_ended(verdict, supervisor.witnesses.step_of_cycle())
        return verdict

    def _assign_worker_ranks(
        self, store: Any, group_rank: int, group_world_size: int, spec: WorkerSpec
    ) -> list[Worker]:
        """Compute the ranks from the seats. Every agent knows all seats, so it need not wait for any other agent, which
        may be lost by now."""
        seats = self._supervisor.handler.membership.seats
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
        supervisor = self._supervisor
        self.failed.clear()
        if isinstance(self._logs_specs, RunFolderLogs):
            self._logs_specs.cycle = supervisor.handler.cycle
        supervisor.warm_start.prepare(supervisor.signals.has_any)
        context, running = self._started_workers(worker_group)
        self._running = running
        supervisor.warm_start.started(context.why_not_forked)
        for worker in worker_group.workers:
            worker.id = context.pids()[worker.local_rank]
            supervisor.witnesses.watch(worker, running.files(worker.local_rank))
            supervisor.reporter.emit(
                events.WorkerStarted(worker.local_rank, worker.global_rank, worker.id, context.how, context.reason)
            )
            record(self._construct_event("START", EventSource.WORKER, worker), worker_group.spec.event_log_handler)
        worker_group.state = WorkerState.HEALTHY
        return dict(context.pids())

    def _started_workers(self, worker_group: WorkerGroup) -> tuple[workers.Workers, RunningWorkers]:
        """Start the workers and watch them. If no descriptor or no process (`ulimit -u`) is left, try again for a
        while: the last cycle's workers, what they started, and telemetry give theirs back. Raises: LaunchError."""
        supervisor = self._supervisor
        deadline = time.monotonic() + SHORTAGE_LIMIT
        while True:
            supervisor.look_after_drain()
            try:
                context = workers.start(worker_env.specification(self, worker_group, supervisor))
                return context, worker_processes.watched(context, worker_group.workers)
            except LaunchError as error:
                cause = error.__cause__
                is_short = descriptors.are_missing(cause) or getattr(cause, "errno", None) == errno.EAGAIN
                if not is_short or time.monotonic() >= deadline or supervisor.signals.has_any():
                    raise
            time.sleep(SHORTAGE_PAUSE)

    def _end_workers(self, verdict: CycleDecision) -> None:
        running, supervisor = self._running, self._supervisor
        if running is None:
            return
        if verdict.outcome == "preempted":
            for ended in supervisor.let_finish(running, verdict):
                self._report_end(ended, expected=True)
        if verdict.failure is not None and verdict.failure.kind == "hang":
            for ended in supervisor.witnesses.record_positions(running):
                self._report_end(ended, expected=True)
        supervisor.monitors.dismiss(verdict.detail or verdict.outcome)
        limit = supervisor.stop_limit(verdict, self._shutdown_timeout)

        def is_urgent() -> bool:
            supervisor.look_after_drain()  # workers may still write
            return supervisor.is_urgent(verdict)

        for ended in running.stop(supervisor.signals.to_workers(verdict.stop_signal), limit, is_urgent):
            self._report_end(ended, expected=True)
        supervisor.reporter.console.losses(running.unshown)
        self.is_clean = verdict.outcome == "preempted" and running.ended_well
        if running.unkillable:
            supervisor.mark_unusable(running.unkillable)
        self._running = None
        self._worker_group.state = WorkerState.STOPPED

    def _shutdown(self, *args: Any, **kwargs: Any) -> None:
        """Stop all workers. torchelastic calls this last, whatever happened."""
        if self._running is not None:
            self._end_workers(self.verdict)
        super()._shutdown(*args, **kwargs)

    # -- while workers run ----------------------------------------------------------------------

    def _watch(self) -> CycleDecision:
        """Wait until something ends the cycle; return the verdict."""
        supervisor = self._supervisor
        assert self._running is not None
        while True:
            self._wait()
            supervisor.reap(self._running)
            verdict = (
                self._decide_on_requests()
                or self._decide_on_failures(self._running.collect())
                or self._decide_on_unkillable()
                or self._decide_on_others()
            )
            if verdict is not None:
                return verdict

    def _wait(self) -> None:
        """Sleep until something may have happened, for at most the monitoring interval."""
        assert self._running is not None
        poll = select.poll()
        for fd in (*self._running.descriptors, *self._supervisor.descriptors):
            poll.register(fd, select.POLLIN)
        poll.poll(self._worker_group.spec.monitor_interval * 1000)

    def _decide_on_requests(self) -> CycleDecision | None:
        """Return the decision that a signal or a rank requests, if any."""
        self._supervisor.witnesses.hear()
        return self._supervisor.request()

    def _decide_on_failures(self, ended: Sequence[EndedWorker]) -> CycleDecision | None:
        """Return the decision that follows if one of the ended workers failed."""
        assert self._running is not None
        if ended:  # after `reap` they may have noted something still
            self._supervisor.warm_start.look(self._running.notes(), self._supervisor.is_cut_off())
        failures = [end for end in ended if self._supervisor.witnesses.has_failed(end)]
        for end in ended:
            self._report_end(end, expected=end not in failures)
        if not failures:
            return None
        if (refusal := self._running.refusal()) is not None:
            return self._supervisor.cannot_execute_program(refusal)
        for end in failures:
            if end.code:
                self.failed[end.rank] = FailedWorker(end, self._running.files(end.local_rank)[2])
        stopping = self._supervisor.stopping
        is_cut_off = self._supervisor.is_cut_off  # then it has no time to wait
        if any(map(stopping.may_be_preemption, failures)) and not is_cut_off() and stopping.await_signal():
            return self._decide_on_requests()
        deadline = time.monotonic() + SETTLE
        for end in failures:
            self._supervisor.witnesses.await_record(end, deadline, is_cut_off)
            self._supervisor.witnesses.record_of(end)
        return self._supervisor.after_failure(failures)

    def _decide_on_unkillable(self) -> CycleDecision | None:
        """Return the decision that follows if a hung worker survives SIGKILL."""
        assert self._running is not None
        self._supervisor.kill_uninterruptible(self._running)
        unkillable = self._running.give_up(self._supervisor.witnesses.unkillable(self._running.pids()))
        return self._supervisor.after_failure(unkillable) if unkillable else None

    def _decide_on_others(self) -> CycleDecision | None:
        """Return the decision that follows from other nodes; checked once per interval."""
        assert self._running is not None
        now = time.monotonic()
        if now < self._next_look_at and not self._supervisor.may_be_over:
            return None
        self._next_look_at = now + self._worker_group.spec.monitor_interval
        return self._supervisor.look(self._running)

    def _report_end(self, ended: EndedWorker, expected: bool) -> None:
        self._supervisor.witnesses.reaped(ended)
        code, number = (ended.code, None) if ended.code >= 0 else (None, ended.how)
        self._supervisor.reporter.emit(
            events.WorkerExited(ended.local_rank, ended.rank, ended.pid, code, number, expected)
        )

    def _result(self) -> RunResult:
        """Return the verdict as torchelastic's result, for its events and metrics."""
        if self.verdict.outcome == "completed":
            values = {worker.global_rank: None for worker in self._worker_group.workers}
            return RunResult(state=WorkerState.SUCCEEDED, return_values=values)
        failed = self.failed if self.verdict.is_failure else {}
        return RunResult(state=WorkerState.FAILED, failures={rank: worker.failure() for rank, worker in failed.items()})

    def _get_fq_hostname(self) -> str:
        """Return the host's name for events about torch's file timers: the one of all events, without a lookup."""
        return api._get_fq_hostname()

    def event_of_end(self) -> Event:
        """Return torchelastic's own event about the end of this agent. Unlike torch's, it has no traceback: the agent
        ends in an orderly way, whatever ended the job."""
        if self.verdict.exit_code == 0 or self.is_clean:
            return self.get_event_succeeded()
        return self._construct_event("FAILED", EventSource.AGENT, raw_error=self.verdict.detail)
