"""A node that joins late, waits, is lost or comes back costs the job only the time in which its ranks had a place."""

from __future__ import annotations

from pathlib import Path

import pytest

from resilience.attribution.incidents import incidents_of
from resilience.attribution.waterfall import waterfall
from resilience.facts import events
from resilience.facts.interruptions import Interruption, InterruptionRecord
from resilience.history.history import History
from resilience.history.wrapped_rank import RankSeconds
from resilience.report.condensed import report
from resilience.run_folder.load import load
from resilience.status.state import Watcher
from resilience.telemetry.metrics import MetricView
from tests.support.agreement import LOST, PRODUCTIVE, assert_same_seconds
from tests.support.node_stories import NodeStory
from tests.support.record_streams import STARTED_NS


def spent(told: NodeStory) -> dict[int, RankSeconds]:
    return History().take_all(told.records).spent()


def seconds(of: RankSeconds) -> dict[str, float]:
    return {name: round(getattr(of, name) / 1e9, 1) for name in (*of.__struct_fields__, "total") if getattr(of, name)}


def counted(told: NodeStory, node: str) -> dict[str, float]:
    """What the node's metrics say at its last record."""
    records = told.of_node(node)
    view = MetricView(lambda: records[-1].mono_ns)
    for record in records:
        view.take(record)
    return {
        labels[0] if labels else "work": round(value, 1)
        for (name, labels), value in view.samples().items()
        if name in (PRODUCTIVE, LOST)
    }


def lost_and_back(pid: int = 11, boot_at: float | None = None) -> NodeStory:
    """Node b is lost at 100 s. Its next agent comes at 110 s, and both ranks work again from 122.1 s to 220 s."""
    told = NodeStory()
    told.join("ab", 0.0, 1.0)
    told.start("ab", 1.0)
    told.break_off("ab", 100.0, failed="b", silently=True)
    told.join("a", 100.2, 120.0, cycle=1, why="failure")
    told.new_agent("b", pid, boot_at)
    told.join("b", 110.0, 120.0, cycle=1, group=1)
    told.start("ab", 121.0, step=90, cycle=1)
    told.finish("ab", 220.0, cycle=1)
    return told


@pytest.mark.parametrize(
    ("pid", "boot_at"), [(11, None), (10, None), (11, 105.0)], ids=["new pid", "same pid", "after a boot"]
)
def test_rank_of_an_agent_that_was_restarted_on_its_node_counts_each_second_once(
    pid: int, boot_at: float | None
) -> None:
    told = lost_and_back(pid, boot_at)
    # It started from 0 to 2.1 s, which is its last record, and from 110 to 122.1 s.
    assert seconds(spent(told)[1]) == {"work": 97.9, "startup": 14.2, "total": 112.1}
    assert counted(told, "b") == {"work": 97.9, "startup": 14.2}
    assert_same_seconds(told.records)


@pytest.mark.parametrize("came", [0.0, 110.0], ids=["spare", "newcomer"])
def test_node_that_waits_for_a_place_costs_nothing_until_the_job_needs_it(came: float, tmp_path: Path) -> None:
    told = NodeStory()
    told.join("ab", 0.0, 1.0)
    told.start("ab", 1.0)
    told.break_off("ab", 100.0, failed="b", silently=True)
    told.join("a", 100.2, 120.0, cycle=1, why="failure")
    told.join("c", came, 120.0, cycle=1, group=1)
    told.start("ac", 121.0, step=90, cycle=1)
    told.finish("ac", 220.0, cycle=1)
    of_rank = spent(told)[1]
    assert of_rank.startup / 1e9 == pytest.approx(2.1 + 122.1 - max(100.0, came), abs=0.01)
    (incident,) = report(load(told.write(tmp_path / "run"))).incidents
    drawn = waterfall(History().take_all(told.records), incident)
    assert drawn is not None and drawn.seconds == pytest.approx(22.1, abs=0.01)
    assert {phase.name: phase.took.max_s for phase in incident.phases}["rendezvous"] <= 20.0


def test_node_that_missed_a_cycle_is_restarted_from_the_one_before() -> None:
    """Node c was left out of cycle 1, because b was quicker, and waited until b failed."""
    told = NodeStory()
    told.join("ac", 0.0, 1.0)
    told.start("ac", 1.0)
    told.break_off("ac", 100.0, failed="c")
    told.join("ab", 100.2, 102.0, cycle=1, why="failure")
    told.start("ab", 102.0, step=90, cycle=1)
    told.break_off("ab", 1000.0, failed="b", cycle=1)
    told.join("a", 1000.2, 1010.0, cycle=2, why="failure")
    told.join("c", 100.2, 1010.0, cycle=2, why="failure", group=1)
    told.start("ac", 1010.0, step=900, cycle=2)
    told.finish("ac", 1100.0, cycle=2)
    assert spent(told)[1].restart / 1e9 <= 30.0
    history = History().take_all(told.records)
    for incident in incidents_of(history):
        assert incident.restart is not None and incident.restart.max_s <= 20.0
        assert {phase.name: phase.took.max_s for phase in incident.phases}["rendezvous"] <= 20.0
        drawn = waterfall(history, incident)
        assert drawn is not None and drawn.seconds <= 20.0
    view = MetricView()
    for record in told.of_node("c"):
        view.take(record)
    restarts = {key: value for key, value in view.samples().items() if key[0].startswith("resilience_restart_duration")}
    assert not any(restarts.values())  # it has no restart of its own


def test_rank_that_was_done_before_another_one_hung_loses_nothing_to_the_hang() -> None:
    told = NodeStory()
    told.join("a", 0.0, 1.0, size=1)
    told.spawn("a", 1.0, [0, 1])
    told.exited("a", 102.0, 0)
    silent = InterruptionRecord(1, Interruption.HARD_TIMEOUT, pid=1001, silent_for_s=50.0, step=150)
    told.monitor("a", 1, 202.0, events.RankFellSilent("heartbeat", "hard", 50.0, 50.0))
    told.monitor("a", 1, 202.0, events.RankInterrupted(silent))
    told.exited("a", 202.0, 1, None, expected=False)
    told.stop("a", 202.0, "failed", silent_for_s=50.0, step=150, failed_node="a")
    of_rank = spent(told)
    assert [of_rank[rank].hang / 1e9 for rank in (0, 1)] == [0.0, 50.0]
    assert_same_seconds(told.records)


def test_rank_on_another_node_than_before_repeats_the_same_work() -> None:
    told = NodeStory()
    told.join("ab", 0.0, 1.0)
    told.start("ab", 1.0)
    told.break_off("ab", 1002.1, failed="a", step=1000)
    told.join("ba", 1003.0, 1004.0, cycle=1, why="failure")
    told.start("ba", 1004.0, step=500, cycle=1)
    told.finish("ba", 1605.1, cycle=1)
    of_rank = spent(told)
    assert [of_rank[rank].rework / 1e9 for rank in (0, 1)] == pytest.approx([500.0, 500.0], rel=0.01)
    assert_same_seconds(told.records)


@pytest.mark.parametrize("pid", [11, 10], ids=["new pid", "same pid"])
def test_node_that_left_and_came_back_has_not_ended(pid: int, tmp_path: Path) -> None:
    told = NodeStory()
    told.join("ab", 0.0, 1.0)
    told.start("ab", 1.0)
    told.agent("b", 60.0, events.StopRequested("SIGTERM", 30.0, leaves=True))
    told.exited("b", 61.0, 1)
    told.stop("b", 61.0, "preempted")
    told.agent("b", 62.0, events.JobEnded("preempted", 143))
    told.exited("a", 61.0, 0, None)
    told.stop("a", 61.0, "interrupted")
    told.join("a", 62.0, 66.0, cycle=1, why="membership")
    told.new_agent("b", pid)
    told.join("b", 65.0, 66.0, cycle=1, group=1)
    told.start("ab", 66.0, cycle=1)
    folder = told.write(tmp_path / "run")
    found = report(load(folder))
    assert found.launched is not None and found.launched.outcome is None
    assert not found.is_ended
    now = Watcher(folder, lambda: STARTED_NS / 1e9 + 70.0).look()
    assert now is not None and (now.phase, now.outcome) == ("running", None)
    for node in "ab":
        view = MetricView()
        for record in told.of_node(node):
            view.take(record)
        assert view.final.outcome is None
