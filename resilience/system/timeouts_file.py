"""The file of limits: YAML for people, read back whole or refused with its line."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from resilience.calibration import rank_groups
from resilience.calibration.differences import OF_TABLE, advice, differences, harmless, serious
from resilience.calibration.limits_file import SCHEMA, Deadline, Timeouts, in_force
from resilience.errors import ConfigurationError, DecodeError
from resilience.facts import encoding
from resilience.facts.configuration import Configuration
from resilience.facts.deadlines import parse_name
from resilience.facts.events import TimeoutsLoaded
from resilience.facts.limits import Limits
from resilience.system import files

NAME = "timeouts.yaml"
AUTO = "auto"
MOST_REFUSED = 3  # most unfitting files, or deadlines without a limit, to name
HEAD = "# Written by `resilience calibrate`. Durations in seconds. What the entries mean: docs/calibration.md\n"


def write(path: Path, timeouts: Timeouts) -> None:
    """Replace the whole file. Raises: ConfigurationError if that fails; the old file then stays."""
    text = HEAD + encoding.to_yaml(_rounded(msgspec.to_builtins(timeouts)))
    if reason := files.why_not_replaced(path, text.encode()):
        raise ConfigurationError(f"{path} could not be written: {reason}; {files.TO_REPLACE}")


def read(path: Path) -> Timeouts:
    """Read a file of limits. Raises: ConfigurationError, naming what is wrong and where."""
    try:
        loaded = encoding.from_yaml(path.read_bytes())
    except OSError as error:
        raise ConfigurationError(
            f"{path}: {error.strerror or error}; expected a file written by `resilience calibrate`"
        ) from error
    except DecodeError as error:
        raise ConfigurationError(f"{path} is not YAML: {error}") from error
    schema = loaded.get("schema") if isinstance(loaded, dict) else None
    if schema is None:
        raise ConfigurationError(f"{path} is no file of limits; expected a file written by `resilience calibrate`")
    if schema != SCHEMA:
        raise ConfigurationError(
            f"{path} has schema {schema!r}, expected {SCHEMA}; rewrite it with this version's `resilience calibrate`"
        )
    try:
        timeouts: Timeouts = encoding.from_builtins(loaded, Timeouts, strict=False)
    except DecodeError as error:
        raise ConfigurationError(f"{path}: {error}; write it again with `resilience calibrate`") from error
    for what, number in (("target_false_alarms", timeouts.target_false_alarms), ("horizon_s", timeouts.horizon_s)):
        if not 0.0 < number < math.inf:
            raise ConfigurationError(f"{path}: {what} is {number!r}, expected a finite number above 0")
    for name, deadline in timeouts.deadlines.items():
        for what, limit in _limits(name, deadline):
            if limit is not None and not 0.0 < limit < math.inf:
                raise ConfigurationError(
                    f"{path}: the limit of {what} is {limit!r}, expected seconds above 0 and finite"
                )
        for group in deadline.groups:
            if not rank_groups.is_name(group.ranks):
                raise ConfigurationError(
                    f"{path}: the ranks of a group of {name!r} are {group.ranks!r}, expected text such as '0,4-7'"
                )
    return timeouts


def _limits(name: str, deadline: Deadline) -> Iterator[tuple[str, float | None]]:
    """Yield all limits of a deadline, each with what it is for."""
    yield repr(name), deadline.timeout_s
    for group in deadline.groups:
        yield f"{name!r} for ranks {group.ranks!r}", group.timeout_s
    if deadline.outside is not None:
        yield f"{name!r} outside known phases", deadline.outside.timeout_s


def learned(
    source: str, run_dir: Path, base: Limits, configuration: Configuration, is_shadow: bool, margin: float | None = None
) -> tuple[Limits, TimeoutsLoaded]:
    """Return the limits of a run, and the event about them.

    source: a file, or `auto` for the newest one that fits this configuration, and that was not learned from a table. If
    there is none, `base` is used, and the event says so. Raises: ConfigurationError for a file that cannot be read, or
    that does not fit."""
    if source == AUTO:
        chosen, refused = _newest(run_dir, configuration)
        if chosen is None:
            where = f"{NAME} for {configuration.name} in {Path.cwd()}, {run_dir} or a run folder there"
            note = f"no {where}; configured or default limits apply" + "".join(f"; {mismatch}" for mismatch in refused)
            return base, TimeoutsLoaded(source, 0, False, is_shadow, note)
        path, timeouts = chosen
    else:
        path = Path(source)
        timeouts = read(path)
    unequal = differences(timeouts.configuration, configuration, timeouts.ranks)
    mismatch = _mismatch(timeouts, configuration)
    if mismatch:
        raise ConfigurationError(
            f"{path} was learned from {timeouts.configuration.name} and does not fit this run: {mismatch}",
            option="timeouts",
            value=source,
        )
    unlike = harmless(unequal)
    limits = in_force(timeouts, base, margin, is_equal=not unlike)
    is_of_table = bool(timeouts.configuration.table)
    if is_of_table:
        notes = [f"learned from {timeouts.configuration.name}; {OF_TABLE}, so make sure that it was such a job"]
    else:
        notes = [f"it fits, with differences: {unlike}"] if unlike else []
        if source == AUTO:
            notes += _other_script(timeouts.configuration, configuration)
    notes += [] if limits.learned else [_without_effect(timeouts)]
    event = TimeoutsLoaded(str(path), len(limits.learned), not is_of_table, is_shadow, "; ".join(notes))
    if is_shadow:
        return msgspec.structs.replace(base, shadow=msgspec.structs.replace(limits, rule=None)), event
    return limits, event


def _other_script(before: Configuration, now: Configuration) -> list[str]:
    """Return a note if a script in another folder gives the workload its name: it may be another program."""
    if now.key or before.script == now.script:
        return []
    return [
        f"learned from the script {before.script}, this run is of {now.script}: "
        "if these are different workloads, give each one its own --calibration-key"
    ]


def _without_effect(timeouts: Timeouts) -> str:
    """Return why no limit of a file is in force, and what applies."""
    deadlines = {name: known for name, known in timeouts.deadlines.items() if parse_name(name)[1] is None}
    refused = [f"{name}: {known.reason}" for name, known in deadlines.items() if known.timeout_s is None]
    reason = "it holds no limit" if len(refused) == len(deadlines) else "its limits are also set by hand"
    return f"{reason}; configured or default limits apply" + "".join(f"; {text}" for text in refused[:MOST_REFUSED])


def _mismatch(timeouts: Timeouts, now: Configuration) -> str:
    """Return why the limits do not fit this run and what to do about it, empty if they fit."""
    before = timeouts.configuration
    reason = serious(differences(before, now, timeouts.ranks))
    return reason and f"{reason}{advice(before, now, timeouts.ranks)}"


def _newest(run_dir: Path, configuration: Configuration) -> tuple[tuple[Path, Timeouts] | None, list[str]]:
    """Return the newest file that fits this configuration, None without any, and why other files do not fit."""
    fitting, refused = [], []
    for path in (Path.cwd() / NAME, run_dir / NAME, *sorted(files.matching(run_dir, f"*/{NAME}"))):
        try:
            age = path.stat().st_mtime_ns
        except OSError:
            continue
        try:
            timeouts = read(path)
        except ConfigurationError as error:
            refused.append(str(error))
            continue
        mismatch = _mismatch(timeouts, configuration)
        if timeouts.configuration.table:
            mismatch = f"learned from {timeouts.configuration.name}; {OF_TABLE}: name the file to use it"
        if mismatch:
            refused.append(f"{path}: {mismatch}")
        else:
            fitting.append((age, path, timeouts))
    newest = max(fitting, key=lambda candidate: candidate[:2], default=None)
    return (None if newest is None else newest[1:]), refused[-MOST_REFUSED:]


def _rounded(value: Any) -> Any:
    """Round to six digits: readable, and more than a limit needs."""
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(item) for item in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value
