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
