"""What does the command line of `resilience run` ask for?  torchrun's parser, plus our own options.

We extend torchrun's parser instead of copying it, so every torchrun option works as in torchrun. One default differs
(`--max-restarts`). Our options are fields of `Options` and `FaultToleranceConfig`; flags, help and the docs page are
generated from them. An option that is also a variable takes its meaning from `environment.Settings`."""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import textwrap
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, get_args

from torch.distributed import run as torchrun
from torch.distributed.elastic import events as elastic_events

from resilience.core.stopping import Mode
from resilience.errors import ConfigurationError
from resilience.facts.printable import usage_error
from resilience.launcher import ft_options
from resilience.monitor.config import NOTHING, YES_OR_NO, FaultToleranceConfig, add_arguments, has_switch
from resilience.system import render, unwritten_stdout
from resilience.system.environment import Settings, torchrun_default, variable

MAX_RESTARTS = 10
LARGEST = 10**9  # products of two numbers fit into a record, and a sum of seconds into a timer
CFG_PATH_HELP = "YAML file with a mapping `fault_tolerance` somewhere in it, whose keys are settings; flags override it"
EPILOG = """\
Exit status: 0 all workers completed; 1 the job failed (for example, no restart is left); 2 wrong
use; 93 another start would not help (the same failure repeats, or there is no progress; see the
option --same-failure-exit-code); 94 a rank requested a shutdown of the workload; 95 this node left
(unhealthy or excluded); 128 + N stopped by signal N.
`resilience report RUN` explains what happened; `resilience status RUN --watch` shows the running job."""


class Bounds(NamedTuple):
    """Which values an option may have. what: the form or unit, as in an error message."""

    what: str
    most: int = LARGEST
    is_above_0: bool = False

    def check(self, name: str, value: float) -> None:
        """Raises: ConfigurationError if the value is out of bounds, infinite or not a number."""
        if not 0 <= value <= self.most or (self.is_above_0 and value == 0):
            expected = f"above 0, up to {self.most}" if self.is_above_0 else f"from 0 to {self.most}"
            raise ConfigurationError(f"{flag(name)} is {value}, expected {self.what} {expected}")


SECONDS, COUNT, PORT = Bounds("seconds"), Bounds("a whole number"), Bounds("a port", 65535)
TORCHRUNS = {  # torchrun's own numbers: torchrun does not check them, or its message does not name the option
    "max_restarts": COUNT,
    "monitor_interval": Bounds("seconds", 10**6),  # poll() takes less than 2**31 ms
    "shutdown_timeout": Bounds("a whole number of seconds"),
    "master_port": PORT,
}


def _of_variable(name: str, default: Any = None, **metadata: Any) -> Any:
    """Return the field of an option whose default is the variable of the same name, which has the same meaning."""
    same = variable(name)
    otherwise = "" if default is False else f", else {same.default}"
    return dataclasses.field(
        default=default, metadata={"help": f"{same.meaning}; default {same.name}{otherwise}", **metadata}
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """The launcher's own options. The metadata holds the help text, and bounds other than those of seconds and counts;
    each field name becomes a flag."""

    run_dir: str | None = _of_variable("run_dir")
    metrics_port: int | None = _of_variable("metrics_port", bounds=PORT)
    metrics_host: str | None = _of_variable("metrics_host")
    metrics_textfile: str | None = _of_variable("metrics_textfile")
    timeouts: str | None = _of_variable("timeouts")
    calibration_key: str | None = _of_variable("calibration_key")
    timeouts_shadow: bool = _of_variable("timeouts_shadow", default=False)
    quiet: bool = _of_variable("quiet", default=False)
    cold: bool = dataclasses.field(
        default=False, metadata={"help": "start each worker as a fresh interpreter, as torchrun does (no zygote)"}
    )
    preload: tuple[str, ...] = dataclasses.field(
        default=(),
        metadata={
            "help": "module that the zygote imports, besides torch, before it forks workers; the first wait for it "
            "at most 20 s; may be repeated"
        },
    )
    no_output_files: bool = dataclasses.field(
        default=False,
        metadata={
            "help": "let workers write straight to the terminal; the run folder keeps no output. The records then lack "
            "the exceptions of scripts without a Wrapper, and a missing import costs all restarts; so it is with "
            "torchrun's --redirects 1, which keeps only stdout"
        },
    )
    output_file_mb: int = dataclasses.field(
        default=256,
        metadata={"help": "MiB at which a worker's output file is rotated; one older file is kept; 0: never"},
    )
    exit_barrier_timeout: float | None = dataclasses.field(
        default=None,
        metadata={
            "help": "seconds that the other workers may still run after the first one has completed; then the job "
            "fails; default: no limit",
            "bounds": Bounds("seconds", is_above_0=True),
        },
    )
    join_timeout: float | None = dataclasses.field(
        default=None,
        metadata={
            "help": "seconds that a node waits for a place, or for enough other nodes, while no cycle runs; a spare "
            "of a running cycle waits without a limit; default: join_timeout of --rdzv-conf, else 600",
            "bounds": Bounds("seconds", is_above_0=True),
        },
    )
    on_sigterm: Mode = dataclasses.field(
        default="leave",
        metadata={
            "help": "what SIGTERM to one agent means: leave (this node leaves; the others continue if enough remain "
            "and none needs its store) or stop (the whole job)"
        },
    )
    stop_grace: float = dataclasses.field(
        default=30.0, metadata={"help": "seconds between the stop request and the signal, for a last checkpoint"}
    )
    term_timeout: float | None = dataclasses.field(
        default=None,
        metadata={
            "help": "seconds between the forwarded signal and SIGKILL when a signal stops the job; default: "
            "--shutdown-timeout"
        },
    )
    same_failure_limit: int = dataclasses.field(
        default=3,
        metadata={"help": "end the job after this many identical failures in a row without progress; 0: never"},
    )
    same_failure_exit_code: int = dataclasses.field(
        default=93,
        metadata={
            "help": "exit status if another start would not help; a scheduler can be told not to requeue the job then",
            "bounds": Bounds("an exit status", 255),
        },
    )
    stalled_restarts: int = dataclasses.field(
        default=5, metadata={"help": "end the job after this many restarts in a row without a higher step; 0: never"}
    )
    same_failure_in_window: int = dataclasses.field(
        default=10,
        metadata={"help": "also end the job after more than this many identical failures within the window; 0: never"},
    )
    failure_window: float = dataclasses.field(default=3600.0, metadata={"help": "length of that window in seconds"})
    health_check: str | None = dataclasses.field(
        default=None,
        metadata={
            "help": "command that must exit with 0 on this node before each start of the workers; default: no check"
        },
    )
    health_check_timeout: float = dataclasses.field(
        default=60.0,
        metadata={
            "help": "seconds that this command may take; then it is killed with its process group, and the node leaves",
            "bounds": Bounds("seconds", is_above_0=True),
        },
    )
    min_free_disk_mb: int = dataclasses.field(
        default=100,
        metadata={"help": "free space in MiB on the run folder's disk below which each node warns; 0: never"},
    )
    exclude_on_full_disk: bool = dataclasses.field(
        default=False,
        metadata={
            "help": "a node with less free space than --min-free-disk-mb, or on whose disk the run folder cannot be "
            "created, leaves the job, with status 95"
        },
    )

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, int | float) and not isinstance(value, bool):
                bounds: Bounds = field.metadata.get("bounds", SECONDS if "float" in str(field.type) else COUNT)
                bounds.check(field.name, value)
            if value == "" and field.name != "calibration_key":  # an empty key is none
                raise ConfigurationError(
                    f"{flag(field.name)} is '', expected a text that is not empty; leave the option out for its default"
                )
        if "" in self.preload:
            raise ConfigurationError("--preload is '', expected the name of a module; leave the option out for none")
        if self.preload and self.cold:
            raise ConfigurationError("--preload has no effect with --cold: a fresh interpreter imports for itself")
        if self.exclude_on_full_disk and not self.min_free_disk_mb:
            raise ConfigurationError(
                "--exclude-on-full-disk has no effect with --min-free-disk-mb 0; leave one of them out"
            )
        if self.on_sigterm not in get_args(Mode):
            raise ConfigurationError(
                f"--on-sigterm is {self.on_sigterm!r}, expected one of {', '.join(get_args(Mode))}"
            )


class Command:
    """A parsed command line: torchrun's namespace, our options, the monitors' limits. config_notes: what the user
    should know about the file of the limits."""

    def __init__(self, namespace: argparse.Namespace) -> None:
        self.torchrun = namespace
        values = {field.name: getattr(namespace, field.name) for field in dataclasses.fields(Options)}
        values["preload"] = tuple(namespace.preload or ())
        self.options = Options(**values)
        for name, bounds in TORCHRUNS.items():
            value = getattr(namespace, name)
            if value is not None:
                bounds.check(name, value)
        if self.options.timeouts_shadow and not (self.options.timeouts or Settings.from_environment().timeouts):
            raise ConfigurationError(
                "--timeouts-shadow has no effect without --timeouts or RESILIENCE_TIMEOUTS; name the limits to try"
            )
        _check_event_log(namespace.event_log_handler)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            self.config = _config(namespace)
        self.config_notes = tuple(str(warning.message) for warning in caught)
        script = namespace.training_script
        is_value = script.lower() in (*YES_OR_NO, *NOTHING) and has_switch(namespace)
        if is_value and not os.path.exists(script):
            raise ConfigurationError(
                f"{script!r} was read as the script; write a switch's value after `=`, such as "
                f"--ft-use-infra-group-rank={script}"
            )


def _check_event_log(name: str) -> None:
    """Raises: ConfigurationError for a handler that torch does not know."""
    try:
        elastic_events.get_logging_handler(name)
    except KeyError as error:
        raise ConfigurationError(f"--event-log-handler is {name!r}, expected console or null") from error


def _config(namespace: argparse.Namespace) -> FaultToleranceConfig:
    """Return the settings of the flags and of the file. Raises: ConfigurationError, also for an unreadable file."""
    path = namespace.ft_cfg_path
    try:
        if path is not None and not Path(path).is_file():
            raise ConfigurationError(f"--ft-cfg-path is {path!r}, but there is no such file")
        return FaultToleranceConfig.from_args(namespace)
    except OSError as error:
        raise ConfigurationError(f"--ft-cfg-path is {path!r}, which cannot be read: {error.strerror}") from error


def parser() -> argparse.ArgumentParser:
    """Return torchrun's parser with our options added."""
    try:
        torchrun_parser = torchrun.get_args_parser()
    except ValueError as error:  # torch reads the variable of a switch with int()
        raise ConfigurationError(
            f"PET_STANDALONE, PET_MODULE, PET_NO_PYTHON, PET_RUN_PATH or PET_VIRTUAL_LOCAL_RANK is not 0 or 1: {error}"
        ) from error
    torchrun_parser.prog = "resilience run"
    torchrun_parser.error = lambda message: argparse.ArgumentParser.error(torchrun_parser, usage_error(message))  # type: ignore[method-assign]
    torchrun_parser.print_help = lambda file=None: _print_help(torchrun_parser, file)  # type: ignore[method-assign]
    torchrun_parser.usage = "%(prog)s [options] training_script [its arguments ...]"
    torchrun_parser.description = (
        "Run a training script on every rank, replace workers that die or hang, and record why. Accepts every option "
        "of torchrun."
    )
    torchrun_parser.epilog = EPILOG
    torchrun_parser.formatter_class = _Help
    torchrun_parser._optionals.title = "torchrun's options"
    torchrun_parser._positionals.title = "what to run"
    for action in torchrun_parser._positionals._group_actions:
        action.required = action.nargs != argparse.REMAINDER  # a script may have no arguments: no error says otherwise
    # The default applies only if neither the flag nor its variable is set.
    torchrun_parser.set_defaults(max_restarts=torchrun_default("MAX_RESTARTS") or MAX_RESTARTS)
    _show_default(torchrun_parser, "--max-restarts")
    own_group = torchrun_parser.add_argument_group("resilience's options")
    for field in dataclasses.fields(Options):
        _add(own_group, field)
    limit_group = torchrun_parser.add_argument_group(
        "limits of the rank monitors", "S: seconds. none: no limit, unless the option says otherwise."
    )
    limit_group.add_argument(
        "--ft-cfg-path",
        "--ft_cfg_path",
        "--ft-cfg_path",
        metavar="FILE",
        help=CFG_PATH_HELP,
    )
    add_arguments(limit_group)
    foreign_group = torchrun_parser.add_argument_group("options of ft_launcher", argparse.SUPPRESS)
    ft_options.add_arguments(torchrun_parser, foreign_group)
    _abbreviate_only_torchruns(
        torchrun_parser, [*own_group._group_actions, *limit_group._group_actions, *foreign_group._group_actions]
    )
    return torchrun_parser


def _print_help(torchrun_parser: argparse.ArgumentParser, file: Any = None) -> None:
    """Write the help. argparse would ignore that it cannot be written. Raises: SystemExit if it cannot."""
    try:
        render.say(torchrun_parser.format_help().rstrip("\n"), file)
        (sys.stdout if file is None else file).flush()
    except OSError as error:
        sys.exit(unwritten_stdout.status_after("run", error))


def _show_default(torchrun_parser: argparse.ArgumentParser, option: str) -> None:
    """Show the default of an option of torchrun that differs from torchrun's own."""
    action = torchrun_parser._option_string_actions[option]
    action.help = f"{(action.help or '').rstrip('. ')}; default %(default)s"


def _abbreviate_only_torchruns(torchrun_parser: argparse.ArgumentParser, ours: list[argparse.Action]) -> None:
    """Allow abbreviations of torchrun's options only.

    argparse also matches the script's own arguments. If our options were candidates, it would refuse a script's
    `--timeout` as ambiguous, and abbreviations of torchrun's options would stop working."""
    candidates = torchrun_parser._get_option_tuples

    def torchrun_candidates(option_string: str) -> list[tuple[argparse.Action, str, str | None]]:
        return [candidate for candidate in candidates(option_string) if candidate[0] not in ours]

    torchrun_parser._get_option_tuples = torchrun_candidates  # type: ignore[method-assign]


def parse(arguments: Sequence[str] | None = None) -> Command:
    """Parse the command line. Raises: SystemExit (help, wrong usage), ConfigurationError."""
    return Command(parser().parse_args(sys.argv[1:] if arguments is None else list(arguments)))


def flag(name: str) -> str:
    """Return the flag of a field."""
    return "--" + name.replace("_", "-")


def _add(group: argparse._ArgumentGroup, field: dataclasses.Field[object]) -> None:
    spellings = sorted({flag(field.name), "--" + field.name}, reverse=True)
    help_text = str(field.metadata["help"])
    if field.default is False:
        group.add_argument(*spellings, action="store_true", help=help_text)
        return
    if field.default == ():
        group.add_argument(*spellings, action="append", metavar="MODULE", help=help_text)
        return
    value_type = float if "float" in str(field.type) else int if "int" in str(field.type) else str
    default = f"{field.default:g}" if isinstance(field.default, float) else "%(default)s"  # 30, as the pages have it
    suffix = "" if field.default is None else f"; default {default}"
    metavar = {float: "S", int: "N", str: "X"}[value_type]
    group.add_argument(*spellings, type=value_type, default=field.default, metavar=metavar, help=help_text + suffix)


class _Help(argparse.HelpFormatter):
    """Fit help into 80 columns; show each flag once, spelled with hyphens, and never broken at one of them."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=30, width=80)

    def _split_lines(self, text: str, width: int) -> list[str]:
        lines = textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False, break_long_words=False)
        return [part for line in lines for part in _parts(line, width)]

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return "\n".join(indent + line for line in self._split_lines(text, width - len(indent)))

    def _format_action_invocation(self, action: argparse.Action) -> str:
        spellings = [name for name in action.option_strings if "_" not in name] or list(action.option_strings)
        if not action.option_strings or action.nargs == 0:
            return ", ".join(spellings) or super()._format_action_invocation(action)
        return f"{', '.join(spellings)} {self._format_args(action, self._get_default_metavar_for_optional(action))}"


def _parts(line: str, width: int) -> list[str]:
    """Return a line as parts of at most `width` characters. A longer line is one long word, such as a URL of torchrun's
    help: it is cut behind a slash if possible."""
    parts = []
    while len(line) > width:
        end = line.rfind("/", 0, width) + 1 or width
        parts.append(line[:end])
        line = line[end:]
    return [*parts, line]
