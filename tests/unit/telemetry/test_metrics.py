"""The numbers of a job, computed from its records: few series, no text, and the same at every replay."""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from resilience.attribution.first_failure import judged
from resilience.attribution.incidents import fold
from resilience.facts import events
from resilience.facts.identity import Origin, trace_id
from resilience.facts.interruptions import Interruption, InterruptionRecord
from resilience.facts.records import Record
from resilience.report.condensed import report
from resilience.run_folder.load import Run
from resilience.telemetry.catalogue import BY_NAME, MAX_SECTIONS, METRICS
from resilience.telemetry.metrics import MOST_NAMES, MOST_NODES, READ_S, MetricView
from resilience.telemetry.timings import HEARTBEAT, Timings
from tests.support import launch_streams
from tests.support.busy_node import busy_node
from tests.support.launch_streams import launched
from tests.support.rank_timings import add_durations, add_failed, durations_of
from tests.support.record_streams import Fault, Kind, job

SERIES_A_NODE = 1220  # docs/performance.md says what a scrape of the node below costs


def view_of(records: list[Record]) -> MetricView:
    view = MetricView()
    for record in records:
        view.take(record)
    return view


def samples(records: list[Record]) -> dict[tuple[str, tuple[str, ...]], float]:
    return view_of(records).samples()


def text_of(view: MetricView) -> str:
    registry = CollectorRegistry()
    registry.register(view)
    return generate_latest(registry).decode()


@given(seed=st.integers(0, 10_000), kind=st.sampled_from(get_args(Kind)), other=st.sampled_from(get_args(Kind)))
@settings(max_examples=60, deadline=None)
def test_replay_gives_the_numbers_of_the_live_run(seed: int, kind: Kind, other: Kind) -> None:
    told = job([Fault(kind, 1, 0), Fault(other, 2, 1, 20)], spares=1, seed=seed)
    assert samples(told.interleaved(seed)) == samples(told.records)


def test_restarts_and_interruptions_are_counted() -> None:
    told = job([Fault("exception", 1, 0), Fault("kill", 2, 1, 20), Fault("hang", 0, 2, 31)], world=3, spares=1)
    found = samples(told.records)
    assert found["resilience_restart_iterations_total", ("inprocess", "interrupted")] == 3
    assert found["resilience_restart_iterations_total", ("inprocess", "completed")] == 1
    assert found["resilience_restart_iteration", ("inprocess",)] == 3
    assert found["resilience_interruptions_total", ("exception", "user_code", "first")] == 1
    assert found["resilience_interruptions_total", ("terminated", "unknown", "first")] == 1
    assert found["resilience_interruptions_total", ("soft_timeout", "storage", "first")] == 1
    assert found["resilience_hangs_detected_total", ("watchdog", "")] == 1
    assert found["resilience_lost_seconds_total", ("hang",)] == pytest.approx(3 * 3.01)
    told_events = Counter(str(record.event.__struct_config__.tag) for record in told.records)
    assert {labels[0]: n for (name, labels), n in found.items() if name == "resilience_events_total"} == told_events


def test_interrupted_iteration_counts_if_another_one_follows_it() -> None:
    """If none follows, the launcher restarts the job, and counts that restart as its own."""
    told = job([Fault("exception", 1, 0)], world=2)
    name, labels = "resilience_restart_iterations_total", ("inprocess", "interrupted")
    followed = [isinstance(r.event, events.IterationStarted) and r.origin.iteration == 1 for r in told.records]
    alone = [record for record in told.records if record.origin.iteration != 1]
    assert any(isinstance(record.event, events.IterationEnded) for record in alone)
    assert (name, labels) not in samples(alone)
    assert samples(told.records[: followed.index(True) + 1])[name, labels] == 1
    assert samples([*alone, told.records[followed.index(True)]])[name, labels] == 1


def test_connection_errors_of_peers_are_cascade() -> None:
    for seed in range(20):
        told = job([Fault("exception", 1, 0)], seed=seed)
        found = samples(told.records)
        echoes = sum(isinstance(record.event, events.RankInterrupted) for record in told.records) - 1
        assert found.get(("resilience_interruptions_total", ("exception", "network", "cascade")), 0) == echoes
        assert ("resilience_interruptions_total", ("exception", "network", "first")) not in found


def test_interruption_of_a_node_that_died_whole_is_counted_in_the_end() -> None:
    """Nobody of the node lives to learn whose record was first: its monitors' end settles it."""
    told = job([Fault("kill", 1, 0)], world=2)
    alone = [record for record in told.files[1] if not isinstance(record.event, events.IterationDecided)]
    assert samples(alone)["resilience_interruptions_total", ("terminated", "unknown", "first")] == 1


def test_iteration_is_counted_once_for_all_ranks_of_the_node() -> None:
    assert samples(job(world=16).records)["resilience_restart_iterations_total", ("inprocess", "completed")] == 1


def test_rank_states_follow_the_ranks() -> None:
    told = job([Fault("kill", 1, 0)], world=3, spares=1)
    mixed = told.interleaved(0)
    seen: list[dict[str, float]] = []
    view = MetricView()
    for record in mixed:
        view.take(record)
        states = {labels[0]: n for (name, labels), n in view.samples().items() if name == "resilience_ranks"}
        if not seen or seen[-1] != states:
            seen.append(states)
    assert {"active": 3, "inactive": 1} in seen
    assert {"active": 2, "inactive": 1, "terminated": 1} in seen
    assert {"active": 3, "excluded": 1} in seen
    assert seen[-1] == {"excluded": 1}  # the others have left cleanly


def test_silent_rank_is_suspect_and_lost_monitor_shows() -> None:
    told = job([Fault("hang", 1, 0)])
    until = next(n for n, r in enumerate(told.files[1]) if isinstance(r.event, events.RankFellSilent))
    assert samples(told.files[1][: until + 1])["resilience_rank_state", ("1", "suspect")] == 1
    told = job([Fault("monitor", 1, 0)])
    until = next(n for n, r in enumerate(told.files[1]) if isinstance(r.event, events.MonitorLost))
    assert samples(told.files[1][: until + 1])["resilience_ranks", ("unmonitored",)] == 1


def test_running_function_counts_as_productive_before_it_ends() -> None:
    told = job(world=1)
    started = next(n for n, r in enumerate(told.records) if getattr(r.event, "stage", "") == "run")
    at = told.records[started].mono_ns
    view = MetricView(lambda: at + round((READ_S + 5.0) * 1e9))
    for record in told.records[: started + 1]:
        view.take(record)
    assert view.samples()["resilience_productive_seconds_total", ()] == 5.0
    assert view_of(told.records[: started + 1]).samples()["resilience_productive_seconds_total", ()] == 0.0


def test_rank_that_died_is_idle_to_the_last_record_once_the_job_is_over() -> None:
    told = job([Fault("kill", 1, 0)], world=3)
    view = MetricView(lambda: told.interleaved(0)[-1].mono_ns)
    for record in told.interleaved(0):
        view.take(record)
    spent = report(Run(Path("run"), None, tuple(told.records), ())).times
    assert spent is not None
    idle = view.samples()["resilience_lost_seconds_total", ("idle",)]
    assert idle == pytest.approx(spent.idle_s * spent.ranks, abs=1e-3)


def test_rank_that_died_has_no_monitor_that_watches_it() -> None:
    told = job([Fault("kill", 1, 0)], world=3)
    exited = next(n for n, r in enumerate(told.files[1]) if isinstance(r.event, events.RankExited))
    assert samples(told.files[1][:exited])["resilience_monitor_up", ()] == 1
    assert samples(told.files[1][: exited + 1])["resilience_monitor_up", ()] == 0


def test_spare_is_not_productive() -> None:
    told = job(world=1, spares=1)
    (run,) = [r.event for r in told.files[0] if isinstance(r.event, events.StageEnded) and r.event.stage == "run"]
    assert samples(told.records)["resilience_productive_seconds_total", ()] == pytest.approx(run.duration_s, rel=1e-4)


def test_durations_fall_into_the_buckets_of_their_definition() -> None:
    record = job().records[0]
    view = MetricView()
    for duration in (0.0515, 0.0516, 3.0, 1e9, -1.0):
        view.take(msgspec.structs.replace(record, event=events.StageEnded("restart", "completed", duration)))
    found = view.samples()
    buckets = {
        labels[1]: n
        for (name, labels), n in found.items()
        if name == "resilience_restart_duration_seconds_bucket" and n
    }
    assert sum(buckets.values()) == 5 and buckets["inf"] == 1
    assert buckets["0.001"] == 1  # a negative duration counts as none


@pytest.mark.parametrize(("name", "ratio"), [("restart", 1.5), ("restart_phase", 1.5), ("section", 2.0)])
def test_buckets_grow_by_no_more_than_a_ratio_from_a_millisecond_to_ten_minutes(name: str, ratio: float) -> None:
    edges = [edge for edge in BY_NAME[f"resilience_{name}_duration_seconds"].buckets if edge <= 600.0]
    assert edges[0] == 0.001 and edges[-1] >= 600.0 / ratio
    assert max(above / below for below, above in itertools.pairwise(edges)) <= ratio


def test_restarts_of_up_to_two_hours_have_buckets_that_at_most_double() -> None:
    edges = [edge for edge in BY_NAME["resilience_restart_duration_seconds"].buckets if edge >= 600.0]
    assert (edges[0], edges[-1]) == (600.0, 7200.0)
    assert max(above / below for below, above in itertools.pairwise(edges)) <= 2.0


def restarts(durations: list[float], view: MetricView) -> None:
    for duration in durations:
        view.take(msgspec.structs.replace(job().records[0], event=events.StageEnded("restart", "completed", duration)))


def phases(durations: list[float], view: MetricView) -> None:
    for duration in durations:
        view.take(msgspec.structs.replace(job().records[0], event=events.StageEnded("abort", "completed", duration)))


def sections(durations: list[float], view: MetricView) -> None:
    timings = Timings()
    add_durations(timings, [("data", duration) for duration in durations])
    view.take_durations({0: durations_of(timings)})


@pytest.mark.parametrize(
    ("name", "observe", "accuracy"),
    [("restart", restarts, 1.0), ("restart_phase", phases, 1.0), ("section", sections, 1.01)],
    ids=("restart", "restart_phase", "section"),
)
@given(
    durations=st.lists(st.floats(0.001, 7200.0).map(lambda seconds: round(seconds, 9)), min_size=1, max_size=50),
    q=st.sampled_from([0.5, 0.95, 0.99]),
)
@settings(max_examples=60, deadline=None)
def test_quantile_of_the_buckets_is_within_one_bucket_of_the_records(
    name: str, observe: Callable[[list[float], MetricView], None], accuracy: float, durations: list[float], q: float
) -> None:
    """accuracy: of the edges; durations of sections are counted in finer buckets first."""
    metric = BY_NAME[f"resilience_{name}_duration_seconds"]
    durations = [min(duration, metric.buckets[-1] / accuracy) for duration in durations]
    view = MetricView()
    observe(durations, view)
    counts = {
        float(labels[-1]): n for (full, labels), n in view.samples().items() if full == f"{metric.name}_bucket" and n
    }
    assert sum(counts.values()) == len(durations)
    exact = sorted(durations)[max(0, math.ceil(q * len(durations)) - 1)]
    below, seen = 0.0, 0.0
    for edge in metric.buckets:
        count = counts.get(edge, 0.0)
        if seen + count >= q * len(durations):
            shown = below + (edge - below) * (q * len(durations) - seen) / count
            break
        below, seen = edge, seen + count
    assert below / accuracy <= exact <= edge * accuracy and below <= shown <= edge


def test_sections_and_heartbeats_come_from_the_timing_histograms() -> None:
    timings = Timings()
    add_durations(timings, [("data", 0.004), ("data", 0.2), (HEARTBEAT, 1.5), (HEARTBEAT, 7000.0)])
    add_failed(timings, [("data", 0.3)])
    view = MetricView()
    view.take_durations({0: durations_of(timings)})
    found = view.samples()
    assert found["resilience_section_duration_seconds_bucket", ("data", "completed", "0.00784")] == 1
    assert found["resilience_section_duration_seconds_bucket", ("data", "completed", "0.242")] == 1
    assert found["resilience_section_duration_seconds_sum", ("data", "completed")] == pytest.approx(0.204)
    assert found["resilience_section_duration_seconds_bucket", ("data", "failed", "inf")] == 1
    assert found["resilience_heartbeat_interval_seconds_bucket", ("1.9",)] == 1
    assert found["resilience_heartbeat_interval_seconds_bucket", ("inf",)] == 1


def test_failed_exports_are_counted_by_what_is_not_exported() -> None:
    view = MetricView()
    for event in (
        events.ExportFailed("otlp", "the collector does not take metrics", signal="metric"),
        events.ExportFailed("otlp", "the collector does not take spans"),
        events.ExportFailed("prometheus", "cannot start", is_at_start=True),
    ):
        view.take(msgspec.structs.replace(job().records[0], event=event))
    found = {labels: n for (name, labels), n in view.samples().items() if name == "resilience_telemetry_errors_total"}
    assert found == {("metric", "send"): 1, ("span", "send"): 1, ("metric", "start"): 1}


def lost_records(told: list[tuple[Origin, events.Event]]) -> list[float]:
    """Return how many records count as lost, after each of these events."""
    view, counts = MetricView(), list[float]()
    for number, (origin, event) in enumerate(told):
        view.take(Record(number, 10**18 + number, number, origin, event))  # type: ignore[arg-type]
        counts.append(view.samples().get(("resilience_telemetry_dropped_total", ("record", "sink")), 0))
    return counts


def test_records_that_a_monitor_loses_count_when_it_reports_them_and_once() -> None:
    """It may end days later. Its last report may be lost as well, but its end states all losses."""
    monitors = [Origin("job", "node", "monitor", pid, iteration=0, initial_rank=pid - 7) for pid in (7, 8)]
    told: list[tuple[Origin, events.Event]] = [
        (monitors[0], events.TelemetryDropped("record", "sink", 3)),
        (monitors[1], events.TelemetryDropped("record", "sink", 1)),
        (monitors[0], events.TelemetryDropped("record", "sink", 2)),
        (monitors[0], events.MonitorEnded(dropped_records=6)),
        (monitors[1], events.MonitorEnded(dropped_records=1)),
    ]
    assert lost_records(told) == [3, 4, 6, 7, 7]


def test_losses_of_a_killed_monitor_are_not_set_off_against_those_of_a_later_one() -> None:
    """A replaced container has the same process ids."""
    monitor = Origin("job", "node", "monitor", 7, iteration=0, initial_rank=0)
    told: list[tuple[Origin, events.Event]] = [
        (monitor, events.TelemetryDropped("record", "sink", 3)),
        (monitor, events.MonitorStarted(9)),
        (monitor, events.MonitorEnded(dropped_records=2)),
    ]
    assert lost_records(told) == [3, 3, 5]


@pytest.mark.timeout(900)  # it takes all samples after each record of 30 streams
def test_each_metric_changes_with_its_events_and_with_no_other() -> None:
    told = [job([Fault(kind, 1, 0)], spares=1).records for kind in get_args(Kind)]
    told.append(job([Fault("kill", 1, 0)]).files[1])  # a node of its own
    # What the synthetic jobs do not hold.
    origin = Origin("job", "node", "monitor", 1, iteration=0, initial_rank=0)
    extra = [
        events.TelemetryDropped("span", "queue full", 3),
        events.ExportFailed("otlp", "cannot start: no", is_at_start=True),
        events.MonitorEnded(dropped_records=2),
        events.TimeoutsStale("step", "it grew", 9.0),
        events.RankSuspected("section:train", 2.0, 1.5, 9.0),
        events.TimeoutsShadowAlarm("step", 3.0, 3.1),
        events.ElasticMeasured("SimpleElasticAgent.run.success", 1.0),
        events.ElasticMeasured("SimpleElasticAgent.run.duration.ms", 20.0),
        events.ElasticMeasured("workers.default.flakiness", 3.0),
        events.ElasticTold("torchelastic.worker.status.SUCCEEDED", "AGENT", "SUCCEEDED"),
        events.IncidentJudged("rank 1 failed first (SIGKILL)", "killed", 0, 0, 1, 0.95, ("node",)),
    ]
    alone = [
        events.RankInterrupted(InterruptionRecord(0, Interruption.TERMINATED, pid=7)),
        events.InterruptionArrived(0, Interruption.TERMINATED, 0, 2, fault_of=0),
    ]
    for few in (extra, alone):
        told.append([Record(n, n, n, origin, event) for n, event in enumerate(few)])  # type: ignore[arg-type]
    for kind in get_args(launch_streams.Kind):
        for signs in (True, False):
            told.append(launched([launch_streams.Fault(kind, 1)], nodes=2, signs=signs).interleaved(0, "node0"))
    told.append(launched(lost_monitors=[(0, 1)]).interleaved(0, "node0"))
    told.append(wrapped_in_a_launch())
    changed: dict[str, set[type]] = {metric.name: set() for metric in METRICS}
    for records in told:
        view, before = MetricView(), MetricView().samples()
        for record in records:
            view.take(record)
            after = view.samples()
            for name in {name for (name, _), _ in after.items() ^ before.items()}:
                family = re.sub("_(bucket|sum)$", "", name) if name not in BY_NAME else name
                changed[family].add(type(record.event))
            before = after
    for metric in METRICS:
        if metric.source:
            assert not changed[metric.name]
        elif metric.events == events.CATALOGUE:
            assert changed[metric.name] <= set(events.CATALOGUE)
        else:
            assert changed[metric.name] == set(metric.events) - NOT_ALONE.get(metric.name, set()), metric.name


def wrapped_in_a_launch() -> list[Record]:
    """A launched job in which a Wrapper is at work, from its second cycle on."""
    told = launched([launch_streams.Fault("kill", 0)], ranks=1, signs=False)
    inside = [
        msgspec.structs.replace(record, origin=msgspec.structs.replace(record.origin, node="node0", cycle=1))
        for record in job(world=1).records
    ]
    begun = next(
        n
        for n, r in enumerate(told.interleaved(0))
        if r.origin.cycle and isinstance(r.event, events.CyclePhaseEnded) and r.event.phase == "spawn"
    )
    records = told.interleaved(0)
    at = records[begun].mono_ns
    moved = [msgspec.structs.replace(record, mono_ns=at + 1 + n) for n, record in enumerate(inside)]
    return [*records[: begun + 1], *moved, *records[begun + 1 :]]


# An event that a metric is a view of, but that by itself changes no number in these jobs.
NOT_ALONE: dict[str, set[type]] = {
    "resilience_job_info": {events.RendezvousCompleted},
    "resilience_monitor_up": {
        events.CycleStarted,  # of monitors that were killed with their agent
        events.MonitorEnded,  # the end of its rank comes first, unless the rank lives on after its call
    },
    "resilience_lost_seconds_total": {  # rework: no step was reported when it began
        events.FirstStepReported,
        events.RestartEnded,
        events.RestartStep,
        events.RankInterrupted,  # the step that its rank had reached
    },
    "resilience_restart_iterations_total": {
        events.RankStoodInFor,  # the others follow, and count
        events.WorkerExited,  # its monitor must have seen it die, in a restart in place
    },
    "resilience_ended_timestamp_seconds": {events.RankSignalled},  # a later end is no answer to a request to stop
}


def test_every_event_of_the_catalogue_has_a_metric() -> None:
    for event in events.CATALOGUE:
        assert any(event in metric.events for metric in METRICS)


def test_names_units_and_labels_follow_the_rules() -> None:
    for metric in METRICS:
        assert re.fullmatch(r"resilience_[a-z_]+", metric.name)
        assert (metric.kind == "counter") == metric.name.endswith("_total")
        assert metric.kind != "histogram" or (metric.name.endswith("_seconds") and metric.buckets)
        assert list(metric.buckets) == sorted(set(metric.buckets))
        assert not {"message", "error", "trace_id", "step", "pid", "reason_text"} & set(metric.labels)
        assert metric.help.endswith(".")


def test_a_busy_node_of_eight_ranks_and_ten_sections_stays_below_the_limit_of_series() -> None:
    text = text_of(busy_node())
    series = [line for line in text.splitlines() if line and not line.startswith("#")]
    assert 300 < len(series) <= SERIES_A_NODE


def test_names_that_users_choose_cannot_multiply_series() -> None:
    view = MetricView()
    timings = Timings()
    add_durations(timings, ((f"batch {number}", 1.0) for number in range(1000)))
    view.take_durations({0: durations_of(timings)})
    record = job().records[0]
    for number in range(1000):
        limit = f"section:batch {number}"
        view.take(msgspec.structs.replace(record, event=events.RankFellSilent(limit, "soft", 1.0, 1.0)))
    found = view.samples()
    assert len({labels for name, labels in found if name == "resilience_hangs_detected_total"}) == MAX_SECTIONS + 1
    names = {labels[0] for name, labels in found if name == "resilience_section_duration_seconds_bucket"}
    assert len(names) == MAX_SECTIONS + 1
    total = sum(n for (name, _), n in found.items() if name == "resilience_section_duration_seconds_bucket")
    assert total == 1000


def test_sections_have_the_same_labels_whichever_exporter_read_what_first() -> None:
    """The live exporter meets each name when it appears; the next one reads all records first, then the durations."""
    hangs = [
        msgspec.structs.replace(job().records[0], event=events.RankFellSilent(f"section:{name}", "soft", 1.0, 1.0))
        for name in ("s19", "s00", "never ended")
    ]
    early, late = Timings(), Timings()
    add_durations(early, ((f"s{number:02}", 1.0) for number in range(5, 15)))
    add_durations(late, ((f"s{number:02}", 1.0) for number in (*range(5, 20), *range(5))))
    live, successor = MetricView(), view_of(hangs)
    live.take_durations({0: durations_of(early)})
    live.samples()
    for hang in reversed(hangs):
        live.take(hang)
        live.samples()
    live.take_durations({1: durations_of(early, rank=1), 0: durations_of(late)})
    successor.take_durations({0: durations_of(late), 1: durations_of(early, rank=1)})
    assert live.samples() == successor.samples()
    names = {labels[0] for name, labels in live.samples() if name == "resilience_section_duration_seconds_sum"}
    assert names == {*(f"s{number:02}" for number in (*range(5, 20), 0)), "other"}  # the first 16 that ended
    hung = {labels[1]: n for (name, labels), n in live.samples().items() if name == "resilience_hangs_detected_total"}
    assert hung == {"s19": 1, "s00": 1, "other": 1}


def test_section_that_was_shown_stays_though_another_rank_ends_others_first() -> None:
    view, first, other = MetricView(), Timings(), Timings()
    add_durations(first, ((f"s{number:02}", 1.0) for number in range(MAX_SECTIONS)))
    add_durations(other, ((f"a{number:02}", 1.0) for number in range(MAX_SECTIONS)))
    view.take_durations({0: durations_of(first)})
    shown = sections_in(view)
    view.take_durations({0: durations_of(first), 1: durations_of(other, rank=1)})
    assert sections_in(view) == {**shown, "other": MAX_SECTIONS}


def sections_in(view: MetricView) -> dict[str, float]:
    """How long each section took."""
    samples = view.samples().items()
    return {labels[0]: value for (name, labels), value in samples if name == "resilience_section_duration_seconds_sum"}


def test_names_that_torch_chooses_cannot_multiply_series() -> None:
    view = MetricView()
    record = job().records[0]
    for number in range(100):
        told: list[events.Event] = [
            events.ElasticMeasured(f"Agent.call{number}.success", 1.0),
            events.ElasticMeasured(f"Agent.call{number}.duration.ms", 10.0),
            events.ElasticMeasured(f"workers.role{number}.run_total", float(number)),
            events.ElasticMeasured(f"value{number}", float(number)),
            events.ElasticTold("event", "AGENT", f"STATE{number}"),
        ]
        for event in told:
            view.take(msgspec.structs.replace(record, event=event))
    found = view.samples()
    assert found["resilience_elastic_value", ("workers.run_total",)] == 99  # of whatever role
    for name in ("calls_total", "call_duration_seconds_sum", "value", "events_total"):
        rows = [labels for of, labels in found if of == f"resilience_elastic_{name}"]
        assert len(rows) == MOST_NAMES + 1
    assert sum(n for (name, _), n in found.items() if name == "resilience_elastic_calls_total") == 100


def on_two_nodes(records: list[Record]) -> list[Record]:
    """Ranks 0 and 1 of the job on node0, the others on node1."""
    moved = []
    for record in records:
        node, event = f"node{(record.origin.initial_rank or 0) // 2}", record.event
        if isinstance(event, events.RankInterrupted):
            event = events.RankInterrupted(msgspec.structs.replace(event.record, node=node))
        origin = msgspec.structs.replace(record.origin, node=node)
        moved.append(msgspec.structs.replace(record, origin=origin, event=event))
    return moved


def test_node_is_blamed_for_a_rank_that_another_node_waited_for() -> None:
    """The limit of a rank that waits for rank 2 fires first. No rank of node1 has a record of its own."""
    told = on_two_nodes(job([Fault("waited_for", 2, 0)]).records)
    (incident,) = fold(told)
    assert incident.verdict.first == 2
    assert {record.node for record in incident.records} == {"node0"}
    verdict = msgspec.structs.replace(told[0], event=judged(incident))
    found = samples([*told, verdict])
    blamed = {labels: n for (name, labels), n in found.items() if name == "resilience_blamed_total"}
    assert blamed == {("node1",): 1}


def test_interruption_that_a_wrapper_and_its_launcher_judge_blames_a_node_once() -> None:
    """The launcher, or torchrun, ends the cycle for a death after which the Wrapper has restarted."""
    told = on_two_nodes(job([Fault("kill", 2, 0)]).records)
    (incident,) = fold(told)
    assert judged(incident).nodes == ("node1",)
    following = next(record for record in told if record.origin.iteration == 1)
    (again,) = fold([*told, msgspec.structs.replace(following, event=judged(incident))])
    assert (judged(again).rank, judged(again).nodes) == (2, ())


def test_blamed_nodes_of_a_large_job_cannot_multiply_series() -> None:
    record = job().records[0]
    view = view_of(
        [
            msgspec.structs.replace(record, event=events.IncidentJudged("", "killed", 0, nodes=(f"node{number}",)))
            for number in range(1000)
        ]
    )
    counts = [n for (name, _), n in view.samples().items() if name == "resilience_blamed_total"]
    assert (len(counts), sum(counts)) == (MOST_NODES + 1, 1000)


def test_exposition_is_valid_openmetrics_with_the_trace_as_exemplar() -> None:
    registry = CollectorRegistry()
    registry.register(busy_node())
    text = openmetrics(registry).decode()
    assert "_created" not in text
    families = {family.name: family for family in text_string_to_metric_families(text)}  # type: ignore[no-untyped-call]
    assert set(families) == {metric.name.removesuffix("_total") for metric in METRICS}
    restarts = families["resilience_restart_duration_seconds"].samples
    exemplars = [sample.exemplar for sample in restarts if sample.exemplar is not None]
    assert {exemplar.labels["trace_id"] for exemplar in exemplars} == {
        format(trace_id("job", 0, 0), "032x")  # of the cycle that failed
    }
    for sample in restarts:
        if sample.name.endswith("_count"):
            infinite = next(
                s for s in restarts if s.name.endswith("_bucket") and s.labels == {**sample.labels, "le": "+Inf"}
            )
            assert infinite.value == sample.value
