"""Notes that a worker writes to memory, and its agent reads."""

from __future__ import annotations

import itertools
import mmap
import operator
import os
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from resilience.launcher.worker.notes import SIZE, ModuleImported, NotesReader, NotesWriter, VariablesSetTooLate

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


def test_notes_of_a_workers_forked_child_do_not_displace_its_own(both: Both, monkeypatch: pytest.MonkeyPatch) -> None:
    writer, reader = both
    writer.write(ModuleImported("torch.utils.data"))
    with monkeypatch.context() as child:
        child.setattr(os, "getpid", lambda: -1)
        writer.write(ModuleImported("torch._dynamo"))
    assert reader.read() == [ModuleImported("torch.utils.data")]
    late = VariablesSetTooLate("torch", ("TORCH_LOGS", "odd\nname"))
    writer.write(late)
    assert reader.read() == [late]


def test_note_that_the_program_has_damaged_is_dropped_alone(both: Both) -> None:
    writer, reader = both
    notes = [ModuleImported(name) for name in ("a", "b", "c")]
    for note in notes:
        writer.write(note)
    memory = writer._memory
    memory[memory.find(b"b")] = 0xFF
    assert reader.read() == [notes[0], notes[2]]


def test_notes_of_several_threads_are_all_read(both: Both) -> None:
    writer, reader = both
    notes = [[ModuleImported(f"m{thread}.n{number}") for number in range(100)] for thread in range(4)]
    threads = [threading.Thread(target=lambda own=own: [writer.write(note) for note in own]) for own in notes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    by_name = operator.attrgetter("module")
    assert sorted(reader.read(), key=by_name) == sorted(itertools.chain.from_iterable(notes), key=by_name)
