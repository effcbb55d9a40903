"""ARCHITECTURE.md is true: what it names exists, and its rows are those of the import contracts."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from resilience.facts.events import CATALOGUE
from resilience.telemetry.catalogue import BY_NAME
from tests.architecture.test_layers import PACKAGE, rows
from tests.support.server import ROOT

PAGE = (ROOT / "ARCHITECTURE.md").read_text()
PACKAGES = "|".join(sorted({path.stem for path in PACKAGE.iterdir() if not path.name.startswith("_")}))
# A path; a dotted name below a package of ours; a test; a metric; the tag of an event.
PATH = re.compile(r"[\w.]+(?:/[\w.-]+)*(?:/|\.(?:py|md|toml|json|txt))|(?:tests|docs|dashboards)/[\w/-]+")
NAME = re.compile(rf"(?:{PACKAGES})(?:\.\w+)+")
COMMANDS = re.compile(r"(?:resilience|poe|lint-imports|emit)\b.*")
RUN_FOLDER = {"job.json", "records/", "logs/", "timings/", "output/"}
WORDS = {"_s", "_bytes", "dashboards/grafana/*.json"}
SPANS = sorted(set(re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", PAGE, flags=re.MULTILINE | re.DOTALL))))
BLOCKS = "\n".join(re.findall(r"^```text\n(.*?)^```", PAGE, flags=re.MULTILINE | re.DOTALL))


@pytest.mark.parametrize("span", SPANS)
def test_name_on_the_page_exists(span: str) -> None:
    assert span in RUN_FOLDER | WORDS or COMMANDS.fullmatch(span) or exists(span), "no such file or name"


def test_names_in_diagrams_exist() -> None:
    paths, names = re.findall(r"\b\w+(?:/\w+)+\.py", BLOCKS), NAME.findall(BLOCKS)
    assert len(paths) > 5
    assert len(names) > 5
    assert [name for name in (*paths, *names) if not exists(name)] == []


def test_rows_are_those_of_the_contract() -> None:
    table = PAGE.partition("## Layers")[2].partition("*Pure* means")[0]
    first_cells = re.findall(r"^\| (`[^|]+) \|", table, flags=re.MULTILINE)
    assert re.findall(r"`(\w+)[./]", "\n".join(first_cells)) == rows()


def test_page_stays_short() -> None:
    assert len(PAGE.splitlines()) <= 260


def exists(span: str) -> bool:
    if NAME.fullmatch(span) and not span.endswith(".py"):
        return is_defined(span)
    if span.startswith("test_"):
        return span in names_of_tests()
    if span.startswith("resilience_"):
        return span in BY_NAME
    if PATH.fullmatch(span):
        return any((folder / span).exists() for folder in (ROOT, PACKAGE))
    return span in {str(kind.__struct_config__.tag) for kind in CATALOGUE}


def is_defined(name: str) -> bool:
    """Return True if a dotted name leads to something in the package: a module, and what it or its class defines."""
    place, parts = PACKAGE, name.split(".")
    while parts and (place / parts[0]).is_dir():
        place /= parts.pop(0)
    if not parts or not (place / f"{parts[0]}.py").is_file():
        return False
    body = parsed(place / f"{parts[0]}.py").body
    for part in parts[1:]:
        found = [node for node in body if part in defined_by(node)]
        if not found:
            return False
        body = getattr(found[0], "body", [])
    return True


def defined_by(node: ast.stmt) -> set[str]:
    match node:
        case ast.FunctionDef(name) | ast.ClassDef(name):
            return {name}
        case ast.Assign(targets):
            return {target.id for target in targets if isinstance(target, ast.Name)}
        case ast.AnnAssign(target=ast.Name(name)):
            return {name}
    return set()


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def names_of_tests() -> frozenset[str]:
    texts = (path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    return frozenset(name for text in texts for name in re.findall(r"^def (test_\w+)", text, flags=re.MULTILINE))
