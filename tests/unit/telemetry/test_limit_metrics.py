"""How near sections come to their limits, of a whole node, and only as far back as matters."""

from __future__ import annotations

import msgspec
import pytest

from resilience.core.watched import watched
from resilience.facts import events
from resilience.facts.identity import Origin
from resilience.facts.limits import First, Learned, Limit, Limits
from resilience.facts.records import Record
from resilience.telemetry.durations import Durations
from resilience.telemetry.limit_metrics import RECENT, LimitMetrics
from resilience.telemetry.metrics import MetricView
from resilience.telemetry.rank_snapshot import Allowed, RankSnapshot, SnapshotSection, allowed
from resilience.telemetry.timings import HEARTBEAT, Timings
from tests.support.rank_timings import add_durations, durations_of

ORIGIN = Origin(job_id="j", node="n", role="monitor", pid=1, initial_rank=0)
STEP, SAVE = Allowed("step", 10.0, is_learned=True), Allowed("save", 100.0)
USED = "resilience_timeout_headroom_ratio"


def shows(*limits: Allowed, open_since: float | None = None, until: float = 0.0) -> RankSnapshot:
    """until: when the monitor last looked."""
    sections = () if open_since is None else (SnapshotSection("step", open_since, 10.0),)
    return RankSnapshot(origin=ORIGIN, doing="run", sections=sections, limits=limits, alive_at=until)


def recorded(first: int = 0, **sections: list[float]) -> Durations:
    """Return what a rank has recorded. first: the number of occurrences that count as the first ones after a start."""
    every, early = Timings(), Timings()
    add_durations(every, ((name, seconds) for name, all_of_it in sections.items() for seconds in all_of_it))
    add_durations(early, ((name, seconds) for name, all_of_it in sections.items() for seconds in all_of_it[:first]))
    made = durations_of(every)
    for deadline, series in durations_of(early).deadlines.items():
        made.deadlines[deadline].early = series.total
    return made


def stale(deadline: str, attempt: int = 0) -> Record:
    origin = Origin(job_id="j", node="n", role="monitor", pid=1, initial_rank=0, attempt=attempt)
    return Record(1, 0, 0, origin, events.TimeoutsStale(deadline, "it grew", 50.0))


def test_limits_are_those_of_the_strictest_rank_and_say_where_they_come_from() -> None:
    shown = {0: shows(STEP, SAVE, Allowed(HEARTBEAT, 60.0)), 1: shows(Allowed("step", 8.0), Allowed(HEARTBEAT, 30.0))}
    made = LimitMetrics().values(shown, str)
    assert made["resilience_section_timeout_seconds"] == {
        ("step", "config"): 8.0,
        ("save", "config"): 100.0,
    }
    assert made["resilience_heartbeat_timeout_seconds"] == {("config",): 30.0}
    assert made[USED] == {}  # nothing has been seen of them


def test_used_of_the_limit_looks_at_what_ended_and_at_what_is_open() -> None:
    view = LimitMetrics()
    view.take_durations({0: recorded(step=[1.0, 4.0, 2.0])}, 0.0)
    assert view.values({0: shows(STEP)}, str)[USED] == {("step",): 0.4}
    assert view.values({0: shows(STEP), 1: shows(STEP, open_since=1.0, until=10.0)}, str)[USED] == {("step",): 0.9}


def test_section_that_may_have_ended_since_its_rank_was_seen_counts_as_far_as_it_was_seen() -> None:
    """Its monitor may write every few seconds, or not at all: how old that is must not look like a long section."""
    seen = msgspec.structs.replace(shows(STEP, open_since=1.0, until=1.5), written_at=1.5)
    view = LimitMetrics()
    assert view.values({0: seen}, str)[USED] == {("step",): 0.05}
    assert view.values({0: msgspec.structs.replace(seen, alive_at=9.0)}, str)[USED] == {("step",): 0.8}  # it looked


def test_each_rank_is_compared_with_its_own_limit() -> None:
    view = LimitMetrics()
    view.take_durations({0: recorded(step=[0.5]), 1: recorded(step=[4.0])}, 0.0)
    shown = {0: shows(Allowed("step", 1.0)), 1: shows(Allowed("step", 10.0))}
    assert view.values(shown, str)[USED] == {("step",): 0.5}
    assert view.values({1: shown[1]}, str)[USED] == {("step",): 0.4}


def test_first_occurrence_is_compared_with_its_own_limit_while_it_is_open() -> None:
    limits = Limits(sections={"train": Limit(hard=2.0)}, first={"train": First(2, {"cold": Limit(hard=300.0)})})
    opened = (SnapshotSection("train", 0.0, 300.0), SnapshotSection("save", 0.0))
    snapshot = RankSnapshot(ORIGIN, "run", sections=opened, limits=allowed(limits), alive_at=45.0)
    view = LimitMetrics()
    assert view.values({0: snapshot}, str)[USED] == {("train",): 0.15}
    ended = msgspec.structs.replace(snapshot, sections=())
    view.take_durations({0: recorded(first=2, train=[45.0, 3.0])}, 46.0)
    assert view.values({0: ended}, str)[USED] == {("train",): 0.0}
    view.take_durations({0: recorded(first=2, train=[45.0, 3.0, 1.0])}, 47.0)
    assert view.values({0: ended}, str)[USED]["train",] == pytest.approx(0.5, rel=0.01)


@pytest.mark.parametrize(
    ("limits", "has_first"),
    [
        (Limits(), False),
        (Limits(first={"save": First(2)}), False),
        (Limits(first={"train": First(2)}), True),
        (Limits(warmup={"train": Limit(hard=9.0)}), False),
        (Limits(warmup={"train": Limit(hard=9.0)}, warmup_occurrences=2), True),
    ],
)
def test_first_occurrences_count_unless_they_have_a_limit_of_their_own(limits: Limits, has_first: bool) -> None:
    (limit,) = allowed(msgspec.structs.replace(limits, sections={"train": Limit(hard=2.0)}))
    assert limit.has_first == has_first
    view = LimitMetrics()
    view.take_durations({0: recorded(first=2, train=[1.0])}, 0.0)
    assert view.values({0: shows(limit)}, str)[USED] == {("train",): 0.0 if has_first else 0.5}


def test_limit_of_heartbeats_is_shown_where_it_holds() -> None:
    """Its default holds once the program has announced heartbeats. The line at the start names it only if it is set."""
    default = Limits(heartbeat=Limit(hard=2700.0), defaults=("heartbeat",))
    learned = {"heartbeat": Learned(2700.0, 1.0, 2.0)}
    for limits, unannounced, announced in (
        (default, None, ("config",)),
        (Limits(heartbeat=Limit(hard=2700.0)), ("config",), ("config",)),
        (msgspec.structs.replace(default, learned=learned), ("calibrated",), ("calibrated",)),
        (Limits(), None, None),
    ):
        for are_announced, source in ((False, unannounced), (True, announced)):
            shown = {0: shows(*allowed(limits, are_announced))}
            values = LimitMetrics().values(shown, str)["resilience_heartbeat_timeout_seconds"]
            assert values == ({} if source is None else {source: 2700.0})
        assert ("heartbeat" in watched(limits).limits) == (unannounced is not None)


def test_slow_section_of_long_ago_does_not_show_for_ever() -> None:
    view = LimitMetrics()
    slow = [9.0]
    used = []
    for minute in range(60):
        view.take_durations({0: recorded(step=slow + [1.0] * minute)}, 60.0 * minute)
        used.append(view.values({0: shows(STEP)}, str)[USED]["step",])
    assert used[0] == used[int(RECENT / 60)] == 0.9
    assert 0.1 <= used[-1] < 0.11


def test_exporter_that_takes_over_a_long_job_shows_no_slow_section_of_long_ago() -> None:
    view, started = LimitMetrics(), 1000.0
    began = Record(1, 0, round(started * 1e9), ORIGIN, events.MonitorStarted(7))
    view.take(began)
    view.take_durations({0: recorded(step=[9.0, 1.0])}, started + RECENT + 1.0)
    assert view.values({0: shows(STEP)}, str)[USED] == {("step",): 0.0}
    view.take_durations({0: recorded(step=[9.0, 1.0, 4.0])}, started + RECENT + 16.0)
    assert view.values({0: shows(STEP)}, str)[USED]["step",] == pytest.approx(0.4, rel=0.01)
    early = LimitMetrics()
    early.take(began)
    early.take_durations({0: recorded(step=[9.0])}, started + RECENT - 1.0)
    assert early.values({0: shows(STEP)}, str)[USED] == {("step",): 0.9}


def test_sections_beyond_the_first_share_one_label() -> None:
    view = LimitMetrics()
    view.take_durations({0: recorded(save=[1.0], load=[9.0])}, 0.0)
    made = view.values({0: shows(STEP, SAVE, Allowed("load", 20.0))}, lambda name: name if name == "step" else "-")
    assert made["resilience_section_timeout_seconds"] == {("step", "calibrated"): 10.0, ("-", "config"): 20.0}
    assert made[USED] == {("-",): 0.45}


def test_stale_limit_shows_until_the_next_attempt() -> None:
    view = LimitMetrics()
    view.take(stale("step"))
    assert view.values({}, str)["resilience_calibration_stale"] == {("step",): 1}
    view.take(stale("save", attempt=1))
    view.take(stale("step"))  # a file of the attempt before, read later
    assert view.values({}, str)["resilience_calibration_stale"] == {("save",): 1}


def test_node_exports_them() -> None:
    view = MetricView()
    view.take_durations({0: recorded(step=[5.0])})
    view.take_snapshots({0: shows(STEP), 1: shows(Allowed("step", 1.0))})  # rank 1 is not here
    view.take(Record(0, 0, 0, msgspec.structs.replace(ORIGIN, layer="launcher"), events.MonitorStarted(7)))
    view.take(stale("step"))
    found = view.samples()
    assert found[USED, ("step",)] == 0.5
    assert found["resilience_section_timeout_seconds", ("step", "calibrated")] == 10.0
    assert found["resilience_calibration_stale", ("step",)] == 1
