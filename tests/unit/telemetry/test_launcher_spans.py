"""The timeline of a launched job: a cycle holds its phases and all that happens in it, at every replay alike."""

from __future__ import annotations

from typing import get_args

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from resilience.facts import events, identity
from resilience.facts.identity import Origin
from resilience.facts.records import Record
from resilience.telemetry.metrics import MetricView
from resilience.telemetry.span import Span, cycle_span_id
from resilience.telemetry.spans import SpanView
from tests.support.launch_streams import Fault, Kind, launched
from tests.support.nested_streams import nested
from tests.support.node_stories import NodeStory
from tests.support.record_streams import STARTED_NS, job
from tests.unit.telemetry.test_spans import assert_whole, by_id, named, order


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


def test_cycle_is_the_one_root_of_its_trace_and_holds_everything_else(spans: list[Span]) -> None:
    known = by_id(spans)
    assert len(known) == len(spans)
    for cycle in range(3):
        within = [span for span in spans if span.trace_id == identity.trace_id("job", 0, cycle)]
        (root,) = [span for span in within if span.parent_id is None]
        assert root.name == "launcher.cycle"
        for span in within:
            if span is not root and span.parent_id is not None:
                assert known[span.parent_id].trace_id == span.trace_id
        nodes = [span for span in within if span.name == "launcher.node"]
        assert {span.parent_id for span in nodes} == {root.span_id}
        assert [span.attributes["host.name"] for span in nodes] == ["node0", "node1"]


def children(spans: list[Span], parent: Span) -> list[str]:
    return sorted(span.name for span in spans if span.parent_id == parent.span_id and span.name != "interruption")


def test_first_start_is_part_of_its_cycle_and_later_ones_are_part_of_the_restart_before(spans: list[Span]) -> None:
    start = ["gate", "import", "import", "rendezvous", "spawn"]
    of_node = {
        (span.attributes["resilience.cycle"], span.attributes["host.name"]): children(spans, span)
        for span in named(spans, "launcher.node")
    }
    assert of_node[0, "node0"] == sorted([*start, "run", "restart"])
    assert of_node[1, "node0"] == ["monitor.hang", "restart", "run"]
    assert of_node[2, "node0"] == ["run", "stop"]


def test_each_restart_is_one_span_on_each_node_under_the_cycle_that_failed(spans: list[Span]) -> None:
    known = by_id(spans)
    restarts = named(spans, "restart")
    found = []
    for span in restarts:
        assert span.parent_id is not None
        node = known[span.parent_id]
        assert (node.name, node.attributes["host.name"]) == ("launcher.node", span.attributes["host.name"])
        assert children(spans, span) == ["detect", "gate", "import", "import", "rendezvous", "spawn", "stop"]
        found.append((span.attributes["resilience.cycle"], span.attributes["resilience.outcome"]))
        inside = [other for other in spans if other.parent_id == span.span_id]
        assert span.start_ns <= min(other.start_ns for other in inside)
        assert span.end_ns == max(other.end_ns for other in inside)
    assert sorted(found) == [(0, "completed"), (0, "completed"), (1, "completed"), (1, "completed")]


def test_restart_points_at_the_interruption_that_it_follows_or_at_the_node_that_had_it(spans: list[Span]) -> None:
    known = by_id(spans)
    causes = {}
    for span in named(spans, "restart"):
        (link,) = span.links
        cause = known[link.span_id]
        assert (link.kind, cause.trace_id) == ("caused_by", span.trace_id)
        place = cause.attributes["host.name"], cause.attributes.get("resilience.rank.initial")
        causes[span.attributes["resilience.cycle"], span.attributes["host.name"]] = (cause.name, *place)
    assert causes == {
        (0, "node0"): ("launcher.node", "node1", None),
        (0, "node1"): ("interruption", "node1", 2),
        (1, "node0"): ("interruption", "node0", 1),
        (1, "node1"): ("launcher.node", "node0", None),
    }


def test_restart_after_the_loss_of_a_node_points_at_nothing_because_nothing_of_it_was_exported() -> None:
    spans = spans_of(launched([Fault("node", 2)], nodes=3).records)
    restarts = named(spans, "restart")
    assert restarts and not [link for span in restarts for link in span.links]


def test_exemplar_of_a_restart_opens_the_trace_that_holds_the_restart(spans: list[Span]) -> None:
    told = launched([Fault("raise", 2), Fault("hang", 1)], nodes=2)
    view = MetricView()
    for record in told.of_node("node1"):
        view.take(record)
    (rows,) = [rows for metric, rows in view.exported() if metric.name == "resilience_restart_duration_seconds"]
    traces = {exemplar[0] for _, value in rows for exemplar in value.exemplars.values()}
    restarts = {format(span.trace_id, "032x") for span in named(spans, "restart")}
    assert traces and traces <= restarts


@pytest.mark.parametrize("nodes", [1, 2])
def test_trace_with_a_wrapper_inside_the_launcher_has_one_root_and_no_orphans(nodes: int) -> None:
    view = SpanView(is_launched=True)
    records = nested([Fault("kill", 1), Fault("hang", 0)], nodes=nodes).records
    found = [span for r in records for span in view.take(r)] + view.left_open()
    assert_whole(found)
    assert {span.name for span in found if span.parent_id is None} == {"launcher.cycle", "resilience.job"}
    nodes_of_cycles = by_id(named(found, "launcher.node"))
    assert all(span.parent_id in nodes_of_cycles for span in named(found, "inprocess.iteration"))


def test_restart_that_leads_to_no_cycle_ends_with_the_job() -> None:
    told = launched([Fault("kill", 1)])
    records = told.files["node0", None]
    second = [r for r in records if r.origin.cycle == 1]
    begun = next(n for n, r in enumerate(second) if isinstance(r.event, events.RendezvousCompleted))
    ended = msgspec.structs.replace(second[begun], event=events.JobEnded("failed", 1, "no nodes came"))
    told.files["node0", None] = [*[r for r in records if r.origin.cycle == 0], *second[:begun], ended]
    told.files |= {key: [r for r in rs if r.origin.cycle == 0] for key, rs in told.files.items() if key[1] is not None}
    found = spans_of(told.records)
    assert_whole(found)
    (restart,) = named(found, "restart")
    assert restart.attributes["resilience.outcome"] == "failed"
    assert children(found, restart) == ["detect", "gate", "rendezvous", "stop"]


@pytest.mark.parametrize("pid", [10, 11])
def test_cycle_of_a_killed_agent_is_left_open_once_the_node_has_another_agent(pid: int) -> None:
    told = NodeStory()
    told.join("a", 0.0, 1.0, size=1)
    told.start("a", 1.0)
    told.new_agent("a", pid)
    told.join("a", 60.0, 61.0, cycle=1, size=1)
    told.start("a", 61.0, cycle=1)
    told.finish("a", 90.0, cycle=1)
    view = SpanView(is_launched=True)
    found = [span for r in told.of_node("a") for span in view.take(r)] + view.left_open()
    assert_whole(found)
    for name in ("launcher.cycle", "launcher.node"):
        first, second = named(found, name)
        assert first.attributes["resilience.outcome"] == "open"
        assert first.attributes["resilience.closed_by"] == "reader"
        assert (first.end_ns - STARTED_NS) / 1e9 < 5.0  # as far as it is known
        assert second.attributes["resilience.outcome"] == "completed"
    assert [span.attributes["resilience.outcome"] for span in named(found, "run")] == ["open", "completed"]


def test_job_whose_start_fails_has_its_phases_in_the_jobs_trace() -> None:
    records = launched().files["node0", None]
    begun = next(n for n, r in enumerate(records) if isinstance(r.event, events.RendezvousCompleted))
    ended = msgspec.structs.replace(records[begun], event=events.JobEnded("failed", 1, "no nodes came"))
    found = spans_of([*records[:begun], ended])
    assert_whole(found)
    (job_span,) = named(found, "resilience.job")
    assert children(found, job_span) == ["gate", "rendezvous"]


@example(kinds=["kill"], nodes=1, is_nested=False, cut=25)
@given(
    kinds=st.lists(st.sampled_from(["kill", "raise", "hang", "membership", "request"]), max_size=3),
    nodes=st.integers(1, 3),
    is_nested=st.booleans(),
    cut=st.integers(0, 80),
)
@settings(max_examples=40, deadline=None)
def test_every_trace_has_one_root_and_no_orphans(kinds: list[Kind], nodes: int, is_nested: bool, cut: int) -> None:
    """Of unfinished runs too: what has no end on record is closed by the reader."""
    faults = [Fault(kind, 1) for kind in kinds]
    told = nested(faults, nodes=nodes) if is_nested else launched(faults, nodes=nodes)
    records = told.interleaved(0)
    view = SpanView(is_launched=True)
    assert_whole([span for r in records[: len(records) - cut] for span in view.take(r)] + view.left_open())


@pytest.mark.parametrize("is_running", [False, True])
def test_cycle_begins_with_its_first_phase_whether_or_not_it_has_ended(is_running: bool) -> None:
    view = SpanView(is_launched=True)
    records = launched([] if is_running else [Fault("kill", 1)], nodes=2, is_running=is_running).interleaved(0)
    found = [span for record in records for span in view.take(record)] + view.left_open()
    by_id = {span.span_id: span for span in found}
    pairs = [(span, by_id[span.parent_id]) for span in found if span.name in ("gate", "rendezvous") and span.parent_id]
    assert pairs
    assert [span.name for span, parent in pairs if span.start_ns < parent.start_ns] == []


def test_cycles_are_linked_to_the_job_and_to_the_one_before(spans: list[Span]) -> None:
    (job_span,) = named(spans, "resilience.job")
    cycles = named(spans, "launcher.cycle")
    for number, span in enumerate(cycles):
        links = {link.kind: (link.trace_id, link.span_id) for link in span.links}
        assert links.pop("job") == (job_span.trace_id, job_span.span_id)
        assert links == (
            {"previous_cycle": (cycles[number - 1].trace_id, cycles[number - 1].span_id)} if number else {}
        )


def test_cycle_tells_its_outcome_and_what_happened_in_it(spans: list[Span]) -> None:
    first = named(spans, "launcher.cycle")[0]
    assert (first.attributes["resilience.outcome"], first.is_error) == ("failed", True)
    assert first.attributes["resilience.world_size"] == 4
    last = named(spans, "launcher.cycle")[-1]
    assert (last.attributes["resilience.outcome"], last.attributes["resilience.why"]) == ("completed", "failure")
    noted = {event.name for span in named(spans, "launcher.node") for event in span.events}
    assert {"worker.started", "worker.exited", "restart.decided", "cycle.started"} <= noted


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
    (node,) = named(spans, "launcher.node")
    (waited,) = named(spans, "rendezvous")
    assert (waited.parent_id, waited.trace_id) == (node.span_id, identity.trace_id("job", 0, 7))


def in_cycle(record: Record, cycle: int) -> Record:
    return msgspec.structs.replace(record, origin=msgspec.structs.replace(record.origin, cycle=cycle))


def test_iterations_are_part_of_the_launchers_cycle() -> None:
    records = job(world=2).records
    for span in named(spans_of(records), "inprocess.iteration"):
        assert span.parent_id == cycle_span_id(records[0].origin)
    for span in named([span for view in [SpanView()] for r in records for span in view.take(r)], "inprocess.iteration"):
        assert span.parent_id != cycle_span_id(records[0].origin)


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
        assert {link.trace_id for link in cycle.links} == {7}
        assert {link.span_id for link in cycle.links if link.kind == "job"} == jobs
