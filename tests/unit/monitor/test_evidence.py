"""What a monitor reads to say how its rank hangs, also from a file server that does not answer."""

from __future__ import annotations

import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from resilience.core.observation import Doing, Observation
from resilience.facts.identity import Origin
from resilience.facts.interruptions import Exit, Frame, Interruption, InterruptionRecord, ProcessInfo
from resilience.facts.limits import Limits, Rule
from resilience.facts.seats import Seat
from resilience.monitor import evidence
from resilience.monitor.evidence import Witness
from resilience.monitor.listening import Listener
from resilience.monitor.page import MonitorSide, OpenEntry, Page, RankSide
from resilience.monitor.snapshots import Snapshots
from resilience.system import stacks
from resilience.system.background import WRITER
from resilience.system.processes import Process, ProcessState, Runnable
from resilience.telemetry import rank_snapshot

EMPTY = MonitorSide(Page.create()).read()


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

    page: Any = SimpleNamespace(read=lambda: msgspec.structs.replace(EMPTY, heartbeat_at=1.0))
    rank: Any = SimpleNamespace(pid=os.getpid(), state=lambda: ProcessState("R", max(0.0, now - 4.0), 1, 1, 0, None))
    monkeypatch.setattr(evidence, "time", SimpleNamespace(monotonic=lambda: now, sleep=pass_by))
    monkeypatch.setattr(evidence.processes, "runnable", lambda pid: None)
    witness = Witness(page, rank, None)
    for now in times:
        witness.take_sample(now)
    now = 4.2
    witness.see(0.0)
    assert witness.hang((Frame("train.py", 1, "train"),), False) == hang


@pytest.mark.parametrize("looks_at", [10.0, 10.02, 20.0])
@pytest.mark.parametrize(
    ("busy", "state", "expected"),
    [
        pytest.param((10.0, 99.0), "S", "on_lock", id="its restart is no loop"),
        pytest.param((2.0, 99.0), "S", "in_loop", id="it was in its loop until then"),
        pytest.param((9.0, 99.0), "S", "runs_again", id="it ran again just then"),
        pytest.param((99.0, 99.0), "D", "on_lock", id="a page was read just then"),
        pytest.param((9.995, 99.0), "S", "on_lock", id="a moment of work"),
    ],
)
def test_what_a_rank_does_in_its_restart_is_not_taken_for_how_it_hung(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    looks_at: float,
    busy: tuple[float, float],
    state: str,
    expected: str,
) -> None:
    """It is silent since second 2, learns in second 10 that the iteration is over, and reports its CPU time of then."""
    now = 0.0

    def used() -> float:
        return min(busy[1], max(now, busy[0])) - busy[0]

    source = tmp_path / "train.py"
    source.write_text("lock.acquire()\n")
    page: Any = SimpleNamespace(read=lambda: EMPTY)
    rank: Any = SimpleNamespace(pid=os.getpid(), state=lambda: ProcessState("S", used(), 1, 1, 0, None))
    monkeypatch.setattr(evidence, "time", SimpleNamespace(monotonic=lambda: now, sleep=lambda seconds: None))
    monkeypatch.setattr(evidence.processes, "runnable", lambda pid: None)
    witness = Witness(page, rank, None)
    for now in (*range(10), 9.99):
        witness.take_sample(now)
    now = 10.0
    reported = ProcessInfo(state, cpu_s_delta=used())
    now = looks_at
    witness.take_sample(now)  # what it does by then comes after the decision
    shown = witness.see_as_of(10.0, silent_for=8.0, process=reported, waits_in="futex_do_wait")
    assert witness.hang((Frame(str(source), 1, "train"),), False) == expected
    assert shown is not None and shown.over_s == 1.0


def test_rank_that_is_reaped_before_its_monitor_looks_leaves_its_last_size(monkeypatch: pytest.MonkeyPatch) -> None:
    states = [ProcessState("S", 0.0, 7 << 20, 3, 0, None), None]
    rank: Any = SimpleNamespace(pid=os.getpid(), state=lambda: states.pop(0))
    monkeypatch.setattr(evidence.processes, "runnable", lambda pid: None)
    witness = Witness(MonitorSide(Page.create()), rank, None)
    witness.take_sample(time.monotonic())
    died = InterruptionRecord(0, Interruption.TERMINATED, exit=Exit(signal="SIGKILL"))
    assert witness.enrich(died, Observation(), Limits()).process == ProcessInfo(rss_bytes=7 << 20, threads=3)


@pytest.mark.parametrize(
    ("runnable_s", "expected"), [pytest.param(4.5, "on_lock", id="it trained, and waits"), (7.0, "in_loop")]
)
def test_of_the_time_since_an_old_sample_only_what_is_certain_of_the_silence_counts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, runnable_s: float, expected: str
) -> None:
    """The monitor has not looked since second 0. The rank used 3 processors in 5 of 10 seconds, and is silent for 5."""
    source = tmp_path / "train.py"
    source.write_text("lock.acquire()\n")
    rank: Any = SimpleNamespace(pid=os.getpid(), state=lambda: ProcessState("S", 0.0, 1, 1, 0, None))
    monkeypatch.setattr(evidence, "time", SimpleNamespace(monotonic=lambda: 0.0))
    monkeypatch.setattr(evidence.processes, "runnable", lambda pid: Runnable(0.0, 1))
    witness = Witness(SimpleNamespace(read=lambda: EMPTY), rank, None)  # type: ignore[arg-type]
    witness.take_sample(0.0)
    reported = ProcessInfo("S", cpu_s_delta=15.0, runnable_s=runnable_s)
    shown = witness.see_as_of(10.0, silent_for=5.0, process=reported, waits_in="futex_do_wait")
    assert witness.hang((Frame(str(source), 1, "train"),), False) == expected
    assert shown is not None
    assert (shown.cpu_s_delta, shown.over_s, shown.runnable_s) == (None, 5.0, max(0.0, runnable_s - 5.0))


@pytest.mark.parametrize(
    ("sign", "at", "expected"),
    [
        ("heartbeat_at", 9.0, None),
        ("step_at", 9.0, None),
        ("section_left_at", 9.0, None),
        ("ping_at", 9.0, None),
        ("step_at", 1.1, "in_call"),  # reported at the beginning of the section
        ("step_at", None, "in_call"),
    ],
)
def test_rank_with_other_signs_of_life_in_its_silence_is_in_no_endless_call(
    monkeypatch: pytest.MonkeyPatch, sign: str, at: float | None, expected: str | None
) -> None:
    """Its section has been open since second 1. The limit is exceeded in second 10."""
    section = OpenEntry("save", 1.0)
    page: Any = SimpleNamespace(read=lambda: msgspec.structs.replace(EMPTY, open_sections=(section,), **{sign: at}))
    rank: Any = SimpleNamespace(pid=os.getpid(), state=lambda: ProcessState("S", 0.0, 1, 1, 0, None))
    monkeypatch.setattr(evidence, "time", SimpleNamespace(monotonic=lambda: 10.0, sleep=lambda seconds: None))
    monkeypatch.setattr(evidence.processes, "runnable", lambda pid: None)
    witness = Witness(page, rank, None)
    witness.see(9.0)
    assert witness.hang((Frame("train.py", 1, "train"),), False) == expected


@pytest.mark.parametrize("last", ["ping", "heartbeat", "step", "enter", "leave"])
def test_record_snapshot_and_rule_agree_on_the_last_sign_of_life(tmp_path: Path, last: str) -> None:
    """The step before it came long before, as that of an epoch."""
    page = Page.create()
    rank, side = RankSide(page), MonitorSide(page)
    rank.set_seat(Seat(0, 0, 1, 1, -1))
    rank.doing(Doing.FUNCTION)
    rank.step(0)
    {
        "ping": rank.ping,
        "heartbeat": rank.heartbeat,
        "step": lambda: rank.step(1),
        "enter": lambda: rank.enter("batch"),
        "leave": lambda: (rank.enter("batch"), rank.leave("batch")),
    }[last]()
    view = side.read()
    witness = Witness(side, Process(os.getpid()), None)
    before = time.monotonic()
    record = witness.enrich(InterruptionRecord(0, Interruption.HARD_TIMEOUT), Observation(), Limits(), "none")
    assert record.last_heartbeat_age_s is not None
    last_sign_at = before - record.last_heartbeat_age_s
    assert last_sign_at <= (view.last_sign_at or 0.0) <= last_sign_at + (time.monotonic() - before)
    Snapshots().write(tmp_path, Origin("job", "n", "monitor", 1, initial_rank=0), view, Observation(), Limits(), before)
    assert WRITER.flush(60.0)
    (shown,) = rank_snapshot.read_of(tmp_path, "n", [0])
    listener = Listener()
    listener.take(side.drain()[0], view, is_healthy=True)
    silence = listener.silence(Rule(), view.since)
    nearly = pytest.approx(view.last_sign_at, abs=1e-6)  # a snapshot has whole nanoseconds
    assert silence is not None and shown.heartbeat_at == nearly and silence.since == nearly
    assert view.last_sign_at > (view.step_at or 0.0) or last == "step"


def test_rank_without_a_sign_of_life_is_described_too() -> None:
    page = Page.create()
    rank, side = RankSide(page), MonitorSide(page)
    rank.set_seat(Seat(0, 0, 1, 1, -1))
    witness = Witness(side, Process(os.getpid()), None)
    witness.see(0.0)
    record = witness.enrich(InterruptionRecord(0, Interruption.HARD_TIMEOUT), Observation(), Limits(), "seen")
    assert record.last_heartbeat_age_s is None
    assert record.process is not None


@pytest.mark.parametrize(
    ("status", "exit"),
    [(3, Exit(code=3)), (-2, Exit(signal="SIGINT")), (-777, Exit(signal="signal 777")), (0, None), (None, None)],
)
def test_exit_that_a_program_has_noted_is_read_whatever_it_wrote(status: int | None, exit: Exit | None) -> None:
    """A program that damages its memory can write any number there."""
    view = msgspec.structs.replace(EMPTY, step=1, doing=Doing.ENDING, exit_status=status)
    page: Any = SimpleNamespace(read=lambda: view, collectives=list)
    witness = Witness(page, SimpleNamespace(pid=os.getpid(), state=lambda: None), None)  # type: ignore[arg-type]
    witness.take_stacks = lambda thorough: stacks.NONE  # type: ignore[method-assign]
    assert witness.look().exit == exit
