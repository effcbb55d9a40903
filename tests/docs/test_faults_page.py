"""The page of faults names tests that are there."""

from __future__ import annotations

import ast
import re
from collections import defaultdict

from resilience.attribution.symptoms import Class
from resilience.core.hang_kind import WORDS
from resilience.facts.interruptions import Hang
from tests.support.server import ROOT

PAGE = (ROOT / "docs" / "faults.md").read_text()
FILES: defaultdict[str, str] = defaultdict(str)  # several files may have one name
for path in (ROOT / "tests").rglob("test_*.py"):
    FILES[path.name] += path.read_text()
MEANT = ("test_launcher_faults.py", "test_launcher_endurance.py")


def test_every_test_that_the_page_names_is_where_it_says() -> None:
    rows = [line for line in PAGE.splitlines() if "`test_" in line and line.startswith("|")]
    assert len(rows) > 20
    for row in rows:
        files = re.findall(r"`(test_\w+\.py)`", row) or MEANT
        for name in re.findall(r"`(test_\w+)`", row):
            assert any(f"def {name}(" in FILES[file] for file in files), name


def test_every_fault_test_of_the_launcher_is_on_the_page() -> None:
    told = set(re.findall(r"`(test_\w+)`", PAGE))
    assert {name for file in MEANT for name in re.findall(r"^def (test_\w+)\(", FILES[file], re.M)} <= told


def test_page_counts_the_mutated_modules_that_the_tool_lists() -> None:
    tree = ast.parse((ROOT / "tests" / "mutate.py").read_text())
    (modules,) = [
        node.value.keys
        for node in tree.body
        if isinstance(node, ast.AnnAssign)
        and ast.unparse(node.target) == "LAUNCHER"
        and isinstance(node.value, ast.Dict)
    ]
    assert re.findall(r"(\w+) modules\s+that `tests/mutate.py` lists", PAGE) == [str(len(modules))]


def test_words_on_the_page_are_those_of_the_records() -> None:
    assert set(WORDS) == set(Hang.__args__)  # type: ignore[attr-defined]
    table = PAGE[PAGE.index("| stopped: ") : PAGE.index("The words come from")]
    words = set(re.findall(r"`(\w+)`", table))
    assert words <= set(WORDS) | set(Class.__args__)  # type: ignore[attr-defined]
    assert set(WORDS) <= words
