"""A Wrapper's monitor starts in whatever process calls the function, and holds nothing of that process."""

from __future__ import annotations

from collections.abc import Callable

from resilience.facts import events
from tests.support.ranks import Job

Start = Callable[..., Job]


def test_what_the_function_closes_is_closed_although_it_was_open_before_the_call(start: Start) -> None:
    job = start(1, "tests.process.closing:close_what_was_open_before")
    (rank,) = job.wait()
    assert rank.value == ["client: Connection refused", "lock: free", "helper: exit code 0"]
    assert [record.event.monitor for record in job.of(events.CallStarted)] == ["forked"]
