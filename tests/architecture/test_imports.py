"""What an import brings along."""

from __future__ import annotations

import json
import subprocess
import sys

from tests.support.server import ROOT

EXPORTERS = {"grpc", "opentelemetry", "prometheus_client", "requests", "rich", "structlog", "urllib3", "yaml"}

SHOW = """
import json, sys
import torch.distributed
before = set(sys.modules)
import resilience
import resilience.inprocess as inprocess
inprocess.Wrapper, inprocess.CallWrapper, inprocess.Compose
resilience.heartbeat, resilience.section, resilience.step
print(json.dumps(sorted(set(sys.modules) - before)))
"""


def test_wrapper_and_signs_of_life_load_no_exporter() -> None:
    shown = subprocess.run([sys.executable, "-c", SHOW], cwd=ROOT, capture_output=True, text=True, check=True)
    loaded = json.loads(shown.stdout)
    assert "resilience.inprocess.wrap" in loaded  # else this looks at nothing
    assert {name.partition(".")[0] for name in loaded} & EXPORTERS == set()


FOR_USERS = """
import json, sys
import torch.distributed
before = set(sys.modules)
from resilience.inprocess import CallWrapper, Wrapper
print(json.dumps(sorted(set(sys.modules) - before)))
"""


def test_names_that_users_import_load_neither_monitor_nor_session_nor_spans() -> None:
    shown = subprocess.run([sys.executable, "-c", FOR_USERS], cwd=ROOT, capture_output=True, text=True, check=True)
    loaded = set(json.loads(shown.stdout))
    assert "resilience.inprocess._runtime.call" in loaded
    heavy = (
        "resilience.monitor.",
        "resilience.telemetry.",
        "resilience.inprocess._runtime.session",
        "resilience.inprocess._runtime.monitor_store",
    )
    assert [name for name in loaded if name.startswith(heavy)] == []


FRAMEWORKS = """
import importlib, json, pkgutil, sys
import resilience
own = ("integrations.lightning", "integrations.transformers")
for module in pkgutil.walk_packages(resilience.__path__, "resilience."):
    if not module.name.endswith((*own, ".__main__")):
        try:
            importlib.import_module(module.name)
        except ModuleNotFoundError as error:
            assert error.name in ("duckdb", "etcd"), error
print(json.dumps(sorted(sys.modules)))
"""


def test_only_a_frameworks_own_callback_imports_it() -> None:
    shown = subprocess.run([sys.executable, "-c", FRAMEWORKS], cwd=ROOT, capture_output=True, text=True, check=True)
    loaded = json.loads(shown.stdout.splitlines()[-1])
    assert {"resilience.integrations.watching", "resilience.launcher.agent"} <= set(loaded)
    assert {name.partition(".")[0] for name in loaded} & {"lightning", "pytorch_lightning", "transformers"} == set()


def test_fault_injection_is_reachable_from_the_package_alone() -> None:
    code = "import resilience.inprocess as inprocess; print(inprocess.tools.inject_fault.Fault.KILL.name)"
    shown = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert shown.stdout == "KILL\n"


def test_mutants_are_judged_by_the_examples_of_the_suite_however_long_these_take() -> None:
    code = (
        "import tests.mutate\n"
        "from tests.unit.core import test_cycle_nodes as tests_of_nodes\n"
        "test = tests_of_nodes.test_last_one_knows_that_it_is_over_and_nobody_earlier\n"
        "used = test._hypothesis_internal_use_settings\n"
        "print(used.deadline, used.derandomize)"
    )
    shown = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert shown.stdout.split() == ["None", "True"]
