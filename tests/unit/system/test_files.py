"""Files are whole or not there, and nothing that happens to them is raised."""

from __future__ import annotations

import errno
import os
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from resilience.system import files
from resilience.system.files import LineFile, create, replace, tail, why_not_replaced
from tests.support.disks import lose_descriptor


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@contextmanager
def disk_with_room_for(size: int) -> Iterator[None]:
    """No file may grow beyond `size` bytes: writes are cut short and then fail, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def failing(number: int) -> Callable[..., int]:
    def fail(*_: object, **__: object) -> int:
        raise OSError(number, os.strerror(number))

    return fail


# -- lines --------------------------------------------------------------------------------------------


def test_lines_of_several_writers_follow_each_other(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "lines"
    first, second = LineFile(path), LineFile(path)
    assert first.write(b"1\n") and second.write(b"2\n") and first.write(b"3\n")
    first.close()
    first.close()  # twice is once
    assert first.write(b"4\n")  # and it opens again
    assert path.read_bytes() == b"1\n2\n3\n4\n"
    first.close()
    second.close()


def test_line_that_was_cut_short_does_not_swallow_the_next(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    file = LineFile(path)
    assert file.write(b"first\n")
    with disk_with_room_for(10):
        assert not file.write(b"second\n")  # four bytes of it went
        assert not file.write(b"third\n")  # nothing of it
    assert file.write(b"fourth\n")
    assert file.write(b"fifth\n")
    assert path.read_bytes() == b"first\nseco\nfourth\nfifth\n"
    file.close()


def test_line_that_an_earlier_process_left_cut_short_does_not_swallow_the_next(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_bytes(b"first\nseco")
    for line in (b"third\n", b"fourth\n"):
        file = LineFile(path)
        assert file.write(line)
        file.close()
    assert path.read_bytes() == b"first\nseco\nthird\nfourth\n"


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EIO, errno.EBADF, errno.EROFS])
def test_file_whose_descriptor_is_lost_is_opened_again(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(files.time, "monotonic", lambda: now)
    file = LineFile(tmp_path / "lines")
    assert file.write(b"1\n")
    assert file._fd is not None
    lose_descriptor(file._fd, number, monkeypatch)
    assert not file.write(b"2\n")
    assert not file.write(b"3\n")  # it was opened a moment ago
    now += files.REOPEN_EVERY
    assert file.write(b"4\n")
    assert file.path.read_bytes() == b"1\n4\n"
    file.close()


def test_file_that_was_opened_long_ago_is_opened_again_for_the_next_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(files.time, "monotonic", lambda: now)
    file = LineFile(tmp_path / "lines")
    assert file.write(b"1\n")
    now += files.REOPEN_EVERY
    assert file._fd is not None
    lose_descriptor(file._fd, errno.ESTALE, monkeypatch)
    assert not file.write(b"2\n")
    assert file.write(b"3\n")
    file.close()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EAGAIN])
def test_line_that_cannot_be_written_is_answered_not_raised(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = LineFile(tmp_path / "lines")
    assert file.write(b"1\n")
    with monkeypatch.context() as broken:
        broken.setattr(os, "write", failing(number))
        assert not file.write(b"2\n")
    assert file.write(b"3\n")
    assert file.path.read_bytes() == b"1\n3\n"
    file.close()


def test_file_that_cannot_be_opened_is_tried_again_but_not_at_every_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(files.time, "monotonic", lambda: now)
    (tmp_path / "folder").write_text("a file where a folder should be")
    file = LineFile(tmp_path / "folder" / "lines")
    assert not file.write(b"1\n")
    (tmp_path / "folder").unlink()
    assert not file.write(b"2\n")  # too early to look again
    now += files.REOPEN_EVERY
    assert file.write(b"3\n")
    assert file.path.read_bytes() == b"3\n"
    file.close()


# -- whole files --------------------------------------------------------------------------------------


def test_replaced_file_is_the_new_one_and_nothing_else_is_left(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "file"
    assert replace(path, b"old")
    assert replace(path, b"new")
    assert path.read_bytes() == b"new"
    assert names(path.parent) == ["file"]


def test_file_that_cannot_be_replaced_stays_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "file"
    assert replace(path, b"old")
    with disk_with_room_for(2):
        assert not replace(path, b"longer")
        assert why_not_replaced(path, b"longer") == os.strerror(errno.EFBIG)
    assert why_not_replaced(path, b"old") == ""
    assert path.read_bytes() == b"old"
    assert names(tmp_path) == ["file"]


@pytest.mark.parametrize("is_there", [True, False])
def test_target_of_a_link_is_replaced_and_the_link_stays(is_there: bool, tmp_path: Path) -> None:
    target, link, first = tmp_path / "folder" / "target", tmp_path / "link", tmp_path / "first"
    if is_there:
        assert replace(target, b"old")
    link.symlink_to("folder/target")
    first.symlink_to(link)
    assert replace(first, b"new")
    assert target.read_bytes() == b"new"
    assert link.is_symlink() and first.is_symlink()
    assert names(target.parent) == ["target"]


def test_open_file_is_not_replaced_by_a_link_to_its_descriptor(tmp_path: Path) -> None:
    with (tmp_path / "output").open("w") as output:
        link = tmp_path / "stdout"
        link.symlink_to(f"/proc/self/fd/{output.fileno()}")
        assert not replace(link, b"page")
        output.write("what was printed")
    assert (tmp_path / "output").read_text() == "what was printed"
    assert link.is_symlink()


def test_links_in_a_circle_are_answered_not_raised(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    assert not replace(tmp_path / "a", b"content")


def test_created_file_is_the_first_ones(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "job.json"
    assert create(path, b"first")
    assert not create(path, b"second")
    assert path.read_bytes() == b"first"
    assert names(path.parent) == ["job.json"]


def test_file_that_cannot_be_created_whole_is_not_there(tmp_path: Path) -> None:
    path = tmp_path / "job.json"
    with disk_with_room_for(2):
        assert not create(path, b"first")
    assert names(tmp_path) == []
    assert create(path, b"second")


def test_file_is_created_where_hard_links_are_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "link", failing(errno.EPERM))
    path = tmp_path / "job.json"
    assert create(path, b"first")
    assert not create(path, b"second")
    assert path.read_bytes() == b"first"
    assert names(tmp_path) == ["job.json"]


@pytest.mark.parametrize("write", [replace, create])
@pytest.mark.parametrize("obstacle", ["folder is a file", "disk is read-only", "name is a folder"])
def test_whole_file_that_cannot_be_written_is_answered_not_raised(
    write: Callable[[Path, bytes], bool], obstacle: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "folder" / "file"
    match obstacle:
        case "folder is a file":
            path.parent.write_text("")
        case "disk is read-only":
            monkeypatch.setattr(Path, "mkdir", failing(errno.EROFS))
        case _:
            path.mkdir(parents=True)
    assert not write(path, b"content")


# -- the end of a file --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "lines", "most", "expected"),
    [
        (b"", 3, 100, ()),
        (b"one\n", 3, 100, ("one",)),
        (b"one\ntwo\nthree\n", 2, 100, ("two", "three")),
        (b"one\ntwo\nhalf", 2, 100, ("two", "half")),
        (b"one\ntwo\nthree\n", 3, 10, ("three",)),  # "o" of "two" is no line
        (b"a single line that is too long\n", 3, 10, ()),
        (b"a\r\nb\xff\n", 3, 100, ("a", "b\\xff")),
        (b"one\n\r 0%\r 1%\r 2%Traceback\n", 3, 100, ("one", " 2%Traceback")),  # a progress bar
        (b"E: a\r0%\r1%\n", 3, 100, ("E: a", "1%")),  # a message may have a carriage return
        (b"\r 0%\r 1%\r    \rTraceback\r\n", 3, 100, ("Traceback",)),
        (b"\r 10%" * 50 + b"]Traceback\n  File\n", 3, 40, (" 10%", " 10%]Traceback", "  File")),
        ("one \u2028 line\n".encode(), 3, 100, ("one \u2028 line",)),  # as JSON may have it
    ],
)
def test_tail_has_the_last_whole_lines(
    content: bytes, lines: int, most: int, expected: tuple[str, ...], tmp_path: Path
) -> None:
    path = tmp_path / "log"
    path.write_bytes(content)
    assert tail(path, lines, most) == expected


def test_tail_of_no_file_is_nothing(tmp_path: Path) -> None:
    assert tail(tmp_path / "missing", 5) == ()
    assert tail(tmp_path, 5) == ()


def test_folder_that_vanishes_while_it_is_listed_hides_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def listing(folder: Path, pattern: str) -> Iterator[Path]:
        yield folder / "one"
        raise FileNotFoundError("deleted meanwhile")

    monkeypatch.setattr(Path, "glob", listing)
    assert files.matching(tmp_path, "*") == [tmp_path / "one"]
