"""Which descriptors a forked process keeps."""

from __future__ import annotations

import os
import resource
from multiprocessing.connection import Connection
from typing import cast

from resilience.inprocess._runtime.monitor_process import Handle
from resilience.monitor.page import RankSide
from resilience.system import channel, descriptors
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


def test_monitor_counts_as_working_while_its_rank_has_no_descriptor_to_look_at_it() -> None:
    """Else the rank would open a further connection to the store in its place."""

    def body(line: Connection) -> None:
        ends = channel.pair()
        monitor = Handle(os.getppid(), "executed", "", 0.0, cast(RankSide, None), ends[0])
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
        line.send(monitor.is_working)

    with child(body) as process:
        assert process.hear() is True


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
