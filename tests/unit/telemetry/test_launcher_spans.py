"""The timeline of a launched job: a cycle holds its phases and all that happens in it, at every replay alike."""

from __future__ import annotations

from typing import get_args

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resilience.core import events, identity
from resilience.core.identity import Origin
from resilience.core.records import Record
from resilience.telemetry.span import Span, cycle_span_id
from resilience.telemetry.spans import SpanView
from tests.support.launch_streams import LEG_S, Fault, Kind, launched
from tests.support.record_streams import job
from tests.unit.telemetry.test_spans import by_id, named, order


def spans_of(records: list[Record]) -> list[Span]:
    view = SpanView(is_launched=True)
    return [span for record in records for span in view.take(record)]


@pytest.fixture(scope="module")
def spans() -> list[Span]:
    return spans_of(launched([Fault("raise", 2), Fault("hang", 1)], nodes=2).records)


@given(seed=st.integers(0, 10_000), kind=st.sampled_from(get_args(Kind)))
@settings(max_examples=40, deadline=None)
def test_replay_gives_the_spans_of_the_live_run(seed: int, kind: Kind) -> None:
    told = launched([Fault("kill", 1), Fault(kind, 2)], nodes=2)
    assert sorted(spans_of(told.interleaved(seed)), key=order) == sorted(spans_of(told.records), key=order)


def test_cycle_is_the_root_of_its_trace_and_holds_everything_else(spans: list[Span]) -> None:
    known = by_id(spans)
    assert len(known) == len(spans)
    for cycle in range(3):
        trace = identity.trace_id("job", 0, cycle)
        within = [span for span in spans if span.trace_id == trace]
        roots = [span for span in within if span.parent_id is None]
        assert [root.name for root in roots] == ["launcher.cycle"] * 2
        for span in within:
            if span.parent_id is not None:
                parent = known[span.parent_id]
                assert parent.name == "launcher.cycle"
                assert parent.attributes["host.name"] == span.attributes["host.name"]
                assert parent.start_ns - 10**6 <= span.start_ns <= span.end_ns <= parent.end_ns
    (phases,) = {
        tuple(sorted(s.name for s in spans if s.parent_id == root.span_id and s.name in (*LEG_S, "run", "import")))
        for root in named(spans, "launcher.cycle")
    }
    assert phases == ("gate", "import", "import", "rendezvous", "run", "spawn", "stop")


def test_cycles_are_linked_to_the_job(spans: list[Span]) -> None:
    jobs = by_id(named(spans, "resilience.job"))
    assert len(jobs) == 2  # one of each node
    for span in named(spans, "launcher.cycle"):
        (link,) = span.links
        assert link.kind == "job"
        assert jobs[link.span_id].attributes["host.name"] == span.attributes["host.name"]
        assert jobs[link.span_id].trace_id == link.trace_id


def test_cycle_tells_its_outcome_and_what_happened_in_it(spans: list[Span]) -> None:
    first = named(spans, "launcher.cycle")[0]
    assert (first.attributes["resilience.outcome"], first.is_error) == ("failed", True)
    assert first.attributes["resilience.world_size"] == 4
    last = named(spans, "launcher.cycle")[-1]
    assert (last.attributes["resilience.outcome"], last.attributes["resilience.why"]) == ("completed", "failure")
    noted = {event.name for span in named(spans, "launcher.cycle") for event in span.events}
    assert {"worker.started", "worker.exited", "restart.decided", "rendezvous.completed"} <= noted


def test_interruptions_and_hangs_hang_below_their_cycle(spans: list[Span]) -> None:
    seen = {
        (s.attributes["resilience.cycle"], s.attributes["resilience.rank.initial"], s.attributes.get("error.type"))
        for s in named(spans, "interruption")
    }
    assert seen == {(0, 2, "exit code 1"), (0, 3, "exit code 1"), (1, 1, None), (1, 1, "SIGKILL")}
    (hang,) = named(spans, "monitor.hang")
    assert (hang.attributes["resilience.rank.initial"], hang.attributes["resilience.detector"]) == (1, "heartbeat")
    assert hang.end_ns - hang.start_ns == 2_010_000_000


def test_newcomers_wait_belongs_to_the_cycle_it_leads_to() -> None:
    """Before the rendezvous an agent does not know which cycle it will take part in."""
    told = launched(ranks=1)
    for key, records in told.files.items():
        begun = next((n for n, r in enumerate(records) if isinstance(r.event, events.CycleStarted)), 0)
        told.files[key] = [*records[:begun], *(in_cycle(record, 7) for record in records[begun:])]
    spans = spans_of(told.records)
    (root,) = named(spans, "launcher.cycle")
    (waited,) = named(spans, "rendezvous")
    assert (waited.parent_id, waited.trace_id) == (root.span_id, identity.trace_id("job", 0, 7))


def in_cycle(record: Record, cycle: int) -> Record:
    return msgspec.structs.replace(record, origin=msgspec.structs.replace(record.origin, cycle=cycle))


def test_iterations_are_part_of_the_launchers_cycle() -> None:
    records = job(world=2).records
    for span in named(spans_of(records), "inprocess.iteration"):
        assert span.parent_id == cycle_span_id(records[0].origin)
    for span in named([span for view in [SpanView()] for r in records for span in view.take(r)], "inprocess.iteration"):
        assert span.parent_id is None


def test_given_parent_holds_the_cycles() -> None:
    view = SpanView((7, 9), is_launched=True)
    found = [span for record in launched().records for span in view.take(record)]
    assert {span.trace_id for span in found if span.name != "resilience.job"} == {7}
    assert [span.parent_id for span in named(found, "launcher.cycle")] == [9]


@pytest.mark.parametrize("agent_first", [True, False])
def test_import_of_a_program_with_a_wrapper_ends_as_its_function_is_entered(agent_first: bool) -> None:
    agent = Origin("job", "n0", "agent", 1, cycle=1)
    rank = Origin("job", "n0", "rank", 9, cycle=1, iteration=0, initial_rank=5, rank=5, world_size=8)
    second = 10**9
    begun = Record(0, 100 * second, 7 * second, agent, events.WorkerStarted(1, 5, 9, "warm"))
    call = Record(0, 103 * second, 10 * second, rank, events.StageStarted("run"))
    again = msgspec.structs.replace(call, sequence=1, wall_ns=call.wall_ns + second)
    late = Record(1, 105 * second, 12 * second, msgspec.structs.replace(rank, role="monitor", layer="launcher"),
                  events.WorkerProgressed("heartbeat", 5.0, None))  # fmt: skip
    told = [begun, call, again, late] if agent_first else [call, again, late, begun]
    (found,) = named(spans_of(told), "import")
    assert (found.start_ns, found.end_ns) == (100 * second, 103 * second)
    assert found.parent_id == cycle_span_id(agent)
    assert found.attributes["resilience.rank.initial"] == 5
    assert found.attributes["resilience.sign"] == "entry"


def test_given_trace_holds_job_and_cycles() -> None:
    view = SpanView((7, 9), is_launched=True)
    found = [span for record in launched([Fault("kill", 1)], nodes=2).records for span in view.take(record)]
    assert {span.trace_id for span in found} == {7}
    for span in found:
        if span.name in ("resilience.job", "launcher.cycle"):
            assert span.parent_id == 9
    jobs = {span.span_id for span in named(found, "resilience.job")}
    for cycle in named(found, "launcher.cycle"):
        assert [(link.kind, link.trace_id) for link in cycle.links] == [("job", 7)]
        assert cycle.links[0].span_id in jobs
