"""An option has an effect, or its description says that it has none."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re

import pytest

from resilience.inprocess import Wrapper
from resilience.launcher import ft_options
from resilience.launcher.arguments import Options
from resilience.monitor.config import FIELDS
from resilience.system.environment import ALL, WRAPPER, Settings, settings_table, variable
from tests.support.server import ROOT

NO_EFFECT = "without effect"
RUN = ("launcher", "monitor", "telemetry", "system")
"""Packages that read a setting for every job. `inprocess` reads it for a Wrapper."""


def attributes_read() -> set[str]:
    """The names of all attributes that a module of the package reads."""
    trees = (ast.parse(path.read_text()) for path in (ROOT / "resilience").rglob("*.py"))
    nodes = (node for tree in trees for node in ast.walk(tree))
    return {node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)}


@pytest.fixture(scope="module")
def read() -> set[str]:
    return attributes_read()


def test_setting_that_nothing_reads_is_described_as_without_effect(read: set[str]) -> None:
    without = {name for name, field in FIELDS.items() if NO_EFFECT in field.metadata["help"]}
    assert set(FIELDS) - read == without


def test_option_of_ft_launcher_for_such_a_setting_is_described_so_too() -> None:
    without = {name for name, field in FIELDS.items() if NO_EFFECT in field.metadata["help"]}
    rows = [line for line in ft_options.table().splitlines() if any(name.replace("_", "-") in line for name in without)]
    assert rows and [row for row in rows if NO_EFFECT not in row] == []


def test_parameter_of_the_wrapper_that_nothing_reads_is_described_as_without_effect(read: set[str]) -> None:
    described = inspect.getdoc(Wrapper) or ""
    without = {
        name
        for names, text in re.findall(r"^([\w, ]+): ([^\n]*(?:\n {4}[^\n]*)*)", described, re.MULTILINE)
        if NO_EFFECT in text
        for name in names.split(", ")
    }
    parameters = set(inspect.signature(Wrapper).parameters)
    assert without <= parameters and parameters - read == without


def test_variable_that_only_a_wrapper_reads_is_described_so() -> None:
    sources = "".join(path.read_text() for package in RUN for path in (ROOT / "resilience" / package).rglob("*.py"))
    read = set(re.findall(r"(?:\bsettings|\bSettings\.from_environment\([^)]*\)|\bouter)\.(\w+)", sources))
    rows = [line.split(" | ") for line in settings_table().splitlines()[2:]]
    holds_for = {name.strip("| `").removeprefix("RESILIENCE_").lower(): holder for name, holder, *_ in rows}
    assert holds_for == {name: ALL if name in read else WRAPPER for name in holds_for}


def test_option_in_two_tables_is_described_in_one_of_them() -> None:
    """A variable that only a Wrapper reads may limit the same thing as a setting of the launcher, in its own way."""
    tables = [{name: field.metadata for name, field in FIELDS.items()}]
    tables.append({field.name: field.metadata for field in dataclasses.fields(Options)})
    launcher, own = ({name: str(metadata.get("help", "")) for name, metadata in table.items()} for table in tables)
    assert not launcher.keys() & own.keys()
    of_jobs = {field for field in Settings.__struct_fields__ if holds_for_jobs(field)}
    shared = {name: text for name, text in (launcher | own).items() if name in of_jobs}
    assert len(shared) > 5
    assert {name for name, text in shared.items() if not text.startswith(variable(name).meaning)} == set()


def holds_for_jobs(name: str) -> bool:
    return f"| `RESILIENCE_{name.upper()}` | {ALL} |" in settings_table()
