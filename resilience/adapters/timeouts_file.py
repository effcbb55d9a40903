"""The file of limits: YAML for people, read back whole or refused with its line."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import msgspec

from resilience.adapters import files
from resilience.core import encoding
from resilience.core.configuration import Configuration, differences, harmless, serious
from resilience.core.events import TimeoutsLoaded
from resilience.core.timeouts import SCHEMA, Timeouts, in_force
from resilience.core.watch import Limits
from resilience.errors import ConfigurationError, DecodeError

NAME = "timeouts.yaml"
AUTO = "auto"
MOST_REFUSED = 3  # files that do not fit, and are named
HEAD = "# Written by `resilience calibrate`. Durations in seconds. What the entries mean: docs/calibration.md\n"


def write(path: Path, timeouts: Timeouts) -> None:
    """Replace the file as a whole. Raises: ConfigurationError if that fails; the old one stays then."""
    text = HEAD + encoding.to_yaml(_rounded(msgspec.to_builtins(timeouts)))
    if not files.replace(path, text.encode()):
        raise ConfigurationError(f"{path} could not be written; is there space, and may this user write there?")


def read(path: Path) -> Timeouts:
    """Read a file of limits. Raises: ConfigurationError, naming what is wrong and where."""
    try:
        loaded = encoding.from_yaml(path.read_bytes())
    except OSError as error:
        raise ConfigurationError(
            f"{path}: {error.strerror or error}; a file of `resilience calibrate` was expected"
        ) from error
    except DecodeError as error:
        raise ConfigurationError(f"{path} is no YAML: {error}") from error
    found = loaded.get("schema") if isinstance(loaded, dict) else None
    if found != SCHEMA:
        raise ConfigurationError(
            f"{path} has schema {found!r}, expected {SCHEMA}; write it again with this version's `resilience calibrate`"
        )
    try:
        timeouts: Timeouts = encoding.from_builtins(loaded, Timeouts, strict=False)
    except DecodeError as error:
        raise ConfigurationError(f"{path}: {error}; write it again with `resilience calibrate`") from error
    for name, deadline in timeouts.deadlines.items():
        limit = deadline.timeout_s
        if limit is not None and not 0.0 < limit < math.inf:
            raise ConfigurationError(f"{path}: the limit of {name!r} is {limit!r}, expected seconds above 0 and finite")
    return timeouts


def learned(
    source: str, run_dir: Path, base: Limits, own: Configuration, is_shadow: bool, margin: float | None = None
) -> tuple[Limits, TimeoutsLoaded]:
    """Return the limits of a run, and what to tell of them.

    source: a file, or `auto` for the newest one that fits this configuration; where there is none `base` holds, and the
    event says so. Raises: ConfigurationError for a file that cannot be read, or that does not fit."""
    if source == AUTO:
        chosen, refused = _newest(run_dir, own)
        if chosen is None:
            where = f"{NAME} for {own.name} in {Path.cwd()}, {run_dir} or a run folder there"
            note = f"no {where}; configured or default limits hold" + "".join(f"; {why}" for why in refused)
            return base, TimeoutsLoaded(source, 0, False, is_shadow, note)
        path, found = chosen
    else:
        path = Path(source)
        found = read(path)
    unlike = differences(found.configuration, own, found.ranks)
    why = serious(unlike)
    if why:
        raise ConfigurationError(
            f"{path} was learned from {found.configuration.name} and does not fit this run: {why}",
            option="timeouts",
            value=source,
        )
    note = harmless(unlike)
    limits = in_force(found, base, margin, is_equal=not note)
    told = TimeoutsLoaded(
        str(path), len(limits.learned), True, is_shadow, note and f"it fits, though not all is equal: {note}"
    )
    if is_shadow:
        return msgspec.structs.replace(base, shadow=msgspec.structs.replace(limits, learned={}, rule=None)), told
    return limits, told


def _newest(run_dir: Path, own: Configuration) -> tuple[tuple[Path, Timeouts] | None, list[str]]:
    """Return the newest file that fits this configuration, None without any; and why others do not fit."""
    fitting, refused = [], []
    for path in (Path.cwd() / NAME, run_dir / NAME, *sorted(run_dir.glob(f"*/{NAME}"))):
        try:
            age = path.stat().st_mtime_ns
        except OSError:
            continue
        try:
            found = read(path)
        except ConfigurationError as error:
            refused.append(str(error))
            continue
        why = serious(differences(found.configuration, own, found.ranks))
        if why:
            refused.append(f"{path}: {why}")
        else:
            fitting.append((age, path, found))
    newest = max(fitting, key=lambda each: each[:2], default=None)
    return (None if newest is None else newest[1:]), refused[-MOST_REFUSED:]


def _rounded(value: Any) -> Any:
    """Leave six digits: what a person reads, and more than a limit needs."""
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(item) for item in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value
