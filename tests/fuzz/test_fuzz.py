"""No input breaks a decoder, a reader of a run folder, or the way out of text. `poe fuzz` feeds fifty times as many."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fuzz.__main__ import shown
from tests.fuzz.running import feed
from tests.fuzz.targets import targets

INPUTS = 20_000


def test_damaged_input_is_refused_and_never_breaks_its_reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    known = targets(tmp_path)
    outcome = feed(known, INPUTS, seed="0.0")
    assert not outcome.failures, "\n".join(map(shown, outcome.failures))
    assert outcome.inputs.total() == INPUTS
    assert set(outcome.inputs) == {target.name for target in known}
