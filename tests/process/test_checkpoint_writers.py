"""A fault while torch.distributed.checkpoint writes in the background: the next iteration writes undisturbed."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from resilience.facts import events
from tests.process import checkpointing
from tests.support.ranks import Job

Start = Callable[..., Job]


@pytest.mark.timeout(1300)
@pytest.mark.parametrize(
    ("kind", "seconds"),
    [
        ("PROCESS", 3600.0),  # without an abort, the next checkpoint would wait for this one
        ("THREAD", 5.0),  # and is awaited
    ],
)
def test_checkpoint_that_is_being_written_is_ended(start: Start, kind: str, seconds: float) -> None:
    body = checkpointing.fail_while_a_checkpoint_is_written
    job = start(2, f"{body.__module__}:{body.__name__}", kind=kind, seconds=seconds)
    for rank in job.wait(1200):
        assert rank.value == {"complete": [False, True], "writing": []}, rank
    assert not job.of(events.AbortFailed)
    assert not job.of(events.RankSignalled)
