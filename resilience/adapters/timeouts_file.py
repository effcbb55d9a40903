"""The file of limits: YAML for people, read back whole or refused with its line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import yaml

from resilience.adapters import files
from resilience.core.timeouts import SCHEMA, Timeouts
from resilience.errors import ConfigurationError

HEAD = "# Written by `resilience calibrate`. Durations in seconds. What the entries mean: docs/calibration.md\n"


def write(path: Path, timeouts: Timeouts) -> None:
    """Replace the file as a whole. Raises: ConfigurationError if that fails; the old one stays then."""
    text = HEAD + yaml.safe_dump(_rounded(msgspec.to_builtins(timeouts)), sort_keys=False, width=100)
    if not files.replace(path, text.encode()):
        raise ConfigurationError(f"{path} could not be written; is there space, and may this user write there?")


def read(path: Path) -> Timeouts:
    """Read a file of limits. Raises: ConfigurationError, naming what is wrong and where."""
    try:
        loaded = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigurationError(
            f"{path}: {error.strerror or error}; a file of `resilience calibrate` was expected"
        ) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{path} is no YAML: {error}") from error
    found = loaded.get("schema") if isinstance(loaded, dict) else None
    if found != SCHEMA:
        raise ConfigurationError(
            f"{path} has schema {found!r}, expected {SCHEMA}; write it again with this version's `resilience calibrate`"
        )
    try:
        return msgspec.convert(loaded, Timeouts, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigurationError(f"{path}: {error}; write it again with `resilience calibrate`") from error


def _rounded(value: Any) -> Any:
    """Leave six digits: what a person reads, and more than a limit needs."""
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(item) for item in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value
