"""Which variables count as read by a module while it is imported."""

from __future__ import annotations

from collections import defaultdict

import pytest

from resilience.launcher.worker.environment_reads import recorded


@pytest.fixture(autouse=True)
def _variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "node0")
    monkeypatch.setenv("MINE_SIZE", "3")


def reads(source: str) -> set[str]:
    """Return what a module with this source reads."""
    recorded_reads: dict[str, set[str]] = defaultdict(set)
    with recorded(recorded_reads):
        exec(f"import os\n{source}", {"__name__": "mine.part"})
    return recorded_reads["mine"]


@pytest.mark.parametrize(
    "source",
    [
        "copy = os.environ.copy()",
        "copy = dict(os.environ)",
        "copy = {**os.environ, 'MINE': '1'}",
        "copy = dict(os.environ.items())",
        "copy = {name: os.environ[name] for name in os.environ}",
        "mine = {name: value for name, value in os.environ.items() if name.startswith('MINE_')}",
        "values = list(os.environ.values())",
        "copies = [dict(os.environ), dict(os.environ)]",
        "count = len(list(os.environ))",
    ],
)
def test_copy_of_the_environment_reads_no_variable(source: str) -> None:
    assert reads(source) == set()


@pytest.mark.parametrize(
    "source",
    [
        "value = os.environ['MINE_SIZE']",
        "value = os.environ.get('MINE_SIZE')",
        "value = os.getenv('MINE_SIZE')",
        "value = 'MINE_SIZE' in os.environ",
        "copy = dict(os.environ); value = os.environ['MINE_SIZE']",
        "names = list(os.environ); value = os.environ['MINE_SIZE']",
        "mine = {name: os.environ[name] for name in os.environ if name.startswith('MINE_')}",
    ],
)
def test_variable_that_is_looked_up_by_its_name_is_read(source: str) -> None:
    assert reads(source) == {"MINE_SIZE"}


def test_variable_that_is_not_set_is_read() -> None:
    assert reads("value = os.environ.get('MINE_COLOR')") == {"MINE_COLOR"}


def test_copy_that_is_not_completed_reads_what_it_has_copied() -> None:
    first = "first = next(iter(os.environ)); value = os.environ[first]"
    assert len(reads(first)) == 1
