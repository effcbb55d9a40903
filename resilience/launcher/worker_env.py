"""Which environment and arguments does a worker get?  torchrun's, and our variables.

torchelastic's variables keep their names and meanings (RANK … TORCHELASTIC_RUN_ID), but the restart count of a cycle
is the job's, not this agent's. TRACEPARENT is the node's cycle, for tracers of the program. RESILIENCE_* name the run
folder and the socket of the rank's monitor, so a Wrapper or a RankMonitorClient in the program finds them."""

from __future__ import annotations

import contextlib
import os
import socket
from string import Template
from typing import TYPE_CHECKING

from torch.distributed.elastic.agent.server.api import Worker, WorkerGroup
from torch.distributed.elastic.utils import macros

from resilience.launcher.worker.workers import WorkersSpec, starting
from resilience.system.environment import Exporting, async_error_handling
from resilience.telemetry import span

if TYPE_CHECKING:
    from resilience.launcher.agent import Agent
    from resilience.launcher.cycle_supervisor import CycleSupervisor


def specification(agent: Agent, group: WorkerGroup, supervisor: CycleSupervisor) -> WorkersSpec:
    """Return what `workers.start` needs to start this cycle's workers; start torch's server of file timers if
    TORCHELASTIC_ENABLE_FILE_TIMER is 1. Raises: LaunchError."""
    spec = group.spec
    envs = {worker.local_rank: _environment(agent, group, worker, supervisor) for worker in group.workers}
    arguments = {
        worker.local_rank: tuple(macros.substitute(list(spec.args), str(worker.local_rank))) for worker in group.workers
    }
    with starting():
        agent._setup_local_watchdog(envs=envs)
    agent._setup_healthcheck()
    return WorkersSpec(
        name=spec.role,
        entrypoint=spec.entrypoint,
        args=arguments,
        envs=envs,
        logs_specs=agent._logs_specs,
        log_line_prefixes=_prefixes(agent, group),
        start_method=agent._start_method,
        numa_options=spec.numa_options,
        duplicate_stdout_filters=spec.duplicate_stdout_filters,
        duplicate_stderr_filters=spec.duplicate_stderr_filters,
        zygote=supervisor.zygote,
        open_files=agent.worker_open_files,
    )


def end_file_timers(agent: Agent) -> None:
    """Stop torch's server of file timers, if this cycle has one. torch does so only at the end of the job."""
    server, agent._worker_watchdog = agent._worker_watchdog, None
    if server is None:
        return
    thread = server._watchdog_thread
    if thread is not None and thread.ident is None:  # it could not be started, so it cannot be joined
        server._watchdog_thread = None
    # A file that cannot be removed stays.
    with contextlib.ExitStack() as until_stopped, contextlib.suppress(OSError):
        # The server's thread waits for the first process that opens its FIFO for writing, for ever if no worker did.
        with contextlib.suppress(OSError):
            until_stopped.callback(os.close, os.open(server._file_path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC))
        server.stop()


def _environment(agent: Agent, group: WorkerGroup, worker: Worker, supervisor: CycleSupervisor) -> dict[str, str]:
    spec = group.spec
    environment = {
        "RANK": str(worker.global_rank),
        "GROUP_RANK": str(group.group_rank),
        "ROLE_RANK": str(worker.role_rank),
        "ROLE_NAME": spec.role,
        "LOCAL_WORLD_SIZE": str(spec.local_world_size),
        "WORLD_SIZE": str(worker.world_size),
        "GROUP_WORLD_SIZE": str(group.group_world_size),
        "ROLE_WORLD_SIZE": str(worker.role_world_size),
        "MASTER_ADDR": str(group.master_addr),
        "MASTER_PORT": str(group.master_port),
        "TORCHELASTIC_RESTART_COUNT": str(supervisor.restarts_used),
        "TORCHELASTIC_MAX_RESTARTS": str(spec.max_restarts),
        "TORCHELASTIC_RUN_ID": spec.rdzv_handler.get_run_id(),
        "TORCHELASTIC_SIGNALS_TO_HANDLE": supervisor.signals.names,
        "TORCHELASTIC_USE_AGENT_STORE": str(spec.rdzv_handler.use_agent_store),
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": async_error_handling(),
        "RESILIENCE_RUN_DIR": str(supervisor.reporter.folder.parent),
        "RESILIENCE_RUN_FOLDER": str(supervisor.reporter.folder),
        "RESILIENCE_JOB_ID": supervisor.reporter.origin.job_id,
        "RESILIENCE_ATTEMPT": str(supervisor.reporter.origin.attempt),
        "RESILIENCE_CYCLE": str(supervisor.reporter.origin.cycle),
        "RESILIENCE_NODE": supervisor.name,
        "RESILIENCE_RESTART_POLICY": supervisor.policy,
        "RESILIENCE_SHORTEST_LIMIT": "" if supervisor.shortest_limit is None else f"{supervisor.shortest_limit:g}",
        "RESILIENCE_DETECT_HANGS": "0" if supervisor.rule is None else "1",
        "RESILIENCE_MONITOR_SOCKET": supervisor.monitors.socket(worker.local_rank),
    }
    if supervisor.rule is not None:  # for a Wrapper
        environment["RESILIENCE_HANG_FIRST_LIMIT"] = f"{supervisor.rule.first:g}"
        environment["RESILIENCE_HANG_LEAST_LIMIT"] = f"{supervisor.rule.least:g}"
    job_trace = span.parse_traceparent(Exporting.from_environment().traceparent)
    cycle = supervisor.reporter.origin
    environment["TRACEPARENT"] = span.to_traceparent((span.trace_id(cycle, job_trace), span.cycle_span_id(cycle)))
    agent._set_local_rank_env(environment, worker.local_rank, spec)  # type: ignore[arg-type]
    return environment


def _prefixes(agent: Agent, group: WorkerGroup) -> dict[int, str] | None:
    template = agent._log_line_prefix_template
    if not template:
        return None
    names = {"role_name": group.spec.role, "hostname": socket.gethostname()}  # torch knows the host's since 2.14
    return {
        worker.local_rank: Template(template).safe_substitute(
            names, rank=worker.global_rank, local_rank=worker.local_rank
        )
        for worker in group.workers
    }
