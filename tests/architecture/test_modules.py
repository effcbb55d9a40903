"""Every module says what it is, is one thing, and raises errors of the one tree."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.support.modules import tree_of
from tests.support.server import ROOT

MODULES = sorted((ROOT / "resilience").rglob("*.py"))
LONGEST = 500  # lines; a longer file has to be one thing, and says here which
LONG = {
    "resilience/system/environment.py": "the one place that reads the environment: settings, and what launchers set",
    "resilience/monitor/server.py": "the loop of a monitor, and everything that one rank's witness owns",
    "resilience/facts/events.py": "the catalogue: one definition an event, in one place",
    "resilience/core/restart.py": "the restart protocol: its operations, values and steps, in one place",
    "resilience/inprocess/_runtime/call.py": "one call of a wrapped function, from its entry to its end",
    "resilience/system/interrupt.py": "one signal, its way out of the standard library, and who swallows it",
    "resilience/calibrate/limits.py": "the way from runs to a file of limits: pooled, fitted, merged, tested",
    "resilience/history/cycles.py": "what is known of a cycle, on each node and of all of them, record by record",
    "resilience/monitor/page.py": "one layout of shared memory: who writes a field and who reads it",
}

LONGEST_FUNCTION = 50  # lines; a longer one does one thing, and says here which
LONG_FUNCTIONS = {
    "resilience/launcher/launch.py:launch": "puts the parts of an agent together, in an order that matters",
    "resilience/attribution/notes.py:note": "a table: one case for each event",
    "resilience/inprocess/wrap.py:__init__": "the parameters of the compatible API",
    "resilience/core/watch.py:_rows": "a table: one row for each limit",
    "resilience/cli/calibrate.py:configure": "a table: one call for each option",
    "resilience/calibration/fitting.py:fit_pool": "the fit, step by step as the page describes it",
    "resilience/calibrate/limits.py:_test_limit": "one row of the backtest, and the fields of its result",
    "resilience/inprocess/_runtime/session.py:_begin": "the beginning of a call, in an order that matters",
    "resilience/report/terminal.py:_header": "the head of the report, line by line",
    "resilience/monitor/server.py:__init__": "the parts of a monitor, one line for each",
}

SAME_NAME = {"FaultToleranceCallback"}  # of Lightning and of transformers: each user has one of them

TERMINAL = {"'TERM'", "'NO_COLOR'"}  # what a terminal can do is no setting of ours, and asked beside `isatty`


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_module_says_what_it_is_for(path: Path) -> None:
    header = ast.get_docstring(tree_of(path))
    assert header
    assert header.split("\n")[0].rstrip().endswith((".", "?", ":"))


def test_long_functions_are_known() -> None:
    long_functions = {
        f"{name_of(path)}:{node.name}"
        for path in MODULES
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if (node.end_lineno or 0) - node.lineno >= LONGEST_FUNCTION
    }
    assert long_functions == set(LONG_FUNCTIONS)


def test_long_modules_are_known() -> None:
    lengths = {name_of(path): len(path.read_text().splitlines()) for path in MODULES}
    assert {name for name, length in lengths.items() if length > LONGEST} - set(LONG) == set()
    assert set(LONG) <= set(lengths)


def test_class_names_are_unique() -> None:
    places: dict[str, list[str]] = {}
    for path in MODULES:
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(name_of(path))
    assert {name for name, paths in places.items() if len(paths) > 1} == SAME_NAME


def test_errors_are_defined_in_one_place() -> None:
    strangers = [
        f"{name_of(path)}: {node.name}"
        for path in MODULES
        if path.name != "errors.py"
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.ClassDef)
        and any(ast.unparse(base).endswith(("Error", "Exception")) for base in node.bases)
    ]
    assert strangers == []


def test_environment_is_read_in_one_place() -> None:
    readers = [
        f"{name_of(path)}:{node.lineno}"
        for path in MODULES
        if name_of(path) != "resilience/system/environment.py"
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.expr) and reads_environment(node)
    ]
    assert readers == []


def reads_environment(node: ast.expr) -> bool:
    match node:
        case ast.Call(func=ast.Attribute(value=ast.Name("os"), attr="getenv"), args=[name, *_]):
            pass
        case ast.Call(func=ast.Attribute(value=ast.Attribute(ast.Name("os"), "environ"), attr="get"), args=[name, *_]):
            pass
        case ast.Subscript(value=ast.Attribute(ast.Name("os"), "environ"), slice=name, ctx=ast.Load()):
            pass
        case _:
            return False
    return ast.unparse(name) not in TERMINAL
