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


def test_launchers_monitor_leaves_the_file_of_a_wrappers_call_alone_and_its_step_in_it(tmp_path: Path) -> None:
    """A section before the call, and steps in it; then a client that beats in both pages."""
    empty = MonitorSide(Page.create()).read()
    outside = msgspec.structs.replace(empty, doing=Doing.OUTSIDE, section_left_at=1.0)
    beating = msgspec.structs.replace(empty, doing=Doing.FUNCTION, heartbeat_at=3.0)
    of_wrapper, of_launcher = Snapshots(), Snapshots()
    launchers = msgspec.structs.replace(ORIGIN, pid=2, layer="launcher")

    def shown() -> rank_snapshot.RankSnapshot:
        assert WRITER.flush(60.0)
        (found,) = rank_snapshot.read_of(tmp_path, "n", [0])
        return found

    of_launcher.write(tmp_path, launchers, outside, Observation(), Limits(), 1.0)
    assert shown().origin == launchers
    stepping = msgspec.structs.replace(beating, step=49)
    of_wrapper.write(tmp_path, ORIGIN, stepping, Observation(step_at=2.0), Limits(), 2.0)
    of_launcher.write(tmp_path, launchers, outside, Observation(), Limits(), 90.0, is_last=True)
    assert (shown().origin, shown().step) == (ORIGIN, 49)
    for now in (200.0, 300.0):
        of_launcher.write(tmp_path, launchers, beating, Observation(), Limits(), now)
        assert (shown().origin, shown().step, shown().step_at) == (launchers, 49, 2.0)
    later = msgspec.structs.replace(launchers, cycle=1)
    of_launcher.write(tmp_path, later, beating, Observation(), Limits(), 400.0)
    assert shown().step is None
