"""What faulthandler writes is read back whole."""

from __future__ import annotations

import itertools
import os
from types import SimpleNamespace
from typing import Any

import pytest

from resilience.facts.interruptions import Frame, ThreadStack
from resilience.system import stacks
from resilience.system.stacks import Dump, parse

DUMP = """\
main thread 0x00007f3ad47feb80
Thread 0x00007f3ad2bff6c0 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 324 in wait
  File "/usr/lib/python3.11/threading.py", line 975 in _bootstrap

Thread 0x00007f3ad33ff6c0 [loader] (most recent call first):
  <no Python frame>

Current thread 0x00007f3ad47feb80 (most recent call first):
  Garbage-collecting
  File "/home/u/my, line 3 in train.py", line 12 in step in two
  File "train.py", line 30 in <module>
"""


def test_dump_is_read_with_the_main_thread_first_and_frames_innermost_last() -> None:
    assert parse(DUMP, "0x00007f3ad47feb80") == (
        ThreadStack(
            "MainThread 0x00007f3ad47feb80",
            (
                Frame("train.py", 30, "<module>"),
                Frame("/home/u/my, line 3 in train.py", 12, "step in two"),
            ),
        ),
        ThreadStack(
            "Thread 0x00007f3ad2bff6c0",
            (
                Frame("/usr/lib/python3.11/threading.py", 975, "_bootstrap"),
                Frame("/usr/lib/python3.11/threading.py", 324, "wait"),
            ),
        ),
        ThreadStack("Thread 0x00007f3ad33ff6c0 [loader]"),
    )


def test_dump_that_was_cut_off_keeps_what_came() -> None:
    for end in range(len(DUMP)):
        threads = parse(DUMP[:end], "0x00007f3ad47feb80")
        assert len(threads) == DUMP[:end].count("first):")


def test_text_after_a_dump_is_no_frame_of_it() -> None:
    assert parse(DUMP + '\nExtension modules: x (total: 1)\n  File "x", line 1 in y\n') == parse(DUMP)


def test_no_dump_is_no_stacks() -> None:
    assert parse("") == parse("main thread 0x1\n") == ()


def test_dump_is_waited_for_though_the_host_stands_still_for_longer_than_its_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    head, _, dump = DUMP.partition("\n")
    fd = os.memfd_create("dump")
    os.write(fd, f"{head}\n".encode())
    seconds, sleeps = itertools.count(), itertools.count()

    def sleep(_: float) -> None:
        if next(sleeps) == 1:
            os.write(fd, dump.encode())

    process: Any = SimpleNamespace(send=lambda number: True)
    monkeypatch.setattr(stacks, "time", SimpleNamespace(monotonic=lambda: float(next(seconds)), sleep=sleep))
    try:
        assert Dump(fd).request(process) == parse(DUMP, "0x00007f3ad47feb80")
    finally:
        os.close(fd)
