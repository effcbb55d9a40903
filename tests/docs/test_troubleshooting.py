"""Each message on the page on troubleshooting is one that the package can show."""

from __future__ import annotations

import ast
import re
from functools import cache

import pytest

from tests.generate_docs import DOCS, ROOT

PAGE = (DOCS / "troubleshooting.md").read_text()
MESSAGES = re.findall(r"^\| `([^`]+)`", PAGE, flags=re.MULTILINE)


@cache
def texts() -> str:
    """Return all text in the package's sources; adjacent literals are one, values in f-strings are a line break."""
    trees = [ast.parse(path.read_text()) for path in sorted((ROOT / "resilience").rglob("*.py"))]
    constants = (node.value for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Constant))
    return "\n".join(value for value in constants if isinstance(value, str))


@pytest.mark.parametrize("message", MESSAGES)
def test_message_is_one_of_the_package(message: str) -> None:
    parts = [part.strip(" ,;:.") for part in message.split("…")]
    assert [part for part in parts if part not in texts()] == []


def test_page_has_messages() -> None:
    assert len(MESSAGES) > 30
    assert len(set(MESSAGES)) == len(MESSAGES)
