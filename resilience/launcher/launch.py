"""How does a command line become a running agent, and its verdict an exit status?

In order: first everything that must be forked while this process has one thread (zygote, store process), then the
rendezvous, the run folder, the monitors, and the agent. At the end, everything started here is stopped in
reverse order, whatever happened."""

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
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch.distributed import run as torchrun
from torch.distributed.elastic import events as elastic_events
from torch.distributed.elastic import metrics as elastic_metrics
from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, LogsSpecs
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.launcher.api import LaunchConfig

from resilience import __version__
from resilience.core.group_ranks import Choice, choose
from resilience.core.rendezvous import LEAVE_LIMIT
from resilience.errors import ConfigurationError, DecodeError, StoreError, error_in_words
from resilience.facts import in_words
from resilience.facts.encoding import text
from resilience.facts.identity import Job
from resilience.facts.interruptions import InterruptionRecord
from resilience.facts.masking import masked
from resilience.launcher import telling
from resilience.launcher.agent import Agent
from resilience.launcher.arguments import LARGEST, Command, Options
from resilience.launcher.console import Console, note, say
from resilience.launcher.cycle_supervisor import CycleSupervisor
from resilience.launcher.event_reporter import NodeEvents
from resilience.launcher.failed_workers import leave_error_file
from resilience.launcher.known_limits import configuration_of, limits_of, refuse_unfit_timeouts
from resilience.launcher.monitors import Monitors
from resilience.launcher.output.destinations import (
    FINISH_LIMIT,
    PREEMPTED_LIMIT,
    DrainProcess,
    NamedLogs,
    RunFolderLogs,
)
from resilience.launcher.preflight import Devices, PeriodicCheck, Preflight, checks
from resilience.launcher.rendezvous.conf import keys_without_effect
from resilience.launcher.rendezvous.handler import Handler
from resilience.launcher.rendezvous.job_store import KINDS, kind_of
from resilience.launcher.rendezvous.stores import StoreProcess
from resilience.launcher.signals import Signals
from resilience.launcher.summary import success, summary
from resilience.launcher.worker import program, worker_main
from resilience.launcher.worker.worker_processes import EXIT_LIMIT
from resilience.launcher.worker.zygote import Zygote
from resilience.system import attempts, descriptors
from resilience.system.background import asked
from resilience.system.environment import (
    PREFIX,
    Exporting,
    Settings,
    agent_node_name,
    infrastructure_rank,
    settings_of_a_launch,
    unknown_variables,
)
from resilience.system.processes import become_subreaper
from resilience.telemetry.elastic import bridged
from resilience.telemetry.exporters import ExportThread, MetricsOptions
from resilience.telemetry.recording import read_job, write_job

DEVICES = ("auto", "cpu", "gpu", "xpu")  # a worker for each; torch also takes the name of a registered backend
NAMELESS = ("", "none")  # values of --rdzv-id; torchrun's default is the second one
WORKERS = f"a number of workers, or {', '.join(DEVICES[:-1])} or {DEVICES[-1]} for one per device"
EXPORT_LIMIT = 2.0  # seconds for the last metrics and spans to leave
DESCRIPTORS_OF_A_WORKER = 8  # in the agent, while a cycle starts; measured with 2 and 8 workers
SPARE_DESCRIPTORS = 4
MONITORS_LIMIT = 2.0  # seconds for the monitors to write the last records and timings


def launch(command: Command) -> int:
    """Run this node's part of the job; return the exit status."""
    settings = settings_of_a_launch()
    is_quiet = be_quiet(command.options.quiet or settings.quiet)
    for line in (*command.config_notes, *unknown_variables()):
        note(line)
    with contextlib.ExitStack() as cleanup:
        become_subreaper()
        zygote = None if command.options.cold else start_zygote(command.options.preload)
        if zygote is not None:
            cleanup.callback(zygote.close)
        stores = StoreProcess.start()
        cleanup.callback(stores.close)
        # This may count GPUs, which initialises CUDA; no fork survives that.
        config, entrypoint, arguments = settle(command)
        if zygote is not None:
            begin_to_preload(zygote, command.options.preload, config)
        cleanup.callback(remove_unused_log_folder, command, config)
        refuse_unfit_timeouts(command, settings, configuration_of(command, settings, config))
        signals = Signals(config.signals_to_handle)
        name = agent_node_name(settings.job_id or f"{config.run_id} {config.rdzv_endpoint}")
        rendezvous = rendezvous_parameters(config, command, settings.attempt_hint)
        choice = group_rank(command, rendezvous)
        unread = keys_without_effect(command.torchrun.rdzv_conf, kind_of(rendezvous))
        if unread:
            note(f"--rdzv-conf {', '.join(unread)}: no effect on this back end (docs/launcher.md lists the keys)")
        try:
            handler = connect_rendezvous(rendezvous, config, command, stores, name, choice, signals)
        except StoreError:
            if not signals.has_any():
                raise
            return signalled_too_early(signals, "the rendezvous was reached")
        cleanup.push(leaving(handler))
        hosts_store = handler.is_host
        if hosts_store and command.options.on_sigterm == "leave" and config.min_nodes < config.max_nodes:
            note("this node hosts the job's store: SIGTERM to it stops the whole job")
        try:
            folder, launched = agreed_folder(command, settings, config, handler)
        except StoreError:
            if not signals.has_any():
                raise
            return signalled_too_early(signals, "the nodes had agreed on a run folder")
        restarts_all = command.config.restart_policy == "any-failed"
        console = Console(command.config.log_level, folder, None, restarts_all, is_quiet, hosts_store)
        reporter = NodeEvents(folder, launched.job_id, name, launched.attempt, console)
        cleanup.callback(reporter.close)
        options = command.options
        metrics = MetricsOptions(options.metrics_port, options.metrics_host, options.metrics_textfile)
        exports = ExportThread.start(folder, name, reporter.emit, metrics, is_agents=True)
        if exports is not None:
            reporter.show(exports)
            cleanup.callback(exports.close, EXPORT_LIMIT)
        cleanup.enter_context(end_on_record(reporter, handler))  # before the exporters end, which show it
        cleanup.enter_context(bridged(reporter.emit, config.event_log_handler))
        drain = start_drain(command)
        if drain is not None:
            cleanup.callback(drain.close)
            drain.report_to(reporter.emit)
        monitors = Monitors(folder, name, config.nproc_per_node, drain.socket if drain is not None else "")
        cleanup.callback(monitors.close, MONITORS_LIMIT)
        monitors.start()
        spec = worker_spec(config, entrypoint, arguments, handler)
        node = CycleSupervisor(
            reporter,
            handler,
            monitors,
            zygote,
            drain,
            signals,
            Preflight(checks(checked_folder(command, settings, folder, launched), handler.probe, command.options)),
            PeriodicCheck(Devices(), command.config.node_health_check_interval),
            command.options,
            limits_of(command, settings, folder, reporter),
            command.config.restart_policy,
            spec,
            choice.mode if choice else "backend",
        )
        handler.leave_limit = leave_limit(command.options, config.shutdown_timeout)
        agent = Agent(
            spec,
            logs_specs(command, config, folder, drain),
            node,
            start_method=config.start_method,
            log_line_prefix_template=config.log_line_prefix_template,
            shutdown_timeout=config.shutdown_timeout,
        )
        warn_of_few_descriptors(config.nproc_per_node)  # now that the agent has raised its limit
        elastic_metrics.initialize_metrics(elastic_metrics.MetricsConfig(config.metrics_cfg))
        run(agent, node)
        if zygote is not None:
            zygote.close()  # an order that it has not read holds copies of the streams of workers
        try:
            if drain is not None:
                pass_on_output(drain, signals, agent.verdict.outcome == "preempted")
                console.losses(drain.losses())
            report_end(agent, node, console, folder)
            elastic_events.record(agent.event_of_end(), config.event_log_handler)
        finally:  # the others do as the verdict says, whatever fails here
            node.over(agent.verdict)
        return agent.verdict.exit_code


def leaving(handler: Handler) -> Callable[[object, BaseException | None, object], None]:
    """Return the end of this agent's part in the rendezvous, for an exit stack. A node whose start fails leaves alone:
    the others continue, or wait for another node."""

    def leave(kind: object, error: BaseException | None, traceback: object) -> None:
        if error is None:
            handler.shutdown()
            return
        why = "Ctrl-C" if isinstance(error, KeyboardInterrupt) else error_in_words(error)
        (handler.shutdown if is_needed(handler) else handler.leave)(f"node {handler.node}: {why}")

    return leave


def is_needed(handler: Handler) -> bool:
    """Return True if the job ends with this node, because it hosts the job's store or has a place in a cycle."""
    return handler.is_host or handler.membership.rank_of(handler.id) is not None


def leave_limit(options: Options, shutdown_timeout: float | None) -> float:
    """Return the seconds for which the host of the store waits for the others once the job is over: their workers may
    write a checkpoint, and may be hard to end."""
    to_end = max(options.term_timeout or 0.0, shutdown_timeout or 0.0)
    return max(LEAVE_LIMIT, options.stop_grace + to_end + EXIT_LIMIT)


def warn_of_few_descriptors(workers: int) -> None:
    """Print a line if this process can open too few files for a restart, though perhaps enough for the first start."""
    try:
        descriptors.check_room(
            DESCRIPTORS_OF_A_WORKER * workers + SPARE_DESCRIPTORS, f"the agent of {in_words.count(workers, 'worker')}"
        )
    except OSError as error:
        note(f"a restart may fail: {error.strerror or error}")


def signalled_too_early(signals: Signals, moment: str) -> int:
    """Return the exit status of an agent that a signal reached before this moment of its start; say so."""
    (number, *_) = signals.take()
    say(f"{signal.Signals(number).name} arrived before {moment}")
    return 128 + number


def agreed_folder(
    command: Command, settings: Settings, config: LaunchConfig, handler: Handler
) -> tuple[Path, attempts.Launch]:
    """Return the run folder that all nodes agree on. If there is none, tell the other nodes why.

    Raises: ConfigurationError."""
    try:
        return run_folder(command, settings, config, handler)
    except ConfigurationError as error:
        handler.turn_away(str(error))
        raise


def report_end(agent: Agent, node: CycleSupervisor, console: Console, folder: Path) -> None:
    """Record how the job ended, and say it on the terminal. Only one node reports a failure."""
    verdict, reporter = agent.verdict, node.reporter
    first, sentence = None, ""
    if verdict.is_failure and not node.has_left:  # before JobEnded, the last record; the others may not have failed
        first, sentence = telling.first_failure(
            folder, reporter.origin, console.has_nodes, reporter.emit, console.is_first
        )
    reporter.job_ended(verdict, agent.is_clean)
    if verdict.outcome == "completed":
        in_place = telling.restarts_in_place(folder, reporter.origin) if console.is_first else 0
        console.completed(success(folder, node.restarts_used, in_place))
    else:
        failure, failures = node.failure_of(first), node.failures()
        if verdict.is_failure:
            tell_scheduler(agent, node, failure, sentence)
        if failure is not None and failure.node != node.name and not console.is_first:
            failure, failures, sentence = None, [], ""  # another node reports it
        console.last_words(summary(verdict, folder, failure, failures, agent.is_clean, node.has_left, sentence))


def tell_scheduler(agent: Agent, node: CycleSupervisor, failure: InterruptionRecord | None, sentence: str) -> None:
    """Leave the job's error in the file that the scheduler named. The node of the failed rank does, or the node that
    ended the job for another reason."""
    if (agent.verdict.node if failure is None or failure.node is None else failure.node) == node.name:
        leave_error_file(sentence or agent.verdict.detail, None if failure is None else agent.failed.get(failure.rank))


def pass_on_output(drain: DrainProcess, signals: Signals, is_preempted: bool) -> bool:
    """Wait until readers have the workers' output; return True if they have all of it that they take.

    Stop waiting if a person asks again. SIGTERM changes nothing: schedulers send it twice anyway."""
    return drain.finish(signals.is_hurried, PREEMPTED_LIMIT if is_preempted else FINISH_LIMIT)


def start_zygote(modules: Sequence[str]) -> Zygote:
    """Start the zygote, which can import these modules later.

    Raises: ConfigurationError if a module does not exist."""
    for name in modules:
        if not program.has_module(name, worker_main.PATHS):
            raise ConfigurationError(f"--preload {name}: this interpreter finds no module of that name")
    return Zygote.start()


def begin_to_preload(zygote: Zygote, modules: Sequence[str], config: LaunchConfig) -> None:
    """Let the zygote import these modules, now that torchrun has set the variables of all workers (OMP_NUM_THREADS)."""
    zygote.worker_variables = ("CUDA_VISIBLE_DEVICES",) if config.virtual_local_rank else ()
    zygote.preload(modules)


def be_quiet(is_quiet: bool) -> bool:
    """Make the workers and other processes of this node quiet too; return `is_quiet`."""
    if is_quiet:
        os.environ[f"{PREFIX}QUIET"] = "1"
    return is_quiet


def connect_rendezvous(
    rendezvous: RendezvousParameters,
    config: LaunchConfig,
    command: Command,
    stores: StoreProcess,
    name: str,
    choice: Choice | None,
    signals: Signals,
) -> Handler:
    """Connect to the job's rendezvous, or host it. Raises: ConfigurationError, StoreError (also on a signal)."""
    return Handler(
        rendezvous,
        stores,
        name,
        choice.rank if choice else None,
        is_interrupted=signals.has_any,
        workers=config.nproc_per_node,
        role=config.role,
        is_hurried=signals.is_hurried,
        is_asked_to_stop=signals.has_arrived,
        policy=command.config.restart_policy,
        say=say,
    )


@contextlib.contextmanager
def end_on_record(reporter: NodeEvents, handler: Handler) -> Iterator[None]:
    """Record the end of the job if this agent fails by an exception of its own, or it looks like a killed one."""
    try:
        yield
    except Exception as error:
        reporter.agent_failed(error, leaves=not is_needed(handler))
        raise


def run(agent: Agent, node: CycleSupervisor) -> None:
    """Run the agent. If the agent itself fails, and not its workers, record it and tell the other nodes why."""
    try:
        agent.run()
    except ConfigurationError as error:
        node.reporter.agent_failed(error)  # first: the host of the store waits for the others
        node.handler.leave("its configuration is wrong")  # if it is wrong on all nodes, they know already
        raise
    except Exception as error:
        elastic_events.record(agent.get_event_failed(), agent.get_worker_group().spec.event_log_handler)
        node.failed(error)
        raise


def group_rank(command: Command, rendezvous: RendezvousParameters) -> Choice | None:
    """Return where this node's group rank comes from; None if the backend assigns it. Raises: ConfigurationError."""
    if kind_of(rendezvous) == "static":
        return None
    wanted = command.config.use_infra_group_rank
    choice = choose(wanted, infrastructure_rank(), rendezvous.min_nodes, rendezvous.max_nodes)
    if choice.warning:
        note(choice.warning)
    return choice


def settle(command: Command) -> tuple[LaunchConfig, str, list[str]]:
    """Let torchrun build its configuration; return it with the workers' program and arguments.

    Raises: ConfigurationError."""
    args = command.torchrun
    if args.rdzv_backend not in (*KINDS, "resilience"):
        raise ConfigurationError(f"--rdzv-backend is {args.rdzv_backend!r}, expected one of {', '.join(KINDS)}")
    if not re.fullmatch(r"\d+(:\d+)?", args.nnodes):
        raise ConfigurationError(f"--nnodes is {args.nnodes!r}, expected a number of nodes, or MIN:MAX")
    try:
        config, entrypoint, arguments = _torchrun_config(args)
    except OSError as error:  # torch creates the folder, or finds a file
        place = f"--log-dir is {args.log_dir!r}, which" if args.log_dir else "a temporary folder for logs"
        raise ConfigurationError(f"{place} cannot be used: {error_in_words(error)}") from error
    except (ValueError, RuntimeError, AssertionError) as error:  # torch's own message
        if not args.nproc_per_node.lstrip("-").isdecimal() and args.nproc_per_node not in DEVICES:
            raise ConfigurationError(f"--nproc-per-node is {args.nproc_per_node!r}, expected {WORKERS}") from error
        raise ConfigurationError(f"{error} (see `resilience run --help`)") from error
    if not 1 <= config.nproc_per_node <= LARGEST:
        raise ConfigurationError(f"--nproc-per-node is {args.nproc_per_node}, expected from 1 to {LARGEST}")
    if config.max_nodes > LARGEST:
        raise ConfigurationError(f"--nnodes is {args.nnodes}, expected {LARGEST} nodes at most")
    return config, entrypoint, arguments


def _torchrun_config(args: argparse.Namespace) -> tuple[LaunchConfig, str, list[str]]:
    _, max_nodes = torchrun.parse_min_max_nnodes(args.nnodes)
    is_alone = args.rdzv_backend == "static" and not args.rdzv_endpoint and args.master_port is None and max_nodes == 1
    if args.standalone or is_alone:
        args.rdzv_backend, args.rdzv_endpoint = "c10d", "localhost:0"
        if args.standalone or args.rdzv_id in NAMELESS:
            args.rdzv_id = _dated_id()
    if args.master_port is None:
        args.master_port = 29500
    # Run the script in an interpreter of its own instead; the script cannot see a difference.
    args.run_path = False
    args.rdzv_id = text(args.rdzv_id)  # names the job, its folder and its keys in the store
    config, entrypoint, arguments = torchrun.config_from_args(args)
    assert isinstance(entrypoint, str)
    return config, entrypoint, arguments


def _dated_id() -> str:
    """Return an id for a job that was given none."""
    return time.strftime("%Y%m%d-%H%M%S-") + uuid.uuid4().hex[:4]


def rendezvous_parameters(config: LaunchConfig, command: Command, attempt: int) -> RendezvousParameters:
    """Return the rendezvous parameters for torchelastic."""
    values = {"attempt": attempt, **config.rdzv_configs}
    if command.options.join_timeout is not None:
        values["join_timeout"] = command.options.join_timeout
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


def start_drain(command: Command) -> DrainProcess | None:
    """Start the process that reads the workers' output; None if the user redirects output, or if it cannot start.
    `--log-dir` alone redirects nothing."""
    args = command.torchrun
    is_users = any((args.redirects != "0", args.tee != "0", args.logs_specs))
    if is_users or command.options.no_output_files:
        return None
    try:
        return DrainProcess(command.options.output_file_mb << 20)
    except OSError as error:
        note(f"workers write to the terminal only, because their output cannot be kept: {error}")
        return None


def remove_unused_log_folder(command: Command, config: LaunchConfig) -> None:
    """Remove the temporary folder that torch makes for logs if the user names none, unless a file is in it: torch makes
    a folder for each worker also if nothing is redirected. The folder of the user's own LogsSpecs stays as it is."""
    specs = config.logs_specs
    if type(specs) is DefaultLogsSpecs and not command.torchrun.log_dir:
        for folder, _, _ in os.walk(specs.root_log_dir, topdown=False):
            with contextlib.suppress(OSError):
                os.rmdir(folder)


def logs_specs(command: Command, config: LaunchConfig, folder: Path, drain: DrainProcess | None) -> LogsSpecs:
    """Return where the workers' output goes."""
    assert config.logs_specs is not None
    if drain is None:
        return NamedLogs(config.logs_specs)
    ranks_filter = command.torchrun.local_ranks_filter
    return RunFolderLogs(folder, set(map(int, ranks_filter.split(","))) if ranks_filter else None, drain)


def writable(folder: Path) -> Path:
    """Return a writable run folder: this one, or a new temporary one, which a terminal line names.

    If neither is possible, return this one: records written to it are lost, and counted."""
    reason = attempts.why_unusable(folder)
    if not reason:
        return folder
    try:
        substitute = attempts.instead_of(folder)
    except OSError as error:
        note(f"{folder} cannot be used: {reason}; nor can a temporary folder: {error}; nothing is recorded")
        return folder
    note(f"{folder} cannot be used: {reason}; records go to {substitute}")
    return substitute


def run_folder(
    command: Command, settings: Settings, config: LaunchConfig, handler: Handler
) -> tuple[Path, attempts.Launch]:
    """Return this node's run folder, which contains job.json, and its launch.

    One node allocates the attempt number, and an id for a job without one. Raises: StoreError, ConfigurationError."""
    root = run_root(command, settings)

    def allocate() -> attempts.Launch:
        job_id = settings.job_id or config.run_id
        if settings.job_id is None and job_id in NAMELESS:
            job_id = _dated_id()
        return attempts.allocate(root, job_id, settings.attempt, settings.attempt_hint)

    launch = attempts.agree(handler.job_store, root, handler.id, allocate, say=note)
    folder = writable(own_folder(root, launch))
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
        configuration=configuration_of(command, settings, config),
        traceparent=Exporting.from_environment().traceparent,
        launch=launch.token,
    )
    with contextlib.suppress(OSError):  # the disk failed or does not answer
        asked(lambda: write_job(job, folder))
    return folder, launch


def run_root(command: Command, settings: Settings) -> Path:
    """Return the folder in which each job gets a folder of its own."""
    return Path(command.options.run_dir or settings.run_dir).absolute()


def checked_folder(command: Command, settings: Settings, folder: Path, launch: attempts.Launch) -> Path:
    """Return the folder whose disk is checked before each cycle: the run folder. With --exclude-on-full-disk it is the
    requested one, even if that cannot be used and records go elsewhere."""
    root = run_root(command, settings)
    is_substitute = folder.parent != root and command.options.exclude_on_full_disk
    return root / launch.run_name if is_substitute else folder


def own_folder(root: Path, launch: attempts.Launch) -> Path:
    """Return the folder of this launch on this node. If each node has its own run directory, a folder of that name may
    belong to an earlier launch; then the launch's token becomes part of the name."""
    folder = root / launch.run_name
    try:
        is_ours = asked(lambda: _belongs_to(folder, launch))
    except (OSError, DecodeError):
        is_ours = True  # the owner is unknown; we only append to existing files
    return folder if is_ours else root / f"{launch.run_name}@node-{launch.token}"


def _belongs_to(folder: Path, launch: attempts.Launch) -> bool:
    """Return True if a folder belongs to this launch or to no launch. Raises: OSError, DecodeError."""
    try:
        return read_job(folder).launch == launch.token
    except FileNotFoundError:
        return not (folder / "records").exists()
