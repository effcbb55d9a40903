"""Which settings does the environment hold?  The only module that reads it.

Each setting is one field of `Settings`: its name, type, bounds, default and meaning are defined there and nowhere else.
Parsing, messages and the docs table are generated from the fields. This module also reads the variables that launchers
set for every rank. The reader of a setting decides its effect."""

from __future__ import annotations

import difflib
import hashlib
import os
import re
import signal
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, cast

import msgspec

from resilience.errors import ConfigurationError, DecodeError
from resilience.facts import encoding
from resilience.facts.identity import safe_name

PREFIX = "RESILIENCE_"
DISTRIBUTED = (
    "RANK",
    "WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_USE_AGENT_STORE",
    "TORCHELASTIC_RESTART_COUNT",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS",
)
"""Variables that the wrapper changes for the function, and restores afterwards."""

MOST_DIGITS = 18  # of a number in a variable of others
LONGEST_PAUSE = 1e9  # seconds; a thread accepts no time limit above about 292 years
_NUMBER = re.compile(f"[0-9]{{1,{MOST_DIGITS}}}")  # int() accepts more, such as 1_000, and isdigit() too, such as ²
_PATHS = ("run_dir", "metrics_textfile", "timeouts")  # paths that are opened: bytes that are not UTF-8 are kept

Count = Annotated[int, msgspec.Meta(ge=0)]
Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]
Address = Annotated[str, msgspec.Meta(min_length=1, max_length=255)]
Seconds = Annotated[float, msgspec.Meta(gt=0, le=1e9)]
NodeName = Annotated[str, msgspec.Meta(min_length=1, max_length=200, pattern=r"^(?!\.{1,2}$)[^/\x00]+$")]
JobId = Annotated[str, msgspec.Meta(min_length=1, pattern=r"^[^\x00]+$")]
SignalNumber = Annotated[int, msgspec.Meta(ge=1, le=int(signal.SIGRTMAX))]


ALL, WRAPPER = "`resilience run`, `Wrapper`", "`Wrapper`"


def _setting(form: str, default: str, meaning: str, holds_for: str = ALL) -> msgspec.Meta:
    """Return a setting's metadata. form: of a value. default: the value if the variable is not set."""
    return msgspec.Meta(description=meaning, extra={"form": form, "default": default, "holds_for": holds_for})


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings outside function signatures. A described field `x` is the variable RESILIENCE_X.

    Raises: ConfigurationError, naming the variable, for a value out of bounds."""

    run_dir: Annotated[
        str, _setting("path", "`./resilience-runs`", "folder in which each job gets a folder of its own")
    ] = "./resilience-runs"
    job_id: Annotated[
        JobId | None,
        _setting(
            "any text",
            "SLURM_JOB_ID; else under `resilience run` `--rdzv-id`, or date, time and a random suffix; else "
            "TORCHELASTIC_RUN_ID unless it is `none`; else agreed by the ranks",
            "id of the job; its run folder is named after it",
        ),
    ] = None
    attempt: Annotated[
        Count | None,
        _setting(
            "whole number that is free",
            "the first free one; the search begins at SLURM_RESTART_COUNT",
            "number of this launch among those of the job; each launch has a run folder of its own",
        ),
    ] = None
    cycle: Annotated[
        Count | None,
        _setting(
            "whole number",
            "TORCHELASTIC_RESTART_COUNT under torchrun, else agreed by the ranks",
            "number of this start of the workers by the launcher",
            WRAPPER,
        ),
    ] = None
    metrics_port: Annotated[
        Port | None,
        _setting("port", "no endpoint", "port of the node's Prometheus endpoint; if it is taken, the next free one"),
    ] = None
    metrics_host: Annotated[
        Address,
        _setting("address", "`127.0.0.1`", "address on which the endpoint listens; `0.0.0.0`: all addresses"),
    ] = "127.0.0.1"
    metrics_textfile: Annotated[
        str | None,
        _setting(
            "path",
            "no file",
            "existing folder of node-exporter's textfile collector; metrics are written there every 15 s",
        ),
    ] = None
    metrics_ranks: Annotated[
        Literal["all", "unhealthy", "none"],
        _setting(
            "all, unhealthy or none",
            "`all`",
            "ranks that have metrics of their own; unhealthy: only suspect, terminated, excluded and unmonitored "
            "ranks, and the most silent rank of each node, if it has been silent for over a minute outside of sections",
        ),
    ] = "all"
    interrupt_signal: Annotated[
        SignalNumber | None,
        _setting(
            "number or name of a signal that can be caught",
            "SIGRTMIN+9",
            "signal that interrupts the main thread; another one is used if it is taken",
            WRAPPER,
        ),
    ] = None
    abort_wait: Annotated[
        Seconds | None,
        _setting(
            "seconds above 0, less than `hard_timeout`",
            "`hard_timeout` - `soft_timeout`",
            "how long an abort may wait for what it ends, such as the groups of accelerators; no limit ends the rank "
            "before that",
            WRAPPER,
        ),
    ] = None
    abort_limit: Annotated[
        Seconds,
        _setting(
            "seconds above 0",
            "2",
            "how long a main thread may be stuck in building a group before its process is ended",
            WRAPPER,
        ),
    ] = 2.0
    step_timeout: Annotated[
        Seconds | None,
        _setting(
            "seconds above 0",
            "no limit",
            "time without a higher `resilience.step(n)` after which all ranks restart; in the first 5 steps after each "
            "start at least RESILIENCE_HANG_FIRST_LIMIT, and until the second step at least 6 times that",
            WRAPPER,
        ),
    ] = None
    section_timeouts: Annotated[
        dict[str, Seconds | None],
        _setting(
            "name:seconds,… such as data:30,checkpoint:none",
            "no limits",
            "how long sections may stay open before all ranks restart",
            WRAPPER,
        ),
    ] = {}
    timeouts: Annotated[
        str | None,
        _setting(
            "path, or `auto`",
            "no learned limits",
            "file of limits from `resilience calibrate`; `auto`: the newest `timeouts.yaml` next to runs of this "
            "configuration",
        ),
    ] = None
    calibration_key: Annotated[
        str,
        _setting(
            "any text",
            "the script's name",
            "name of the workload for learned limits: runs with the same name are the same workload, even if their "
            "scripts or arguments differ",
        ),
    ] = ""
    timeouts_shadow: Annotated[
        bool, _setting("1 or 0", "0", "do not apply the learned limits; only report what they would have done")
    ] = False
    detect_hangs: Annotated[
        bool,
        _setting("1 or 0", "1", "end a rank that is silent for a long time, if no limit is set for what it is doing"),
    ] = True
    hang_first_limit: Annotated[
        Seconds,
        _setting(
            "seconds above 0",
            "600",
            "seconds of silence that end a rank without a limit, until the job's usual pauses are known",
        ),
    ] = 600.0
    hang_least_limit: Annotated[
        Seconds,
        _setting(
            "seconds above 0",
            "60",
            "once the job's usual pauses are known, a rank without a limit is ended after 10 times the longest "
            "silence of the same kind, but after at least this many seconds",
        ),
    ] = 60.0
    collectives: Annotated[
        bool,
        _setting(
            "1 or 0", "1", "record each call of a collective, to find the awaited rank in a hang; under 3 µs a call"
        ),
    ] = True
    quiet: Annotated[
        bool,
        _setting("1 or 0", "0", "print nothing about the run on the terminal: no start, restart, warning or end"),
    ] = False
    node: Annotated[
        NodeName | None,
        _setting(
            "name without `/`",
            "under `resilience run` the host's name, and a number for further agents of the job on this host (`vm`, "
            "`vm-1`); else the host's name, and GROUP_RANK if a launcher set it (`vm-g0` under torchrun)",
            "name of the node",
        ),
    ] = None
    run_id: str = "none"
    restart_count: Count = 0
    scheduler_restarts: Count = 0

    @property
    def attempt_hint(self) -> int:
        """Return the attempt, as far as the environment shows it."""
        return self.scheduler_restarts if self.attempt is None else self.attempt

    def __post_init__(self) -> None:
        for field in msgspec.structs.fields(Settings):
            value = getattr(self, field.name)
            try:
                encoding.from_builtins(value, field.type)
            except DecodeError as error:
                raise _invalid_setting(field, _variable(field), value, error) from error
        if self.interrupt_signal in (signal.SIGKILL, signal.SIGSTOP):
            raise ConfigurationError(
                f"{PREFIX}INTERRUPT_SIGNAL is {self.interrupt_signal}, which cannot be caught; use e.g. SIGRTMIN+9"
            )

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> Settings:
        """Return the settings in force. Raises: ConfigurationError, naming the variable."""
        env = os.environ if environment is None else environment
        run_id = encoding.text(env.get("TORCHELASTIC_RUN_ID") or "none")
        is_elastic = run_id != "none"
        launchers = {
            "job_id": ("SLURM_JOB_ID", "TORCHELASTIC_RUN_ID") if is_elastic else ("SLURM_JOB_ID",),
            "cycle": ("TORCHELASTIC_RESTART_COUNT",) if is_elastic else (),
        }
        values: dict[str, Any] = {}
        for field in msgspec.structs.fields(cls):
            if _meta(field) is not None:
                names = (_variable(field), *launchers.get(field.name, ()))
                name = next((name for name in names if env.get(name)), None)
                if name is not None:
                    text = env[name] if field.name in _PATHS else encoding.text(env[name])
                    values[field.name] = _parsed(field, name, text)
        return cls(
            **values,
            run_id=run_id,
            restart_count=_number(env, "TORCHELASTIC_RESTART_COUNT"),
            scheduler_restarts=_number(env, "SLURM_RESTART_COUNT"),
        )


def _number(env: Mapping[str, str], name: str) -> int:
    """Return the number that a scheduler or launcher has set, 0 for any other text."""
    text = env.get(name, "")
    return int(text) if _NUMBER.fullmatch(text) else 0


def settings_table() -> str:
    """Return the settings as the docs' Markdown table."""
    lines = ["| variable | holds for | value | default | meaning |", "|---|---|---|---|---|"]
    for field in msgspec.structs.fields(Settings):
        meta = _meta(field)
        if meta is not None:
            about = cast("dict[str, str]", meta.extra)
            cells = (f"`{_variable(field)}`", about["holds_for"], about["form"], about["default"], meta.description)
            lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines) + "\n"


class Variable(NamedTuple):
    """What the help of an option with the same name says about a variable."""

    name: str
    meaning: str
    default: str


def variable(setting: str) -> Variable:
    """Return the variable of a setting."""
    (field,) = (field for field in msgspec.structs.fields(Settings) if field.name == setting)
    meta = _meta(field)
    assert meta is not None
    default = cast("dict[str, str]", meta.extra)["default"]
    return Variable(_variable(field), str(meta.description), default.replace("`", ""))


def _variable(field: msgspec.structs.FieldInfo) -> str:
    return PREFIX + field.name.upper()


def _meta(field: msgspec.structs.FieldInfo) -> msgspec.Meta | None:
    """Return the description of a setting, None for a field without its own variable."""
    notes = getattr(field.type, "__metadata__", ())
    return next((note for note in notes if isinstance(note, msgspec.Meta) and note.description), None)


def _parsed(field: msgspec.structs.FieldInfo, variable: str, text: str) -> Any:
    try:
        match field.name:
            case "interrupt_signal":
                return _signal_number(text)
            case "section_timeouts":
                sections = [_section(part) for part in _parts(text)]
                if len(dict(sections)) < len(sections):
                    raise ValueError("a section has two limits")
                return {name: None if value == "none" else float(value) for name, value in sections}
            case "step_timeout":
                return float(text)
            case _:
                return encoding.from_builtins(text, field.type, strict=False)
    except ValueError as error:  # DecodeError is one
        raise _invalid_setting(field, variable, text, error) from error


def _parts(text: str) -> list[str]:
    return [part for part in (part.strip() for part in text.split(",")) if part]


def _section(text: str) -> tuple[str, str]:
    name, _, seconds = text.rpartition(":")
    if not name:
        raise ValueError(f"{text!r} has no name")
    return name, seconds


def _signal_number(text: str) -> int:
    if text.isdecimal():
        return int(text)
    name, _, offset = text.partition("+")
    if name not in signal.Signals.__members__ or not (offset or "0").isdecimal():
        raise ValueError(f"there is no signal {text!r}")
    return signal.Signals[name] + int(offset or 0)


# Reasons of Python and msgspec that only repeat the expected form, in their own words.
_WORDS_OF_A_PARSER = re.compile(r"Expected [^<>]*, got .*|could not convert .*")


def unknown_variables(environment: Mapping[str, str] | None = None) -> Iterator[str]:
    """Yield a line for each RESILIENCE_ variable that is neither a setting nor set by the launcher."""
    settings = [_variable(field) for field in msgspec.structs.fields(Settings) if _meta(field) is not None]
    known = {*settings, *(PREFIX + name for name in _WORKER_VARIABLES)}
    for name in sorted(os.environ if environment is None else environment):
        if name.startswith(PREFIX) and name not in known:
            similar = difflib.get_close_matches(name, settings, 1, 0.8)
            hint = f"did you mean {similar[0]}?" if similar else "docs/settings.md lists the variables"
            yield f"there is no variable {encoding.text(name)}, so it has no effect; {hint}"


def _invalid_setting(
    field: msgspec.structs.FieldInfo, variable: str, value: object, error: Exception
) -> ConfigurationError:
    meta = _meta(field)
    form = "" if meta is None else f", expected {cast('dict[str, str]', meta.extra)['form']}"
    reason = str(error).replace("`", "")
    reason = "" if form and _WORDS_OF_A_PARSER.match(reason) else f" ({reason})"
    return ConfigurationError(
        f"{variable} is {value!r}{form}{reason}; correct the variable, or unset it for the default",
        option=variable,
        value=value,
    )


# -- what launchers set --------------------------------------------------------------------------


class LauncherRendezvous(msgspec.Struct, frozen=True):
    """The launcher's address for its ranks. is_agents: the launcher's agent hosts the store there. is_one_node: the
    launcher says that all ranks are on this host."""

    host: str | None
    port: int | None
    world_size: int | None
    is_agents: bool
    is_one_node: bool = False

    @classmethod
    def from_environment(cls) -> LauncherRendezvous:
        """Read MASTER_ADDR, MASTER_PORT, WORLD_SIZE and GROUP_WORLD_SIZE. Raises: ConfigurationError."""
        return cls(
            host=os.environ.get("MASTER_ADDR") or None,
            port=_whole_number("MASTER_PORT"),
            world_size=_whole_number("WORLD_SIZE"),
            is_agents=os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            is_one_node=os.environ.get("GROUP_WORLD_SIZE") == "1",
        )

    @property
    def server_host(self) -> str:
        """Return the host name under which ranks reach our servers; empty if it is unknown."""
        return "127.0.0.1" if self.is_one_node else self.host or ""


def rank_and_world_size() -> tuple[int, int]:
    """Return RANK (default 0) and WORLD_SIZE (default 1). Raises: ConfigurationError."""
    rank, size = _whole_number("RANK") or 0, _whole_number("WORLD_SIZE")
    size = 1 if size is None else size
    if rank >= size:
        raise ConfigurationError(
            f"RANK is {rank} and WORLD_SIZE is {size}, expected 0 <= RANK < WORLD_SIZE; set both on every rank, or "
            "neither for a world of one",
            rank=rank,
            world_size=size,
        )
    return rank, size


def local_rank() -> int | None:
    """Return LOCAL_RANK, the rank within its node; None if no launcher set it."""
    return _whole_number("LOCAL_RANK")


def local_world_size() -> int | None:
    """Return LOCAL_WORLD_SIZE, the number of ranks on this node; None if no launcher set it."""
    return _whole_number("LOCAL_WORLD_SIZE")


def _whole_number(name: str) -> int | None:
    text = os.environ.get(name, "")
    if text and not text.isdecimal():
        raise ConfigurationError(f"{name} is {text!r}, expected a whole number from 0; the launcher sets it")
    if len(text) > MOST_DIGITS:  # Python refuses to convert thousands of digits
        raise ConfigurationError(f"{name} has {len(text)} digits, expected {MOST_DIGITS} at most; the launcher sets it")
    return int(text) if text else None


def torchrun_restarts_left() -> int | None:
    """Return how often torchrun may start the ranks again, None if torchrun has not started them."""
    limit, count = _whole_number("TORCHELASTIC_MAX_RESTARTS"), _whole_number("TORCHELASTIC_RESTART_COUNT")
    return None if limit is None else limit - (count or 0)


def torchrun_default(option: str) -> str | None:
    """Return the default that PET_<OPTION> sets for an option of torchrun, None if it is not set."""
    return os.environ.get(f"PET_{option}") or None


def keep_nccl_watchdog_from_raising() -> None:
    """Set TORCH_NCCL_RETHROW_CUDA_ERRORS=0, unless it is set. Otherwise torch's watchdog thread, which checks a group
    that was aborted on purpose, raises the error that it finds, and so ends the process."""
    os.environ.setdefault("TORCH_NCCL_RETHROW_CUDA_ERRORS", "0")


def nvls_may_be_used() -> bool:
    """Return True unless NCCL_NVLS_ENABLE=0 keeps NCCL from using NVLink SHARP."""
    return os.environ.get("NCCL_NVLS_ENABLE") != "0"


def async_error_handling() -> str:
    """Return the workers' TORCH_NCCL_ASYNC_ERROR_HANDLING: the value set here, else on."""
    return os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")


@contextmanager
def one_blas_thread() -> Iterator[None]:
    """Keep numerical libraries imported in the body from starting threads: this process will fork."""
    name = "OPENBLAS_NUM_THREADS"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def infrastructure_rank() -> tuple[str, int] | None:
    """Return the node's rank in its allocation, after its variable: SLURM_PROCID, else GROUP_RANK. None if neither is
    set."""
    ranks = ((name, _whole_number(name)) for name in ("SLURM_PROCID", "GROUP_RANK"))
    return next(((name, rank) for name, rank in ranks if rank is not None), None)


def monitor_socket() -> str | None:
    """Return the address of this process's rank monitor, None if there is none. The second name is the compatible
    API's, for launchers other than ours."""
    return os.environ.get("RESILIENCE_MONITOR_SOCKET") or os.environ.get("FT_RANK_MONITOR_IPC_SOCKET") or None


def is_quiet() -> bool:
    """Return True if nothing about the run is printed on the terminal."""
    try:
        return Settings.from_environment().quiet
    except ConfigurationError:  # the job's reader of the settings reports it
        return False


def notes_collectives() -> bool:
    """Return True if calls of collectives are recorded."""
    try:
        return Settings.from_environment().collectives
    except ConfigurationError:  # the job's reader of the settings reports it
        return False


def has_agent() -> bool:
    """Return True if an agent of `resilience run` has started this process. Other launchers may set
    RESILIENCE_MONITOR_SOCKET, and the ranks of `resilience demo` have RESILIENCE_RUN_FOLDER."""
    return bool(os.environ.get("RESILIENCE_RESTART_POLICY"))


def launched_folder() -> Path | None:
    """Return the run folder that the launcher gives its workers, None in a process without such a launcher."""
    folder = os.environ.get("RESILIENCE_RUN_FOLDER")
    return Path(folder) if folder else None


class LaunchedWorker(msgspec.Struct, frozen=True):
    """A worker's place in the job, from `resilience run`."""

    folder: Path
    job_id: str
    attempt: int
    cycle: int
    node: str
    rank: int
    world_size: int

    @classmethod
    def from_environment(cls) -> LaunchedWorker | None:
        """Return None if no agent has started this process, or if its variables were changed."""
        folder, env = launched_folder(), os.environ
        if folder is None:
            return None
        try:
            return cls(
                folder=folder,
                job_id=env[f"{PREFIX}JOB_ID"],
                attempt=int(env[f"{PREFIX}ATTEMPT"]),
                cycle=int(env[f"{PREFIX}CYCLE"]),
                node=env[f"{PREFIX}NODE"],
                rank=int(env["RANK"]),
                world_size=int(env["WORLD_SIZE"]),
            )
        except (KeyError, ValueError):
            return None


_WORKER_VARIABLES = (
    *("RUN_FOLDER", "CYCLE", "NODE", "MONITOR_SOCKET", "RESTART_POLICY", "SHORTEST_LIMIT"),  # with PREFIX
)
_ELASTIC_WORKER_VARIABLES = (
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
    *("GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT"),
    *("TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_ERROR_FILE"),
)


def settings_of_a_launch() -> Settings:
    """Return the settings of a launcher. If a worker of another launcher starts it, it runs a job of its own. The
    variables of the worker's place in the outer job are then removed from the environment, and the scheduler's id and
    restart count belong to the outer job. An id or attempt that differs from the outer job's is kept."""
    outer = launched_folder()
    if outer is None:
        return Settings.from_environment()
    job, *more = outer.name.split("@")
    attempt = more[0] if more and more[0].isdecimal() else "0"
    if safe_name(os.environ.get(f"{PREFIX}JOB_ID", "")) == job:
        os.environ.pop(f"{PREFIX}JOB_ID", None)
    if os.environ.get(f"{PREFIX}ATTEMPT") == attempt:
        del os.environ[f"{PREFIX}ATTEMPT"]
    for name in (*(PREFIX + name for name in _WORKER_VARIABLES), *_ELASTIC_WORKER_VARIABLES):
        os.environ.pop(name, None)
    schedulers = ("SLURM_JOB_ID", "SLURM_RESTART_COUNT")
    return Settings.from_environment({name: value for name, value in os.environ.items() if name not in schedulers})


class Launcher(msgspec.Struct, frozen=True):
    """How `resilience run` treats this job. policy: empty without it; shortest_limit: seconds of silence after which
    its monitors end a rank that shows them signs of life, None for never. nodes: number of agents; ranks_per_node:
    on this node."""

    policy: str
    shortest_limit: float | None
    nodes: int = 1
    ranks_per_node: int = 1

    @classmethod
    def from_environment(cls) -> Launcher:
        """Read RESILIENCE_RESTART_POLICY, RESILIENCE_SHORTEST_LIMIT, GROUP_WORLD_SIZE and LOCAL_WORLD_SIZE, which the
        launcher sets."""
        return cls(
            os.environ.get("RESILIENCE_RESTART_POLICY", ""),
            _shortest_limit(os.environ.get("RESILIENCE_SHORTEST_LIMIT", "")),
            _whole_number("GROUP_WORLD_SIZE") or 1,
            _whole_number("LOCAL_WORLD_SIZE") or 1,
        )


def _shortest_limit(text: str) -> float | None:
    if not text:
        return None
    try:
        limit = float(text)
    except ValueError:
        limit = 0.0
    if not 0.0 < limit < float("inf"):
        raise ConfigurationError(f"RESILIENCE_SHORTEST_LIMIT is {text!r}, expected seconds; the launcher sets it")
    return limit


ERROR_FILE = "TORCHELASTIC_ERROR_FILE"


def error_file() -> str | None:
    """Return the file in which a scheduler looks for this process's own error, None if there is none."""
    return os.environ.get(ERROR_FILE) or None


UNINTERRUPTIBLE_LIMIT = "TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT"


def uninterruptible_limit() -> float:
    """Return torch's limit in seconds for a worker in an uninterruptible wait of the kernel. 0: none, also for a value
    that is no positive number, as in torch (since 2.13)."""
    try:
        limit = float(os.environ.get(UNINTERRUPTIBLE_LIMIT) or 0.0)
    except ValueError:
        return 0.0
    return limit if 0.0 < limit < float("inf") else 0.0


def finished_flag_file() -> str | None:
    """Return the file whose existence means that there is nothing left to resume; None if it is not wanted.

    The name of the variable is the compatible API's."""
    return os.environ.get("FAULT_TOL_FINISHED_FLAG_FILE") or None


class Exporting(msgspec.Struct, frozen=True):
    """The settings of exporters in the standard OTEL_* variables and TRACEPARENT. OpenTelemetry itself reads headers,
    certificates, timeouts and resource attributes.

    protocol: None if no endpoint is set or spans are switched off. delay_s, queue and batch: how long spans are
    gathered, how many may wait, how many are sent together. Source: OpenTelemetry specification, environment
    variables (batch span processor, OTLP exporter). metrics_protocol: None if metrics over OTLP are not requested.
    metrics_endpoint: where they go. metrics_every_s: time between two sendings."""

    protocol: str | None = None
    endpoint: str = ""
    delay_s: float = 5.0
    queue: int = 2048
    batch: int = 512
    traceparent: str = ""
    metrics_protocol: str | None = None
    metrics_endpoint: str = ""
    metrics_every_s: float = 60.0

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> Exporting:
        """Return the settings. Like OpenTelemetry, use the default for a number that is not valid."""
        env = os.environ if environment is None else environment
        endpoint = env.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT") or env.get("OTEL_EXPORTER_OTLP_ENDPOINT") or ""
        is_off = env.get("OTEL_SDK_DISABLED", "").lower() == "true" or env.get("OTEL_TRACES_EXPORTER") == "none"
        names = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
        protocol = next((env[name] for name in names if env.get(name)), "http/protobuf")
        queue = _positive(env, "OTEL_BSP_MAX_QUEUE_SIZE", 2048)
        return cls(
            protocol=protocol if endpoint and not is_off else None,
            endpoint=endpoint,
            delay_s=_pause_s(env, "OTEL_BSP_SCHEDULE_DELAY", 5000),
            queue=queue,
            batch=min(queue, _positive(env, "OTEL_BSP_MAX_EXPORT_BATCH_SIZE", 512)),
            traceparent=encoding.text(env.get("TRACEPARENT", "")),
            metrics_protocol=_metrics_protocol(env),
            metrics_endpoint=env.get("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT")
            or env.get("OTEL_EXPORTER_OTLP_ENDPOINT")
            or "",
            metrics_every_s=_pause_s(env, "OTEL_METRIC_EXPORT_INTERVAL", 60_000),
        )


def _metrics_protocol(env: Mapping[str, str]) -> str | None:
    """Return the protocol for metrics, None unless requested: most collectors of spans accept no metrics."""
    is_asked = env.get("OTEL_METRICS_EXPORTER") == "otlp" and env.get("OTEL_EXPORTER_OTLP_ENDPOINT")
    if not (env.get("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT") or is_asked) or env.get("OTEL_METRICS_EXPORTER") == "none":
        return None
    if env.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return None
    names = ("OTEL_EXPORTER_OTLP_METRICS_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
    return next((env[name] for name in names if env.get(name)), "http/protobuf")


def _positive(env: Mapping[str, str], name: str, default: int) -> int:
    text = env.get(name, "")
    return (int(text) if _NUMBER.fullmatch(text) else 0) or default


def _pause_s(env: Mapping[str, str], name: str, default_ms: int) -> float:
    return min(_positive(env, name, default_ms) / 1000, LONGEST_PAUSE)


def node_name() -> str:
    """Return the name of this node: RESILIENCE_NODE, else the host, and the group rank if a launcher set one."""
    configured = Settings.from_environment().node
    if configured is not None:
        return configured
    group = os.environ.get("GROUP_RANK")
    host = encoding.text(socket.gethostname()).replace("/", "-")
    return host if group is None else f"{host}-g{group}"


@contextmanager
def scoped_environment() -> Iterator[None]:
    """Restore the variables of DISTRIBUTED after the body."""
    before = {name: os.environ.get(name) for name in DISTRIBUTED}
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def agent_node_name(job_id: str) -> str:
    """Return the node name of a launcher's agent: RESILIENCE_NODE, else the host's; further agents of a job on one host
    are numbered. If another user holds a number, this agent takes the next one. This process holds its number as long
    as it lives."""
    configured = Settings.from_environment().node
    if configured is not None:
        return configured
    host = encoding.text(socket.gethostname()).replace("/", "-")
    job = hashlib.sha256(encoding.text(job_id).encode()).hexdigest()[:32]  # a long id would be cut
    for number in range(10_000):
        lock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            lock.bind(f"\0resilience-agent-{os.geteuid()}-{job}-{number}")
        except OSError:
            lock.close()
            continue
        lock.detach()  # an object that nobody closes would be warned of
        return host if not number else f"{host}-{number}"
    return f"{host}-{os.getpid()}"
