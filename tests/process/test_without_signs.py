"""What is said of a job whose function shows no progress that anybody can see."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from resilience.facts import events
from resilience.history.history import History
from tests.support.ranks import Job


def test_function_without_signs_is_at_work_again_as_soon_as_a_restart_has_entered_it(
    start: Callable[..., Job], tmp_path: Path
) -> None:
    go = tmp_path / "go"
    job = start(2, "tests.process.without_signs:restart_once", go=str(go))
    for rank in range(2):
        job.await_record(events.RestartEnded, rank=rank)
    an_hour = time.monotonic_ns() + 3600 * 10**9
    spent = History().take_all(job.account.records()).spent(lambda _: an_hour)
    for rank in range(2):
        assert spent[rank].work > 3500 * 10**9
        assert spent[rank].restart < spent[rank].work // 10
    go.touch()
    assert [rank.value for rank in job.wait()] == [1, 1]
    sign = {record.event.sign for record in job.of(events.RestartEnded)}
    assert sign == {"entry"}
