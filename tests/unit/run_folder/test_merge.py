"""One timeline of all files: every line of every file, in order, in memory that the files' length cannot touch."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from resilience.attribution.incidents import fold, incidents_of
from resilience.facts import events
from resilience.history.clocks import NodeAtBarrier, NodeClock, compared
from resilience.run_folder import lines, merge
from resilience.run_folder.lines import FileLines, KnownFile, line_text
from resilience.run_folder.merge import LineFilter, MergedLines, history_of, last_ns, uncertainty_of, window
from resilience.system.files import times_of
from tests.support.lines import AT, SECOND, log_line, record_line, write
from tests.support.node_stories import NodeStory
from tests.support.record_streams import Fault, job


def worker(rank: int) -> events.WorkerStarted:
    return events.WorkerStarted(local_rank=rank, worker_rank=rank, worker_pid=7, how="warm")


def texts(folder: Path, choice: LineFilter | None = None) -> list[str]:
    return [line.event for line in MergedLines(folder, choice)]


# -- order -------------------------------------------------------------------------------------


def test_lines_of_all_files_come_by_time(tmp_path: Path) -> None:
    write(tmp_path, "logs/node-0.jsonl", log_line("b", AT + 2), log_line("d", AT + 4000))
    write(tmp_path, "logs/node-1.jsonl", log_line("a", AT, 1), log_line("c", AT + 3000, 1))
    write(tmp_path, "records/node-0.jsonl", record_line(events.MonitorStarted(5), AT + 5000, rank=0))
    assert texts(tmp_path) == ["b", "a", "c", "d", "monitor.started"]  # log lines have microseconds


def test_order_within_a_file_is_its_own(tmp_path: Path) -> None:
    write(tmp_path, "logs/node-0.jsonl", log_line("first", AT + SECOND), log_line("told late", AT))
    write(tmp_path, "logs/node-1.jsonl", log_line("between", AT + SECOND // 2, 1))
    assert texts(tmp_path) == ["between", "first", "told late"]


def test_stamp_of_a_broken_clock_does_not_move_the_lines_after_it(tmp_path: Path) -> None:
    broken = log_line("broken", AT + 10**18)
    write(tmp_path, "logs/node-0.jsonl", log_line("a", AT), broken, log_line("c", AT + 2 * SECOND))
    write(tmp_path, "logs/node-1.jsonl", log_line("d", AT + 3 * SECOND, 1))
    assert texts(tmp_path) == ["a", "broken", "c", "d"]


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(
    files=st.lists(st.lists(st.binary(max_size=60).filter(lambda b: b"\n" not in b), max_size=12), max_size=5),
    torn=st.booleans(),
    chunk=st.integers(1, 70),
)
def test_no_line_is_lost_whatever_it_holds(
    tmp_path_factory: pytest.TempPathFactory, files: list[list[bytes]], torn: bool, chunk: int
) -> None:
    folder = tmp_path_factory.mktemp("run")
    folders = ("records/n-{}.jsonl", "logs/n-{}.jsonl", "output/0/{}.out")
    paths = []
    for number, content in enumerate(files):
        path = folder / folders[number % 3].format(number)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"\n".join(content) + (b"" if torn else b"\n"))
        paths.append(path)
    sources = [FileLines(path, KnownFile(path.name, "text"), chunk) for path in paths]
    seen = [[line.raw for line in iter(source.next, None)] for source in sources]
    assert seen == [[line for line in content if line] for content in files]
    assert sorted(line.raw for line in MergedLines(folder)) == sorted(line for file in seen for line in file)


# -- what is no record -------------------------------------------------------------------------


def test_bad_and_torn_lines_are_shown_as_they_are_and_counted(tmp_path: Path) -> None:
    whole = record_line(events.MonitorStarted(5), AT, rank=0)
    write(tmp_path, "records/node-0.jsonl", whole, b"\xff\x00 not a record\n", whole, whole[:40])
    timeline = MergedLines(tmp_path)
    found = list(timeline)
    assert [line.kind for line in found] == ["record", "bad", "record", "bad"]
    assert [line.raw for line in found if line.kind == "bad"] == [b"\xff\x00 not a record", whole[:40]]
    assert line_text(found[1]) == "\\xff\x00 not a record"
    assert {line.rank for line in found} == {0}
    assert timeline.bad == {"records/node-0.jsonl": 2}


def test_record_of_a_newer_release_keeps_its_tag_and_place(tmp_path: Path) -> None:
    line = record_line(events.MonitorStarted(5), AT, rank=3).replace(b"monitor.started", b"new.thing")
    write(tmp_path, "records/node-3.jsonl", line)
    (found,) = MergedLines(tmp_path)
    assert (found.kind, found.event, found.rank) == ("record", "new.thing", 3)


def test_lines_without_a_time_are_placed_from_process_start_to_last_file_change(
    tmp_path: Path,
) -> None:
    write(tmp_path, "records/n-agent.jsonl", record_line(worker(4), AT, cycle=1))
    write(tmp_path, "output/1/4.out", b"a" * 9 + b"\n", b"b" * 9 + b"\n", changed_ns=AT + 2 * SECOND)
    first, second = (line for line in MergedLines(tmp_path) if line.kind == "text")
    assert (first.at_ns, second.at_ns) == (AT + SECOND, AT + 2 * SECOND)
    assert first.is_placed and second.is_placed
    assert (first.rank, first.cycle, first.node) == (4, 1, "n")


def test_plain_line_with_a_time_has_that_time_and_gives_it_to_the_lines_after_it(tmp_path: Path) -> None:
    write(
        tmp_path, "output/0/0.err", b"[2023-11-14T22:13:21.5Z] stamped\n", b"  more\n", b"2023-11-14 22:13:22+00:00\n"
    )
    found = list(MergedLines(tmp_path))
    half = SECOND // 2
    assert [(line.at_ns - AT, line.is_placed) for line in found] == [
        (SECOND + half, False),
        (SECOND + half, True),
        (2 * SECOND, False),
    ]


@pytest.mark.parametrize("stamp", ["[W1114 22:13:21.5 gloo.cc:5] slow", "2023-11-14 22:13:21,500 - INFO - slow"])
def test_time_without_a_zone_is_this_machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stamp: str) -> None:
    monkeypatch.setenv("TZ", "UTC+5")
    time.tzset()
    lines._seconds_of.clear()
    try:
        write(tmp_path, "output/0/0.err", stamp.encode(), changed_ns=AT + 20 * 3600 * SECOND)
        (line,) = MergedLines(tmp_path)
    finally:
        monkeypatch.undo()
        time.tzset()
        lines._seconds_of.clear()
    assert (line.at_ns - AT, line.is_placed) == (5 * 3600 * SECOND + 3 * SECOND // 2, False)


def test_what_looks_like_a_time_and_is_none_is_text(tmp_path: Path) -> None:
    write(tmp_path, "output/0/0.err", b"2023-99-14T22:13:21Z x\n", b"9999-01-01 00:00:00Z y\n", changed_ns=AT)
    assert [line.is_placed for line in MergedLines(tmp_path)] == [True, True]


_PARTS = [
    '  |   File "train.py", line 1, in <module>',
    "  | ExceptionGroup: two (1 sub-exception)",
    "  +-+---------------- 1 ----------------",
    "    | ValueError: x",
    "    +------------------------------------",
]


@pytest.mark.parametrize(
    ("text", "levels"),
    [
        (["2023-11-14 22:13:20,000 WARNING train: slow"], ["warning"]),
        (["W1114 22:13:20.000 gloo.cc:5] slow"], ["warning"]),
        (["the error of the loss"], ["info"]),
        (
            ["Traceback (most recent call last):", "  File", "ValueError: x", "after"],
            ["error", "error", "error", "info"],
        ),
        (["torch.cuda.OutOfMemoryError: no memory"], ["error"]),
        (
            ["[rank0]: Traceback (most recent call last):", "[rank0]:   File", "[rank0]: ValueError: x", "after"],
            ["error", "error", "error", "info"],
        ),
        (["[rank0]:[E1114 22:13:20.000 ProcessGroupNCCL.cpp:616] timeout"], ["error"]),
        (["  + Exception Group Traceback (most recent call last):", *_PARTS, "after"], ["error"] * 6 + ["info"]),
        (
            ["[rank12]:   + Exception Group Traceback (most recent call last):", *(f"[rank12]: {p}" for p in _PARTS)],
            ["error"] * 6,
        ),
        (["\x1b[31mERROR\x1b[0m disk full"], ["error"]),
        (["\x1b[1;35mTraceback (most recent call last):\x1b[0m", "  File", "ValueError"], ["error"] * 3),
    ],
)
def test_level_of_a_plain_line_is_what_it_says(tmp_path: Path, text: list[str], levels: list[str]) -> None:
    write(tmp_path, "output/0/0.err", "\n".join(text).encode())
    assert [line.level for line in MergedLines(tmp_path)] == levels


def test_a_coloured_line_has_its_time_and_no_colours(tmp_path: Path) -> None:
    write(tmp_path, "output/0/0.err", b"\x1b[32m2023-11-14T22:13:21Z\x1b[0m saved\n")
    (line,) = MergedLines(tmp_path)
    assert (line.at_ns, line.is_placed, line.event) == (AT + SECOND, False, "2023-11-14T22:13:21Z saved")


def test_endless_line_comes_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "LONGEST", 1000)
    monkeypatch.setattr(merge, "MOST_CHUNK", 300)
    write(tmp_path, "output/0/0.out", b"x" * 2500, b"\nend\n")
    assert [len(line.raw) for line in MergedLines(tmp_path)] == [1000, 1000, 500, 3]


def test_file_that_cannot_be_read_is_listed(tmp_path: Path) -> None:
    write(tmp_path, "logs/node-0.jsonl", log_line("a", AT))
    (tmp_path / "logs" / "node-1.jsonl").mkdir()
    timeline = MergedLines(tmp_path)
    assert [line.event for line in timeline] == ["a"]
    assert list(timeline.unreadable) == ["logs/node-1.jsonl"]


def test_folder_that_is_no_run_gives_nothing(tmp_path: Path) -> None:
    assert list(MergedLines(tmp_path / "nowhere")) == []
    assert last_ns(tmp_path) == 0


# -- choosing ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("choice", "wanted"),
    [
        (LineFilter(ranks=frozenset({1})), ["one", "out"]),
        (LineFilter(level="warning"), ["warned"]),
        (LineFilter(event="wa*"), ["warned"]),
        (LineFilter(event="worker.*"), ["worker.started"]),
        (LineFilter(iteration=2), ["one"]),
        (LineFilter(cycle=1), ["out"]),
        (LineFilter(since_ns=AT + 2 * SECOND), ["warned", "out"]),
        (LineFilter(until_ns=AT + SECOND), ["worker.started", "one"]),
    ],
)
def test_choice(tmp_path: Path, choice: LineFilter, wanted: list[str]) -> None:
    write(tmp_path, "logs/node-0.jsonl", log_line("warned", AT + 2 * SECOND, level="warning"))
    write(tmp_path, "logs/node-1.jsonl", log_line("one", AT + SECOND, 1, iteration=2))
    write(tmp_path, "records/node-agent.jsonl", record_line(worker(0), AT))
    write(tmp_path, "output/1/1.out", b"out\n", changed_ns=AT + 9 * SECOND)
    assert texts(tmp_path, choice) == wanted


def test_lines_within_the_window_are_shown_also_after_a_clock_was_set_back(tmp_path: Path) -> None:
    write(tmp_path, "logs/node-0.jsonl", *(log_line(f"at {at}", AT + at * SECOND) for at in (100, 75, 80)))
    write(tmp_path, "logs/node-1.jsonl", *(log_line(f"at {at}", AT + at * SECOND, 1) for at in (60, 85, 95)))
    choice = LineFilter(since_ns=AT + 70 * SECOND, until_ns=AT + 90 * SECOND)
    assert texts(tmp_path, choice) == ["at 85", "at 75", "at 80"]


def test_lines_long_after_the_window_are_not_read(tmp_path: Path) -> None:
    path = write(tmp_path, "logs/node-0.jsonl", log_line("a", AT), log_line("b", AT + 2 * lines.AHEAD_NS))
    with path.open("ab") as file:
        file.write(b"no log line\n")
    timeline = MergedLines(tmp_path, LineFilter(until_ns=AT + SECOND))
    assert [line.event for line in timeline] == ["a"]
    assert not timeline.bad


def test_incidents_come_from_the_files_one_record_at_a_time(tmp_path: Path) -> None:
    told = job([Fault("kill", 1, 0)])
    folder = told.write(tmp_path / "run")
    (incident,) = incidents_of(history_of(folder))
    assert (incident,) == fold(told.records)
    begin, end = window(incident) or (0, 0)
    seen = [line.event for line in MergedLines(folder, LineFilter(since_ns=begin, until_ns=end))]
    assert "rank.interrupted" in seen and "restart.ended" in seen


# -- following ---------------------------------------------------------------------------------


def test_following_tells_what_comes_and_waits_for_the_rest_of_a_line(tmp_path: Path) -> None:
    path = write(tmp_path, "logs/node-0.jsonl", log_line("a", AT), log_line("b", AT)[:30])
    seen: list[str] = []
    seen_at: list[list[str]] = []

    def later() -> Iterator[bool]:
        with path.open("ab") as file:
            file.write(log_line("b", AT)[30:])
        yield True
        write(tmp_path, "logs/node-1.jsonl", log_line("c", AT, 1), b"torn")
        yield True
        yield False

    steps = later()

    def wait() -> bool:
        seen_at.append(list(seen))
        return next(steps)

    for line in MergedLines(tmp_path).follow(wait):
        if line is not None:
            seen.append(line.event)
    assert seen_at == [["a"], ["a", "b"], ["a", "b", "c"]]
    assert seen == ["a", "b", "c", "torn"]


def test_output_that_was_rotated_is_read_before_what_followed_it(tmp_path: Path) -> None:
    write(tmp_path, "output/0/0.out", b"c\n", changed_ns=AT + SECOND)
    write(tmp_path, "output/0/0.out.1", b"a\nb\n", changed_ns=AT)
    assert texts(tmp_path) == ["a", "b", "c"]


def test_following_reads_what_was_left_of_a_file_that_is_rotated(tmp_path: Path) -> None:
    path = write(tmp_path, "output/0/0.out", b"a\nb\n")
    seen: list[str] = []

    def later() -> Iterator[bool]:
        with path.open("ab") as file:
            file.write(b"c\n")
        path.rename(tmp_path / "output" / "0" / "0.out.1")
        path.write_bytes(b"d\n")
        yield True
        yield False

    steps = later()
    for line in MergedLines(tmp_path).follow(lambda: next(steps)):
        if line is not None:
            seen.append(line.event)
    assert seen == ["a", "b", "c", "d"]


@pytest.mark.parametrize("is_recorded_later", [False, True])
def test_following_knows_the_node_and_the_clock_of_output_of_a_later_cycle(
    tmp_path: Path, is_recorded_later: bool
) -> None:
    """The output may be there before the agent has recorded the start of its worker."""

    records = tmp_path / "records" / "n-agent.jsonl"
    records.parent.mkdir()

    def start(cycle: int, at: int) -> None:
        with records.open("ab") as file:
            file.write(record_line(worker(0), at + 7 * SECOND, node="n", cycle=cycle))

    def later() -> Iterator[bool]:
        if not is_recorded_later:
            start(1, AT + SECOND)
        path = write(tmp_path, "output/1/0.out", b"" if is_recorded_later else b"second\n")
        yield True
        if is_recorded_later:
            start(1, AT + SECOND)
            path.write_bytes(b"second\n")
            yield True
        yield False

    start(0, AT)
    write(tmp_path, "output/0/0.out", b"first\n")
    steps = later()
    merged = MergedLines(tmp_path, LineFilter(kinds=frozenset({"text"})), (NodeClock("n", 7 * SECOND, 0),))
    shown = [line for line in merged.follow(lambda: next(steps)) if line is not None]
    again = list(MergedLines(tmp_path, LineFilter(kinds=frozenset({"text"})), merged.clocks))
    assert [(line.event, line.node) for line in shown] == [("first", "n"), ("second", "n")]
    assert [line.at_ns for line in shown] == [line.at_ns for line in again]


def numbered(word: str, count: int) -> list[str]:
    return [f"{word} {number:05}" for number in range(count)]


def as_bytes(said: list[str]) -> bytes:
    return "".join(f"{one}\n" for one in said).encode()


@pytest.mark.parametrize("now", [20, 40])
def test_following_shows_no_line_twice_if_a_rotated_file_is_replaced(tmp_path: Path, now: int) -> None:
    older = write(tmp_path, "output/0/0.out.1", as_bytes(numbered("first", 30)), changed_ns=AT)
    path = write(tmp_path, "output/0/0.out", as_bytes(numbered("second", now)), changed_ns=AT + SECOND)

    def later() -> Iterator[bool]:
        path.replace(older)
        path.write_bytes(b"third\n")
        yield True
        yield False

    steps = later()
    seen = [line.event for line in MergedLines(tmp_path).follow(lambda: next(steps)) if line is not None]
    assert seen == [*numbered("first", 30), *numbered("second", now), "third"]


@pytest.mark.parametrize("new", [10, 2000])
def test_file_that_is_rotated_while_it_is_read_is_read_to_its_end(tmp_path: Path, new: int) -> None:
    path = write(tmp_path, "0.out", as_bytes(numbered("old", 2000)))
    source = FileLines(path, KnownFile("0.out", "text", 0), 4096)
    seen = [line for line in (source.next(),) if line is not None]
    path.rename(tmp_path / "0.out.1")
    write(tmp_path, "0.out", as_bytes(numbered("new", new)))
    seen += iter(source.next, None)
    assert [line.event for line in seen] == numbered("old", 2000) + numbered("new", new)


def test_copy_of_a_file_that_was_rotated_is_read_to_its_end(tmp_path: Path) -> None:
    """Each file has another inode than before: rsync replaces files, and some network file systems number them anew."""
    path = write(tmp_path, "0.out", b"a1\na2\n")
    source = FileLines(path, KnownFile("0.out", "text", 0), 4)
    assert [line.event for line in iter(source.next, None)] == ["a1", "a2"]
    write(tmp_path, "0.out.1", b"a1\na2\na3\na4\n")
    write(tmp_path, ".0.out.new", b"b1\n").replace(path)
    assert [line.event for line in iter(source.next, None)] == ["a3", "a4", "b1"]


def test_file_that_was_rotated_twice_is_read_from_its_beginning(tmp_path: Path) -> None:
    """What was left of the file that was read is gone; the file that follows it has other lines."""
    path = write(tmp_path, "0.out", as_bytes(numbered("old", 10)))
    source = FileLines(path, KnownFile("0.out", "text", 0), 4096)
    assert len(list(iter(source.next, None))) == 10
    write(tmp_path, "0.out.1", as_bytes(numbered("lost", 20)))
    path.write_bytes(b"new\n")
    assert [line.event for line in iter(source.next, None)] == ["new"]


def test_file_that_is_replaced_by_a_longer_copy_of_itself_is_read_on(tmp_path: Path) -> None:
    """A folder that rsync keeps up to date."""
    path = write(tmp_path, "0.out", b"a\n")
    write(tmp_path, "0.out.1", b"before\n")
    source = FileLines(path, KnownFile("0.out", "text", 0), 4096)
    assert [line.event for line in iter(source.next, None)] == ["a"]
    write(tmp_path, ".0.out.new", b"a\nb\n").replace(path)
    assert [line.event for line in iter(source.next, None)] == ["b"]


# -- clocks ------------------------------------------------------------------------------------


def met(folder: Path, node: str, rank: int, ahead: int, came: tuple[int, ...], left: tuple[int, ...]) -> None:
    """One rank's meetings, on a clock that is `ahead` of the true one."""
    content = []
    for iteration, (arrived, departed) in enumerate(zip(came, left, strict=True)):
        arrives = events.StageStarted("regroup") if iteration else events.CallStarted("f", 2, "", "", "", "", "forked")
        content.append(record_line(arrives, AT + arrived + ahead, node, rank))
        started = events.IterationStarted(2, "active")
        content.append(record_line(started, AT + departed + ahead, node, rank, iteration=iteration))
    write(folder, f"records/{node}-{rank}.jsonl", *content)


def test_one_node_has_one_clock(tmp_path: Path) -> None:
    job([Fault("kill", 1, 0)]).write(tmp_path / "run")
    assert MergedLines(tmp_path / "run").clocks == ()


def test_clock_that_meetings_prove_wrong_is_corrected_within_the_bound(tmp_path: Path) -> None:
    met(tmp_path, "a", 0, 0, (10, 1000), (110, 1200))
    met(tmp_path, "b", 1, 5000, (100, 1190), (112, 1201))
    first, second = MergedLines(tmp_path).clocks
    assert first == NodeClock("a", 0, 0)
    assert second.meetings == 2
    assert second.uncertainty_ns is not None
    assert abs(second.offset_ns - 5000) <= second.uncertainty_ns <= 200
    found = [line for line in MergedLines(tmp_path) if line.event == "iteration.started"]
    assert [line.iteration for line in found] == [0, 0, 1, 1]


def test_clock_that_may_be_right_is_left_alone_and_its_error_bound_is_known(tmp_path: Path) -> None:
    met(tmp_path, "a", 0, 0, (10,), (110,))
    met(tmp_path, "b", 1, 3, (100,), (112,))
    assert MergedLines(tmp_path).clocks[1] == NodeClock("b", 0, 105, 1)


def test_clock_that_was_set_during_the_run_has_an_error_bound_of_its_whole_change(tmp_path: Path) -> None:
    met(tmp_path, "a", 0, 0, (10, 10000), (110, 10110))
    met(tmp_path, "b", 1, 0, (100, 10100 + 9000), (112, 10112 + 9000))
    clock = MergedLines(tmp_path).clocks[1]
    assert (clock.offset_ns, clock.was_set) == (0, True)
    assert clock.uncertainty_ns is not None
    assert 9000 - 110 <= clock.uncertainty_ns <= 9000 + 110


@pytest.mark.parametrize("of", "abc")
def test_clock_of_three_that_was_set_is_the_one_that_is_named(of: str, tmp_path: Path) -> None:
    for rank, node in enumerate("abc"):
        late = 9000 if node == of else 0
        met(tmp_path, node, rank, 0, (10 + rank, 10000 + rank + late), (110 + rank, 10110 + rank + late))
    assert [clock.node for clock in MergedLines(tmp_path).clocks if clock.was_set] == [of]
    assert not any(clock.offset_ns for clock in MergedLines(tmp_path).clocks)


def test_clock_that_drifts_is_corrected_only_if_it_was_always_wrong(tmp_path: Path) -> None:
    """It gains 300 ns in a millisecond: less than the kernel's largest change of the rate."""
    for ahead, name in ((-100, "right in the middle"), (5000, "always wrong")):
        met(tmp_path / name, "a", 0, 0, (0, 1_000_000), (1, 1_000_001))
        met(tmp_path / name, "b", 1, ahead, (0, 1_000_300), (1, 1_000_301))
    clock = MergedLines(tmp_path / "right in the middle").clocks[1]
    assert (clock.offset_ns, clock.was_set) == (0, False)
    clock = MergedLines(tmp_path / "always wrong").clocks[1]
    assert clock.offset_ns == pytest.approx(5150) and not clock.was_set


def test_node_that_never_met_the_others_has_a_clock_of_unknown_error(tmp_path: Path) -> None:
    met(tmp_path, "a", 0, 0, (10,), (110,))
    write(tmp_path, "records/b-1.jsonl", record_line(events.MonitorStarted(5), AT, "b", 1))
    assert MergedLines(tmp_path).clocks[1] == NodeClock("b", 0, None, 0)


def test_agents_meet_at_the_rendezvous(tmp_path: Path) -> None:
    for node, ahead in (("a", 0), ("b", 7000)):
        began = record_line(events.CyclePhaseStarted("rendezvous"), AT + ahead, node)
        ended = record_line(events.CyclePhaseEnded("rendezvous", "completed", 1e-6), AT + 1000 + ahead, node)
        led_to = record_line(events.CycleStarted("first", 0, 3), AT + 1000 + ahead, node)
        write(tmp_path, f"records/{node}-agent.jsonl", began, ended, led_to)
    assert MergedLines(tmp_path).clocks[1] == NodeClock("b", 7000, 1000, 1)


def test_clocks_of_two_nodes_may_differ_by_both_their_errors(tmp_path: Path) -> None:
    met(tmp_path, "a", 0, 0, (0,), (SECOND,))
    met(tmp_path, "b", 1, SECOND, (0,), (SECOND,))
    met(tmp_path, "c", 2, -2 * SECOND, (SECOND * 9 // 10,), (2 * SECOND,))  # 3 s from b
    assert [clock.offset_ns for clock in MergedLines(tmp_path).clocks] == [0, 0, 0]
    assert uncertainty_of(tmp_path) == pytest.approx(2.0 + 2.1)


def test_clocks_of_two_nodes_may_differ_by_anything_if_one_is_unknown(tmp_path: Path) -> None:
    met(tmp_path, "a", 0, 0, (0,), (1000,))
    met(tmp_path, "b", 1, 0, (0,), (1000,))
    assert uncertainty_of(tmp_path) == pytest.approx(1e-6)
    write(tmp_path, "records/z-2.jsonl", record_line(events.MonitorStarted(5), AT, "z", 2))
    assert uncertainty_of(tmp_path) is None


def test_nodes_are_compared_though_the_first_one_met_nobody(tmp_path: Path) -> None:
    """It waits as a spare."""
    write(tmp_path, "records/a-agent.jsonl", record_line(events.CyclePhaseStarted("rendezvous"), AT, "a"))
    met(tmp_path, "b", 1, 0, (0,), (1000,))
    met(tmp_path, "c", 2, 90 * SECOND, (0,), (1000,))
    assert MergedLines(tmp_path).clocks == (
        NodeClock("a", 0, None, 0),
        NodeClock("b", 0, 0, 0),
        NodeClock("c", 90 * SECOND, 1000, 1),
    )


def test_one_wrong_clock_is_the_one_that_is_corrected(tmp_path: Path) -> None:
    for rank, node in enumerate("abcde"):
        met(tmp_path, node, rank, -90 * SECOND if node == "a" else rank, (0,), (1000 + rank,))
    clocks = MergedLines(tmp_path).clocks
    assert [clock.offset_ns for clock in clocks[1:]] == [0, 0, 0, 0]
    assert clocks[0].uncertainty_ns is not None
    assert abs(clocks[0].offset_ns + 90 * SECOND) <= clocks[0].uncertainty_ns <= 2000


def test_halves_that_disagree_take_the_clock_of_the_first_node(tmp_path: Path) -> None:
    for rank, node in enumerate("abcd"):
        met(tmp_path, node, rank, rank % 2 * 90 * SECOND, (0,), (1000,))
    assert [clock.offset_ns for clock in MergedLines(tmp_path).clocks] == [0, 90 * SECOND, 0, 90 * SECOND]


def test_nodes_that_never_met_are_compared_over_one_that_both_met() -> None:
    """c replaced b after b had left; only a met both. Then d replaced a. e and f met each other only."""
    at = {"a": 0, "b": 5000, "c": 70, "d": -8000, "e": 0, "f": 0}

    def meeting(nodes: str, waited: int) -> dict[str, NodeAtBarrier]:
        return {node: NodeAtBarrier(at[node], at[node] + waited) for node in nodes}

    found = compared("abcdefg", [meeting("ab", 100), meeting("ac", 200), meeting("cd", 300), meeting("ef", 1)])
    assert found == (
        NodeClock("a", 0, 0, 0),
        NodeClock("b", 5000, 100, 1),
        NodeClock("c", 0, 270, 1),
        NodeClock("d", -8000, 500, 1),
        NodeClock("e"),
        NodeClock("f"),
        NodeClock("g"),
    )


@given(st.data())
def test_true_difference_of_any_two_nodes_lies_within_both_errors(data: st.DataObject) -> None:
    ahead = {node: data.draw(st.sampled_from([0, 3, -2000, 9000])) for node in "abcdef"}
    meetings = []
    for barrier in data.draw(st.lists(st.sets(st.sampled_from("abcdef"), min_size=1), max_size=6)):
        came = {node: data.draw(st.integers(0, 1000)) for node in sorted(barrier)}
        left = {node: max(came.values()) + data.draw(st.integers(0, 50)) for node in came}
        meetings.append({node: NodeAtBarrier(came[node] + ahead[node], left[node] + ahead[node]) for node in came})
    found = [clock for clock in compared("abcdef", meetings) if clock.uncertainty_ns is not None]
    for one in found:
        for other in found:
            error = (one.offset_ns - other.offset_ns) - (ahead[one.node] - ahead[other.node])
            assert abs(error) <= (one.uncertainty_ns or 0) + (other.uncertainty_ns or 0)


@pytest.mark.parametrize("came", [0.0, 90.0], ids=["spare", "newcomer"])
def test_clock_of_a_node_that_joins_late_is_compared_at_the_cycle_that_it_joined(came: float, tmp_path: Path) -> None:
    """Until then its agent knows no cycle, and its records name the first one."""
    told = NodeStory()
    told.join("ab", 0.0, 1.0)
    told.start("ab", 1.0)
    told.break_off("ab", 80.0, failed="b", silently=True)
    told.join("a", 80.2, 100.0, cycle=1, why="failure")
    told.join("c", came, 100.001, cycle=1, group=1)
    told.start("ac", 101.0, cycle=1)
    clock = MergedLines(told.write(tmp_path / "run")).clocks[-1]
    assert (clock.node, clock.offset_ns, clock.meetings) == ("c", 0, 1)
    assert clock.uncertainty_ns is not None and clock.uncertainty_ns <= 100 * SECOND


def test_last_line_of_a_run_has_the_corrected_time(tmp_path: Path) -> None:
    met(tmp_path, "a", 0, 0, (0,), (1000,))
    met(tmp_path, "b", 1, 1200 * SECOND, (0,), (1000,))
    assert last_ns(tmp_path) == AT + 1000
    write(tmp_path, "records/b-agent.jsonl", record_line(worker(1), AT + 1200 * SECOND, "b"))
    output = write(tmp_path, "output/0/1.out", b"said\n")
    times_of(output).write_bytes(b"0 %d\n" % (AT + 1203 * SECOND))
    assert last_ns(tmp_path) == AT + 3 * SECOND


def test_last_line_of_a_run_is_not_from_a_broken_clock(tmp_path: Path) -> None:
    broken = log_line("broken", AT + 10**18)
    write(tmp_path, "logs/node-0.jsonl", log_line("a", AT), broken)
    write(tmp_path, "logs/node-1.jsonl", log_line("b", AT + SECOND, 1))
    write(tmp_path, "logs/node-2.jsonl", broken, changed_ns=AT + 2 * SECOND)
    assert last_ns(tmp_path) == AT + SECOND == max(line.at_ns for line in MergedLines(tmp_path) if line.rank == 1)


# -- size --------------------------------------------------------------------------------------


def test_buffers_of_many_files_stay_within_the_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Path] = []
    is_open = 0
    real = Path.open

    class Counted:
        def __init__(self, path: Path) -> None:
            self._file = real(path, "rb", buffering=0)

        def __enter__(self) -> object:
            nonlocal is_open
            is_open += 1
            assert is_open == 1
            return self._file

        def __exit__(self, *_: object) -> None:
            nonlocal is_open
            is_open -= 1
            self._file.close()

    def counting(path: Path, *arguments: object, **options: object) -> object:
        opened.append(path)
        return Counted(path)

    for number in range(50):
        write(tmp_path, f"logs/node-{number}.jsonl", *(log_line("x", AT + i * 1000, number) for i in range(100)))
    monkeypatch.setattr(merge, "BUFFERS", 50 * 4096)
    monkeypatch.setattr(Path, "open", counting)
    assert sum(1 for _ in MergedLines(tmp_path)) == 5000
    assert len(opened) > 50 * 3  # each file in several pieces, closed in between
