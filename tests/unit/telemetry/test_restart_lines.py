"""The incident that a restart's line tells of, from a part of the record files."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from resilience.attribution.incident import Incident
from resilience.facts import events
from resilience.facts.records import to_line
from resilience.telemetry import restart_lines
from tests.support import launch_streams
from tests.support.launch_streams import launched
from tests.support.record_streams import Fault, Kind, job


def told(folder: Path, is_in_a_hurry: bool = True) -> Incident | None:
    hurry = threading.Event()
    if is_in_a_hurry:
        hurry.set()
    return restart_lines.incident(folder, lambda _: True, lambda _: True, lambda found: next(iter(found), None), hurry)


@pytest.mark.parametrize("kind", ["exception", "kill", "hang"])
def test_rank_that_was_first_is_named_though_only_other_files_changed_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Kind
) -> None:
    write(tmp_path, kind)
    monkeypatch.setattr(restart_lines, "MOST_FILES", 2)
    found = told(tmp_path)
    assert found is not None and [culprit.rank for culprit in found.verdict.culprits] == [1]


def test_rank_that_all_others_waited_for_is_named_though_it_reported_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only where it was when it learned of the interruption tells."""
    write(tmp_path, "waited_for")
    monkeypatch.setattr(restart_lines, "MOST_FILES", 2)
    monkeypatch.setattr(restart_lines, "FIRST_LOOK", 0.0)
    assert told(tmp_path) is None, "a process that exits has no time to look for it"
    found = told(tmp_path, is_in_a_hurry=False)
    assert found is not None and [culprit.rank for culprit in found.verdict.culprits] == [1]


def test_part_of_the_records_that_blames_no_rank_says_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "communication")
    found = told(tmp_path)
    assert found is not None and not found.verdict.culprits
    monkeypatch.setattr(restart_lines, "MOST_FILES", 2)
    assert told(tmp_path) is None


@pytest.mark.parametrize("kind", ["kill", "raise", "hang"])
def test_worker_that_failed_is_named_though_only_the_agents_files_changed_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: launch_streams.Kind
) -> None:
    (tmp_path / "records").mkdir()
    for (node, rank), records in launched([launch_streams.Fault(kind, 1)], nodes=2).files.items():
        path = tmp_path / "records" / f"{node}-{'agent' if rank is None else rank}.jsonl"
        path.write_bytes(b"".join(map(to_line, records)))
        os.utime(path, (1000 + (rank is None), 1000 + (rank is None)))
    monkeypatch.setattr(restart_lines, "MOST_FILES", 2)
    found = told(tmp_path)
    assert found is not None and [culprit.rank for culprit in found.verdict.culprits] == [1]


def test_line_waits_no_longer_than_its_limit_for_records_that_do_not_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted from the restart: the wait before the first look is a part of it."""
    clock = Clock()
    monkeypatch.setattr(restart_lines, "time", clock)
    write(tmp_path, "kill")
    found = restart_lines.incident(
        tmp_path, lambda _: True, lambda _: False, lambda found: next(iter(found), None), clock.hurry
    )
    assert found is not None and [culprit.rank for culprit in found.verdict.culprits] == [1]
    assert clock.now == pytest.approx(restart_lines.LIMIT)


class Clock:
    """A clock that only the waits of `hurry` move."""

    def __init__(self) -> None:
        self.now = 0.0
        self.hurry = threading.Event()
        self.hurry.wait = self._wait  # type: ignore[method-assign]

    def monotonic(self) -> float:
        return self.now

    def _wait(self, timeout: float | None = None) -> bool:
        self.now += timeout or 0.0
        return False


def write(folder: Path, kind: Kind) -> None:
    """Write the files of a job of 6 ranks; that of rank 1, which breaks, is the oldest."""
    (folder / "records").mkdir()
    for rank, records in job([Fault(kind, 1, 0)], world=6).files.items():
        path = folder / "records" / f"node-{rank}.jsonl"
        path.write_bytes(b"".join(map(to_line, records)))
        os.utime(path, (1000 + (rank != 1), 1000 + (rank != 1)))


def test_line_that_gets_no_thread_is_not_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_thread(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    printed: list[object] = []
    monkeypatch.setattr(threading.Thread, "start", no_thread)
    restart_lines.RestartLine(lambda hurry: "line", printed.append, printed.append).finish()
    assert printed == []


def test_line_of_the_newest_restart_alone_follows_the_present_one() -> None:
    printed: list[object] = []
    is_entered, may_end = threading.Event(), threading.Event()

    def slow(hurry: restart_lines.Hurry) -> str:
        is_entered.set()
        assert may_end.wait(60)
        return f"1 {hurry.is_behind}"

    line = restart_lines.RestartLine(slow, printed.append, printed.append)
    assert is_entered.wait(60)
    for number in (2, 3, 4):
        assert line.follow(lambda hurry, number=number: f"{number} {hurry.is_behind}")
    may_end.set()
    line._thread.join(60)
    assert printed == ["1 True", "4 False"]
    assert not line.follow(lambda hurry: "5")
    assert printed == ["1 True", "4 False"]


def test_line_follows_none_that_got_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_thread(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", no_thread)
    assert not restart_lines.RestartLine(lambda hurry: "line", print, print).follow(lambda hurry: "line")


def test_analysis_that_fails_costs_its_own_line_only_and_an_event_says_so() -> None:
    printed: list[object] = []
    emitted: list[events.Event] = []
    may_fail = threading.Event()

    def broken(hurry: restart_lines.Hurry) -> str:
        assert may_fail.wait(60)
        raise ImportError("the package was replaced on disk")

    line = restart_lines.RestartLine(broken, printed.append, emitted.append)
    assert line.follow(lambda hurry: "2")
    may_fail.set()
    line._thread.join(60)
    assert printed == ["2"]
    assert emitted == [events.AnalysisFailed("ImportError: the package was replaced on disk")]
    assert not line.follow(lambda hurry: "3")
