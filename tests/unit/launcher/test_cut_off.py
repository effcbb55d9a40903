"""What an agent no longer waits for once it is cut off from the job's store: others may soon continue without it."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from resilience.facts.limits import Limits
from resilience.launcher import warm_start
from resilience.launcher.warm_start import WarmStart
from resilience.launcher.witnesses import Witnesses
from resilience.launcher.worker.notes import ModuleImported, VariablesSetTooLate
from resilience.launcher.worker.worker_processes import EndedWorker


class SilentMonitors:
    """Monitors that are there and report nothing."""

    def poll(self, limit: float) -> list[Any]:
        return []

    def is_monitored(self, local_rank: int) -> bool:
        return True


def test_agent_that_is_cut_off_waits_for_no_report_on_a_dead_worker() -> None:
    unused: Any = None
    monitors: Any = SilentMonitors()
    asked = iter([False, True])
    witnesses = Witnesses(unused, monitors, Limits())
    witnesses.await_record(EndedWorker(0, 0, 1, 1), math.inf, lambda: next(asked))
    assert list(asked) == []


class Preloading:
    """A zygote that notes what it is asked: the modules to preload, or none for what has become of earlier ones."""

    pid, why_not, why_unsuited, is_preloading = 1, "", "", False

    def __init__(self) -> None:
        self.asked: list[tuple[str, ...]] = []

    def succeed(self, limit: float) -> list[Any]:
        self.asked.append(())
        return []

    def preload(self, modules: tuple[str, ...], learned: tuple[str, ...]) -> None:
        self.asked.append(learned)


def test_agent_that_is_cut_off_asks_its_zygote_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(warm_start, "time", SimpleNamespace(monotonic=lambda: now[0]))
    unused: Any = None
    zygote: Any = Preloading()
    warm = WarmStart(unused, zygote)
    warm.look([(0, ModuleImported("json"))], is_cut_off=False)
    now[0] = warm_start.SETTLED
    zygote.asked.clear()
    warm.look([], is_cut_off=True)
    assert zygote.asked == []
    warm.look([], is_cut_off=False)
    assert zygote.asked == [(), ("json",)]


def test_note_that_the_program_has_damaged_is_no_reason_to_start_cold() -> None:
    zygote: Any = Preloading()
    unused: Any = None
    WarmStart(unused, zygote).look([(0, VariablesSetTooLate("torch", ()))], is_cut_off=False)
    assert zygote.why_unsuited == ""
