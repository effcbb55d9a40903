"""The tree is the architecture: every module has a row, and the import contracts can fail."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from importlinter import api

from tests.support.modules import tree_of
from tests.support.server import ROOT

PACKAGE = ROOT / "resilience"


def lint(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from importlinter.cli import lint_imports_command as run; run()", "--no-cache"]
    env = {**os.environ, "PYTHONPATH": str(folder), "COLUMNS": "300"}
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)


def rows() -> list[str]:
    """Every module that the layers contract names."""
    contracts = api.read_configuration(str(ROOT / "pyproject.toml"))["contracts_options"]
    layers = next(contract["layers"] for contract in contracts if contract["type"] == "layers")
    return [name for layer in layers for name in re.findall(r"\w+", layer)]


def test_imports_keep_the_contracts() -> None:
    linted = lint(ROOT)
    assert linted.returncode == 0, linted.stdout[-3000:] + linted.stderr


def test_every_module_has_a_row() -> None:
    on_disk = {path.stem for path in PACKAGE.glob("*.py")} | {path.parent.name for path in PACKAGE.glob("*/*.py")}
    assert on_disk - {"__init__", PACKAGE.name} <= set(rows())


def test_no_folder_is_hidden_from_the_contracts() -> None:
    """A folder without __init__.py is no package to the linter, which then checks nothing in it."""
    folders = {path.parent for path in PACKAGE.rglob("*.py")}
    assert [str(folder.relative_to(ROOT)) for folder in folders if not (folder / "__init__.py").exists()] == []


VIOLATIONS = [
    ("core/watch.py", "import time", "The core decides", "resilience.core.watch -> time"),
    ("core/restart.py", "import resilience.system.files", "A module imports from the rows", "core.restart -> "),
    ("system/files.py", "import resilience.telemetry.emitter", "A module imports from", "system.files -> "),
    ("monitor/server.py", "import logging", "Only telemetry logs", "resilience.monitor.server -> logging"),
    ("nowhere.py", "", "A module imports from the rows", "- resilience.nowhere"),
    ("launcher/rendezvous/conf.py", "import resilience.launcher.agent", "The launcher's parts", "rendezvous.conf -> "),
    (
        "launcher/rendezvous/stores.py",
        "import resilience.launcher.worker.tied",
        "The launcher's",
        "rendezvous.stores -> ",
    ),
    ("launcher/worker/tied.py", "import resilience.launcher.signals", "The launcher's parts", "worker.tied -> "),
    ("launcher/worker/hidden.py", "import resilience.launcher.rendezvous.conf", "The launcher's", "worker.hidden -> "),
    ("launcher/output/streams.py", "import resilience.launcher.worker.tied", "The launcher's", "output.streams -> "),
    ("launcher/nowhere.py", "", "The launcher's parts", "- resilience.launcher.nowhere"),
    ("cli/run.py", "import resilience.inprocess._runtime.call", "Only inprocess imports", "cli.run -> "),
    ("report/page.py", "import resilience.monitor.page", "A view reads", "report.page -> resilience.monitor"),
    ("status/view.py", "import resilience.core.watch", "A view reads", "status.view -> resilience.core"),
    ("logs/notes.py", "import resilience.status.view", "A module imports from the rows", "logs.notes -> "),
    ("trace/export.py", "import resilience.report.page", "A module imports from the rows", "trace.export -> "),
    ("monitor/page.py", "import resilience.monitor.server", "The loop of a monitor", "monitor.page -> "),
    ("monitor/evidence.py", "import resilience.monitor.client", "The loop of a monitor", "monitor.evidence -> "),
    ("monitor/nowhere.py", "", "The loop of a monitor", "- resilience.monitor.nowhere"),
    ("telemetry/durations.py", "import resilience.telemetry.metrics", "Exports are above", "telemetry.durations -> "),
    ("telemetry/nowhere.py", "", "Exports are above", "- resilience.telemetry.nowhere"),
    ("history/cycles.py", "import resilience.history.history", "Timelines are above", "history.cycles -> "),
    ("history/nowhere.py", "", "Timelines are above", "- resilience.history.nowhere"),
    ("calibration/tails.py", "import resilience.calibration.fitting", "The file of limits", "calibration.tails -> "),
    ("calibration/nowhere.py", "", "The file of limits", "- resilience.calibration.nowhere"),
]


@pytest.fixture(scope="module")
def violated(tmp_path_factory: pytest.TempPathFactory) -> subprocess.CompletedProcess[str]:
    """Lint a copy of the package that has all violations."""
    folder = tmp_path_factory.mktemp("violated")
    shutil.copytree(PACKAGE, folder / PACKAGE.name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    for module, line, _, _ in VIOLATIONS:
        with (folder / PACKAGE.name / module).open("a") as file:
            file.write(f"\n{line}\n")
    return lint(folder)


@pytest.mark.parametrize(("module", "line", "broken", "because"), VIOLATIONS)
def test_violation_breaks_its_contract(
    violated: subprocess.CompletedProcess[str], module: str, line: str, broken: str, because: str
) -> None:
    assert violated.returncode == 1
    assert re.search(rf"^{broken}.* BROKEN", violated.stdout, flags=re.MULTILINE)
    assert because in violated.stdout


MUTUAL_PACKAGES = {
    (
        "resilience.inprocess",
        "resilience.inprocess._runtime",
    ): "names of the compatible API in front, their code behind",
}
MUTUAL_WITH_TYPES = {
    ("resilience.launcher.agent", "resilience.launcher.worker_env"): "the agent asks for what a worker gets of it",
    (
        "resilience.inprocess._runtime.call",
        "resilience.inprocess._runtime.monitor_process",
        "resilience.inprocess._runtime.session",
        "resilience.inprocess.wrap",
    ): "each part of a call reads the Wrapper's options, and the Wrapper makes the call",
}
IN_FUNCTIONS = "in functions"
FOR_TYPES = "for types"
AT_START = "at the start"


def test_no_modules_import_each_other() -> None:
    """Not in functions either: an import that is put off hides a cycle, it does not remove it."""
    assert cycles(imports(AT_START, IN_FUNCTIONS)) == set()


def test_modules_that_import_each_other_for_types_have_a_reason() -> None:
    assert cycles(imports(AT_START, IN_FUNCTIONS, FOR_TYPES, but="__init__.py")) == set(MUTUAL_WITH_TYPES)


def test_packages_that_import_each_other_have_a_reason() -> None:
    by_package: dict[str, set[str]] = {}
    for module, imported in imports(AT_START, IN_FUNCTIONS).items():
        package = package_of(module)
        by_package.setdefault(package, set()).update({package_of(name) for name in imported} - {package})
    assert cycles(by_package) == set(MUTUAL_PACKAGES)


def test_cycle_is_found() -> None:
    assert cycles({"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": set()}) == {("a", "b", "c")}


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


PATHS = {name_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def package_of(module: str) -> str:
    return module if PATHS[module].name == "__init__.py" else module.rpartition(".")[0]


def imports(*kinds: str, but: str = "") -> dict[str, set[str]]:
    """Return what each module of the package imports of it, by these kinds of import."""
    return {
        name: {imported for imported, kind in imports_of(tree_of(path), AT_START) if kind in kinds and imported != name}
        for name, path in PATHS.items()
        if path.name != but
    }


def imports_of(tree: ast.AST, kind: str) -> Iterator[tuple[str, str]]:
    """Yield the package's modules that a tree imports, each with the kind of the import."""
    for node in ast.iter_child_nodes(tree):
        match node:
            case ast.Import(names=names):
                yield from ((alias.name, kind) for alias in names if alias.name in PATHS)
            case ast.ImportFrom(module=str(package), names=names):
                modules = (f"{package}.{alias.name}" for alias in names)
                yield from ((name, kind) for name in (*modules, package) if name in PATHS)
            case ast.If(test=ast.Name("TYPE_CHECKING"), orelse=orelse):
                yield from imports_of(ast.Module(node.body, []), FOR_TYPES)
                yield from imports_of(ast.Module(orelse, []), kind)
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                yield from imports_of(node, IN_FUNCTIONS if kind == AT_START else kind)
            case _:
                yield from imports_of(node, kind)


def cycles(graph: Mapping[str, set[str]]) -> set[tuple[str, ...]]:
    """Return the largest groups of names of which each reaches each other, sorted."""
    reached = {name: reachable(graph, name) for name in graph}
    groups = {
        tuple(sorted(other for other in reached if other in reached[name] and name in reached[other]))
        for name in graph
        if name in reached[name]
    }
    return groups - {()}


def reachable(graph: Mapping[str, set[str]], start: str) -> set[str]:
    names: set[str] = set()
    following = [start]
    while following:
        more = graph.get(following.pop(), set()) - names
        names |= more
        following += more
    return names
