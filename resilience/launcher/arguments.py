"""What was `resilience run` asked to do?  torchrun's own parser, and a group of options of ours.

Every option of torchrun is torchrun's: its parser is extended, not copied. One default differs
(`--max-restarts`). Ours are fields of `Options` and `FaultToleranceConfig`; flags, help and the page of
the docs are made from them."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from torch.distributed import run as torchrun

from resilience.adapters.environment import torchrun_default
from resilience.core.printable import printable
from resilience.core.stopping import Mode
from resilience.errors import ConfigurationError
from resilience.launcher import ft_options
from resilience.monitor.config import YES_OR_NO, FaultToleranceConfig, add_arguments

MAX_RESTARTS = 10
EPILOG = """\
Exit status: 0 all workers completed; 1 a worker failed and no restart is left; 2 wrong use; 93
starting again is of no use (the same failure again and again, or no progress; see the option
--same-failure-exit-code); 94 a rank asked to shut the workload down; 95 this node left (unhealthy
or excluded); 128 + N stopped by signal N.
`resilience report RUN` tells what happened, `resilience status RUN --watch` what happens now."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Our own options of the launcher. The metadata is the help; names become flags."""

    run_dir: str | None = dataclasses.field(
        default=None, metadata={"help": "folder that holds a folder for each job; default RESILIENCE_RUN_DIR"}
    )
    metrics_port: int | None = dataclasses.field(
        default=None, metadata={"help": "port of the node's Prometheus endpoint; default RESILIENCE_METRICS_PORT"}
    )
    metrics_host: str | None = dataclasses.field(
        default=None, metadata={"help": "address it listens on; default RESILIENCE_METRICS_HOST, else 127.0.0.1"}
    )
    metrics_textfile: str | None = dataclasses.field(
        default=None,
        metadata={"help": "folder in which node-exporter finds the metrics; default RESILIENCE_METRICS_TEXTFILE"},
    )
    timeouts: str | None = dataclasses.field(
        default=None,
        metadata={"help": "limits of `resilience calibrate`; auto: the newest beside runs of this configuration"},
    )
    calibration_key: str | None = dataclasses.field(
        default=None,
        metadata={
            "help": "name of the workload, for limits that are learned: runs with equal names are alike, whatever "
            "their scripts and arguments; default RESILIENCE_CALIBRATION_KEY, else the script's name"
        },
    )
    timeouts_shadow: bool = dataclasses.field(
        default=False, metadata={"help": "tell what these limits would have done, and do nothing"}
    )
    quiet: bool = dataclasses.field(
        default=False,
        metadata={"help": "say nothing at the terminal about the run: no start, restart, warning or end"},
    )
    cold: bool = dataclasses.field(
        default=False, metadata={"help": "start each worker as a fresh interpreter, as torchrun does (no zygote)"}
    )
    preload: tuple[str, ...] = dataclasses.field(
        default=(),
        metadata={"help": "module that the zygote imports too, so that restarted workers have it; may be repeated"},
    )
    no_output_files: bool = dataclasses.field(
        default=False,
        metadata={"help": "let workers write straight to the terminal; no output is kept in the run folder"},
    )
    output_file_mb: int = dataclasses.field(
        default=256,
        metadata={
            "help": "MiB at which a file of a worker's output is rotated; it and the one before are kept; 0: never"
        },
    )
    exit_barrier_timeout: float = dataclasses.field(
        default=300.0, metadata={"help": "seconds by which workers may finish apart"}
    )
    join_timeout: float = dataclasses.field(
        default=600.0, metadata={"help": "seconds that a node waits for a free place, and a cycle for its nodes"}
    )
    on_sigterm: Mode = dataclasses.field(
        default="leave",
        metadata={
            "help": "what SIGTERM to one agent means: leave (this node leaves, the others go on if they are enough and "
            "do not need its store) or stop (the whole job)"
        },
    )
    stop_grace: float = dataclasses.field(
        default=30.0, metadata={"help": "seconds between the request to stop and SIGTERM, to write a checkpoint in"}
    )
    term_timeout: float | None = dataclasses.field(
        default=None,
        metadata={
            "help": "seconds between SIGTERM and SIGKILL where a signal stops the job; default: --shutdown-timeout"
        },
    )
    same_failure_limit: int = dataclasses.field(
        default=3, metadata={"help": "identical failures in a row without progress that end the job; 0: never"}
    )
    same_failure_exit_code: int = dataclasses.field(
        default=93, metadata={"help": "exit status then, for a scheduler that must not requeue the job"}
    )
    stalled_restarts: int = dataclasses.field(
        default=5, metadata={"help": "restarts in a row without a higher step than before that end it; 0: any number"}
    )
    same_failure_in_window: int = dataclasses.field(
        default=10, metadata={"help": "identical failures within the window that end the job too; 0: any number"}
    )
    failure_window: float = dataclasses.field(default=3600.0, metadata={"help": "seconds of that window"})
    health_check: str | None = dataclasses.field(
        default=None, metadata={"help": "command that must exit with 0 on this node before each cycle"}
    )
    min_free_disk_mb: int = dataclasses.field(
        default=100, metadata={"help": "free space of the run folder's disk below which each node warns; 0: never"}
    )
    exclude_on_full_disk: bool = dataclasses.field(
        default=False, metadata={"help": "a node whose disk has less than that leaves the job, with 95"}
    )

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, int | float) and not isinstance(value, bool) and value < 0:
                raise ConfigurationError(f"{flag(field.name)} is {value}, expected 0 or more")
        if self.preload and self.cold:
            raise ConfigurationError("--preload has no effect with --cold: a fresh interpreter imports for itself")
        if self.on_sigterm not in get_args(Mode):
            raise ConfigurationError(
                f"--on-sigterm is {self.on_sigterm!r}, expected one of {', '.join(get_args(Mode))}"
            )
        if not 0 <= self.same_failure_exit_code <= 255:
            raise ConfigurationError(
                f"--same-failure-exit-code is {self.same_failure_exit_code}, an exit status is from 0 to 255"
            )


class Command:
    """A command line, read: torchrun's namespace, our options, limits of the monitors."""

    def __init__(self, namespace: argparse.Namespace) -> None:
        self.torchrun = namespace
        values = {field.name: getattr(namespace, field.name) for field in dataclasses.fields(Options)}
        values["preload"] = tuple(namespace.preload or ())
        self.options = Options(**values)
        path = namespace.ft_cfg_path
        if path is not None and not Path(path).is_file():
            raise ConfigurationError(f"--ft-cfg-path is {path!r}, and there is no such file")
        self.config = FaultToleranceConfig.from_args(namespace)
        if namespace.training_script.lower() in YES_OR_NO and not Path(namespace.training_script).exists():
            raise ConfigurationError(
                f"{namespace.training_script!r} is taken for the script; a switch has its value after `=`, such as "
                f"--ft-use-infra-group-rank={namespace.training_script}"
            )


def parser() -> argparse.ArgumentParser:
    """Return torchrun's parser with our options beside its own."""
    made = torchrun.get_args_parser()
    made.prog = "resilience run"
    made.error = lambda message: argparse.ArgumentParser.error(made, printable(message))  # type: ignore[method-assign]
    made.usage = "%(prog)s [options] training_script [its arguments ...]"
    made.description = (
        "Run a training script on every rank; replace what dies or hangs; account for it. Takes whatever torchrun "
        "takes."
    )
    made.epilog = EPILOG
    made.formatter_class = _Help
    made._optionals.title = "torchrun's options"
    made._positionals.title = "what to run"
    # Only where neither the flag nor its variable says otherwise.
    made.set_defaults(max_restarts=int(torchrun_default("MAX_RESTARTS") or MAX_RESTARTS))
    ours = made.add_argument_group("resilience's options")
    for field in dataclasses.fields(Options):
        _add(ours, field)
    limits = made.add_argument_group("limits of the rank monitors")
    limits.add_argument(
        "--ft-cfg-path",
        "--ft_cfg_path",
        "--ft-cfg_path",
        metavar="FILE",
        help="YAML file with a `fault_tolerance` mapping",
    )
    add_arguments(limits)
    theirs = made.add_argument_group("options of ft_launcher", argparse.SUPPRESS)
    ft_options.add_arguments(made, theirs)
    _abbreviate_only(made, [*ours._group_actions, *limits._group_actions, *theirs._group_actions])
    return made


def _abbreviate_only(made: argparse.ArgumentParser, ours: list[argparse.Action]) -> None:
    """Let abbreviations stand for torchrun's options alone.

    argparse looks at the script's own arguments too: with ours among the candidates, a script's `--timeout`
    would be refused as ambiguous, and an abbreviation of torchrun's mean nothing any more."""
    found = made._get_option_tuples

    def theirs(option_string: str) -> list[tuple[argparse.Action, str, str | None]]:
        return [each for each in found(option_string) if each[0] not in ours]

    made._get_option_tuples = theirs  # type: ignore[method-assign]


def parse(arguments: Sequence[str] | None = None) -> Command:
    """Read the command line. Raises: SystemExit (help, wrong use), ConfigurationError."""
    return Command(parser().parse_args(sys.argv[1:] if arguments is None else list(arguments)))


def flag(name: str) -> str:
    """Return the flag of a field."""
    return "--" + name.replace("_", "-")


def _add(group: argparse._ArgumentGroup, field: dataclasses.Field[object]) -> None:
    spellings = sorted({flag(field.name), "--" + field.name}, reverse=True)
    text = str(field.metadata["help"])
    if field.default is False:
        group.add_argument(*spellings, action="store_true", help=text)
        return
    if field.default == ():
        group.add_argument(*spellings, action="append", metavar="MODULE", help=text)
        return
    kind = float if "float" in str(field.type) else int if "int" in str(field.type) else str
    suffix = "" if field.default is None else "; default %(default)s"
    metavar = {float: "S", int: "N", str: "X"}[kind]
    group.add_argument(*spellings, type=kind, default=field.default, metavar=metavar, help=text + suffix)


class _Help(argparse.HelpFormatter):
    """Fits 80 columns, and shows each flag once, in the spelling with hyphens."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=30, width=80)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        shown = [name for name in action.option_strings if "_" not in name] or list(action.option_strings)
        if not action.option_strings or action.nargs == 0:
            return ", ".join(shown) or super()._format_action_invocation(action)
        return f"{', '.join(shown)} {self._format_args(action, self._get_default_metavar_for_optional(action))}"
