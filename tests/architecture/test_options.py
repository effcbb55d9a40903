"""An option has an effect, or its description says that it has none."""

from __future__ import annotations

import ast
import inspect
import re

import pytest

from resilience.inprocess import Wrapper
from resilience.launcher import ft_options
from resilience.monitor.config import FIELDS
from resilience.system.environment import ALL, WRAPPER, settings_table
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
