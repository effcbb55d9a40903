"""The incident that a restart's line tells of, from a part of the record files."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import msgspec
import pytest

from resilience.attribution.incident import Incident
from resilience.attribution.incidents import incidents_of
from resilience.facts import events
from resilience.facts.interruptions import Exit, Interruption, InterruptionRecord
from resilience.facts.records import Record, to_line
from resilience.run_folder.merge import history_of
from resilience.telemetry import restart_lines
from tests.support import launch_streams
from tests.support.launch_streams import launched
from tests.support.record_streams import Fault, Kind, job


def told(folder: Path, is_in_a_hurry: bool = True) -> Incident | None:
    hurry = threading.Event()
    if is_in_a_hurry:
        hurry.set()
    return restart_lines.incident(folder, lambda _: True, lambda _: True, lambda found: next(iter(found), None), hurry)


def told_of(folder: Path, iteration: int) -> Incident | None:
    hurry = threading.Event()
    hurry.set()
    return restart_lines.incident(
        folder,
        lambda _: True,
        lambda _: True,
        lambda found: next((entry for entry in found if entry.iteration == iteration), None),
        hurry,
    )


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


@pytest.mark.parametrize("is_large", [False, True])
def test_restart_that_many_others_have_followed_is_named_in_a_small_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_large: bool
) -> None:
    """A hook that fails before the function restarts a job 50 times a second; a large job has too many files."""
    monkeypatch.setattr(restart_lines, "ALL_BYTES", 0 if is_large else restart_lines.ALL_BYTES)
    faults = [Fault("exception", 1, iteration, 13) for iteration in range(40)]
    folder = job(faults).write(tmp_path / "run")
    sizes = [path.stat().st_size for path in (folder / "records").iterdir()]
    assert max(sizes) > restart_lines.LAST_BYTES
    assert told(folder) is not None
    first = told_of(folder, iteration=0)
    assert (first is None) == is_large


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


def put(folder: Path, files: dict[str, list[Record]], ahead_s: dict[str, float]) -> None:
    """Write record files by name. ahead_s: how far the clocks of nodes are ahead."""
    (folder / "records").mkdir(parents=True)
    for name, records in files.items():
        skewed = [_skewed(record, round(ahead_s.get(record.origin.node, 0.0) * 10**9)) for record in records]
        (folder / "records" / f"{name}.jsonl").write_bytes(b"".join(map(to_line, skewed)))


def _skewed(record: Record, ahead_ns: int) -> Record:
    event = record.event
    if isinstance(event, events.RankInterrupted):
        detected_ns = (event.record.detected_wall_ns or record.wall_ns) + ahead_ns
        event = events.RankInterrupted(msgspec.structs.replace(event.record, detected_wall_ns=detected_ns))
    return msgspec.structs.replace(record, wall_ns=record.wall_ns + ahead_ns, event=event)


@pytest.mark.parametrize("behind_s", [0.0, 3.0])
def test_rank_that_gives_up_after_another_one_died_is_not_named_because_of_a_wrong_clock(
    tmp_path: Path, behind_s: float
) -> None:
    """Rank 3 on node1 is killed. Rank 0 on node0 gives up 10 ms later: by its own clock before that. The barriers that
    show it are beside the records of the cycle."""
    streams = launched([launch_streams.Fault("kill", 3)], nodes=2, ranks=2).files
    killed = next(record for record in streams["node1", 3] if isinstance(record.event, events.RankInterrupted))
    lines = streams["node0", 0]
    place = next(number for number, line in enumerate(lines) if isinstance(line.event, events.RankExited))
    gave_up = InterruptionRecord(0, Interruption.TERMINATED, exit=Exit(code=1), node="node0", pid=1000, step=40)
    lines[place] = msgspec.structs.replace(
        lines[place], wall_ns=killed.wall_ns + 10**7, event=events.RankInterrupted(gave_up)
    )
    agent = streams["node0", None]
    for number, line in enumerate(agent):
        if isinstance(line.event, events.WorkerExited) and (line.event.worker_rank, line.origin.cycle) == (0, 0):
            exited = events.WorkerExited(0, 0, 1000, 1, None, False)
            agent[number] = msgspec.structs.replace(line, event=exited)
    files = {f"{node}-{'agent' if rank is None else rank}": records for (node, rank), records in streams.items()}
    put(tmp_path, files, {"node0": -behind_s})
    hurry = threading.Event()
    hurry.set()

    def wanted(record: Record) -> bool:
        return record.origin.cycle == 0

    incident = restart_lines.incident(tmp_path, wanted, lambda _: True, lambda incidents: incidents[0], hurry)
    assert incident is not None and [culprit.rank for culprit in incident.verdict.culprits] == [3]
    (reported,) = incidents_of(history_of(tmp_path))
    assert incident.verdict.culprits == reported.verdict.culprits
    assert incident.verdict.candidates == reported.verdict.candidates


def test_times_of_a_restart_in_place_are_of_one_clock(tmp_path: Path) -> None:
    times = []
    for ahead_s in (0.0, 3.0):
        told_job = job([Fault("exception", 3, 0)], world=4)
        files = {
            f"{'ab'[rank // 2]}-{rank}": [
                msgspec.structs.replace(line, origin=msgspec.structs.replace(line.origin, node="ab"[rank // 2]))
                for line in lines
            ]
            for rank, lines in told_job.files.items()
        }
        folder = tmp_path / f"{ahead_s:g}"
        put(folder, files, {"b": ahead_s})
        incident = told(folder)
        assert incident is not None
        times.append(incident.detected_wall_ns)
    assert None not in times and abs(times[1] - times[0]) < 10**6


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
