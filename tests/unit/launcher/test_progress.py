"""Killed workers that take long to end, and those that never do."""

from __future__ import annotations

from collections.abc import Hashable

from resilience.launcher.worker.worker_processes import KILL_LIMIT, ExitProgress


class Host:
    """A virtual clock, and what is seen of each process."""

    def __init__(self) -> None:
        self.now = 0.0
        self.samples: dict[int, Hashable | None] = {}
        self.progress = ExitProgress(lambda pid: self.samples[pid], lambda: self.now)

    def unkillable_after(self, seconds: float) -> list[int]:
        self.now += seconds
        return self.progress.unkillable(self.samples)


def test_process_that_shows_the_same_for_the_limit_is_unkillable() -> None:
    host = Host()
    host.samples = {7: (0.1, 4096)}
    assert host.unkillable_after(0) == []
    assert host.unkillable_after(KILL_LIMIT - 0.1) == []
    assert host.unkillable_after(0.1) == [7]


def test_process_that_frees_its_memory_is_not_unkillable_however_long_that_takes() -> None:
    host = Host()
    for left in range(40, 0, -1):
        host.samples = {7: (0.1, left)}
        assert host.unkillable_after(KILL_LIMIT / 2) == []


def test_process_that_waits_for_a_processor_is_not_unkillable() -> None:
    host = Host()
    host.samples = {7: None}
    for _ in range(10):
        assert host.unkillable_after(KILL_LIMIT) == []
    host.samples = {7: (0.1, 0)}
    assert host.unkillable_after(0) == []
    assert host.unkillable_after(KILL_LIMIT) == [7]


def test_only_the_unkillable_ones_are_returned() -> None:
    host = Host()
    host.samples = {7: (0.1, 0), 8: (0.1, 1)}
    assert host.unkillable_after(0) == []
    host.samples[8] = (0.2, 1)
    assert host.unkillable_after(KILL_LIMIT) == [7]
