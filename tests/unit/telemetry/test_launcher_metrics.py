"""The numbers of a launched job: cycles, restarts, seconds by cause, and each rank's present signs."""

from __future__ import annotations

import re
from typing import get_args

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resilience.core.watch import AGENT_LOST
from resilience.facts import events
from resilience.facts.interruptions import Exit, Interruption, InterruptionRecord
from resilience.facts.records import Record
from resilience.telemetry.metrics import READ_S, MetricView, Ranks
from resilience.telemetry.rank_snapshot import OUTSIDE, Allowed, SnapshotSection
from tests.support.agreement import assert_one_first_interruption_for_each_incident
from tests.support.busy_node import shown
from tests.support.launch_streams import LAST_STEP, LEG_S, STEP_S, Fault, Kind, launched
from tests.support.node_stories import NodeStory
from tests.unit.telemetry.test_metrics import samples, view_of

STOP = sum(LEG_S.values())
RESTARTS = "resilience_restart_iterations_total", ("launcher", "interrupted")


@given(seed=st.integers(0, 10_000), kind=st.sampled_from(get_args(Kind)), signs=st.booleans())
@settings(max_examples=60, deadline=None)
def test_replay_gives_the_numbers_of_the_live_run(seed: int, kind: Kind, signs: bool) -> None:
    told = launched([Fault("kill", 1), Fault(kind, 2)], nodes=2, signs=signs)
    for node in ("node0", "node1"):
        live = told.interleaved(seed, node)
        assert samples(live) == samples(told.of_node(node)) == samples(by_file_backwards(live))


def by_file_backwards(records: list[Record]) -> list[Record]:
    """An agent's file comes last: what it completes may have begun in its ranks' files."""
    return sorted(records, key=lambda record: (record.origin.role == "agent", -(record.origin.initial_rank or 0)))


def test_cycles_and_the_budget_are_counted() -> None:
    found = samples(launched([Fault("kill", 1), Fault("hang", 0), Fault("membership")]).records)
    assert found["resilience_restart_iterations_total", ("launcher", "interrupted")] == 3
    assert found["resilience_restart_iterations_total", ("launcher", "completed")] == 1
    assert found["resilience_restart_iteration", ("launcher",)] == 3
    assert found["resilience_restart_budget_remaining", ("launcher",)] == 8
    assert found["resilience_restart_budget_max", ("launcher",)] == 10
    assert found["resilience_interruptions_total", ("terminated", "unknown", "first")] == 1
    assert found["resilience_interruptions_total", ("hard_timeout", "storage", "first")] == 1
    assert found["resilience_interruptions_total", ("terminated", "unknown", "cascade")] == 1  # the hung one's end
    assert found["resilience_hangs_detected_total", ("heartbeat", "")] == 1
    assert found["resilience_job_info", ("job", "2", "launcher")] == 1
    ended = samples(launched([Fault("exhausted", 0)]).records)
    assert ended["resilience_restart_iterations_total", ("launcher", "exhausted")] == 1
    stopped = samples(launched([Fault("preempt", 0)]).records)
    assert stopped["resilience_restart_iterations_total", ("launcher", "aborted")] == 1


@pytest.mark.parametrize("is_over", [False, True])
def test_failed_cycle_that_none_follows_is_no_restart(is_over: bool) -> None:
    told = NodeStory()
    told.join("a", 0.0, 1.0, size=1)
    told.start("a", 1.0)
    told.stop("a", 50.0, "failed")
    if is_over:
        told.agent("a", 51.0, events.JobEnded("failed", 1, "premature completion"))
    assert RESTARTS not in samples(told.of_node("a"))
    told.join("a", 52.0, 53.0, cycle=1, why="failure", size=1)
    assert samples(told.of_node("a"))[RESTARTS] == 1


@pytest.mark.parametrize(
    ("nodes", "is_dead_before", "first"),
    [
        (1, False, {("unresponsive", "host")}),
        (1, True, {("terminated", "unknown")}),
        (2, False, set()),  # the other node counts it
    ],
)
def test_cycle_whose_agent_was_killed_counts_once_another_one_follows_on_the_node(
    nodes: int, is_dead_before: bool, first: set[tuple[str, str]]
) -> None:
    told = NodeStory()
    told.join("a", 0.0, 1.0, size=nodes)
    told.spawn("a", 1.0, [0, 1])
    for rank in range(2):
        at = 50.0 + rank
        if rank == 1 or not is_dead_before:
            told.monitor("a", rank, at, events.RankSignalled(("SIGTERM",), AGENT_LOST))
        killed = InterruptionRecord(rank, Interruption.TERMINATED, pid=1000 + rank, exit=Exit(signal="SIGKILL"))
        told.monitor("a", rank, at, events.RankInterrupted(killed))
    told.new_agent("a", 11)
    before = samples(told.of_node("a"))
    assert not counted_as(before) and RESTARTS not in before
    told.join("a", 60.0, 61.0, cycle=1, why="failure", size=nodes)
    told.spawn("a", 61.0, [0, 1], cycle=1)
    live, view = told.of_node("a"), MetricView()
    for record in live:
        view.take(record)
        view.samples()
    for found in (view.samples(), samples(live), samples(told.records), samples(by_file_backwards(live))):
        assert found[RESTARTS] == 1
        counts = counted_as(found)
        assert {labels[:2] for labels, n in counts.items() if labels[2] == "first" and n == 1} == first
        assert sum(n for labels, n in counts.items() if labels[0] == "terminated") == 2
    if nodes == 1:
        assert_one_first_interruption_for_each_incident(told.records)


def counted_as(found: dict[tuple[str, tuple[str, ...]], float]) -> dict[tuple[str, ...], float]:
    return {labels: n for (name, labels), n in found.items() if name == "resilience_interruptions_total"}


def test_neighbours_that_see_a_connection_close_are_cascade() -> None:
    found = samples(launched([Fault("raise", 2)], nodes=2).of_node("node1"))
    assert found["resilience_interruptions_total", ("terminated", "user_code", "first")] == 1
    assert found["resilience_interruptions_total", ("terminated", "network", "cascade")] == 1


def test_restart_lasts_from_the_failure_to_each_workers_first_sign() -> None:
    found = samples(launched([Fault("kill", 1)], nodes=2).of_node("node0"))
    assert found["resilience_restart_duration_seconds_sum", ("launcher",)] == pytest.approx(2 * (STOP + 0.4), abs=0.001)
    of_others = samples(launched([Fault("kill", 1)], nodes=2).of_node("node1"))
    assert of_others["resilience_restart_duration_seconds_sum", ("launcher",)] == pytest.approx(
        2 * (STOP + 0.4), abs=0.001
    )
    for phase, seconds in LEG_S.items():
        key = "resilience_restart_phase_duration_seconds_sum", ("launcher", phase)
        assert found[key] == pytest.approx(seconds)
    key = "resilience_restart_phase_duration_seconds_sum", ("launcher", "import")
    assert found[key] == pytest.approx(0.8, abs=0.001)


def test_worker_without_signs_counts_with_its_start_once_its_cycle_is_over() -> None:
    told = launched([Fault("kill", 1)], signs=False)
    found = samples(told.records)
    key = "resilience_restart_duration_seconds_sum", ("launcher",)
    assert found[key] == pytest.approx(2 * STOP, abs=0.001)
    running = [r for r in told.records if not (isinstance(r.event, events.CycleEnded) and r.origin.cycle == 1)]
    assert key not in samples(running)


def test_seconds_are_productive_or_lost_by_cause() -> None:
    found = samples(launched([Fault("hang", 1)]).records)
    startup = LEG_S["gate"] + LEG_S["rendezvous"] + LEG_S["spawn"] + 0.4
    assert found["resilience_lost_seconds_total", ("startup",)] == pytest.approx(2 * startup, abs=0.001)
    assert found["resilience_lost_seconds_total", ("restart",)] == pytest.approx(2 * (STOP + 0.41), abs=0.01)
    assert found["resilience_lost_seconds_total", ("hang",)] == pytest.approx(2 * 2.01)
    assert found["resilience_lost_seconds_total", ("rework",)] == pytest.approx(2 * 10 * STEP_S, rel=0.01)
    first = LAST_STEP * STEP_S + 2.0
    assert found["resilience_productive_seconds_total", ()] == pytest.approx(2 * (first + 2.0), abs=0.01)


def test_running_workers_are_productive_before_they_end() -> None:
    told = launched(is_running=True)
    last = max(record.mono_ns for record in told.records)
    started = next(r.mono_ns for r in told.records if isinstance(r.event, events.WorkerStarted))
    view = MetricView(lambda: last + 10**9 + round(READ_S * 1e9))
    for record in told.records:
        view.take(record)
    expected = 2 * (last + 10**9 - started - 0.4e9) / 1e9
    assert view.samples()["resilience_productive_seconds_total", ()] == pytest.approx(expected, abs=0.001)


@pytest.mark.parametrize("kind", ["kill", "hang"])
def test_scrape_before_a_restarts_end_is_read_adds_nothing_to_it(kind: Kind) -> None:
    told = launched([Fault(kind, 1)], is_running=True)
    records = told.interleaved(0)
    last = max(record.mono_ns for record in records)
    clock = last
    view = MetricView(lambda: clock)
    for record in records:
        is_end = isinstance(record.event, events.WorkerProgressed)
        clock = record.mono_ns + round(READ_S * 1e9 * 0.9) if is_end else record.mono_ns
        view.samples()
        view.take(record)
    clock = last + round(READ_S * 1e9)
    for cause in ("startup", "restart", "hang"):
        key = "resilience_lost_seconds_total", (cause,)
        assert view.samples().get(key) == samples(records).get(key), cause


def test_states_follow_the_workers_of_each_cycle() -> None:
    told = launched([Fault("hang", 1)], is_running=True)
    assert states(told.records) == {("0", "active"), ("1", "active")}
    until = next(n for n, r in enumerate(told.interleaved(0)) if isinstance(r.event, events.RankSignalled))
    assert states(told.interleaved(0)[:until]) == {("0", "active"), ("1", "suspect")}
    assert states(launched().records) == set()


def states(records: list[Record]) -> set[tuple[str, ...]]:
    return {labels for name, labels in samples(records) if name == "resilience_rank_state"}


def test_monitors_that_a_node_lost_are_counted_when_they_are_lost() -> None:
    told = launched(is_running=True, lost_monitors=[(0, 0), (0, 1), (0, 1)])
    kind = "monitor_process_exception"
    found = {labels[1:]: count for (name, labels), count in samples(told.records).items() if labels[:1] == (kind,)}
    assert found == {("host", "first"): 1, ("host", "cascade"): 1}


def test_rank_that_ended_well_after_it_had_lost_a_monitor_is_not_shown_as_terminated() -> None:
    told = launched(lost_monitors=[(0, 1)])
    assert states(told.records) == states(by_file_backwards(told.records)) == set()


def test_rank_whose_monitor_was_lost_is_unmonitored_until_another_one_begins() -> None:
    told = launched(is_running=True)
    agent = told.files["node0", None][-1]
    origin = msgspec.structs.replace(agent.origin, initial_rank=1)
    lost = msgspec.structs.replace(agent, origin=origin, event=events.MonitorLost(501, "killed"))
    assert states([*told.records, lost]) == {("0", "active"), ("1", "unmonitored")}
    assert samples([*told.records, lost])["resilience_monitor_up", ()] == 1
    again = told.files["node0", 1][0]
    place = msgspec.structs.replace(again.origin, pid=999)
    again = msgspec.structs.replace(again, origin=place, mono_ns=lost.mono_ns + 1)
    assert states([*told.records, again, lost]) == {("0", "active"), ("1", "active")}


@pytest.mark.parametrize(("ranks", "seen"), [("all", {"0", "1"}), ("unhealthy", {"1"}), ("none", set())])
def test_switch_says_which_ranks_have_series_of_their_own(ranks: Ranks, seen: set[str]) -> None:
    told = launched([Fault("hang", 1)])
    until = next(n for n, r in enumerate(told.interleaved(0)) if isinstance(r.event, events.RankSignalled))
    view = MetricView(lambda: 30 * 10**9, ranks)
    for record in told.interleaved(0)[:until]:
        view.take(record)
    view.take_snapshots({0: shown(0), 1: shown(1)})
    found = view.samples()
    for name in ("state", "step", "silence_seconds", "section_open_seconds"):
        assert {labels[0] for metric, labels in found if metric == f"resilience_rank_{name}"} == seen
    assert found["resilience_step", ()] == 7  # of the node
    assert {labels[0]: n for (name, labels), n in found.items() if name == "resilience_ranks"} == {
        "active": 1,
        "suspect": 1,
    }


@pytest.mark.parametrize("ranks", ["all", "unhealthy", "none"])
def test_steps_of_the_node_are_those_of_all_its_ranks_whichever_have_series(ranks: Ranks) -> None:
    view = MetricView(lambda: 30 * 10**9, ranks)
    for record in launched(ranks=4, is_running=True).records:
        view.take(record)
    view.take_snapshots({rank: msgspec.structs.replace(shown(rank), step=100 + 10 * rank) for rank in range(4)})
    found = {name: n for (name, labels), n in view.samples().items() if name.startswith("resilience_step")}
    assert found == {"resilience_step": 130, "resilience_step_lowest": 100, "resilience_step_median": 110}


@pytest.mark.parametrize(("sections", "seen"), [(0, {"1"}), (1, set())])
def test_most_silent_rank_counts_as_unhealthy_unless_a_section_is_open(sections: int, seen: set[str]) -> None:
    """A rank that hangs without a limit stays active."""
    view = MetricView(lambda: 200 * 10**9, "unhealthy")
    for record in launched(is_running=True).records:
        view.take(record)
    view.take_snapshots(
        {
            0: msgspec.structs.replace(shown(0, sections, 200.0), heartbeat_at=199.0, written_at=199.0),
            1: shown(1, sections, 200.0),
        }
    )
    found = view.samples()
    for name in ("state", "step", "silence_seconds"):
        assert {labels[0] for metric, labels in found if metric == f"resilience_rank_{name}"} == seen


def test_signs_of_the_worker_before_do_not_count() -> None:
    view = view_of(launched([Fault("kill", 1)], is_running=True).records)
    view.take_snapshots({0: shown(0)})
    assert not [name for name, _ in view.samples() if name in ("resilience_rank_step", "resilience_step")]


def test_present_signs_are_gauges() -> None:
    view = view_of(launched(is_running=True).records)
    view._clock = lambda: 30 * 10**9
    view.take_snapshots({0: shown(0, alive_at=30.0)})
    found = view.samples()
    assert found["resilience_rank_step", ("0",)] == 7
    assert found["resilience_rank_silence_seconds", ("0",)] == 10.5  # nothing had changed when the monitor looked
    assert found["resilience_rank_section_open_seconds", ("0", "section 0")] == 20.0


def test_rank_shows_no_longer_silence_and_section_than_its_monitor_saw() -> None:
    view = view_of(launched(is_running=True).records)
    view._clock = lambda: 31 * 10**9
    opened = (SnapshotSection("data", 19.8, 10.0),)
    limits = (Allowed("data", 10.0),)
    view.take_snapshots({0: msgspec.structs.replace(shown(0), sections=opened, limits=limits)})
    found = view.samples()
    assert found["resilience_rank_silence_seconds", ("0",)] == 0.5
    assert found["resilience_rank_section_open_seconds", ("0", "data")] == pytest.approx(0.2)
    assert found["resilience_rank_section_used_ratio", ("0", "data")] == pytest.approx(0.02)
    assert found["resilience_timeout_headroom_ratio", ("data",)] == pytest.approx(0.02)


@pytest.mark.parametrize("ranks", ["all", "unhealthy", "none"])
def test_rank_whose_monitor_cannot_write_shows_no_step_silence_and_section(ranks: Ranks) -> None:
    """The disk is full, or the monitor is stopped: nobody knows whether the rank is well."""
    view = MetricView(lambda: 1000 * 10**9, ranks)
    for record in launched(is_running=True).records:
        view.take(record)
    limits = (Allowed("section 0", 10.0),)
    old = msgspec.structs.replace(shown(0, alive_at=987.0), limits=limits)
    view.take_snapshots({0: old, 1: msgspec.structs.replace(shown(1, alive_at=987.0), step=70)})
    names = {name for name, _ in view.samples()}
    assert not {name for name in names if re.search("_step|_silence|_section_(open|used|timeout)|headroom", name)}
    assert "resilience_ranks" in names  # from the records
    view.take_snapshots({0: old, 1: shown(1, alive_at=989.0)})
    found = view.samples()
    for name in ("resilience_step", "resilience_step_lowest", "resilience_step_median"):
        assert found[name, ()] == 7


def test_step_of_a_rank_that_no_monitor_watches_any_more_stays() -> None:
    """Its monitor has ended as it should: nothing is missing."""
    view = MetricView(lambda: 1000 * 10**9)
    for record in launched(is_running=True).records:
        view.take(record)
    view.take_snapshots({0: msgspec.structs.replace(shown(0, 0), doing=OUTSIDE)})
    assert view.samples()["resilience_rank_step", ("0",)] == 7


def test_used_share_of_an_open_section_is_that_of_the_limit_in_force() -> None:
    """A first occurrence has the warm-up limit, not the limit of the later ones. A section without a limit has none."""
    view = view_of(launched(is_running=True).records)
    view._clock = lambda: 610 * 10**9
    warming = (SnapshotSection("setup", 10.0, 3000.0), SnapshotSection("load", 10.0))
    view.take_snapshots(
        {
            0: msgspec.structs.replace(
                shown(0, alive_at=610.0), sections=warming, limits=(Allowed("setup", 60.0, has_first=True),)
            )
        }
    )
    found = {labels: n for (name, labels), n in view.samples().items() if name == "resilience_rank_section_used_ratio"}
    assert found == {("0", "setup"): 0.2}
