"""The thread that shows workers' output at the launcher's stdout or stderr, whose reader may be gone."""

from __future__ import annotations

import os
import time

from resilience.launcher.drain import Stream
from resilience.launcher.shown import Shower
from resilience.launcher.streams import OpenStream, StreamLost


def test_loss_at_the_terminal_has_the_error_of_the_write() -> None:
    told: list[StreamLost] = []
    reading, writing = os.pipe()
    os.close(reading)
    shower = Shower(writing, told.append)
    shower.take(Stream(OpenStream(1, "rank 0's stdout", b"/0.out", 0, 1), -1), b"nobody reads this\n")
    deadline = time.monotonic() + 60.0
    while not shower.is_stuck(0.0):  # the first attempt to write has not failed yet
        assert time.monotonic() < deadline
        time.sleep(0.01)
    shower.settle()
    assert [(each.place, each.count, each.why) for each in told] == [("terminal", 18, "Broken pipe")]
