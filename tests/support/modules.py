"""The syntax trees of modules, each parsed once a process."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path


@cache
def tree_of(path: Path) -> ast.Module:
    """Return the syntax tree of a module. All callers share it: do not change it."""
    return ast.parse(path.read_text(encoding="utf-8"))
