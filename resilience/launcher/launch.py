"""From a command line to an agent at work, and from its verdict to an exit status.

In order: whatever has to be forked while this process has one thread (zygote, store process), then the
rendezvous, the run folder, the monitors, and the agent. At the end everything started here is ended
here, in the opposite order, whatever happened in between."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import socket
import sys
import time
import uuid
from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch
from torch.distributed import run as torchrun
from torch.distributed.elastic import events as elastic_events
from torch.distributed.elastic import metrics as elastic_metrics
from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.multiprocessing import LogsSpecs
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.launcher.api import LaunchConfig

from resilience import __version__
from resilience.adapters import launches, timeouts_file
from resilience.adapters.background import asked
from resilience.adapters.environment import (
    PREFIX,
    Exporting,
    Settings,
    agent_node_name,
    infrastructure_rank,
    settings_of_a_launch,
)
from resilience.adapters.processes import become_subreaper
from resilience.core import events
from resilience.core.configuration import Configuration
from resilience.core.encoding import text
from resilience.core.group_ranks import Choice, choose
from resilience.core.masking import masked
from resilience.core.silences import Rule
from resilience.core.watch import Limits
from resilience.core.watched import watched
from resilience.errors import ConfigurationError, DecodeError, StoreError
from resilience.launcher import program, telling, worker_main
from resilience.launcher.account import Account
from resilience.launcher.agent import Agent
from resilience.launcher.arguments import Command, Options
from resilience.launcher.console import Console, note, say
from resilience.launcher.gate import Check, Devices, Gate, Patrol, checks
from resilience.launcher.meeting import KINDS, kind_of
from resilience.launcher.monitors import Monitors
from resilience.launcher.node import Node
from resilience.launcher.output import FINISH_LIMIT, PREEMPTED_LIMIT, Drain, NamedLogs, RunFolderLogs
from resilience.launcher.rendezvous import Handler
from resilience.launcher.signals import Signals
from resilience.launcher.stores import StoreProcess
from resilience.launcher.summary import success, summary
from resilience.launcher.zygote import Zygote
from resilience.monitor.config import FaultToleranceConfig, to_limits
from resilience.telemetry.elastic import bridged
from resilience.telemetry.recording import Job, read_job
from resilience.telemetry.setup import AgentExports, Asked


def launch(command: Command) -> int:
    """Run this node's part of the job; return the exit status."""
    settings = settings_of_a_launch()
    is_quiet = be_quiet(command.options.quiet or settings.quiet)
    with contextlib.ExitStack() as ending:
        become_subreaper()
        zygote = None if command.options.cold else start_zygote(command.options.preload)
        if zygote is not None:
            ending.callback(zygote.close)
        stores = StoreProcess.start()
        ending.callback(stores.close)
        config, entrypoint, arguments = settle(command)  # counting GPUs initialises CUDA, which no fork survives
        signals = Signals(config.signals_to_handle)
        name = agent_node_name(settings.job_id or f"{config.run_id} {config.rdzv_endpoint}")
        rendezvous = parameters(config, command, settings.attempt_hint)
        choice = group_rank(command, rendezvous)
        try:
            handler = reach(rendezvous, config, stores, name, choice, signals)
        except StoreError:
            if not signals.has_any():
                raise
            (number, *_) = signals.take()
            say(f"{signal.Signals(number).name} before the rendezvous was reached")
            return 128 + number
        ending.callback(handler.shutdown)
        if handler.is_host and command.options.on_sigterm == "leave" and config.min_nodes < config.max_nodes:
            note("this node hosts the job's store: SIGTERM to it stops the whole job")
        try:
            folder, launched = run_folder(command, settings, config, handler)
        except ConfigurationError as error:
            if handler.is_host and config.min_nodes > 1:
                say(f"{error}. This node ends once the other nodes know, after 300 s at most")
            handler.turn_away(str(error))
            raise
        restarts_all = command.config.restart_policy == "any-failed"
        console = Console(command.config.log_level, folder, restarts_all=restarts_all, quiet=is_quiet)
        account = Account(folder, launched.job_id, name, launched.attempt, console)
        ending.callback(account.close)
        exports = AgentExports.start(folder, name, account.emit, asked_of_metrics(command))
        if exports is not None:
            ending.callback(exports.close, 2.0)
        ending.enter_context(bridged(account.emit, config.event_log_handler))
        drain = start_drain(command)
        if drain is not None:
            ending.callback(drain.close)
            drain.report_to(account.emit)
        monitors = Monitors(folder, name, config.nproc_per_node, drain.socket if drain is not None else "")
        ending.callback(monitors.close, 2.0)
        monitors.start()
        spec = worker_spec(config, entrypoint, arguments, handler)
        node = Node(
            account,
            handler,
            monitors,
            zygote,
            drain,
            signals,
            Gate(gate_checks(command.options, folder, handler)),
            Patrol(Devices(), command.config.node_health_check_interval),
            command.options,
            limits_of(command, settings, folder, account),
            command.config.restart_policy,
            spec,
            choice.mode if choice else "backend",
        )
        agent = Agent(
            spec,
            logs(command, config, folder, drain),
            node,
            start_method=config.start_method,
            exit_barrier_timeout=command.options.exit_barrier_timeout,
            log_line_prefix_template=config.log_line_prefix_template,
            shutdown_timeout=config.shutdown_timeout,
        )
        elastic_metrics.initialize_metrics(elastic_metrics.MetricsConfig(config.metrics_cfg))
        run(agent, node)
        verdict = agent.verdict
        if drain is not None:
            drain.finish(signals.has_any, PREEMPTED_LIMIT if verdict.outcome == "preempted" else FINISH_LIMIT)
            console.losses(drain.losses())
        is_clean = verdict.outcome == "preempted" and agent.is_clean
        first, sentence = None, ""
        if verdict.outcome not in ("completed", "preempted"):  # before the end, which is the last record
            state = account.emit if console.is_first else lambda event: None
            first, sentence = telling.first_failure(folder, account.origin, console.has_nodes, state)
        account.emit(events.JobEnded(verdict.outcome, verdict.exit_code, verdict.detail[:500], is_clean))
        made = agent.get_event_succeeded() if verdict.exit_code == 0 or is_clean else agent.get_event_failed()
        elastic_events.record(made, config.event_log_handler)
        if verdict.outcome == "completed":
            console.completed(success(folder, node.restarts_used))
        elif not is_quiet:
            failure, failures = node.failure_of(first), node.failures()
            if failure is not None and failure.node != name and not console.is_first:
                failure, failures, sentence = None, [], ""  # another node has it
            console.last_words(summary(verdict, folder, failure, failures, is_clean, node.has_left, sentence))
        node.over(verdict)
        return verdict.exit_code


def start_zygote(modules: Sequence[str]) -> Zygote:
    """Start the zygote, and have it import these modules.

    Raises: ConfigurationError, if there is no such module."""
    for name in modules:
        if not program.has_module(name, worker_main.PATHS):
            raise ConfigurationError(f"--preload {name}: this interpreter finds no module of that name")
    zygote = Zygote.start()
    zygote.preload(modules)
    return zygote


def be_quiet(is_quiet: bool) -> bool:
    """Let workers and other processes of this node be quiet too; return whether they are."""
    if is_quiet:
        os.environ[f"{PREFIX}QUIET"] = "1"
    return is_quiet


def gate_checks(options: Options, folder: Path, handler: Handler) -> list[Check]:
    """Return what is looked at before each cycle."""
    return checks(folder, options.min_free_disk_mb, handler.probe, options.health_check, options.exclude_on_full_disk)


def asked_of_metrics(command: Command) -> Asked:
    """Return where the command line wants the metrics to be read."""
    return Asked(command.options.metrics_port, command.options.metrics_host, command.options.metrics_textfile)


def reach(
    rendezvous: RendezvousParameters,
    config: LaunchConfig,
    stores: StoreProcess,
    name: str,
    choice: Choice | None,
    signals: Signals,
) -> Handler:
    """Reach the place where the nodes meet, or make it. Raises: ConfigurationError, StoreError (also on a signal)."""
    return Handler(
        rendezvous,
        stores,
        name,
        choice.rank if choice else None,
        is_interrupted=signals.has_any,
        workers=config.nproc_per_node,
        role=config.role,
    )


def run(agent: Agent, node: Node) -> None:
    """Let the agent work. What makes it fail, and not its workers, is told to the others."""
    try:
        agent.run()
    except ConfigurationError:
        node.handler.leave("its configuration is wrong")  # if all of them are, they know already
        raise
    except Exception as error:
        node.failed(f"the agent of {node.name} failed: {type(error).__name__}: {error}")
        raise


def group_rank(command: Command, rendezvous: RendezvousParameters) -> Choice | None:
    """Return where this node's group rank comes from, None where the backend gives it. Raises: ConfigurationError."""
    if kind_of(rendezvous) == "static":
        return None
    wanted = command.config.use_infra_group_rank
    choice = choose(wanted, infrastructure_rank(), rendezvous.min_nodes, rendezvous.max_nodes)
    if choice.warning:
        note(choice.warning)
    return choice


def limits_of(command: Command, settings: Settings, folder: Path, account: Account) -> Limits:
    """Return what the monitors watch: known limits, and the rule for what none of them covers."""
    limits = _known_limits(command, settings, folder, account)
    limits = msgspec.structs.replace(limits, rule=_rule(command.config, settings))
    account.emit(watched(limits))
    return limits


def _rule(config: FaultToleranceConfig, settings: Settings) -> Rule | None:
    """Return the rule for silences that have no limit, None if it is switched off."""
    is_on = settings.detect_hangs if config.detect_hangs is None else config.detect_hangs
    first, least = config.hang_first_limit, config.hang_least_limit
    return Rule(first or settings.hang_first_limit, least or settings.hang_least_limit) if is_on else None


def _known_limits(command: Command, settings: Settings, folder: Path, account: Account) -> Limits:
    """Return the limits that somebody has set, and learned ones beside them."""
    configured = to_limits(command.config)
    source = command.options.timeouts or settings.timeouts
    if source is None:
        return configured
    is_shadow = command.options.timeouts_shadow or settings.timeouts_shadow
    limits, told = timeouts_file.learned(source, folder.parent, configured, _configuration(folder), is_shadow)
    account.emit(told)
    if told.note:
        note(f"--timeouts {source}: {told.note}")
    return limits


def _configuration(folder: Path) -> Configuration:
    """Return the configuration that the run folder names, which the first node has written; empty if unreadable."""
    try:
        return asked(lambda: read_job(folder)).configuration
    except (OSError, DecodeError):
        return Configuration()


def settle(command: Command) -> tuple[LaunchConfig, str, list[str]]:
    """Let torchrun make its configuration; return it with the workers' program and arguments.

    Raises: ConfigurationError."""
    args = command.torchrun
    if args.rdzv_backend not in (*KINDS, "resilience"):
        raise ConfigurationError(f"--rdzv-backend is {args.rdzv_backend!r}, expected one of {', '.join(KINDS)}")
    if not re.fullmatch(r"\d+(:\d+)?", args.nnodes):
        raise ConfigurationError(f"--nnodes is {args.nnodes!r}, expected a number of nodes, or MIN:MAX")
    try:
        config, entrypoint, arguments = _settle(args)
    except (ValueError, RuntimeError, AssertionError) as error:  # torch's own words
        raise ConfigurationError(f"{error} (see `resilience run --help`)") from error
    if config.nproc_per_node < 1:
        raise ConfigurationError(f"--nproc-per-node is {args.nproc_per_node}, expected 1 or more")
    return config, entrypoint, arguments


def _settle(args: argparse.Namespace) -> tuple[LaunchConfig, str, list[str]]:
    _, most = torchrun.parse_min_max_nnodes(args.nnodes)
    is_alone = args.rdzv_backend == "static" and not args.rdzv_endpoint and args.master_port is None and most == 1
    if args.standalone or is_alone:
        args.rdzv_backend, args.rdzv_endpoint = "c10d", "localhost:0"
        args.rdzv_id = str(uuid.uuid4())
    if args.master_port is None:
        args.master_port = 29500
    # The same script in an interpreter of its own: nothing that a script can see tells the two apart.
    args.run_path = False
    args.rdzv_id = text(args.rdzv_id)  # names the job, its folder and its keys in the store
    config, entrypoint, arguments = torchrun.config_from_args(args)
    assert isinstance(entrypoint, str)
    return config, entrypoint, arguments


def parameters(config: LaunchConfig, command: Command, attempt: int) -> RendezvousParameters:
    """Return torchelastic's parameters of the rendezvous."""
    values = {"join_timeout": int(command.options.join_timeout), "attempt": attempt, **config.rdzv_configs}
    return RendezvousParameters(
        backend=config.rdzv_backend,
        endpoint=config.rdzv_endpoint,
        run_id=config.run_id,
        min_nodes=config.min_nodes,
        max_nodes=config.max_nodes,
        local_addr=config.local_addr,
        **values,
    )


def worker_spec(config: LaunchConfig, entrypoint: str, arguments: list[str], handler: Handler) -> WorkerSpec:
    """Return torchelastic's description of the workers."""
    return WorkerSpec(
        role=config.role,
        local_world_size=config.nproc_per_node,
        entrypoint=entrypoint,
        args=tuple(arguments),
        rdzv_handler=handler,
        max_restarts=config.max_restarts,
        monitor_interval=config.monitor_interval,
        local_addr=config.local_addr,
        event_log_handler=config.event_log_handler,
        numa_options=config.numa_options,
        duplicate_stdout_filters=config.duplicate_stdout_filters,
        duplicate_stderr_filters=config.duplicate_stderr_filters,
        virtual_local_rank=config.virtual_local_rank,
    )


def start_drain(command: Command) -> Drain | None:
    """Start what takes the workers' output; None where the user says something else, or it cannot be started."""
    args = command.torchrun
    is_users = any((args.log_dir, args.redirects != "0", args.tee != "0", args.logs_specs))
    if is_users or command.options.no_output_files:
        return None
    try:
        return Drain(command.options.output_file_mb << 20)
    except OSError as error:
        note(f"workers write to the terminal only, for their output cannot be kept: {error}")
        return None


def logs(command: Command, config: LaunchConfig, folder: Path, drain: Drain | None) -> LogsSpecs:
    """Return where workers' output goes."""
    assert config.logs_specs is not None
    if drain is None:
        return NamedLogs(config.logs_specs)
    shown = command.torchrun.local_ranks_filter
    return RunFolderLogs(folder, set(map(int, shown.split(","))) if shown else None, drain)


def usable(folder: Path) -> Path:
    """Return a run folder that can be written to: this one, or one in a private folder, which the terminal names.

    Where that cannot be made either, this one: what is written there is lost, and counted."""
    why = launches.why_unusable(folder)
    if not why:
        return folder
    try:
        instead = launches.instead_of(folder)
    except OSError as error:
        note(f"{folder} cannot be used: {why}; nor can a temporary folder: {error}; no account is kept")
        return folder
    note(f"{folder} cannot be used: {why}; the account is kept in {instead}")
    return instead


def run_folder(
    command: Command, settings: Settings, config: LaunchConfig, handler: Handler
) -> tuple[Path, launches.Launch]:
    """Return this node's run folder, with job.json in it, and the launch that it is for.

    One node allocates the attempt, and a name for a job that has none. Raises: StoreError, ConfigurationError."""
    root = Path(command.options.run_dir or settings.run_dir).absolute()

    def allocate() -> launches.Launch:
        job_id = settings.job_id or config.run_id
        if settings.job_id is None and (job_id in ("", "none") or command.torchrun.rdzv_endpoint == "localhost:0"):
            job_id = time.strftime("%Y%m%d-%H%M%S-") + uuid.uuid4().hex[:4]
        return launches.allocate(root, job_id, settings.attempt, settings.attempt_hint)

    launch = launches.agree(handler.job_store, root, handler.id, allocate)
    folder = usable(own_folder(root, launch))
    argv = masked(sys.argv[1:])
    job = Job(
        job_id=launch.job_id,
        attempt=launch.attempt,
        created_wall_ns=time.time_ns(),
        function=command.torchrun.training_script,
        command=argv,
        world_size=config.max_nodes * config.nproc_per_node,
        hostname=socket.gethostname(),
        resilience_version=__version__,
        torch_version=str(torch.__version__),
        python_version=sys.version.split()[0],
        configuration=Configuration(
            command.torchrun.training_script,
            settings.calibration_key if command.options.calibration_key is None else command.options.calibration_key,
            config.max_nodes * config.nproc_per_node,
            config.nproc_per_node,
            masked(command.torchrun.training_script_args),
            str(torch.__version__),
        ),
        traceparent=Exporting.from_environment().traceparent,
        launch=launch.token,
    )
    with contextlib.suppress(OSError):  # the disk does not answer
        asked(lambda: job.write(folder))
    return folder, launch


def own_folder(root: Path, launch: launches.Launch) -> Path:
    """Return the folder of this launch on this node. Where each node has a run directory of its own, a folder of that
    name may belong to an earlier launch; then the launch's token is part of the name."""
    folder = root / launch.run_name
    try:
        is_ours = asked(lambda: _is_of(folder, launch))
    except (OSError, DecodeError):
        is_ours = True  # nobody can tell; what is there is only appended to
    return folder if is_ours else root / f"{launch.run_name}@node-{launch.token}"


def _is_of(folder: Path, launch: launches.Launch) -> bool:
    """Return True if a folder is this launch's, or nobody's. Raises: OSError, DecodeError."""
    try:
        return read_job(folder).launch == launch.token
    except FileNotFoundError:
        return not (folder / "records").exists()
