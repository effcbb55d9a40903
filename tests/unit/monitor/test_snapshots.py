"""What a rank shows is written down, also by a disk that is slow at the end."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import msgspec
import pytest

from resilience.core.observation import Doing, Observation
from resilience.facts.identity import Origin
from resilience.facts.limits import Limits
from resilience.monitor.page import MonitorSide, Page
from resilience.monitor.snapshots import Snapshots
from resilience.system import background
from resilience.system.background import WRITER
from resilience.telemetry import rank_snapshot

ORIGIN = Origin("job", "n", "monitor", 1, initial_rank=0, rank=0, world_size=1)


def test_rank_that_is_gone_is_shown_so_though_the_disk_is_slow_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    view = msgspec.structs.replace(MonitorSide(Page.create()).read(), doing=Doing.FUNCTION, step=7)
    snapshots = Snapshots()
    snapshots.write(tmp_path, ORIGIN, view, Observation(), Limits(), 1.0)
    goes_on = threading.Event()
    with monkeypatch.context() as slow:
        slow.setattr(background, "STALL", 0.01)
        assert WRITER.submit(lambda: goes_on.wait(60.0))
        while not WRITER.is_stalled:
            time.sleep(0.01)
        snapshots.write(tmp_path, ORIGIN, view, Observation(), Limits(), 2.0, is_last=True)
        goes_on.set()
    assert WRITER.flush(60.0)
    (shown,) = rank_snapshot.read_of(tmp_path, "n", [0])
    assert (shown.doing, shown.step) == (Doing.OUTSIDE.value, 7)
