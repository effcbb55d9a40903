"""The shop window of the compatible names: complete, and as lazy as it can be."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys

import pytest

from resilience import fault_tolerance
from tests.support.server import ROOT

SHOW = """
import json, sys
import resilience.fault_tolerance as ft
window = sorted(sys.modules)
ft.FaultToleranceConfig(rank_heartbeat_timeout=3), ft.RankMonitorClient(), ft.RankMonitorServer
ft.WorkloadControlRequest(ft.WorkloadAction.ShutdownWorkload), ft.RankMonitorClientError
print(json.dumps([window, sorted(sys.modules)]))
"""
HEAVY = {"torch", "numpy", "opentelemetry", "prometheus_client", "structlog", "yaml", "rich"}


@pytest.mark.parametrize("name", ["RankMonitorState", "RankMonitorStateMachine", "InvalidStateTransitionException"])
def test_name_that_is_not_here_says_what_to_use(name: str) -> None:
    with pytest.raises(AttributeError, match=f"no attribute '{name}': a monitor's state is not public; `resilience st"):
        getattr(fault_tolerance, name)


def test_neither_window_nor_names_load_torch_or_an_exporter() -> None:
    shown = subprocess.run([sys.executable, "-c", SHOW], cwd=ROOT, capture_output=True, text=True, check=True)
    window, names = json.loads(shown.stdout)
    assert [name for name in window if name.startswith("resilience.") and name != "resilience.fault_tolerance"] == []
    assert "resilience.monitor.rank_client" in names  # else this looks at nothing
    assert {name.partition(".")[0] for name in names} & HEAVY == set()


def test_every_name_is_there_and_no_other() -> None:
    for name in fault_tolerance.__all__:
        assert getattr(fault_tolerance, name).__name__ == name
        assert name in dir(fault_tolerance)
    with pytest.raises(AttributeError, match="has no attribute 'RankMonitor'"):
        fault_tolerance.RankMonitor  # noqa: B018


@pytest.mark.parametrize(
    ("call", "parameters"),
    [
        ("init_workload_monitoring", ["num_warmup_iters"]),
        ("shutdown_workload_monitoring", []),
        ("send_heartbeat", []),
        ("start_section", ["section"]),
        ("end_section", ["section"]),
        ("end_all_sections", []),
        ("calculate_and_set_timeouts", ["skip_if_not_ready"]),  # 0.2
        ("calculate_and_set_hb_timeouts", ["skip_if_not_ready"]),
        (
            "calculate_and_set_section_timeouts",
            ["selected_sections", "calc_out_of_section", "skip_if_not_ready", "method"],  # the last one is ours
        ),
        ("state_dict", []),
        ("load_state_dict", ["state"]),
        ("send_workload_control_request", ["req"]),
    ],
)
def test_client_has_the_calls_of_the_compatible_api(call: str, parameters: list[str]) -> None:
    signature = inspect.signature(getattr(fault_tolerance.RankMonitorClient, call))
    assert list(signature.parameters) == ["self", *parameters]


def test_actions_are_those_of_the_compatible_api() -> None:
    assert {action.name: action.value for action in fault_tolerance.WorkloadAction} == {
        "Continue": 0,
        "ExcludeThisNode": 1,
        "ShutdownWorkload": 2,
    }


def test_server_starts_as_the_compatible_one_does() -> None:
    signature = inspect.signature(fault_tolerance.RankMonitorServer.run_in_subprocess)
    assert list(signature.parameters)[:4] == ["cfg", "ipc_socket_path", "is_restarter_logger", "mp_ctx"]
