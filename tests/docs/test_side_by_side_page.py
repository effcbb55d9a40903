"""Rows that compare the launchers, and clauses of torchrun's contract, name tests that are where they say."""

from __future__ import annotations

import ast
import re
from functools import cache

from tests.support.server import ROOT

PAGE = (ROOT / "docs" / "side-by-side.md").read_text()
CONTRACT = (ROOT / "docs" / "launcher.md").read_text().partition("## torchrun's contract")[2].partition("\n## ")[0]
TESTS = re.compile(r"((?:`test_\w+`(?:, )?)+) in `(test_\w+\.py)`")
RUNS_BOTH = re.compile(r"LAUNCHERS|TORCHRUN|both\(|'torchrun'")


def rows(text: str) -> list[str]:
    """Return the rows of all tables, without their heads."""
    return [line for line in re.sub(r"^\|.*\n\|---.*", "", text, flags=re.M).splitlines() if line.startswith("|")]


def sources(row: str) -> list[str]:
    """Return the source of each test that a row names, without the test's name; empty if it is not there."""
    return [sources_in(file).get(name, "") for names, file in TESTS.findall(row) for name in re.findall(r"\w+", names)]


@cache
def sources_in(file: str) -> dict[str, str]:
    """Return the source of each test in the files of this name."""
    return {
        node.name: "\n".join(ast.unparse(part) for part in (*node.decorator_list, node.args, *node.body))
        for path in (ROOT / "tests").rglob(file)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef)
    }


def test_every_row_names_tests_that_are_where_it_says() -> None:
    assert len(rows(PAGE)) >= 45
    for row in rows(PAGE):
        assert sources(row) and all(sources(row)), row


def test_a_row_runs_both_launchers_or_says_that_it_runs_ours() -> None:
    for row in rows(PAGE):
        is_ours = "| ours: " in row
        assert all((RUNS_BOTH.search(source) is None) == is_ours for source in sources(row)), row


def test_every_clause_of_the_contract_names_tests_that_are_where_it_says() -> None:
    assert len(rows(CONTRACT)) >= 8
    for row in rows(CONTRACT):
        assert sources(row) and all(sources(row)), row
