"""What a node's leader does for a rank whose own monitor is gone."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from resilience.core import restart
from resilience.facts import events
from resilience.facts.interruptions import Interruption, InterruptionRecord
from resilience.inprocess._runtime import monitor_store
from resilience.inprocess._runtime.monitor_store import MonitorStore
from resilience.inprocess._runtime.supervision import finished_key
from resilience.inprocess.store import Notice

RECORD = InterruptionRecord(rank=0, interruption=Interruption.TERMINATED, message="by schedule")
BARRIER = 100.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Any:
    def sleep(seconds: float) -> None:
        virtual.seconds += seconds

    virtual = SimpleNamespace(seconds=0.0, monotonic=lambda: virtual.seconds, sleep=sleep)
    monkeypatch.setattr(monitor_store, "time", virtual)
    return virtual


def represent(factory: Callable[[], Any]) -> list[Any]:
    """Represent the only rank of a world; return the events."""
    emitted: list[Any] = []
    receiver = MonitorStore(
        factory, {}, object(), False, Notice("test/"), lambda _: None, emitted.append, lambda _: None
    )  # type: ignore[arg-type]
    receiver._call_begin = SimpleNamespace(  # type: ignore[assignment]
        prefix="test/", waits=restart.WaitLimits(barrier=BARRIER), origin=SimpleNamespace(world_size=1)
    )
    receiver._represent(RECORD)
    return emitted


def test_rank_that_was_stood_in_for_needs_no_other_stand_in(clock: Any) -> None:
    store = dist.HashStore()
    assert results(represent(lambda: store)) == [("excluded", "")]
    assert dist.PrefixStore("test/", store).check([finished_key(RECORD.rank)])


def results(emitted: list[Any]) -> list[tuple[str, str]]:
    return [(event.result, event.error) for event in emitted if isinstance(event, events.RankStoodInFor)]


@pytest.mark.parametrize("error", [OSError(24, "Too many open files"), RuntimeError("timeout"), KeyError("users")])
def test_rank_is_excluded_although_the_first_connection_for_its_stand_in_failed(clock: Any, error: Exception) -> None:
    failures = [error]

    def factory() -> Any:
        if failures:
            raise failures.pop()
        return dist.HashStore()

    reason = f"{type(error).__name__}: {error}"
    assert results(represent(factory)) == [("failed", reason), ("excluded", "")]


def test_stand_in_that_never_connects_is_given_up_at_the_barriers_limit(clock: Any) -> None:
    def factory() -> Any:
        raise OSError(24, "Too many open files")

    emitted = represent(factory)
    reason = "OSError: [Errno 24] Too many open files"
    assert results(emitted) == [("failed", reason), ("failed", reason)]
    assert [event.duration_s for event in emitted] == [0.0, BARRIER]
