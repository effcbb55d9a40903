"""The timeline of a job, computed from its records: complete, nested, linked, and the same at every replay."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from random import Random
from typing import get_args

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resilience.facts import events, identity
from resilience.facts.identity import Origin
from resilience.facts.interruptions import Detector, Interruption, InterruptionRecord
from resilience.facts.records import Record
from resilience.history.intervals import NOTED
from resilience.report.condensed import report
from resilience.run_folder.load import Run
from resilience.telemetry.metrics import LAYER, MetricView
from resilience.telemetry.span import ALL_UP_TO, SAMPLED, Span, is_sampled, parse_traceparent, run_span_id, trace_id
from resilience.telemetry.spans import SpanView
from tests.support.record_streams import STARTED_NS, Fault, Job, Kind, job
from tests.support.torchrun_streams import in_cycle, stopped_in_restart, under_torchrun


def spans_of(records: list[Record]) -> list[Span]:
    view = SpanView()
    return [span for record in records for span in view.take(record)]


def named(spans: list[Span], name: str, rank: int | None = None) -> list[Span]:
    return [s for s in spans if s.name == name and (rank is None or s.attributes["resilience.rank.initial"] == rank)]


def assert_whole(spans: list[Span]) -> None:
    """Every trace has one root, every parent is there and in the same trace, every link leads to a span."""
    known = by_id(spans)
    assert len(known) == len(spans)
    for span in spans:
        assert span.parent_id is None or known[span.parent_id].trace_id == span.trace_id, span.name
        for link in span.links:
            assert link.span_id not in known or known[link.span_id].trace_id == link.trace_id, span.name
    roots = Counter(span.trace_id for span in spans if span.parent_id is None)
    assert roots == Counter({span.trace_id for span in spans})


def by_id(spans: list[Span]) -> dict[int, Span]:
    return {span.span_id: span for span in spans}


@pytest.fixture(scope="module")
def told() -> Job:
    return job([Fault("exception", 1, 0), Fault("kill", 2, 1, 20), Fault("hang", 0, 2, 31)], world=3, spares=1)


@given(seed=st.integers(0, 10_000), kind=st.sampled_from(get_args(Kind)), poll=st.integers(1, 60))
@settings(max_examples=40, deadline=None)
def test_replay_gives_the_spans_of_the_live_run(seed: int, kind: Kind, poll: int) -> None:
    """Live, records come in batches, mixed between files; a replay reads file by file."""
    told = job([Fault(kind, 1, 0), Fault("kill", 2, 1, 20)], spares=1, seed=seed)
    live = SpanView()
    mixed = told.interleaved(seed)
    seen = [span for start in range(0, len(mixed), poll) for r in mixed[start : start + poll] for span in live.take(r)]
    assert sorted(seen, key=order) == sorted(spans_of(told.records), key=order)


def order(span: Span) -> tuple[int, str, int]:
    return span.end_ns, span.name, span.span_id


def test_ids_are_unique_and_children_lie_within_what_is_open(told: Job) -> None:
    spans = spans_of(told.records)
    assert len(by_id(spans)) == len(spans)
    for span in spans:
        assert span.start_ns <= span.end_ns
        assert span.start_ns >= STARTED_NS
    assert_whole(spans)
    assert {span.trace_id for span in spans} == {identity.trace_id("job", 0, 0)}


def test_traces_of_two_attempts_share_no_id(told: Job) -> None:
    again = [msgspec.structs.replace(r, origin=msgspec.structs.replace(r.origin, attempt=1)) for r in told.records]
    first, second = spans_of(told.records), spans_of(again)
    assert len(first) == len(second) > 0
    assert {span.trace_id for span in first}.isdisjoint(span.trace_id for span in second)
    assert by_id(first).keys().isdisjoint(by_id(second))
    assert_whole(spans_of([*told.records, *again]))


def test_iteration_holds_its_stages_and_the_restart_its_phases(told: Job) -> None:
    spans = spans_of(told.records)
    known = by_id(spans)
    for restart in named(spans, "restart"):
        if restart.attributes["resilience.outcome"] != "completed":
            continue
        children = {s.name for s in spans if s.parent_id == restart.span_id and not s.name.endswith(".start")}
        assert children == set(events.PHASES)
        assert restart.parent_id is not None
        assert known[restart.parent_id].name == "inprocess.iteration"
    for run in named(spans, "run"):
        assert run.parent_id is not None
        iteration = known[run.parent_id]
        assert iteration.attributes["resilience.iteration"] == run.attributes["resilience.iteration"]
    assert len(named(spans, "run")) == len(named(spans, "inprocess.iteration")) == 4 + 4 + 3 + 3


def test_root_has_an_anchor_that_leaves_before_anything_else(told: Job) -> None:
    spans = spans_of(told.interleaved(0))
    (anchor,) = [span for span in spans if span.name.endswith(".start")]
    assert spans[0] is anchor
    root = by_id(spans)[anchor.parent_id or 0]
    assert (root.name, root.parent_id) == ("inprocess.call", None)
    assert (root.attributes["code.function.name"], root.attributes["resilience.world_size.initial"]) == (
        "train.main",
        4,
    )


@given(faults=st.integers(0, 3), world=st.integers(4, 8), seed=st.integers(0, 99))
@settings(max_examples=20, deadline=None)
def test_no_more_than_a_tenth_of_all_spans_are_anchors(faults: int, world: int, seed: int) -> None:
    spans = spans_of(job([Fault("exception", 1, n, n) for n in range(faults)], world=world, seed=seed).records)
    assert sum(span.name.endswith(".start") for span in spans) <= 0.1 * len(spans)


def test_rank_that_leaves_in_the_middle_of_its_restart_closes_what_is_open(told: Job) -> None:
    records = told.files[1]
    begun = next(n for n, r in enumerate(records) if r.event == events.StageStarted("finalize"))
    left = [
        msgspec.structs.replace(records[begun], sequence=9000 + number, event=event)
        for number, event in enumerate(
            (events.CallEnded("failed", 1, 2.0, "OSError: full"), events.RankLeft("OSError"))
        )
    ]
    others = [r for r in told.records if r.origin.initial_rank != 1]
    spans = spans_of([*others, *records[: begun + 1], *left])
    assert_whole(spans)
    closed = [span for span in spans if span.attributes.get("resilience.closed_by") == "call"]
    assert [span.name for span in closed] == ["finalize", "restart", "inprocess.iteration"], closed
    assert {span.attributes["resilience.outcome"] for span in closed} == {"failed"}


def test_what_a_killed_rank_left_open_is_closed_by_its_monitor(told: Job) -> None:
    lost = [span for span in spans_of(told.records) if span.attributes.get("resilience.closed_by") == "monitor"]
    assert {span.name for span in lost} == {"run", "inprocess.iteration"}
    assert {span.attributes["resilience.rank.initial"] for span in lost} == {2}
    assert all(span.is_error and span.attributes["resilience.outcome"] == "lost" for span in lost)


def test_restart_points_at_the_first_failing_ranks_interruption(told: Job) -> None:
    spans = spans_of(told.records)
    known = by_id(spans)
    first = [s for s in named(spans, "restart") if s.attributes["resilience.iteration"] == 0]
    links = {s.attributes["resilience.rank.initial"]: s.links for s in first}
    for found in links.values():
        (link,) = found
        assert link.kind == "caused_by"
        cause = known[link.span_id]
        assert (cause.name, cause.attributes["resilience.rank.initial"]) == ("interruption", 1)


def test_iteration_points_at_the_one_before(told: Job) -> None:
    spans = spans_of(told.records)
    known = by_id(spans)
    for span in named(spans, "inprocess.iteration", rank=1):
        iteration = span.attributes["resilience.iteration"]
        if iteration == 0:
            assert span.links == ()
        else:
            (link,) = span.links
            assert link.kind == "previous_iteration"
            assert known[link.span_id].attributes["resilience.iteration"] == int(iteration) - 1


def test_interruption_tells_what_broke(told: Job) -> None:
    spans = spans_of(told.records)
    (raised,) = named(spans, "interruption", rank=1)[:1]
    assert raised.attributes["error.type"] == "ValueError"
    assert raised.attributes["resilience.interruption.kind"] == "exception"
    (event,) = raised.events
    assert event.name == "exception"
    assert event.attributes["exception.message"] == "bad batch"
    assert '/home/me/data.py", line 34' in str(event.attributes["exception.stacktrace"])
    (died,) = [
        s for s in named(spans, "interruption", 2) if s.attributes["resilience.interruption.kind"] == "terminated"
    ]
    assert died.attributes["error.type"] == "SIGKILL"


def test_hang_spans_the_silence(told: Job) -> None:
    (hang,) = named(spans_of(told.records), "monitor.hang")
    assert hang.end_ns - hang.start_ns == 3_010_000_000
    assert hang.attributes["resilience.timeout_s"] == 3.0


def test_what_has_no_span_of_its_own_is_an_event_of_the_iteration(told: Job) -> None:
    spans = spans_of(told.records)
    (iteration,) = [s for s in named(spans, "inprocess.iteration", 0) if s.attributes["resilience.iteration"] == 2]
    assert [event.name for event in iteration.events] == [
        "restart.ended",
        "evidence.captured",
        "abort.cut",
        "interrupt.delivered",
    ]


def place_of(**changes: object) -> Origin:
    fields: dict[str, object] = {"iteration": 0, "initial_rank": 0, "rank": 0, "world_size": 2} | changes
    return Origin("job", "node", "rank", 1, **fields)  # type: ignore[arg-type]


def record(event: object, number: int = 0, **changes: object) -> Record:
    return Record(number, 10**18 + number * 10**9, number * 10**9, place_of(**changes), event)  # type: ignore[arg-type]


def test_stage_told_afterwards_ended_when_it_says() -> None:
    ended = events.StageEnded("resume", "completed", 0.25, ended_ago_s=2.0)
    (span,) = spans_of([record(ended, 5)])
    assert (span.start_ns, span.end_ns) == (10**18 + 2_750_000_000, 10**18 + 3_000_000_000)


def test_span_whose_beginning_is_lost_is_derived_from_its_end() -> None:
    spans = spans_of(
        [record(events.StageEnded("run", "completed", 1.0), 5), record(events.IterationEnded("completed", 2.0), 6)]
    )
    assert [span.name for span in spans] == ["run", "inprocess.iteration"]
    assert spans[0].parent_id == spans[1].span_id
    assert spans[0].span_id == run_span_id(place_of(), 0, 0)


def test_negative_duration_is_no_length() -> None:
    (span,) = spans_of([record(events.StageEnded("restart", "completed", -1.7), 5)])
    assert span.start_ns == span.end_ns


def test_events_of_one_iteration_are_bounded() -> None:
    swallowed = events.InterruptSwallowed("a.py", 1, "f")
    records = [record(events.IterationStarted(2, "active")), *(record(swallowed, n) for n in range(500))]
    (span,) = spans_of([*records, record(events.IterationEnded("completed", 1.0), 501)])
    assert len(span.events) == NOTED


def test_attributes_are_values_that_opentelemetry_takes(told: Job) -> None:
    for span in spans_of(told.records):
        for values in (span.attributes, *(event.attributes for event in span.events)):
            assert all(isinstance(value, (str, int, float, bool)) for value in values.values())


def test_large_world_shows_a_share_of_its_ranks_and_every_faulty_one() -> None:
    """The kill also ends the collectives of many other ranks. They have no fault of their own."""
    told = job([Fault("kill", 7, 0)], world=ALL_UP_TO * 4)
    spans = spans_of(told.records)
    shown = {span.attributes["resilience.rank.initial"] for span in named(spans, "inprocess.iteration")}
    sampled = {r.origin.initial_rank for r in told.records if is_sampled(r.origin)}
    assert len(sampled) < 2 * SAMPLED
    assert shown == sampled | {7}
    assert len(named(spans, "interruption")) > 2 * SAMPLED


@pytest.mark.parametrize("pid", [4711, None])
def test_interruption_of_a_lost_rank_names_its_own_place_and_not_the_reporters(pid: int | None) -> None:
    detector = Detector("peer", 8.0)
    lost = InterruptionRecord(7, Interruption.UNRESPONSIVE, "", detector=detector, active_rank=6, node="lost", pid=pid)
    origin = Origin("job", "reporter", "monitor", 12, initial_rank=0, rank=0, world_size=8, iteration=0)
    reported = Record(1, STARTED_NS, 0, origin, events.RankInterrupted(lost))
    (span,) = SpanView().take(reported)
    assert span.attributes["host.name"] == "lost"
    assert span.attributes["resilience.rank.initial"] == 7
    assert span.attributes["resilience.rank.active"] == 6
    assert span.attributes.get("process.pid") == pid
    own = msgspec.structs.replace(lost, rank=0)
    (span,) = SpanView().take(msgspec.structs.replace(reported, event=events.RankInterrupted(own)))
    assert (span.attributes["host.name"], span.attributes["process.pid"]) == ("reporter", 12)


def test_traceparent_wins_over_the_computed_trace() -> None:
    parent = parse_traceparent("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01")
    assert parent == (0x4BF92F3577B34DA6A3CE929D0E0E4736, 0x00F067AA0BA902B7)
    view = SpanView(parent)
    spans = [span for r in job().records for span in view.take(r)]
    assert {span.trace_id for span in spans} == {parent[0]}
    (root,) = [span for span in spans if span.name == "inprocess.call"]
    assert root.parent_id == parent[1]
    assert {span.parent_id for span in spans if span.name == "inprocess.iteration"} == {root.span_id}
    assert trace_id(place_of(), parent) == parent[0]


@pytest.mark.parametrize(
    "text",
    [
        *("", "00", "00-zz-1-01"),
        *("00-" + "0" * 32 + "-" + "1" * 16 + "-01", "ff-" + "1" * 32 + "-" + "1" * 16 + "-01"),
        "00-" + "1_" * 15 + "11-" + "1" * 16 + "-01",  # int() accepts it
    ],
)
def test_text_that_is_no_traceparent_is_none(text: str) -> None:
    assert parse_traceparent(text) is None


def test_state_of_finished_ranks_is_let_go(told: Job) -> None:
    view = SpanView()
    for r in told.records:
        view.take(r)
    assert view._timeline._ranks == {}


def test_later_call_of_the_same_process_has_spans_of_its_own() -> None:
    again = [msgspec.structs.replace(r, origin=msgspec.structs.replace(r.origin, call=1)) for r in job().records]
    assert_whole(spans_of([*job().records, *again]))


def restarted_by_torchrun() -> list[Record]:
    """A rank dies, so torchrun stops the other one and starts both again, 300 s later."""
    told = job([Fault("kill", 1, 0)], world=2)
    failed = stopped_in_restart(told, cause=1)
    return under_torchrun([*failed, *in_cycle(job(world=2).records, 1)], left=1)


def test_restart_by_torchrun_is_a_span_of_the_cycle_that_failed() -> None:
    """The dashboard links to the spans of this name."""
    view = SpanView()
    spans = [span for record in restarted_by_torchrun() for span in view.take(record)] + view.left_open()
    restarts = [span for span in named(spans, "restart") if span.attributes["resilience.layer"] == "launcher"]
    assert [span.attributes["resilience.rank.initial"] for span in restarts] == [0, 1]
    (root,) = [span for span in named(spans, "inprocess.call") if span.attributes["resilience.cycle"] == 0]
    for span in restarts:
        assert (span.trace_id, span.parent_id) == (root.trace_id, root.span_id)
        assert span.attributes["resilience.cycle"] == 0
        assert [link.kind for link in span.links] == ["caused_by"]
        assert {link.span_id for link in span.links} <= {each.span_id for each in named(spans, "interruption")}
        entered = min(each.start_ns for each in named(spans, "run") if each.attributes["resilience.cycle"] == 1)
        assert span.end_ns == pytest.approx(entered, abs=10**8)
    assert_whole(spans)


def test_restarts_by_torchrun_have_the_durations_of_the_report() -> None:
    records = restarted_by_torchrun()
    (reported,) = [each for each in report(Run(Path("run"), None, tuple(records), ())).restarts if each.layer != LAYER]
    spans = [span for span in named(spans_of(records), "restart") if span.attributes["resilience.layer"] != LAYER]
    assert (reported.restarts, reported.ranks) == (1, len(spans))
    longest_s = max((span.end_ns - span.start_ns) / 1e9 for span in spans)
    assert longest_s == pytest.approx(reported.max_s, abs=0.1)
    view = MetricView()
    for record in records:
        view.take(record)
    found = view.samples()
    buckets = {labels: n for (name, labels), n in found.items() if name == "resilience_restart_duration_seconds_bucket"}
    assert sum(n for labels, n in buckets.items() if labels[0] == "launcher") == reported.ranks
    seconds = sum((span.end_ns - span.start_ns) / 1e9 for span in spans)
    assert found["resilience_restart_duration_seconds_sum", ("launcher",)] == pytest.approx(seconds)


def test_cycles_without_a_launcher_that_starts_ranks_again_are_no_restart_by_it() -> None:
    records = [*job(world=2).records, *in_cycle(job(world=2).records, 1)]
    assert not named(spans_of(records), "restart")


@given(seed=st.integers(0, 10_000))
@settings(max_examples=20, deadline=None)
def test_replay_gives_the_restarts_by_torchrun_in_any_order_of_the_files(seed: int) -> None:
    records = restarted_by_torchrun()
    files = [[each for each in records if each.origin.initial_rank == rank] for rank in range(2)]
    mixed = Random(seed).sample([rank for rank, file in enumerate(files) for _ in file], len(records))
    lines = [iter(file) for file in files]
    seen = spans_of([next(lines[rank]) for rank in mixed])
    assert sorted(map(repr, named(seen, "restart"))) == sorted(map(repr, named(spans_of(records), "restart")))
