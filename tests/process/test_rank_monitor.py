"""Rank monitors under the launcher: what they notice of real workers, and what they survive."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from resilience.core import events
from resilience.core.attribution import Interruption
from resilience.core.watch import Limit, Limits
from resilience.monitor import messages
from tests.process.watched import Node, await_line, let_on, node

WAIT = "print('here', flush=True); input()"


@pytest.fixture
def one(tmp_path: Path) -> Iterator[Node]:
    with node(tmp_path) as made:
        yield made


def test_worker_that_never_attaches_is_watched_for_its_end(one: Node) -> None:
    worker = one.start(WAIT)
    await_line(worker)
    let_on(worker)
    gone = one.hear(messages.Gone)
    assert (gone.worker_pid, gone.exit.code, gone.goodbye) == (worker.pid, 0, True)
    assert one.said(messages.Found) == []
    crashing = one.start("import os; os.kill(os.getpid(), 9)")
    gone = one.hear(messages.Gone, lambda gone: gone.worker_pid == crashing.pid)
    assert (gone.exit.signal, gone.goodbye) == ("SIGKILL", False)
    (found,) = one.said(messages.Found)
    assert found.ended
    assert (found.record.interruption, found.record.pid) == (Interruption.TERMINATED, crashing.pid)


def test_first_sign_of_life_attaches_and_a_stalled_step_is_found(one: Node) -> None:
    code = "import resilience, threading; resilience.step(7); threading.Event().wait()"
    worker = one.start(code, Limits(step=Limit(None, 0.5), signal="SIGKILL"))
    assert one.hear(messages.Connected).link.pid == worker.pid
    found = one.hear(messages.Found)
    assert (found.ended, found.record.step, found.record.stack_method) == (False, 7, "faulthandler")
    assert found.record.stacks[0].frames[-1].function == "wait"
    gone = one.hear(messages.Gone)
    assert (gone.exit.signal, gone.goodbye) == ("SIGKILL", False)
    assert [record.event.limit for record in one.records(events.RankFellSilent)] == ["step"]
