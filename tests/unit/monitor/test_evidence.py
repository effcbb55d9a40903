"""What a monitor reads to say how its rank hangs, also from a file server that does not answer."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from resilience.core.observation import Doing
from resilience.facts.interruptions import Exit, Frame
from resilience.monitor import evidence
from resilience.monitor.evidence import Witness
from resilience.system import stacks
from resilience.system.processes import ProcessState


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


@pytest.mark.parametrize(
    ("times", "hang"),
    [
        pytest.param((0.0, 0.6, 4.0), "runs_again", id="the monitor stood still while the rank waited"),
        pytest.param((0.0, 0.6, 1.2, 2.0, 3.0, 4.0), "runs_again", id="the monitor always looked"),
        pytest.param((4.0,), "in_loop", id="nothing is known of the wait"),
    ],
)
def test_rank_that_computes_only_since_a_moment_ago_is_seen_to_have_waited(
    monkeypatch: pytest.MonkeyPatch, times: tuple[float, ...], hang: str
) -> None:
    """Its last sign of life is of second 1. It waits until second 4, and then uses a whole processor."""
    now = 0.0

    def pass_by(seconds: float) -> None:
        nonlocal now
        now += seconds

    page: Any = SimpleNamespace(
        read=lambda: SimpleNamespace(since=0.0, heartbeat_at=1.0, step_at=None, section_left_at=None)
    )
    rank: Any = SimpleNamespace(pid=os.getpid(), state=lambda: ProcessState("R", max(0.0, now - 4.0), 1, 1, 0, None))
    monkeypatch.setattr(evidence, "time", SimpleNamespace(monotonic=lambda: now, sleep=pass_by))
    monkeypatch.setattr(evidence.processes, "runnable", lambda pid: None)
    witness = Witness(page, rank, None)
    for now in times:
        witness.take_sample(now)
    now = 4.2
    witness.see(0.0)
    assert witness.hang((Frame("train.py", 1, "train"),), False) == hang


@pytest.mark.parametrize(
    ("sign", "at", "expected"),
    [
        ("heartbeat_at", 9.0, None),
        ("step_at", 9.0, None),
        ("section_left_at", 9.0, None),
        ("step_at", 1.1, "in_call"),  # reported at the beginning of the section
        ("step_at", None, "in_call"),
    ],
)
def test_rank_with_other_signs_of_life_in_its_silence_is_in_no_endless_call(
    monkeypatch: pytest.MonkeyPatch, sign: str, at: float | None, expected: str | None
) -> None:
    """Its section has been open since second 1. The limit is exceeded in second 10."""
    signs: dict[str, float | None] = dict.fromkeys(("heartbeat_at", "step_at", "section_left_at"))
    page: Any = SimpleNamespace(read=lambda: SimpleNamespace(since=0.0, **{**signs, sign: at}))
    rank: Any = SimpleNamespace(pid=os.getpid(), state=lambda: ProcessState("S", 0.0, 1, 1, 0, None))
    monkeypatch.setattr(evidence, "time", SimpleNamespace(monotonic=lambda: 10.0, sleep=lambda seconds: None))
    monkeypatch.setattr(evidence.processes, "runnable", lambda pid: None)
    witness = Witness(page, rank, None)
    witness.see(9.0)
    assert witness.hang((Frame("train.py", 1, "train"),), False) == expected


@pytest.mark.parametrize(
    ("status", "exit"),
    [(3, Exit(code=3)), (-2, Exit(signal="SIGINT")), (-777, Exit(signal="signal 777")), (0, None), (None, None)],
)
def test_exit_that_a_program_has_noted_is_read_whatever_it_wrote(status: int | None, exit: Exit | None) -> None:
    """A program that damages its memory can write any number there."""
    view = SimpleNamespace(
        since=0.0,
        heartbeat_at=None,
        step_at=None,
        section_left_at=None,
        step=1,
        doing=Doing.ENDING,
        exit_status=status,
    )
    page: Any = SimpleNamespace(read=lambda: view, collectives=list)
    witness = Witness(page, SimpleNamespace(pid=os.getpid(), state=lambda: None), None)  # type: ignore[arg-type]
    witness.take_stacks = lambda thorough: stacks.NONE  # type: ignore[method-assign]
    assert witness.look().exit == exit
