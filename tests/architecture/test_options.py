"""An option has an effect, or its description says that it has none."""

from __future__ import annotations

import ast
import inspect
import re

import pytest

from resilience.inprocess import Wrapper
from resilience.launcher import ft_options
from resilience.monitor.config import FIELDS
from tests.support.server import ROOT

NO_EFFECT = "without effect"


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
