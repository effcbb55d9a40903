"""Files, modules and tests that a page names exist."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

from tests.docs.test_architecture import PACKAGE, is_defined, names_of_tests
from tests.support.server import ROOT

OURS = ("resilience", "tests", "examples", "docs", "dashboards")
PAGES = sorted([*ROOT.glob("*.md"), *(page for top in OURS for page in (ROOT / top).rglob("*.md"))])
PACKAGES = sorted(path.name for path in PACKAGE.iterdir() if path.is_dir() and not path.name.startswith("_"))
# These words begin the names of events and spans as well: `launcher.cycle`.
IN_OTHER_NAMES = {"launcher", "inprocess", "monitor", "telemetry"}

GONE = {"testing", "adapters"}  # packages that there were: a page may still name a module of theirs

PATH = re.compile(
    rf"(?<![\w./*-])(?:{'|'.join({*OURS, *PACKAGES})})/[\w./*-]*\.(?:py|md|toml|json|yaml|html|svg|txt)\b"
)
SOURCE = re.compile(r"`([\w.-]+\.py)`")
MODULE = re.compile(rf"`((?:{'|'.join({*PACKAGES, *GONE} - IN_OTHER_NAMES)})(?:\.\w+)+)")
TEST = re.compile(r"`(test_\w+)`")
LINK = re.compile(r"\]\(([^)#:\s]+)(?:#[^)\s]*)?\)")

NOT_OURS = {
    "advanced_example.py": "an example of nvidia-resiliency-ext",
    "attribution.straggler": "a module of nvidia-resiliency-ext",
    "fault_tolerance.ipc_connector": "a module of nvidia-resiliency-ext",
    "fault_tolerance.launcher": "a module of nvidia-resiliency-ext",
    "fault_tolerance.rank_monitor_state_machine": "a module of nvidia-resiliency-ext",
    "fault_tolerance/in_job_and_in_process_example.py": "an example of nvidia-resiliency-ext",
    "inprocess/basic_example.py": "an example of nvidia-resiliency-ext",
    "inprocess/optimal_example.py": "an example of nvidia-resiliency-ext",
    "numpy.py": "a file of a user",
    "queue.py": "a file of a user",
}


def id_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=id_of)
def test_what_a_page_names_exists(page: Path) -> None:
    assert missing(page, page.read_text()) - set(NOT_OURS) == set()


def test_names_that_lead_nowhere_are_found() -> None:
    text = (
        "`core/gone.py` `gone.py` `core.gone` `testing.x` `test_gone` tests/gone/*.json [a](gone.md) [b](gone.md#part)"
    )
    names = {"core/gone.py", "gone.py", "core.gone", "testing.x", "test_gone", "tests/gone/*.json", "gone.md"}
    assert missing(ROOT / "docs" / "index.md", text) == names


def test_exempt_names_are_needed() -> None:
    named = {name for page in PAGES for name in missing(page, page.read_text())}
    assert set(NOT_OURS) - named == set()


def missing(page: Path, text: str) -> set[str]:
    """Return the names in the text of a page that lead to nothing."""
    folders = (ROOT, PACKAGE, page.parent)
    paths = {path for path in PATH.findall(text) if not any(list(folder.glob(path)) for folder in folders)}
    sources = {name for name in SOURCE.findall(text) if name not in names_of_sources()}
    modules = {name for name in MODULE.findall(text) if not is_defined(name)}
    tests = {name for name in TEST.findall(text) if name not in names_of_tests()}
    return paths | sources | modules | tests | {to for to in LINK.findall(text) if not (page.parent / to).exists()}


@cache
def names_of_sources() -> frozenset[str]:
    return frozenset(path.name for top in OURS for path in (ROOT / top).rglob("*.py"))
