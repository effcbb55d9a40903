"""Code that was written for the compatible API runs with another name of the package in its imports."""

from __future__ import annotations

import argparse
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from resilience.fault_tolerance import FaultToleranceConfig
from resilience.inprocess.state import State
from tests.support.server import ROOT

NAMES = {
    "fault_tolerance.config": ("FaultToleranceConfig",),
    "fault_tolerance.data": (
        "FT_RANK_MONITOR_IPC_SOCKET_ENV_VAR",
        "HeartbeatTimeouts",
        "SectionTimeouts",
        "WorkloadAction",
        "WorkloadControlRequest",
    ),
    "fault_tolerance.rank_monitor_client": ("RankMonitorClient", "RankMonitorClientError"),
    "fault_tolerance.rank_monitor_server": ("RankMonitorServer",),
    "inprocess.wrap": ("CallWrapper", "Wrapper"),
    "inprocess.compose": ("Compose",),
}


@pytest.mark.parametrize(("module", "name"), [(module, name) for module, names in NAMES.items() for name in names])
def test_name_is_in_the_module_where_the_compatible_api_has_it(module: str, name: str) -> None:
    package, _, _ = module.partition(".")
    thing = getattr(importlib.import_module(f"resilience.{module}"), name)
    assert thing is getattr(importlib.import_module(f"resilience.{package}"), name, thing)


@pytest.mark.parametrize("module", ["wrap", "compose", "tools", "state"])
def test_module_is_an_attribute_before_anything_has_imported_it(module: str) -> None:
    code = f"import resilience.inprocess as inprocess; print(inprocess.{module}.__name__)"
    shown = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert shown.stdout == f"resilience.inprocess.{module}\n"


def test_module_of_the_wrapper_lacks_other_names() -> None:
    from resilience.inprocess import wrap

    with pytest.raises(AttributeError, match="has no attribute 'HealthCheckPassed'"):
        wrap.HealthCheckPassed  # noqa: B018


def test_state_reads_its_place_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    state = State()
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "4")
    state.get_distributed_vars()
    assert (state.rank, state.world_size, state.initial_rank, state.active_world_size) == (2, 4, 0, 1)


def test_arguments_of_any_parser_are_settings(tmp_path: Path) -> None:
    path = tmp_path / "limits.yaml"
    path.write_text("fault_tolerance: {safety_factor: 3, rank_heartbeat_timeout: 20}")
    arguments = argparse.Namespace(my_safety_factor=4.0, my_log_level=None, file=str(path), ft_safety_factor=9.0)
    config = FaultToleranceConfig.from_args(arguments, cfg_file_arg="file", ft_args_prefix="my_")
    assert (config.safety_factor, config.rank_heartbeat_timeout) == (4.0, 20.0)
    without_file = FaultToleranceConfig.from_args(arguments, cfg_file_arg=None, ft_args_prefix="my_")
    assert without_file.rank_heartbeat_timeout == FaultToleranceConfig().rank_heartbeat_timeout
