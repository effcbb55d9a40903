"""Whose is the interpreter's lock?  Of real processes, seen from outside."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

import pytest

from resilience.adapters import interpreter
from resilience.adapters.interpreter import Holder, Mark, holder
from tests.process.children import LIMIT, child, hold

needs_marks = pytest.mark.skipif(not interpreter.marks(), reason="this interpreter leaves no marks (glibc's dladdr1?)")


def read(library: ctypes.CDLL) -> None:
    """Read a pipe in C that nobody ever writes to."""
    empty, _keep = os.pipe()
    library.read(empty, ctypes.create_string_buffer(1), 1)


def with_the_lock(line: Connection) -> None:
    read(ctypes.PyDLL(None))


def without_the_lock(line: Connection) -> None:
    read(ctypes.CDLL(None))


def in_a_thread(line: Connection) -> None:
    threading.Thread(target=read, args=(ctypes.PyDLL(None),)).start()
    threading.Event().wait()


@needs_marks
@pytest.mark.parametrize(
    ("hang", "whose"), [(with_the_lock, "main"), (without_the_lock, "nobody"), (in_a_thread, "other"), (hold, "nobody")]
)
def test_holder_of_the_lock_is_seen_from_outside(hang: Callable[[Connection], object], whose: Holder) -> None:
    def body(line: Connection) -> None:
        line.send(interpreter.to_text(interpreter.marks()))
        hang(line)

    with child(body) as other:
        marks = interpreter.from_text(other.hear())
        deadline = time.monotonic() + LIMIT
        while holder(other.pid, marks) != whose:  # it may still be on its way there
            assert time.monotonic() < deadline, holder(other.pid, marks)
            time.sleep(0.01)


def test_thread_that_runs_meanwhile_leaves_no_wrong_marks() -> None:
    def body(line: Connection) -> None:
        is_over = threading.Event()

        def spin() -> None:
            while not is_over.is_set():
                pass

        thread = threading.Thread(target=spin)
        thread.start()
        found = [interpreter.marks() for _ in range(20)]
        is_over.set()
        thread.join()
        line.send([interpreter.to_text(marks) for marks in found])
        hold(line)

    with child(body) as other:
        found = [interpreter.from_text(text) for text in other.hear()]
        other.hear()
        deadline = time.monotonic() + LIMIT
        while {holder(other.pid, marks) for marks in found} - {None, "nobody"}:  # it is on its way to the end of `hold`
            assert time.monotonic() < deadline, found
            time.sleep(0.01)


@pytest.mark.parametrize("marks", [(), ((8, 1, 0),)])  # none were found; an address where nothing is
def test_what_cannot_be_seen_is_no_answer(marks: tuple[Mark, ...]) -> None:
    assert holder(os.getpid(), marks) is None


def test_process_that_is_gone_is_no_answer() -> None:
    assert holder(1 << 22, ((8, 1, 0),)) is None


def test_only_the_main_thread_can_leave_marks() -> None:
    found = []
    thread = threading.Thread(target=lambda: found.append(interpreter.marks()))
    thread.start()
    thread.join()
    assert found == [()]


def test_permission_is_given_without_a_word_where_nobody_asks_for_it() -> None:
    interpreter.allow_reading(os.getpid())
