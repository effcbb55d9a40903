"""Which limits apply to the ranks of a job, and what happens past them?  Keywords, a YAML file, or flags.

Each setting is one field of `FaultToleranceConfig` with its unit and meaning; flags, help and the docs page are
generated from the fields. The valid form of a value is defined once, beside its kind, for all three sources. Names
and defaults are those of the compatible API. The monitors get `watch.Limits`; the launcher reads the settings that
concern the job."""

from __future__ import annotations

import argparse
import dataclasses
import math
import signal
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from resilience.errors import ConfigurationError, ConfigurationTypeError, DecodeError
from resilience.facts import encoding
from resilience.facts.deadlines import HEARTBEAT
from resilience.facts.limits import Limit, Limits, Rule
from resilience.monitor.unknown_settings import hint_at, names_unknown, without_settings_of_others
from resilience.system.environment import Settings, variable

SECTION = "fault_tolerance"  # the key of a YAML file
GRACE = 5.0  # seconds between a termination signal other than SIGKILL, and SIGKILL
LOG_LEVELS = {"DEBUG": 10, "INFO": 20, "WARNING": 30, "ERROR": 40, "CRITICAL": 50}
NOTHING = ("none", "null", "")
SHORT_LEVELS = {"DBG": 10, "WARN": 30}  # other names of levels in the compatible API
YES_OR_NO = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}

RestartPolicy = Literal["any-failed", "min-healthy"]
POLICIES = ("any-failed", "min-healthy")


def _seconds(value: Any) -> float:
    number = _number(value)
    if not 0 < number <= 1e9:
        raise ValueError("above 0")
    return number


def _timeout(value: Any) -> float | None:
    return None if _is_nothing(value) else _seconds(value)


def _factor(value: Any) -> float:
    number = _number(value)
    if number < 1:
        raise ValueError("1 or more")
    return number


def _count(value: Any) -> int:
    number = _number(value)
    if number < 0 or number != int(number):
        raise ValueError("0 or more")
    return int(number)


def _timeouts(value: Any) -> dict[str, float | None]:
    if _is_nothing(value):
        return {}
    if isinstance(value, str):
        parts = [part.strip() for part in value.split(",") if part.strip()]
        value = {name.strip(): limit.strip() for name, _, limit in (part.rpartition(":") for part in parts)}
        if len(value) < len(parts):
            raise ValueError("one limit of each section")
    if not isinstance(value, Mapping):
        raise TypeError(type(value).__name__)
    if not all(isinstance(name, str) and name for name in value):
        raise ValueError("named sections")
    if any(isinstance(limit, str) and not limit.strip() for limit in value.values()):
        raise ValueError("a limit of each section")
    return {name: _timeout(limit) for name, limit in value.items()}


def _signal(value: Any) -> signal.Signals:
    if isinstance(value, str) and not value.isdecimal():
        name = "SIG" + value.upper().removeprefix("SIG")
        if name not in signal.Signals.__members__:
            raise ValueError("a signal of this system")
        return signal.Signals[name]
    return signal.Signals(_count(value))


def _log_level(value: Any) -> int:
    if isinstance(value, str) and not value.isdecimal():
        levels = LOG_LEVELS | SHORT_LEVELS
        if value.upper() not in levels:
            raise ValueError("a level")
        return levels[value.upper()]
    return _count(value)


def _policy(value: Any) -> RestartPolicy:
    if value not in POLICIES:
        raise ValueError("a policy")
    policy: RestartPolicy = value
    return policy


def _yes_or_no(value: Any) -> bool | None:
    if value is None or isinstance(value, bool):
        return value
    if not isinstance(value, str):
        raise TypeError(type(value).__name__)
    if value.lower() in NOTHING:
        return None
    if value.lower() not in YES_OR_NO:
        raise ValueError("true or false")
    return YES_OR_NO[value.lower()]


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise TypeError(type(value).__name__)
    number = float(value)
    if not math.isfinite(number):
        raise ValueError("finite")
    return number


def _is_nothing(value: Any) -> bool:
    return value is None or (isinstance(value, str) and value.strip().lower() in NOTHING)


FORMS: dict[Callable[[Any], Any], tuple[str, str]] = {  # function that reads a value: (expected form, form in help)
    _seconds: ("seconds above 0", "S"),
    _timeout: ("seconds above 0, or none", "S"),
    _factor: ("a factor of 1 or more", "X"),
    _count: ("a whole number from 0", "N"),
    _timeouts: ("name:seconds,… or a mapping of names to seconds above 0, or none; each name once", "NAME:S,..."),
    _signal: ("name or number of a signal, such as SIGTERM", "SIGNAL"),
    _log_level: ("name or number of a log level, such as INFO", "LEVEL"),
    _policy: (" or ".join(POLICIES), "POLICY"),
    _yes_or_no: ("true, false or none", "BOOL"),
}


def _metadata(read: Callable[[Any], Any], meaning: str) -> dict[str, Any]:
    return {"help": meaning, "read": read}


def _of_variable(name: str, read: Callable[[Any], Any], more: str = "") -> Any:
    """Return the field of a setting that is also a variable, which has the same meaning. more: is added to it."""
    same = variable(name)
    meaning = f"{same.meaning}; none: the value of {same.name}, which is {same.default} by default{more}"
    return dataclasses.field(default=None, metadata=_metadata(read, meaning))


@names_unknown
@dataclasses.dataclass
class FaultToleranceConfig:
    """Limits of the ranks, and what happens when one is exceeded. Timeouts are in seconds; None never fires.

    A value is checked when it is set. Raises: ConfigurationError, ConfigurationTypeError."""

    workload_check_interval: float = dataclasses.field(
        default=5.0,
        metadata=_metadata(
            _seconds,
            "accepted for compatibility, without effect: a monitor wakes when a limit is due",
        ),
    )
    initial_rank_heartbeat_timeout: float | None = dataclasses.field(
        default=3600.0,
        metadata=_metadata(_timeout, "longest time from init_workload_monitoring() to the first heartbeat"),
    )
    rank_heartbeat_timeout: float | None = dataclasses.field(
        default=2700.0, metadata=_metadata(_timeout, "longest time between two heartbeats")
    )
    rank_section_timeouts: dict[str, float | None] = dataclasses.field(
        default_factory=dict, metadata=_metadata(_timeouts, "longest time that a section may be open, by its name")
    )
    rank_out_of_section_timeout: float | None = dataclasses.field(
        default=None,
        metadata=_metadata(_timeout, "longest time in which no section is open, once one has been closed"),
    )
    step_timeout: float | None = dataclasses.field(
        default=None,
        metadata=_metadata(
            _timeout,
            "longest time without a higher resilience.step(n), after the first call; during the warm-up after each "
            "start at least hang_first_limit (its default if detect_hangs is off), and until the second step at least "
            "6 times that",
        ),
    )
    detect_hangs: bool | None = _of_variable("detect_hangs", _yes_or_no, "; in a RankMonitorServer of your own: false")
    hang_first_limit: float | None = _of_variable("hang_first_limit", _timeout)
    hang_least_limit: float | None = _of_variable("hang_least_limit", _timeout)
    end_suspected_ranks: bool | None = dataclasses.field(
        default=False,
        metadata=_metadata(
            _yes_or_no,
            "end a rank before its learned limit if three things hold: it has been silent for 1.25 times its longest "
            "healthy silence, it stands still outside a collective, and all other ranks of its node wait in one",
        ),
    )
    num_warmup_iterations: int = dataclasses.field(
        default=5,
        metadata=_metadata(
            _count,
            "number of sections of each name, of gaps between heartbeats, and of gaps between steps, that count as "
            "warm-up after each start",
        ),
    )
    warmup_rank_heartbeat_timeout: float | None = dataclasses.field(
        default=None,
        metadata=_metadata(_timeout, "longest time between two heartbeats during the warm-up; none: as usual"),
    )
    warmup_rank_section_timeouts: dict[str, float | None] = dataclasses.field(
        default_factory=dict,
        metadata=_metadata(
            _timeouts,
            "longest time that a section may be open during the warm-up, by its name; other sections: as usual",
        ),
    )
    safety_factor: float = dataclasses.field(
        default=5.0,
        metadata=_metadata(_factor, "factor: a calculated limit is the longest observed time multiplied by it"),
    )
    rank_termination_signal: signal.Signals = dataclasses.field(
        default=signal.SIGKILL, metadata=_metadata(_signal, "signal sent to a rank that has exceeded a limit")
    )
    log_level: int = dataclasses.field(
        default=LOG_LEVELS["INFO"],
        metadata=_metadata(_log_level, "lowest level of the launcher's messages on standard error"),
    )
    restart_policy: RestartPolicy = dataclasses.field(
        default="any-failed",
        metadata=_metadata(
            _policy,
            "any-failed: all workers start again if one fails; min-healthy: only when fewer nodes are healthy than the "
            "minimum of --nnodes",
        ),
    )
    use_infra_group_rank: bool | None = dataclasses.field(
        default=None,
        metadata=_metadata(
            _yes_or_no, "take a node's group rank from SLURM_PROCID, else GROUP_RANK; none: only if one of them is set"
        ),
    )
    node_health_check_interval: float = dataclasses.field(
        default=5.0, metadata=_metadata(_seconds, "time between two checks of a node's devices while workers run")
    )

    def __setattr__(self, name: str, value: Any) -> None:
        field = FIELDS.get(name)
        if field is None:
            raise ConfigurationError(f"there is no setting {name!r}; there are {', '.join(FIELDS)}", option=name)
        object.__setattr__(self, name, checked(field, value))
        if "_given" in vars(self):
            object.__setattr__(self, "_given", vars(self)["_given"] | {name})  # a new set: a copy shares this one

    def __post_init__(self) -> None:
        object.__setattr__(self, "_given", frozenset())

    def __eq__(self, other: object) -> bool:
        """Return True if both have the same effect: a limit that is a default may be weaker than one that is set."""
        if not isinstance(other, FaultToleranceConfig):
            return NotImplemented
        is_same = all(getattr(self, name) == getattr(other, name) for name in FIELDS)
        return is_same and not (self.given ^ other.given) & HEARTBEATS.keys()

    @property
    def given(self) -> set[str]:
        """Return the names of the settings that were set explicitly, or that differ from their default. In a copy by
        `dataclasses.replace` all settings count as set that differ from their default, and no others."""
        different = {name for name, field in FIELDS.items() if getattr(self, name) != _default(field)}
        names: set[str] = different | vars(self)["_given"]
        return names

    @classmethod
    def from_kwargs(cls, ignore_not_recognized: bool = True, **kwargs: Any) -> FaultToleranceConfig:
        """Return the settings, with these in place of the defaults. A warning names unknown settings.

        ignore_not_recognized: False raises an error instead. Raises: ConfigurationError."""
        return cls._from(kwargs, ignore_not_recognized, SECTION)

    @classmethod
    def _from(cls, settings: Mapping[str, Any], ignore_not_recognized: bool, source: str) -> FaultToleranceConfig:
        settings = without_settings_of_others(settings)
        unknown = sorted(set(settings) - set(FIELDS))
        if unknown:
            message = f"not recognized: {', '.join(unknown)}; {hint_at(unknown, FIELDS)}"
            if not ignore_not_recognized:
                raise ConfigurationError(message, unknown=unknown)
            warnings.warn(f"settings of {source} are ignored: {message}", stacklevel=3)
        config = cls()
        for name, value in settings.items():
            if name in FIELDS:
                setattr(config, name, value)
        return config

    @classmethod
    def from_yaml_file(cls, cfg_path: str | Path, ignore_not_recognized: bool = True) -> FaultToleranceConfig:
        """Return the settings of the file's mapping `fault_tolerance`, which may be anywhere in the file.

        Raises: ConfigurationError if there is no such mapping or several, or if it is not valid; OSError."""
        values = _read_section(Path(cfg_path))
        try:
            return cls._from(values, ignore_not_recognized, f"{SECTION} in {cfg_path}")
        except ConfigurationError as error:
            raise type(error)(f"{cfg_path}: {error}", **vars(error)) from error

    @classmethod
    def from_args(
        cls, args: argparse.Namespace, cfg_file_arg: str | None = "ft_cfg_path", ft_args_prefix: str = "ft_"
    ) -> FaultToleranceConfig:
        """Return the settings given by flags, the others from the file of `--ft-cfg-path`.

        args: from a parser with `add_arguments`. An attribute that is missing or None is a flag that was not given.
        cfg_file_arg: its attribute for the file, None for no file. ft_args_prefix: what precedes a setting's name in
        its attribute. Raises: ConfigurationError, OSError."""
        path = getattr(args, cfg_file_arg, None) if cfg_file_arg else None
        config = cls() if path is None else cls.from_yaml_file(path)
        for name in FIELDS:
            value = getattr(args, ft_args_prefix + name, None)
            if value is not None:
                setattr(config, name, value)
        return config

    def to_yaml_file(self, cfg_path: str | Path) -> None:
        """Write the settings that were set, in the form that `from_yaml_file` reads. Raises: OSError."""
        names = {number: name for name, number in LOG_LEVELS.items()}
        values = {name: getattr(self, name) for name in FIELDS if name in self.given}
        if "rank_termination_signal" in values:
            values["rank_termination_signal"] = self.rank_termination_signal.name
        if "log_level" in values:
            values["log_level"] = names.get(self.log_level, self.log_level)
        Path(cfg_path).write_bytes(encoding.to_yaml({SECTION: values}).encode())


HEARTBEATS = {"initial_rank_heartbeat_timeout": "initial_heartbeat", "rank_heartbeat_timeout": HEARTBEAT}
"""Settings that are limits by default, and the names of these limits."""

FIELDS: Mapping[str, dataclasses.Field[Any]] = {field.name: field for field in dataclasses.fields(FaultToleranceConfig)}


def _default(field: dataclasses.Field[Any]) -> Any:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def checked(field: dataclasses.Field[Any], value: Any) -> Any:
    """Return the value of a setting in its stored form. Raises: ConfigurationError, ConfigurationTypeError."""
    read = field.metadata["read"]
    try:
        return read(value)
    except (TypeError, ValueError, OverflowError) as error:
        kind = ConfigurationTypeError if isinstance(error, TypeError) else ConfigurationError
        raise kind(f"{field.name} is {value!r}, expected {FORMS[read][0]}", option=field.name, value=value) from error


def to_limits(config: FaultToleranceConfig) -> Limits:
    """Return the limits for the ranks' monitors: past a limit a rank is ended.

    Raises: ConfigurationError, ConfigurationTypeError for a wrong value that was added to a mapping."""
    sections = checked(FIELDS["rank_section_timeouts"], config.rank_section_timeouts)
    warmup = checked(FIELDS["warmup_rank_section_timeouts"], config.warmup_rank_section_timeouts)
    return Limits(
        step=Limit(hard=config.step_timeout),
        heartbeat=Limit(hard=config.rank_heartbeat_timeout),
        initial_heartbeat=Limit(hard=config.initial_rank_heartbeat_timeout),
        out_of_section=Limit(hard=config.rank_out_of_section_timeout),
        sections={name: Limit(hard=limit) for name, limit in sections.items()},
        warmup={name: Limit(hard=limit) for name, limit in warmup.items()},
        warmup_heartbeat=None if (warm := config.warmup_rank_heartbeat_timeout) is None else Limit(hard=warm),
        warmup_occurrences=config.num_warmup_iterations,
        signal=config.rank_termination_signal.name,
        grace=0.0 if config.rank_termination_signal is signal.SIGKILL else GRACE,
        safety_factor=config.safety_factor,
        defaults=tuple(name for setting, name in HEARTBEATS.items() if setting not in config.given),
        ends_suspects=bool(config.end_suspected_ranks),
    )


def rule_of(config: FaultToleranceConfig, settings: Settings) -> Rule | None:
    """Return the rule for silences without a limit; None if it is switched off."""
    is_on = settings.detect_hangs if config.detect_hangs is None else config.detect_hangs
    first, least = config.hang_first_limit, config.hang_least_limit
    return Rule(first or settings.hang_first_limit, least or settings.hang_least_limit) if is_on else None


def from_limits(limits: Limits) -> FaultToleranceConfig:
    """Return the settings that yield these limits in `to_limits`, and their rule in `rule_of`; the others have their
    default."""
    rule = limits.rule
    config = FaultToleranceConfig(
        rank_section_timeouts={name: limit.hard for name, limit in limits.sections.items()},
        rank_out_of_section_timeout=limits.out_of_section.hard,
        step_timeout=limits.step.hard,
        num_warmup_iterations=limits.warmup_occurrences,
        warmup_rank_heartbeat_timeout=None if limits.warmup_heartbeat is None else limits.warmup_heartbeat.hard,
        warmup_rank_section_timeouts={name: limit.hard for name, limit in limits.warmup.items()},
        safety_factor=limits.safety_factor,
        rank_termination_signal=signal.Signals[limits.signal],
        end_suspected_ranks=limits.ends_suspects,
        detect_hangs=rule is not None,
        hang_first_limit=None if rule is None else rule.first,
        hang_least_limit=None if rule is None else rule.least,
    )
    heartbeats = (limits.initial_heartbeat.hard, limits.heartbeat.hard)
    for (setting, name), hard in zip(HEARTBEATS.items(), heartbeats, strict=True):
        if name not in limits.defaults or hard != getattr(config, setting):
            setattr(config, setting, hard)
    return config


# -- flags ---------------------------------------------------------------------------------------


def flag(name: str) -> str:
    """Return the flag of a setting."""
    return "--ft-" + name.replace("_", "-")


def add_arguments(parser: argparse._ActionsContainer) -> None:
    """Add a flag for each setting to a parser, or to its group. The namespace only has flags that were given."""
    for field in FIELDS.values():
        if field.metadata["read"] is _yes_or_no:
            _add_switch(parser, field)
            continue
        parser.add_argument(
            *_spellings(field.name),
            dest=f"ft_{field.name}",
            default=argparse.SUPPRESS,
            type=_reader(field),
            metavar=FORMS[field.metadata["read"]][1],
            help=_help(field),
        )


def has_switch(args: argparse.Namespace) -> bool:
    """Return True if a flag was given whose value follows `=`."""
    return any(field.metadata["read"] is _yes_or_no and hasattr(args, f"ft_{name}") for name, field in FIELDS.items())


def _spellings(name: str, prefix: str = "--ft-", suffix: str = "") -> list[str]:
    """Return a flag with hyphens, and with underscores, as in the compatible launcher."""
    return list(dict.fromkeys(prefix + spelling + suffix for spelling in (name.replace("_", "-"), name)))


def _reader(field: dataclasses.Field[Any]) -> Callable[[str], str]:
    def read(value: str) -> str:
        """Check during parsing, so that the error names the flag. Keep the text, because `none` is a value too."""
        try:
            checked(field, value)
        except ConfigurationError as error:
            raise argparse.ArgumentTypeError(str(error)) from error
        return value

    return read


def _add_switch(parser: argparse._ActionsContainer, field: dataclasses.Field[Any]) -> None:
    """Add a flag whose optional value follows `=`, because the word after a blank is the script."""

    def add(spellings: list[str], value: str, text: str) -> None:
        parser.add_argument(
            *spellings,
            dest=f"ft_{field.name}",
            default=argparse.SUPPRESS,
            action="store_const",
            const=value,
            help=text,
        )

    name = field.name
    add(_spellings(name), "true", f"{_help(field)}. Or {flag(name)}=False, or --no-{flag(name)[2:]}")
    for text in (*YES_OR_NO, *(text.capitalize() for text in YES_OR_NO if text.isalpha()), "none", "None"):
        add(_spellings(name, suffix=f"={text}"), text, argparse.SUPPRESS)
    add(_spellings(name, prefix="--no-ft-"), "false", argparse.SUPPRESS)


def _help(field: dataclasses.Field[Any]) -> str:
    return f"{field.metadata['help']}; default {shown_default(field)}".replace("%", "%%")


def shown_default(field: dataclasses.Field[Any]) -> str:
    """Return a default in the form that a user would write."""
    if field.default is dataclasses.MISSING or field.default is None:
        return "none"
    if isinstance(field.default, signal.Signals):
        return field.default.name
    if field.metadata["read"] is _log_level:
        return {number: name for name, number in LOG_LEVELS.items()}[field.default]
    return f"{field.default:g}" if isinstance(field.default, float) else str(field.default)


# -- files ---------------------------------------------------------------------------------------


def _read_section(path: Path) -> Mapping[str, Any]:
    """Return the one mapping `fault_tolerance` of a YAML file."""

    try:
        document = encoding.from_yaml(path.read_bytes())
    except DecodeError as error:
        raise ConfigurationError(f"{path} is not YAML: {error}") from error
    places = list(_places(document, ""))
    if len(places) != 1:
        where = ": " + ", ".join(place for place, _ in places) if places else ""
        raise ConfigurationError(f"{path} has {len(places) or 'no'} mappings {SECTION!r}, expected one{where}")
    place, values = places[0]
    if not isinstance(values, Mapping | None):
        raise ConfigurationTypeError(f"{path}: {place} is a {type(values).__name__}, expected a mapping")
    if not all(isinstance(name, str) for name in values or ()):
        raise ConfigurationTypeError(f"{path}: {place} has keys that are not names: {list(values or ())}")
    return values or {}


def _places(document: Any, place: str) -> Iterator[tuple[str, Any]]:
    if isinstance(document, Mapping):
        for key, value in document.items():
            inner = f"{place}.{key}" if place else str(key)
            if key == SECTION:
                yield inner, value
            else:
                yield from _places(value, inner)
    elif isinstance(document, list):
        for number, value in enumerate(document):
            yield from _places(value, f"{place}[{number}]")
