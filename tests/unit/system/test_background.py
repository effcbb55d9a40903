"""What is left to a thread, because a disk may hold it."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from resilience.system import background
from resilience.system.background import BackgroundFile, Writer, asked


@pytest.fixture
def answers() -> Iterator[threading.Event]:
    """Set when the disk answers, at the latest at the end of the test."""
    event = threading.Event()
    yield event
    event.set()


def test_jobs_are_done_in_order() -> None:
    writer, done = Writer(), list[int]()
    for number in range(100):
        assert writer.submit(lambda number=number: done.append(number))  # type: ignore[misc]
    assert writer.flush(60.0)
    assert done == list(range(100))
    writer.end(60.0)


def test_signal_handler_that_logs_while_its_thread_starts_the_writer_does_not_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    writer, done = Writer(), list[int]()
    before = set(threading.enumerate())

    class Interrupted(threading.Thread):
        """The writer's thread. A signal handler of the thread that makes it writes a line meanwhile."""

        def __init__(self, **arguments: Any) -> None:
            monkeypatch.undo()
            assert writer.submit(lambda: done.append(1))
            super().__init__(**arguments)

    def log() -> None:
        monkeypatch.setattr(background.threading, "Thread", Interrupted)
        assert writer.submit(lambda: done.append(2))

    program = threading.Thread(target=log, daemon=True)
    program.start()
    program.join(20.0)
    assert not program.is_alive()
    writer.end(60.0)
    assert done == [1, 2]
    assert not set(threading.enumerate()) - before


@pytest.mark.parametrize("has_started", [False, True])
def test_signal_handler_that_raises_while_the_writer_starts_leaves_it_usable(
    has_started: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, done = Writer(), list[int]()
    before = set(threading.enumerate())

    class Interrupted(threading.Thread):
        def start(self) -> None:
            if has_started:
                super().start()
            raise KeyboardInterrupt

    monkeypatch.setattr(background.threading, "Thread", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        writer.submit(lambda: done.append(1))
    monkeypatch.undo()
    assert writer.submit(lambda: done.append(2))
    writer.end(60.0)
    assert done == [2]
    for thread in set(threading.enumerate()) - before:  # one that has started ends by itself
        thread.join(60.0)
        assert not thread.is_alive()


def test_job_that_is_accepted_while_another_thread_ends_the_writer_is_done() -> None:
    writer, done = Writer(), list[int]()
    assert writer.submit(lambda: done.append(1))

    class Jobs:
        """The writer's queue. Another thread ends the writer just before a job is put into it."""

        qsize = writer._jobs.qsize
        at_end = threading.Thread(target=writer.leave, daemon=True)

        def put(self, job: Any) -> None:
            if job is not None and not self.at_end.ident:
                self.at_end.start()
                self.at_end.join(0.5)  # it waits now, or is done
            queue_of_thread.put(job)

    queue_of_thread = writer._jobs
    jobs = Jobs()
    writer._jobs = jobs  # type: ignore[assignment]
    thread = writer._thread
    assert thread is not None
    assert writer.submit(lambda: done.append(2))
    jobs.at_end.join(60.0)
    thread.join(60.0)
    assert done == [1, 2]


def test_full_queue_refuses(answers: threading.Event, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "MOST", 3)
    writer, has_begun = Writer(), threading.Event()
    writer.submit(lambda: (has_begun.set(), answers.wait()))
    assert has_begun.wait(60.0)
    assert [writer.submit(lambda: None) for _ in range(5)] == [True] * 3 + [False] * 2


def test_full_queue_refuses_no_last_job_and_is_waited_for(
    answers: threading.Event, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(background, "MOST", 3)
    writer, has_begun, done = Writer(), threading.Event(), list[int]()
    writer.submit(lambda: (has_begun.set(), answers.wait()))
    assert has_begun.wait(60.0)
    while writer.submit(lambda: done.append(1)):
        pass
    assert writer.submit(lambda: done.append(2), is_last=True)
    threading.Timer(0.1, answers.set).start()
    assert writer.flush(60.0)
    assert done == [1] * 3 + [2]
    writer.end(60.0)


def test_disk_that_does_not_answer_is_known_and_asked_no_more(
    answers: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "STALL", 0.0)
    writer, has_begun = Writer(), threading.Event()
    with pytest.raises(OSError, match="the disk does not answer"):
        writer.ask(lambda: (has_begun.set(), answers.wait()), 0.01)
    assert has_begun.wait(60.0)
    assert writer.is_stalled
    with pytest.raises(OSError, match="the disk does not answer"):
        writer.ask(lambda: 7, 1000.0)
    assert not writer.replace(Path("/nowhere/file"), b"")
    answers.set()
    writer.end(60.0)


def test_last_lines_are_waited_for_as_long_as_the_disk_answers(
    answers: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, done = Writer(), list[int]()
    for number in range(30):
        writer.submit(lambda number=number: (time.sleep(0.05), done.append(number)))  # type: ignore[misc]
    assert writer.flush(120.0)
    assert done == list(range(30))
    monkeypatch.setattr(background, "STALL", 0.0)  # it writes lines late, but it may still write the last ones
    writer.submit(lambda: (time.sleep(0.05), done.append(30)))
    assert writer.flush(120.0)
    assert done[-1] == 30
    monkeypatch.setattr(background, "LAST_STALL", 0.05)
    writer.submit(answers.wait)
    assert not writer.flush(1000.0)
    answers.set()
    writer.end(60.0)


def test_question_raises_what_it_raises() -> None:
    with pytest.raises(FileNotFoundError):
        asked(Path("/nowhere").stat)
    assert asked(lambda: 7) == 7


def test_writer_without_a_thread_refuses_and_starts_one_later(monkeypatch: pytest.MonkeyPatch) -> None:
    writer = Writer()
    with monkeypatch.context() as scarce:
        scarce.setattr(threading.Thread, "start", no_thread)
        assert not writer.submit(lambda: None)
        assert writer.flush()
    assert writer.ask(lambda: 7, 60.0) == 7
    writer.end(60.0)


def no_thread(thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def test_job_that_raises_ends_no_other() -> None:
    writer = Writer()
    writer.submit(lambda: 1 // 0)
    assert writer.ask(lambda: 7, 60.0) == 7
    writer.end(60.0)


def test_lines_that_could_not_be_written_are_counted_once(tmp_path: Path) -> None:
    (tmp_path / "folder").write_text("a file where a folder should be")
    file = BackgroundFile(tmp_path / "folder" / "lines")
    assert file.write(b"1\n") and file.write(b"2\n")
    file.close(60.0)
    assert (file.take_lost(), file.take_lost()) == (2, 0)
    assert not file.write_now(b"3\n", 60.0)


def test_line_that_is_waited_for_is_in_the_file(tmp_path: Path) -> None:
    file = BackgroundFile(tmp_path / "lines")
    assert file.write_now(b"1\n", 60.0)
    assert (tmp_path / "lines").read_bytes() == b"1\n"
    file.close(60.0)


def test_forked_child_has_a_writer_of_its_own(tmp_path: Path) -> None:
    file = BackgroundFile(tmp_path / "lines")
    assert file.write_now(b"parent\n", 60.0)
    child = os.fork()
    if not child:
        os._exit(0 if file.write_now(b"child\n", 60.0) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert (tmp_path / "lines").read_bytes() == b"parent\nchild\n"
    file.close(60.0)
