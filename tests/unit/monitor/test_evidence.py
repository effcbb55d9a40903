"""What a monitor reads to say how its rank hangs, also from a file server that does not answer."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from resilience.facts.interruptions import Frame
from resilience.monitor import evidence
from resilience.monitor.evidence import Witness


def test_source_that_never_answers_holds_up_no_monitor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pipe that nobody writes to stands for it: opening it blocks, as a file of a dead server does."""
    monkeypatch.setattr(evidence, "READ_LIMIT", 0.2)
    pipe = tmp_path / "train.py"
    os.mkfifo(pipe)
    nothing: Any = None
    witness = Witness(nothing, nothing, None)
    stack = (Frame(str(pipe), 1, "train"),)
    witness.hang(stack, False)
    asked: list[Any] = []
    monkeypatch.setattr(evidence, "asked", lambda *arguments: asked.append(arguments))
    witness.hang(stack, False)
    assert asked == []  # the thread that waits is enough
    os.close(os.open(pipe, os.O_RDWR | os.O_NONBLOCK))  # lets it go
