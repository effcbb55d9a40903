"""Every span of the record files arrives at a receiver, once and in every field: directly, and through a real
collector; under the launcher and without it; within the trace that the job was started in."""

from __future__ import annotations

import json
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from resilience.cli import main
from resilience.trace.export import parent_of, spans_of
from tests.process.test_export import STRAIGHT, Receiver, receiving
from tests.support.agents import run_job
from tests.support.collector import LIMIT, Plain, collecting, of_records, of_wire
from tests.support.ranks import started
from tests.support.record_streams import Fault, job

TRACE, PARENT = "a1" * 16, "b2" * 8
ROUTES = ("receiver", "collector")


@contextmanager
def on_route(route: str, folder: Path) -> Iterator[tuple[Receiver, dict[str, str], ExitStack]]:
    """A receiver, the environment of a job that sends to it, and what is to be closed once the job has ended."""
    with receiving() as receiver, ExitStack() as between:
        endpoint = receiver.endpoint
        if route == "collector":
            endpoint = between.enter_context(collecting(folder, receiver.endpoint))
        env = {"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint, "OTEL_BSP_SCHEDULE_DELAY": "20"}
        yield receiver, env | {"TRACEPARENT": f"00-{TRACE}-{PARENT}-01"}, between


def arrived(receiver: Receiver, between: ExitStack, expected: list[Plain]) -> list[Plain]:
    """Wait until all expected spans are there, let the collector send all that it holds, and return what has come."""
    deadline = time.monotonic() + LIMIT
    while missing := {span["id"] for span in expected} - {span["id"] for span in of_wire(list(receiver.requests))}:
        names = [(span["name"], span["attributes"]) for span in expected if span["id"] in missing]
        assert time.monotonic() < deadline, f"{len(names)} of {len(expected)} spans have not come: {names}"
        time.sleep(0.02)
    between.close()
    return of_wire(receiver.requests)


def assert_same(came: list[Plain], expected: list[Plain]) -> None:
    """Nothing is missing, nothing came twice, and every field is that of the records."""
    assert Counter(span["id"] for span in came) == Counter(span["id"] for span in expected)
    known = {span["id"]: span for span in expected}
    for span in came:
        assert span == known[span["id"]]


def assert_one_trace(spans: list[Plain]) -> None:
    """All are in the trace of the TRACEPARENT, below its span."""
    known = {span["id"]: span for span in spans}
    assert {span["trace"] for span in spans} == {TRACE}
    for span in spans:
        above = span
        while above["parent"] in known:
            above = known[above["parent"]]
        assert above["parent"] == PARENT, span["name"]


def path_of(span: Plain, known: dict[str, Plain]) -> tuple[str, ...]:
    names: list[str] = []
    while span["id"] in known:
        names.insert(0, span["name"])
        span = known.get(span["parent"], {"id": ""})
    return tuple(names)


@pytest.mark.slow
@pytest.mark.parametrize(("route", "nodes"), [("receiver", 1), ("collector", 1), ("collector", 2)])
def test_launched_job_is_one_trace_with_the_programs_own_spans_in_it(tmp_path: Path, route: str, nodes: int) -> None:
    with on_route(route, tmp_path) as (receiver, env, between):
        folder = run_job(tmp_path, "tracing_train.py", nodes, 2 // nodes, env)
        expected = of_records(span for batch in spans_of(folder, parent_of(folder)) for span in batch.spans)
        came = arrived(receiver, between, expected)
    ours = [span for span in came if span["scope"] == "resilience"]
    assert_same(ours, expected)
    assert_one_trace(came)

    known = {span["id"]: span for span in came}
    paths = {path_of(span, known) for span in came}
    cycle, iteration = "launcher.cycle", "inprocess.iteration"
    node = (cycle, "launcher.node")
    for phase in ("gate", "rendezvous", "spawn", "import", "run", "stop"):
        assert (*node, phase) in paths
    for phase in ("detect", "stop", "gate", "rendezvous", "spawn", "import"):
        assert (*node, "restart", phase) in paths
    for phase in ("detect", "abort", "agree", "finalize", "check", "regroup", "resume"):
        assert (*node, iteration, "restart", phase) in paths
    assert (*node, iteration, "run", "step") in paths

    steps = [span for span in came if span["scope"] == "user"]
    assert {span["name"] for span in steps} == {"step"}
    for step in steps:
        run = known[step["parent"]]
        place = {name: run["attributes"][f"resilience.{key}"] for name, key in PLACES.items()}
        assert place == {name: step["attributes"][name] for name in PLACES}
        assert run["start"] <= step["start"] <= step["end"] <= run["end"] + 10**7

    killed = [span for span in ours if span["attributes"].get("resilience.closed_by") == "monitor"]
    assert {(s["name"], s["attributes"]["resilience.rank.initial"], s["attributes"]["resilience.cycle"]) for s in killed
            if s["attributes"]["resilience.outcome"] == "lost"} >= {("run", 1, 0), (iteration, 1, 0)}  # fmt: skip
    links = {(link[2]["resilience.link.kind"], known[link[1]]["name"]) for span in ours for link in span["links"]}
    elsewhere = {("caused_by", "launcher.node")} if nodes > 1 else set()  # of the node that did not fail
    assert links == elsewhere | {
        ("caused_by", "interruption"),
        ("previous_iteration", iteration),
        ("previous_cycle", cycle),
        ("job", "resilience.job"),
    }
    lines = [json.loads(line) for path in folder.glob("logs/*.jsonl") for line in path.read_text().splitlines()]
    assert {line["trace_id"] for line in lines} == {TRACE}
    assert {known[line["span_id"]]["name"] for line in lines if line["span_id"] in known} == {"step"}


PLACES = {"cycle": "cycle", "iteration": "iteration", "rank": "rank.initial"}


@pytest.mark.slow
@pytest.mark.parametrize("route", ROUTES)
def test_wrapper_alone_is_one_trace_too(fork_server: Any, tmp_path: Path, route: str) -> None:
    faults = [
        {"kind": "exception", "rank": 1, "iteration": 0, "step": 5},
        {"kind": "kill", "rank": 2, "iteration": 1, "step": 3},
    ]
    with on_route(route, tmp_path) as (receiver, env, between):
        with started(fork_server, tmp_path, 3, "tests.process.jobs:train", {"faults": faults}, env) as running:
            running.wait()
            folder = running.run
        expected = of_records(span for batch in spans_of(folder, parent_of(folder)) for span in batch.spans)
        came = arrived(receiver, between, expected)
    assert_same(came, expected)
    assert_one_trace(came)
    assert {span["name"] for span in came} >= {
        "inprocess.iteration",
        "run",
        "restart",
        "interruption",
        "inprocess.call.start",
    }
    lost = [span for span in came if span["attributes"].get("resilience.closed_by") == "monitor"]
    assert {span["attributes"]["resilience.rank.initial"] for span in lost} == {2}


@pytest.mark.slow
def test_file_of_spans_is_what_a_collector_takes(tmp_path: Path) -> None:
    """`resilience trace --format otlp-json`, line by line by POST, as docs/traces.md says."""
    faults = [Fault("exception", 1, 0), Fault("kill", 2, 1, 20), Fault("hang", 0, 2, 31)]
    folder = job(faults, world=3, spares=1).write(tmp_path / "run")
    assert main(["trace", str(folder), "--format", "otlp-json", "--output", str(tmp_path / "spans.jsonl")]) == 0
    with receiving() as receiver, ExitStack() as between:
        endpoint = between.enter_context(collecting(tmp_path, receiver.endpoint))
        for line in (tmp_path / "spans.jsonl").read_bytes().splitlines():
            headers = {"Content-Type": "application/json"}
            with STRAIGHT.open(urllib.request.Request(f"{endpoint}/v1/traces", line, headers), timeout=LIMIT) as answer:
                assert answer.status == 200
        expected = of_records(span for batch in spans_of(folder, parent_of(folder)) for span in batch.spans)
        came = arrived(receiver, between, expected)
    assert_same(came, expected)
