"""Which descriptors a forked process keeps."""

from __future__ import annotations

import os
from multiprocessing.connection import Connection

from resilience.system import descriptors
from tests.process.children import child


def test_process_keeps_its_streams_and_what_it_names_and_nothing_else() -> None:
    def body(line: Connection) -> None:
        kept, closed = os.pipe()
        far = os.dup2(closed, 900)
        descriptors.close_others((kept, line.fileno()))
        still_open = {int(name) for name in os.listdir("/proc/self/fd")}
        line.send((kept in still_open, closed in still_open, far in still_open, {0, 1, 2} <= still_open))

    with child(body) as process:
        assert process.hear() == (True, False, False, True)


def test_forked_process_lets_go_of_its_parents_files_and_their_numbers_reach_no_other_file() -> None:
    read, write = os.pipe()

    def body(line: Connection) -> None:
        kept = os.dup(line.fileno())
        descriptors.release_others((kept, line.fileno()))
        opened, other_end = os.pipe()
        os.write(write, b"of an object that knows only its number")
        line.send((os.fstat(kept).st_ino == os.fstat(line.fileno()).st_ino, write in (opened, other_end)))
        line.recv()

    with child(body) as process:
        assert process.hear() == (True, False)
        os.close(write)
        assert os.read(read, 100) == b""  # the process, which still runs, does not hold the pipe
        process.tell()
    os.close(read)
