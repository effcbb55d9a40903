"""No message says "1 ranks": `facts.in_words.count` writes a number of things."""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "resilience"
PLURAL = re.compile(
    r" (?:(?:more|other|initial|active|shorter) )?"
    r"(?:ranks|nodes|restarts|cycles|attempts|iterations|steps|incidents|faults|spares|runs|starts)\b"
)
NEVER_ONE = {
    "calibration/differences.py",  # the upper end of a range
    "calibration/fitting.py",  # a rate needs two runs
    "calibrate/timings.py",  # a part of several ranks
    "calibrate/terminal.py",  # the same; names of groups of ranks
    "core/budget.py",  # `_used_up` has a text for 0 and for 1
    "core/restart.py",  # a barrier for one rank is complete when it arrives
    "core/watched.py",  # the upper end of a range
    "inprocess/_runtime/telling.py",  # "1 rank continues" is another sentence
    "launcher/launch.py",  # a constant
    "report/counterfactual.py",  # "one spare" is another text
    "report/drawings.py",  # many ranks; steps per second
    "report/page.py",  # more than four nodes
    "telemetry/standard.py",  # "rank 1 restarts": a verb
}


def test_modules_that_write_a_plural_themselves_have_a_reason() -> None:
    assert {
        str(path.relative_to(PACKAGE)) for path in sorted(PACKAGE.rglob("*.py")) if any(_plurals(path))
    } <= NEVER_ONE


def _plurals(path: Path) -> Iterator[str]:
    """Yield the plural nouns that follow a value in the module's f-strings."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        parts = node.values if isinstance(node, ast.JoinedStr) else []
        for value, following in itertools.pairwise(parts):
            if isinstance(value, ast.FormattedValue) and isinstance(following, ast.Constant):
                found = PLURAL.match(str(following.value))
                yield from [found[0]] if found else []
