"""Which ranks does a node have now?  A later cycle or another agent ends what no record ended."""

from __future__ import annotations

import pytest

from resilience.facts import events
from resilience.facts.identity import Origin
from resilience.telemetry.metrics import MetricView
from resilience.telemetry.rank_snapshot import Allowed, RankSnapshot, SnapshotSection
from tests.support.node_stories import NodeStory

Samples = dict[tuple[str, tuple[str, ...]], float]
OF_RANKS = (
    "resilience_ranks",
    "resilience_rank_state",
    "resilience_rank_step",
    "resilience_rank_silence_seconds",
    "resilience_rank_section_open_seconds",
    "resilience_section_timeout_seconds",
    "resilience_timeout_headroom_ratio",
)


def shown(told: NodeStory, node: str, ranks: tuple[int, ...] = (), hours: float = 1.0) -> Samples:
    """Return what the node's metrics say about its ranks, hours after its last record.

    ranks: those with a snapshot from the first cycle, in an open section with a limit."""
    records = told.of_node(node)
    view = MetricView(lambda: records[-1].mono_ns + round(hours * 3600e9))
    for record in records:
        view.take(record)
    at = records[3].mono_ns / 1e9
    snapshots = {}
    for rank in ranks:
        origin = Origin(
            "job", node, "monitor", 500 + rank, initial_rank=rank, rank=rank, world_size=2, layer="launcher"
        )
        opened, limits = (SnapshotSection("data", at, 60.0),), (Allowed("data", 60.0),)
        now = records[-1].mono_ns / 1e9 + hours * 3600
        snapshots[rank] = RankSnapshot(
            origin, "run", at, 0.0, step=90, heartbeat_at=at, sections=opened, limits=limits, alive_at=now
        )
    view.take_snapshots(snapshots)
    return {key: value for key, value in view.samples().items() if key[0] in OF_RANKS or "monitor_up" in key[0]}


@pytest.mark.parametrize("boot_at", [None, 120.0])
def test_node_that_was_lost_and_waits_for_a_place_has_no_ranks(boot_at: float | None) -> None:
    """Agent and monitors were killed, and the rank has its place on another node."""
    told = NodeStory()
    told.join("ab", 0.0, 1.0)
    told.start("ab", 1.0)
    assert shown(told, "b", (1,))["resilience_rank_state", ("1", "active")] == 1
    told.new_agent("b", 11, boot_at)
    told.agent("b", 130.0, events.CyclePhaseStarted("rendezvous"))
    assert shown(told, "b", (1,)) == {("resilience_monitor_up", ()): 0}


@pytest.mark.parametrize("is_read_late", [False, True])
def test_monitor_that_has_the_pid_of_a_lost_one_watches_its_rank(is_read_late: bool) -> None:
    """The container was replaced, and process ids began again."""
    told = NodeStory()
    told.join("a", 0.0, 1.0, size=1)
    told.start("a", 1.0)
    told.put("a", 0, "agent", 10, 5.0, events.MonitorLost(500, "it was killed"), 0)
    records = told.of_node("a")
    lost = records[-1]
    view = MetricView()
    for record in [lost, *records[:-1]] if is_read_late else records:
        view.take(record)
    assert view.samples()["resilience_monitor_up", ()] == 0
    told.new_agent("a", 10)
    told.join("a", 9.0, 10.0, 1, size=1)
    told.put("a", 0, "monitor", 500, 11.0, events.MonitorStarted(2000), 1)
    for record in told.of_node("a")[len(records) :]:
        view.take(record)
    assert view.samples()["resilience_monitor_up", ()] == 1


def test_rank_that_a_smaller_job_has_under_another_number_is_forgotten() -> None:
    told = NodeStory()
    told.join("abc", 0.0, 1.0, size=3)
    told.start("abc", 1.0)
    told.exited("c", 100.0, 2, None)
    told.monitor("c", 2, 100.05, events.RankExited(False, None, "SIGTERM"))
    told.stop("c", 100.0, "failed", failed_node="b")
    told.join("ac", 101.0, 103.0, cycle=1, why="failure", size=2)
    told.spawn("c", 103.0, [1], cycle=1)
    found = shown(told, "c")
    assert found == {
        ("resilience_ranks", ("active",)): 1,
        ("resilience_rank_state", ("1", "active")): 1,
        ("resilience_monitor_up", ()): 1,
    }


def test_limits_of_the_previous_worker_are_not_those_of_the_present_one() -> None:
    told = NodeStory()
    told.join("ab", 0.0, 1.0)
    told.start("ab", 1.0)
    told.break_off("ab", 100.0, failed="b")
    told.join("ab", 101.0, 103.0, cycle=1, why="failure")
    told.start("ab", 103.0, cycle=1)
    assert not any("headroom" in name or "timeout" in name for name, _ in shown(told, "b", (1,)))


def test_rank_whose_host_was_booted_has_a_monitor_again() -> None:
    """The monotonic clock of the new boot shows earlier times than the loss of the last monitor."""
    told = NodeStory()
    told.join("ab", 0.0, 1.0)
    told.start("ab", 1.0)
    told.monitor("b", 1, 90.0, events.MonitorLost(501, "killed"))
    assert shown(told, "b")["resilience_ranks", ("unmonitored",)] == 1
    told.new_agent("b", 11, boot_at=120.0)
    told.join("ab", 130.0, 131.0, cycle=1, why="failure")
    told.start("ab", 131.0, cycle=1)
    assert shown(told, "b")["resilience_ranks", ("active",)] == 1


def test_node_waits_from_its_rendezvous_until_it_has_a_place() -> None:
    told = NodeStory()
    told.join("a", 0.0, 1.0)
    joined = told.of_node("a")
    began = next(n for n, record in enumerate(joined) if record.event == events.CyclePhaseStarted("rendezvous"))
    for number, is_waiting in ((began - 1, 0), (began, 1), (len(joined) - 1, 0)):
        view = MetricView()
        for record in joined[: number + 1]:
            view.take(record)
        assert view.samples()["resilience_node_waiting", ()] == is_waiting
    told.new_agent("a", 11)
    told.agent("a", 50.0, events.CyclePhaseStarted("rendezvous"))
    view = MetricView()
    for record in told.of_node("a"):
        view.take(record)
    assert view.samples()["resilience_node_waiting", ()] == 1
