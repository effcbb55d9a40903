"""Plain text of workers has the time at which it was read, where the launcher has noted that."""

from __future__ import annotations

import os
from datetime import datetime
from pathlib import Path

import pytest

from resilience.run_folder.lines import FileLines, KnownFile, last_stamp
from resilience.run_folder.stamps import Stamps
from resilience.system import files
from tests.support.lines import AT, SECOND, write

TEXT = b"loading\nTraceback (most recent call last):\n  File\nValueError: no\n"
LOADING, TRACEBACK = AT, AT + 27 * SECOND


def stamped(folder: Path, name: str = "0.err", times: bytes | None = None) -> Path:
    path = write(folder, name, TEXT)
    noted = b"0 %d\n8 %d\n" % (LOADING, TRACEBACK) if times is None else times
    files.times_of(path).write_bytes(noted)
    return path


def lines_of(path: Path, offset_ns: int = 0, began_ns: int | None = AT - SECOND) -> list[tuple[str, int, bool]]:
    source = FileLines(path, KnownFile(path.name, "text", offset_ns=offset_ns, began_ns=began_ns), 16)
    found = []
    while (line := source.next()) is not None:
        found.append((line.raw.decode(), line.at_ns, line.is_placed))
    return found


def test_line_has_the_time_at_which_it_was_read(tmp_path: Path) -> None:
    assert [at for _, at, _ in lines_of(stamped(tmp_path))] == [LOADING, TRACEBACK, TRACEBACK, TRACEBACK]
    assert not any(is_placed for _, _, is_placed in lines_of(stamped(tmp_path)))


def test_clock_of_the_node_is_taken_off(tmp_path: Path) -> None:
    assert lines_of(stamped(tmp_path), offset_ns=SECOND)[0][1] == LOADING - SECOND


def test_copy_of_a_run_keeps_the_times(tmp_path: Path) -> None:
    path = stamped(tmp_path)
    for copied in (path, files.times_of(path)):
        os.utime(copied, ns=(AT + 10**14, AT + 10**14))
    assert [at for _, at, _ in lines_of(path)][:2] == [LOADING, TRACEBACK]
    assert last_stamp(path, "text") == TRACEBACK


@pytest.mark.parametrize("first", [b"2023-11-14T22:13:25Z ready\n", b"I1114 22:13:25.000000 7 main.cc:1] ready\n"])
@pytest.mark.parametrize("has_times", [False, True])
@pytest.mark.parametrize("began", [AT - SECOND, None])
def test_copy_that_lost_the_time_of_its_last_change_keeps_the_times_that_lines_say(
    first: bytes, has_times: bool, began: int | None, tmp_path: Path
) -> None:
    """`tar --mtime=@0` and some file systems set it to 0. A line of glog names no year."""
    path = write(tmp_path, "0.err", first, b"more\n", changed_ns=0)
    if has_times:
        files.times_of(path).write_bytes(b"0 %d\n" % (AT + 9 * SECOND))
    expected = [AT + 5 * SECOND, AT + (9 if has_times else 5) * SECOND]
    if began is None and not has_times and first.startswith(b"I"):
        expected = [0, 0]  # nothing says the year
    assert [at for _, at, _ in lines_of(path, began_ns=began)] == expected


def test_file_changed_1_s_before_process_start_has_no_line_of_the_next_year(tmp_path: Path) -> None:
    """The clock of a file server may be behind."""
    path = write(tmp_path, "0.err", b"2024-11-14T22:13:25Z ready\n", changed_ns=AT - SECOND)
    assert [at for _, at, _ in lines_of(path, began_ns=AT)] == [AT]


@pytest.mark.parametrize("line", ["W1231 23:30:00.000000 7 a.cc:1] old", "W0101 00:05:00.000000 7 a.cc:1] new"])
def test_line_that_names_no_year_is_not_dated_a_year_before_its_process_began(line: str, tmp_path: Path) -> None:
    """The process began an hour before New Year, and its file has lost the time of its last change."""
    path = write(tmp_path, "0.err", line.encode() + b"\n", changed_ns=0)
    expected = datetime(2024, 12, 31, 23, 30) if "old" in line else datetime(2025, 1, 1, 0, 5)
    began_ns = round(datetime(2024, 12, 31, 23).timestamp()) * SECOND
    assert [at for _, at, _ in lines_of(path, began_ns=began_ns)] == [round(expected.timestamp()) * SECOND]


def test_line_after_the_end_of_its_file_has_no_time_of_its_own(tmp_path: Path) -> None:
    path = write(tmp_path, "0.err", b"2024-11-14T22:13:25Z ready\n", changed_ns=AT + 60 * SECOND)
    assert [at for _, at, _ in lines_of(path)] == [AT + 60 * SECOND]


def test_rotated_file_has_its_own_times(tmp_path: Path) -> None:
    path = stamped(tmp_path, "0.err.1")
    assert files.times_of(path).name == "0.err.times.1"
    assert [at for _, at, _ in lines_of(path)][:2] == [LOADING, TRACEBACK]


def test_line_that_says_its_time_itself_has_that(tmp_path: Path) -> None:
    path = write(tmp_path, "0.out", b"2023-11-14T22:13:25Z ready\nmore\n")
    files.times_of(path).write_bytes(b"0 %d\n" % (AT + 9 * SECOND))
    assert [at for _, at, _ in lines_of(path)] == [AT + 5 * SECOND, AT + 9 * SECOND]


def test_time_of_reading_is_not_looked_up_for_a_line_that_says_its_time_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A position after the last entry of the file of times opens that file."""
    looked_up = []
    monkeypatch.setattr(Stamps, "at", lambda _, position: looked_up.append(position))
    lines_of(write(tmp_path, "0.out", b"2023-11-14T22:13:25Z ready\n", b"more\n"))
    assert looked_up == [31]


def test_file_without_times_is_placed_as_before(tmp_path: Path) -> None:
    assert all(is_placed for _, _, is_placed in lines_of(write(tmp_path, "0.err", TEXT)))


def test_damaged_times_are_left_out(tmp_path: Path) -> None:
    damaged = b"\xff\n0 %d\nx y\n9999999999999999999999 1\n5\n-1 -1\n8 %d\n3 7\n12 " % (LOADING, TRACEBACK)
    assert [at for _, at, _ in lines_of(stamped(tmp_path, times=damaged))][:2] == [LOADING, TRACEBACK]


def test_times_that_are_added_are_read_when_they_are_needed(tmp_path: Path) -> None:
    path = stamped(tmp_path, times=b"")
    stamps = Stamps(path)
    assert stamps.at(0) is None
    files.times_of(path).write_bytes(b"0 7\n5 8")
    assert (stamps.at(0), stamps.at(4), stamps.at(6)) == (7, 7, 7)
    files.times_of(path).write_bytes(b"0 7\n5 8\n")
    assert (stamps.at(4), stamps.at(5), stamps.at(99)) == (7, 8, 8)
