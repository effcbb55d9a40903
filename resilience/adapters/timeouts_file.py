"""The file of limits: YAML for people, read back whole or refused with its line."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import msgspec

from resilience.adapters import files
from resilience.core import encoding
from resilience.core.events import TimeoutsLoaded
from resilience.core.timeouts import SCHEMA, Timeouts, in_force, matches
from resilience.core.watch import Limits
from resilience.errors import ConfigurationError, DecodeError

NAME = "timeouts.yaml"
AUTO = "auto"
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
        return encoding.from_builtins(loaded, Timeouts, strict=False)
    except DecodeError as error:
        raise ConfigurationError(f"{path}: {error}; write it again with `resilience calibrate`") from error


def learned(
    source: str, run_dir: Path, base: Limits, fingerprint: str, is_shadow: bool, margin: float | None = None
) -> tuple[Limits, TimeoutsLoaded]:
    """Return the limits of a run, and what to tell of them.

    source: a file, or `auto` for the newest one beside runs of this configuration in run_dir; where there is
    none `base` holds, and the event says so. Raises: ConfigurationError for a file that cannot be read."""
    path = Path(source) if source != AUTO else newest(run_dir, fingerprint)
    if path is None:
        note = f"no {NAME} of this configuration ({fingerprint}) below {run_dir}; configured or default limits hold"
        return base, TimeoutsLoaded(source, 0, False, is_shadow, note)
    found = read(path)
    is_same = matches(found, fingerprint)
    note = (
        ""
        if is_same
        else (
            f"it was learned from configuration {found.fingerprint}, this run is {fingerprint}: limits are at least 5 "
            "times the largest value; calibrate on runs of this configuration"
        )
    )
    limits = in_force(found, base, fingerprint, margin)
    told = TimeoutsLoaded(str(path), len(limits.learned), is_same, is_shadow, note)
    if is_shadow:
        return msgspec.structs.replace(base, shadow=msgspec.structs.replace(limits, learned={}, rule=None)), told
    return limits, told


def newest(run_dir: Path, fingerprint: str) -> Path | None:
    """Return the newest file of limits beside runs of this configuration, None if there is none."""
    candidates = []
    for path in run_dir.glob(f"*/{NAME}"):
        with contextlib.suppress(ConfigurationError, OSError):
            if read(path).fingerprint == fingerprint:
                candidates.append((path.stat().st_mtime_ns, path))
    return max(candidates)[1] if candidates else None


def _rounded(value: Any) -> Any:
    """Leave six digits: what a person reads, and more than a limit needs."""
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(item) for item in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value
