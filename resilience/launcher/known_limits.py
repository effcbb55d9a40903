"""Which limits do this node's monitors enforce?  The configured ones, completed by those that `--timeouts` names.

A file of limits that cannot be used is refused before the job has a run folder. After that, what the first node wrote
into the folder decides whether learned limits fit."""

from __future__ import annotations

from pathlib import Path

import msgspec
import torch
from torch.distributed.launcher.api import LaunchConfig

from resilience.core.watched import watched
from resilience.errors import DecodeError
from resilience.facts.configuration import Configuration
from resilience.facts.limits import Limits
from resilience.facts.masking import masked
from resilience.launcher.arguments import Command
from resilience.launcher.console import note
from resilience.launcher.event_reporter import NodeEvents
from resilience.monitor.config import rule_of, to_limits
from resilience.system import timeouts_file
from resilience.system.background import asked
from resilience.system.environment import Settings
from resilience.telemetry.recording import read_job


def limits_of(command: Command, settings: Settings, folder: Path, reporter: NodeEvents) -> Limits:
    """Return what the monitors enforce: the known limits, and the rule for silences that no limit covers."""
    limits = _known_limits(command, settings, folder, reporter)
    limits = msgspec.structs.replace(limits, rule=rule_of(command.config, settings))
    reporter.emit(watched(limits))
    return limits


def refuse_unfit_timeouts(command: Command, settings: Settings, configuration: Configuration) -> None:
    """Refuse a file of limits that cannot be read or does not fit, before the job has a folder.

    Raises: ConfigurationError."""
    source = command.options.timeouts or settings.timeouts
    if source is not None and source != timeouts_file.AUTO:
        timeouts_file.learned(source, Path(), to_limits(command.config), configuration, is_shadow=False)


def configuration_of(command: Command, settings: Settings, config: LaunchConfig) -> Configuration:
    """Return what this node runs: the facts on which durations depend."""
    key = settings.calibration_key if command.options.calibration_key is None else command.options.calibration_key
    return Configuration(
        command.torchrun.training_script,
        key,
        config.max_nodes * config.nproc_per_node,
        config.nproc_per_node,
        masked(command.torchrun.training_script_args),
        str(torch.__version__),
    )


def _known_limits(command: Command, settings: Settings, folder: Path, reporter: NodeEvents) -> Limits:
    """Return the configured limits, completed by learned limits."""
    configured = to_limits(command.config)
    source = command.options.timeouts or settings.timeouts
    if source is None:
        return configured
    is_shadow = command.options.timeouts_shadow or settings.timeouts_shadow
    limits, event = timeouts_file.learned(source, folder.parent, configured, _configuration(folder), is_shadow)
    reporter.emit(event)
    if event.note:
        note(f"--timeouts {source}: {event.note}")
    return limits


def _configuration(folder: Path) -> Configuration:
    """Return the configuration in the run folder, as the first node wrote it; empty if unreadable."""
    try:
        return asked(lambda: read_job(folder)).configuration
    except (OSError, DecodeError):
        return Configuration()
