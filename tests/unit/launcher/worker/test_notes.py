"""Lines that a worker writes to memory, and its agent reads."""

from __future__ import annotations

import itertools
import mmap
import os
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from resilience.launcher.worker.notes import SIZE, NotesReader, NotesWriter

Both = tuple[NotesWriter, NotesReader]


class Yielding(mmap.mmap):
    """Lets other threads run in the middle of each write."""

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(key, value)
        time.sleep(0)


@pytest.fixture
def both(monkeypatch: pytest.MonkeyPatch) -> Iterator[Both]:
    monkeypatch.setattr(mmap, "mmap", Yielding)
    memory = os.memfd_create("notes")
    os.ftruncate(memory, SIZE)
    yield NotesWriter(memory, 0), NotesReader(memory, 0)
    os.close(memory)


def test_lines_of_a_workers_forked_child_do_not_displace_its_own(both: Both, monkeypatch: pytest.MonkeyPatch) -> None:
    writer, reader = both
    writer.write("import torch.utils.data")
    with monkeypatch.context() as child:
        child.setattr(os, "getpid", lambda: -1)
        writer.write("import torch._dynamo")
    assert reader.read() == ["import torch.utils.data"]
    writer.write("late torch TORCH_LOGS")
    assert reader.read() == ["late torch TORCH_LOGS"]


def test_lines_of_several_threads_are_all_read(both: Both) -> None:
    writer, reader = both
    lines = [[f"import m{thread}.n{number}" for number in range(100)] for thread in range(4)]
    threads = [threading.Thread(target=lambda own=own: [writer.write(line) for line in own]) for own in lines]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(reader.read()) == sorted(itertools.chain.from_iterable(lines))
