"""What a rank shows is on record at its first sign, and lies where others can see it from then on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from resilience.facts import events
from resilience.facts.limits import Limit, Limits
from resilience.monitor import messages
from resilience.telemetry import rank_snapshot
from tests.process.watched import Node, await_line, let_on, node

WAIT = "print('here', flush=True); input()"


@pytest.fixture
def one(tmp_path: Path) -> Iterator[Node]:
    with node(tmp_path) as made:
        yield made


def test_first_sign_and_first_step_are_on_record(one: Node) -> None:
    code = "import resilience\nfor step in (40, 41, 42):\n    resilience.heartbeat(); resilience.step(step)\n" + WAIT
    worker = one.start(code)
    await_line(worker)
    let_on(worker)
    one.hear(messages.Gone)
    told = [record.event for record in one.records(events.WorkerProgressed)]
    assert [(event.sign, event.step) for event in told] == [("heartbeat", None), ("step", 40)]
    assert all(record.origin.layer == "launcher" for record in one.records(events.WorkerProgressed))
    assert 0.0 < told[0].after_s <= told[1].after_s


def test_present_signs_are_left_where_others_can_see_them(one: Node) -> None:
    code = "import resilience\nresilience.step(7)\nwith resilience.section('data'):\n    " + WAIT
    worker = one.start(code, Limits(sections={"data": Limit(None, 60.0)}))
    await_line(worker)
    path = rank_snapshot.path_of(one.folder, "node", 0)
    one.wait_until(lambda: path.exists() and bool(rank_snapshot.read(path).sections))
    shown = rank_snapshot.read(path)
    assert (shown.step, shown.doing, shown.origin.cycle) == (7, "run", 0)
    assert [(section.name, section.limit_s) for section in shown.sections] == [("data", 60.0)]
    assert shown.limits == (rank_snapshot.Allowed("data", 60.0),)
    assert shown.heartbeat_at is not None and shown.heartbeat_at <= shown.sections[0].at <= shown.written_at
    let_on(worker)
    one.hear(messages.Gone)
    one.wait_until(lambda: rank_snapshot.read(path).doing == "outside")  # the disk gets it after the agent
    last = rank_snapshot.read(path)
    assert (last.step, last.sections) == (7, ())
