"""What an import brings along."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.support.server import ROOT

EXPORTERS = {"grpc", "opentelemetry", "prometheus_client", "requests", "rich", "structlog", "urllib3", "yaml"}

# One process, because torch takes most of its time: what it has loaded after each of three steps.
SHOW = """
import importlib, json, pkgutil, sys
import torch.distributed
before = set(sys.modules)
shown = {}
from resilience.inprocess import CallWrapper, Wrapper
shown["for users"] = sorted(set(sys.modules) - before)
import resilience
import resilience.inprocess as inprocess
inprocess.Wrapper, inprocess.CallWrapper, inprocess.Compose
resilience.heartbeat, resilience.section, resilience.step
shown["signs of life"] = sorted(set(sys.modules) - before)
own = ("integrations.lightning", "integrations.transformers")
for module in pkgutil.walk_packages(resilience.__path__, "resilience."):
    if not module.name.endswith((*own, ".__main__")):
        try:
            importlib.import_module(module.name)
        except ModuleNotFoundError as error:
            assert error.name in ("duckdb", "etcd"), error
shown["everything"] = sorted(sys.modules)
print(json.dumps(shown))
"""


@pytest.fixture(scope="module")
def loaded() -> dict[str, list[str]]:
    shown = subprocess.run([sys.executable, "-c", SHOW], cwd=ROOT, capture_output=True, text=True, check=True)
    modules: dict[str, list[str]] = json.loads(shown.stdout.splitlines()[-1])
    return modules


def test_wrapper_and_signs_of_life_load_no_exporter(loaded: dict[str, list[str]]) -> None:
    modules = loaded["signs of life"]
    assert "resilience.inprocess.wrap" in modules  # else this looks at nothing
    assert {name.partition(".")[0] for name in modules} & EXPORTERS == set()


def test_names_that_users_import_load_neither_monitor_nor_session_nor_spans(loaded: dict[str, list[str]]) -> None:
    modules = loaded["for users"]
    assert "resilience.inprocess._runtime.call" in modules
    heavy = (
        "resilience.monitor.",
        "resilience.telemetry.",
        "resilience.inprocess._runtime.session",
        "resilience.inprocess._runtime.monitor_store",
    )
    assert [name for name in modules if name.startswith(heavy)] == []


def test_only_a_frameworks_own_callback_imports_it(loaded: dict[str, list[str]]) -> None:
    modules = loaded["everything"]
    assert {"resilience.integrations.watching", "resilience.launcher.agent"} <= set(modules)
    assert {name.partition(".")[0] for name in modules} & {"lightning", "pytorch_lightning", "transformers"} == set()


def test_fault_injection_is_reachable_from_the_package_alone() -> None:
    code = "import resilience.inprocess as inprocess; print(inprocess.tools.inject_fault.Fault.KILL.name)"
    shown = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert shown.stdout == "KILL\n"


def test_mutants_are_judged_by_the_examples_of_the_suite_however_long_these_take() -> None:
    code = (
        "import tests.mutate\n"
        "from tests.unit.core import test_cycle_nodes as tests_of_nodes\n"
        "test = tests_of_nodes.test_cycle_is_over_for_the_last_node_and_for_no_node_before\n"
        "used = test._hypothesis_internal_use_settings\n"
        "print(used.deadline, used.derandomize)"
    )
    shown = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert shown.stdout.split() == ["None", "True"]
