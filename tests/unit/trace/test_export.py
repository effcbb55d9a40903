"""A run's spans as files for other tools, by their documented formats; one restart and whom it waited for."""

from __future__ import annotations

import base64
import json
from collections import defaultdict
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resilience.attribution.incidents import incidents_of
from resilience.attribution.waterfall import MEETINGS, NOTICE, critical_path, waterfall
from resilience.facts import events
from resilience.facts.records import Record
from resilience.history.cycles import RESTART
from resilience.history.history import History
from resilience.history.phases import TimedPhase
from resilience.run_folder.merge import history_of
from resilience.telemetry.span import Span
from resilience.telemetry.spans import SpanView
from resilience.trace.export import SLACK_NS, otlp, perfetto, spans_of
from tests.support import launch_streams
from tests.support.lines import AT, SECOND, record_line, write
from tests.support.record_streams import Fault, Job, Kind, job

MS = 10**6


@pytest.fixture(scope="module")
def told() -> Job:
    return job([Fault("exception", 1, 0), Fault("kill", 2, 1, 20), Fault("hang", 0, 2, 31)], world=3, spares=1)


@pytest.fixture
def run(told: Job, tmp_path: Path) -> Path:
    return told.write(tmp_path / "run")


def live(told: Job) -> list[Span]:
    view = SpanView()
    return [span for record in told.records for span in view.take(record)]


def set_back(records: list[Record], after: int, by_s: int = 3600) -> list[Record]:
    """The same records if the clock is set back once `after` of them are written; the monotonic clock goes on."""
    turned = sorted(records, key=lambda record: record.mono_ns)[after].mono_ns
    return [
        record if record.mono_ns < turned else msgspec.structs.replace(record, wall_ns=record.wall_ns - by_s * SECOND)
        for record in records
    ]


@pytest.mark.parametrize("after", [10, 40, 80])
@pytest.mark.parametrize("cut", [0, 30])
def test_no_span_is_negative_or_longer_than_the_job_after_the_clock_is_set_back(
    told: Job, after: int, cut: int
) -> None:
    records = told.interleaved(0)
    records = set_back(records[: len(records) - cut], after)
    took = records[-1].mono_ns - records[0].mono_ns
    view = SpanView()
    spans = [span for record in records for span in view.take(record)] + view.left_open()
    assert all(0 <= span.end_ns - span.start_ns <= took for span in spans)
    history = History().take_all(records)
    stretches = [each for rank in history.ranks.ranks for each in history.ranks.stretches(rank, 2**62)]
    assert all(each.end_ns >= each.begin_ns for each in stretches)


# -- OTLP --------------------------------------------------------------------------------------


def from_otlp_json(message: dict[str, Any]) -> Any:
    """Read OTLP/JSON with the official protobuf classes, which want base64 where OTLP has hexadecimal."""
    json_format = pytest.importorskip("google.protobuf.json_format")
    from opentelemetry.proto.trace.v1.trace_pb2 import TracesData

    def converted(value: Any) -> Any:
        if isinstance(value, list):
            return [converted(item) for item in value]
        if not isinstance(value, dict):
            return value
        ids = ("traceId", "spanId", "parentSpanId")
        return {
            name: base64.b64encode(bytes.fromhex(inner)).decode() if name in ids else converted(inner)
            for name, inner in value.items()
        }

    return json_format.ParseDict(converted(message), TracesData())


def test_otlp_is_what_the_protocol_says_and_holds_every_span(run: Path, told: Job) -> None:
    found = {}
    for message in otlp(run):
        for resource in from_otlp_json(json.loads(json.dumps(message))).resource_spans:
            for span in resource.scope_spans[0].spans:
                found[int.from_bytes(span.span_id, "big")] = span
    expected = {span.span_id: span for span in live(told)}
    assert set(found) == set(expected)
    for number, span in expected.items():
        other = found[number]
        assert (other.name, other.start_time_unix_nano, other.end_time_unix_nano) == (
            span.name,
            span.start_ns,
            span.end_ns,
        )
        assert int.from_bytes(other.parent_span_id, "big") == (span.parent_id or 0)
        assert len(other.attributes) == len(span.attributes)
        assert [int.from_bytes(link.span_id, "big") for link in other.links] == [link.span_id for link in span.links]
        assert (other.status.code == 2) == span.is_error


def test_given_parent_is_everybodys(run: Path) -> None:
    spans = [span for batch in spans_of(run, (7, 9)) for span in batch.spans]
    assert {span.trace_id for span in spans} == {7}
    assert {span.parent_id for span in spans if span.name == "inprocess.call"} == {9}


def test_iterations_of_a_launched_job_are_within_its_cycle(tmp_path: Path) -> None:
    folder = launch_streams.launched([launch_streams.Fault("kill", 1)], nodes=2).write(tmp_path / "run")
    names = {span.name for batch in spans_of(folder) for span in batch.spans}
    assert {"launcher.cycle", "rendezvous", "spawn", "import"} <= names


# -- Perfetto ----------------------------------------------------------------------------------


def slices(events: list[dict[str, Any]]) -> dict[tuple[int, int], list[dict[str, Any]]]:
    found = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            found[event["pid"], event["tid"]].append(event)
    return found


def assert_nested(events: list[dict[str, Any]]) -> None:
    """Slices of one thread lie within each other or after each other: the format's condition."""
    for of_thread in slices(events).values():
        open_until: list[float] = []
        for event in sorted(of_thread, key=lambda event: (event["ts"], -event["dur"])):
            end = event["ts"] + event["dur"]
            while open_until and open_until[-1] <= event["ts"] + 1e-3:
                open_until.pop()
            assert not open_until or end <= open_until[-1] + 2e-3
            open_until.append(end)


@given(seed=st.integers(0, 1000), kind=st.sampled_from(get_args(Kind)))
@settings(max_examples=30, deadline=None)
def test_slices_of_a_thread_nest_and_none_is_missing(
    tmp_path_factory: pytest.TempPathFactory, seed: int, kind: Kind
) -> None:
    told = job([Fault(kind, 1, 0), Fault("kill", 2, 1, 20)], spares=1, seed=seed)
    found = list(perfetto(told.write(tmp_path_factory.mktemp("run") / "run")))
    assert_nested(found)
    ended = [span.name for span in live(told) if not span.name.endswith(".start")]
    names = [event["name"] for event in found if event["ph"] == "X"]
    assert sorted(name for name in names if "no end" not in name) == sorted(ended)


def test_a_process_is_a_node_and_a_thread_a_rank(run: Path) -> None:
    found = list(perfetto(run))
    names = {
        (event["name"], event["pid"], event["tid"]): event["args"]["name"]
        for event in found
        if event["ph"] == "M" and "name" in event["args"]
    }
    assert [name for (kind, _, _), name in names.items() if kind == "process_name"] == ["node node"]
    threads = {name: tid for (kind, _, tid), name in names.items() if kind == "thread_name"}
    assert {f"rank {rank}" for rank in range(4)} <= set(threads)
    for (_, tid), of_thread in slices(found).items():
        ranks = {event["args"]["resilience.rank.initial"] for event in of_thread if event["name"] != "interruption"}
        assert len(ranks) <= 1, tid
    assert min(event["ts"] for event in found if "ts" in event) >= 0


def test_causes_are_arrows_from_the_first_interruption_to_each_restart(run: Path) -> None:
    found = list(perfetto(run))
    begun = {event["id"]: event for event in found if event["ph"] == "s"}
    ended = {event["id"]: event for event in found if event["ph"] == "f"}
    assert set(begun) == set(ended) != set()
    for number, start in begun.items():
        assert innermost(found, start) == "interruption"
        assert innermost(found, ended[number]) == "restart"
        assert ended[number]["bp"] == "e"
        assert {name: start[name] for name in ("cat", "name")} == {
            name: ended[number][name] for name in ("cat", "name")
        }


def innermost(found: list[dict[str, Any]], flow: dict[str, Any]) -> str:
    """What an end of an arrow is bound to: the innermost slice that is open there ("bp": "e"), of those begun last."""
    around = [e for e in slices(found)[flow["pid"], flow["tid"]] if e["ts"] <= flow["ts"] < e["ts"] + e["dur"]]
    begun = max(event["ts"] for event in around)
    names = [event["name"] for event in around if event["ts"] == begun]
    return "restart" if "restart" in names else names[-1]  # its first phase begins in the same moment


@pytest.mark.parametrize("launched", [False, True])
def test_every_event_has_what_the_format_asks_of_its_phase(run: Path, tmp_path: Path, launched: bool) -> None:
    """Source: "Trace Event Format": fields of complete events, instants, flows and metadata; times in microseconds."""
    if launched:
        run = launch_streams.launched([launch_streams.Fault("kill", 1)], nodes=2).write(tmp_path / "launched")
    needed = {
        "X": {"name", "cat", "pid", "tid", "ts", "dur", "args"},
        "i": {"name", "cat", "pid", "tid", "ts", "s", "args"},
        "s": {"name", "cat", "pid", "tid", "ts", "id"},
        "f": {"name", "cat", "pid", "tid", "ts", "id", "bp"},
        "M": {"name", "pid", "tid", "args"},
    }
    named: set[tuple[str, int, int]] = set()
    used: set[tuple[int, int]] = set()
    for event in json.loads(json.dumps(list(perfetto(run)))):
        assert event.keys() == {"ph"} | needed[event["ph"]]
        assert type(event["pid"]) is int and type(event["tid"]) is int
        if event["ph"] == "M":
            named.add((event["name"], event["pid"], event["tid"]))
            continue
        used.add((event["pid"], event["tid"]))
        assert event["ts"] >= 0 and event.get("dur", 0) >= 0
        assert event.get("s", "t") == "t"
    assert {(pid, tid) for name, pid, tid in named if name == "thread_name"} == used
    assert {pid for name, pid, _ in named if name == "process_name"} == {pid for pid, _ in used}


def test_node_that_an_arrow_points_from_has_its_name_too(told: Job, tmp_path: Path) -> None:
    folder = told.write(tmp_path / "run")
    for path in (folder / "records").iterdir():
        node = "b" if path.stem == "node-2" else "a"  # rank 2 fails
        path.write_bytes(path.read_bytes().replace(b'"node":"node"', b'"node":"%s"' % node.encode()))
        path.rename(path.with_stem(path.stem.replace("node", node)))
    found = list(perfetto(folder))
    assert {event["pid"] for event in found if event["ph"] == "s"} == {1, 2}
    names = [(event["pid"], event["args"]["name"]) for event in found if event["name"] == "process_name"]
    assert names == [(1, "node a"), (2, "node b")]


def test_run_begins_at_0_on_the_corrected_clock(tmp_path: Path) -> None:
    """Perfetto drops events before 0. Here the node whose clock is ahead is the one that began first."""
    for node, ahead, began in (("a", 0, 29), ("b", 90, 0)):
        phase = [
            (events.CyclePhaseStarted("rendezvous"), began),
            (events.CyclePhaseEnded("rendezvous", "completed", 30.0 - began), 30),
            (events.CycleStarted("first", 0, 3), 30),
        ]
        content = [record_line(event, AT + (at + ahead) * SECOND, node) for event, at in phase]
        write(tmp_path, f"records/{node}-agent.jsonl", *content)
    begins = [(event["pid"], event["ts"]) for event in perfetto(tmp_path) if event["name"] == "rendezvous"]
    assert begins == [(1, 29e6), (2, 0.0)]


def test_what_has_no_end_on_record_lasts_to_the_end_of_its_file(tmp_path: Path) -> None:
    started = record_line(events.IterationStarted(2, "active"), AT, rank=0, iteration=0)
    later = record_line(events.StageStarted("run"), AT + SECOND, rank=0, iteration=0)
    write(tmp_path, "records/n-0.jsonl", started, later)
    shown = [event for event in perfetto(tmp_path) if event["ph"] == "X"]
    assert [(event["name"], event["ts"], event["dur"]) for event in shown] == [
        ("inprocess.iteration (end not recorded)", 0.0, 1e6),
        ("run (end not recorded)", 1e6, 0.0),
    ]


def test_launched_job_is_shown_nested(tmp_path: Path) -> None:
    folder = launch_streams.launched([launch_streams.Fault("kill", 1)], nodes=2).write(tmp_path / "run")
    found = list(perfetto(folder))
    assert_nested(found)
    assert "launcher.cycle" in {event["name"] for event in found}
    assert SLACK_NS < 10 * MS


# -- one restart -------------------------------------------------------------------------------


def leg(name: str, who: int | str, start: int, end: int, node: str = "n") -> TimedPhase:
    return TimedPhase(name, who, node, start * MS, end * MS)


def steps(legs: list[TimedPhase], start: int = 0) -> list[tuple[str, int | str, int]]:
    return [(step.name, step.who, round(step.seconds * 1e3)) for step in critical_path(legs, start * MS)]


def test_critical_path_goes_through_the_last_rank_of_each_phase() -> None:
    legs = [leg("abort", rank, 0, 5) for rank in range(8)]
    legs += [leg("finalize", rank, 5, 305 if rank == 5 else 6) for rank in range(8)]
    legs += [leg("regroup", rank, 305 if rank == 5 else 6, 310) for rank in range(8)]
    legs += [leg("resume", rank, 310, 410 if rank == 2 else 320) for rank in range(8)]
    assert steps(legs) == [
        ("abort", 5, 5),
        ("finalize", 5, 300),
        ("regroup", 2, 5),
        ("resume", 2, 100),
    ]


def test_critical_path_includes_the_time_until_the_last_rank_has_notice() -> None:
    assert steps([leg("abort", 0, 0, 5), leg("abort", 1, 50, 55)]) == [(NOTICE, 1, 50), ("abort", 1, 5)]


def test_worker_follows_on_what_its_node_did() -> None:
    legs = [leg("stop", "a", 0, 10, "a"), leg("spawn", "a", 10, 20, "a"), leg("import", 3, 15, 90, "a")]
    assert steps(legs) == [("stop", "a", 10), ("spawn", "a", 5), ("import", 3, 75)]


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["abort", "finalize", "regroup", "resume", "rendezvous"]),
            st.integers(0, 3),
            st.integers(0, 50),
            st.integers(0, 50),
        ),
        min_size=1,
        max_size=16,
    )
)
def test_path_adds_up_to_the_whole_whatever_is_on_record(told: list[tuple[str, int, int, int]]) -> None:
    legs = [leg(name, rank, start, start + took) for name, rank, start, took in told]
    start, end = min(one.start_ns for one in legs), max(one.end_ns for one in legs)
    path = critical_path(legs, start)
    assert sum(round(step.seconds * 1e9) for step in path) == end - start
    at = start
    for step in path:
        assert step.start_ns == at
        at += round(step.seconds * 1e9)


@pytest.mark.parametrize("kind", get_args(Kind))
def test_restart_of_every_kind_of_fault_has_a_waterfall(tmp_path: Path, kind: Kind) -> None:
    folder = job([Fault(kind, 1, 0, 13), Fault("exception", 2, 1, 20)], spares=1).write(tmp_path / "run")
    history = history_of(folder)
    incidents = incidents_of(history)
    found = [waterfall(history, incident) for incident in incidents]
    assert found[-1] is not None
    for one, incident in zip(found, incidents, strict=True):
        if one is not None:
            assert {row.name for row in one.rows} <= set(events.PHASES)
            assert sum(step.seconds for step in one.path) == pytest.approx(one.seconds)
            assert incident.restart is None or one.seconds >= incident.restart.max_s * 0.5


def test_restart_by_the_launcher_has_legs_of_nodes_and_ranks(tmp_path: Path) -> None:
    folder = launch_streams.launched([launch_streams.Fault("kill", 1)], nodes=2).write(tmp_path / "run")
    history = history_of(folder)
    (incident,) = incidents_of(history)
    found = waterfall(history, incident)
    assert found is not None
    assert {"stop", "rendezvous", "spawn", "import"} <= {row.name for row in found.rows}
    assert {row.name: type(row.slowest) for row in found.rows if row.name in ("spawn", "import")} == {
        "spawn": str,
        "import": int,
    }
    assert sum(step.seconds for step in found.path) == pytest.approx(found.seconds)


def test_meetings_are_phases() -> None:
    assert {*events.PHASES, *RESTART} >= MEETINGS
