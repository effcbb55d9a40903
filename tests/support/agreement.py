"""Do all views of a run answer the same question with the same number?  Checks for any run's records."""

from __future__ import annotations

import math
import re
import tempfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pytest

from resilience.attribution.cost import Times, times
from resilience.attribution.incidents import incidents_of
from resilience.attribution.restarts import restart_times
from resilience.attribution.symptoms import symptom
from resilience.attribution.waterfall import waterfall
from resilience.facts.in_words import count as number_of
from resilience.facts.in_words import seconds as in_words
from resilience.facts.records import Record, to_line
from resilience.history.cycles import restarts_of
from resilience.history.history import History
from resilience.history.phases import seconds_of
from resilience.report.condensed import Report
from resilience.report.page import ReportPage
from resilience.status.state import Now, Watcher
from resilience.telemetry.metrics import READ_S, MetricView
from resilience.telemetry.span import Span
from resilience.telemetry.spans import SpanView
from tests.fixtures.count import times_of

INTERRUPTIONS = "resilience_interruptions_total"
ITERATIONS = "resilience_restart_iterations_total"
PHASES = "resilience_restart_phase_duration_seconds_sum"
PRODUCTIVE, LOST = "resilience_productive_seconds_total", "resilience_lost_seconds_total"


def written(records: Iterable[Record], folder: Path) -> Path:
    """Write the run folder of these records, a file for each rank and agent."""
    (folder / "records").mkdir(parents=True)
    for record in records:
        origin = record.origin
        name = f"{origin.node}-{'agent' if origin.role == 'agent' else origin.initial_rank}.jsonl"
        with (folder / "records" / name).open("ab") as file:
            file.write(to_line(record))
    return folder


def counted(records: list[Record]) -> Counter[tuple[str, ...]]:
    """What the nodes' metrics say, added up over the nodes: name and labels."""
    found: Counter[tuple[str, ...]] = Counter()
    for node in {record.origin.node for record in records}:
        view = MetricView()
        for record in records:
            if record.origin.node == node:
                view.take(record)
        for (name, labels), value in view.samples().items():
            found[(name, *labels)] += value  # type: ignore[assignment]
    return found


def spans_of(records: list[Record]) -> list[Span]:
    """All spans, of what has no end on record too."""
    view = SpanView(is_launched=any(record.origin.role == "agent" for record in records))
    return [span for record in records for span in view.take(record)] + view.left_open()


def phases_in(spans: list[Span], layer: str) -> dict[str, float]:
    """How long all phases of a name took together, by the spans below those named `restart`."""
    restarts = {span.span_id: span for span in spans if span.name == "restart"}
    found: Counter[str] = Counter()
    for span in spans:
        outcome, closed_by = (span.attributes.get(f"resilience.{name}") for name in ("outcome", "closed_by"))
        restart = restarts.get(span.parent_id or 0)
        if restart is None or span.attributes["resilience.layer"] != layer:
            continue
        is_told = outcome not in ("lost", "open") and closed_by not in ("call", "reader")
        is_idle = span.name == "resume" and span.attributes.get("resilience.rank.state") == "inactive"
        if is_told and not is_idle:
            found[span.name] += (span.end_ns - span.start_ns) / 1e9  # type: ignore[assignment]
    return dict(found)


def assert_agree(records: list[Record]) -> None:
    history = History().take_all(records)
    metrics, spans = counted(records), spans_of(records)
    assert_same_restarts(history, metrics, spans)
    in_spans = {layer: phases_in(spans, layer) for layer in ("inprocess", "launcher")}
    for layer in ("inprocess", "launcher"):
        whole: Counter[str] = Counter()
        places = history.iterations if layer == "inprocess" else history.cycles.places
        for place in places:
            for name, seconds in seconds_of(history.restart_phases(place)).items():
                whole[name] += sum(seconds.values())  # type: ignore[assignment]
        for name, seconds_in_all in whole.items():
            counted_s, drawn_s = metrics[PHASES, layer, name], in_spans[layer].get(name, 0.0)
            assert drawn_s == pytest.approx(counted_s, abs=1e-6), (layer, name)
            if layer == "inprocess":
                assert counted_s == pytest.approx(seconds_in_all, abs=1e-6), name
            else:  # a start is no restart; nodes that join or leave have only a part of it
                assert counted_s <= seconds_in_all + 1e-6, name
    for incident in incidents_of(history):
        drawn = waterfall(history, incident)
        rows = {} if drawn is None else {row.name: (row.median_s, row.max_s) for row in drawn.rows}
        assert {phase.name: (phase.took.median_s, phase.took.max_s) for phase in incident.phases} == rows
        if drawn is not None:
            assert sum(step.seconds for step in drawn.path) == pytest.approx(drawn.seconds, abs=1e-6)
    with tempfile.TemporaryDirectory() as temporary:
        folder = written(records, Path(temporary) / "run")
        shown = ReportPage(folder)
        told, now = shown.found, Watcher(folder, lambda: 0.0).look()
        assert_same_durations(told, history)
        assert_same_page(told, times(history), shown.page())
    if now is not None:
        assert_same_header(told, now, metrics, history)


def assert_one_first_interruption_for_each_incident(records: list[Record], without: int = 0) -> None:
    """without: incidents in which no rank has a fault of its own on record, because all only waited."""
    counts = counted(records).items()
    firsts = sum(n for labels, n in counts if labels[0] == INTERRUPTIONS and labels[-1] == "first")
    assert firsts == len(incidents_of(History().take_all(records))) - without


def assert_same_number_of_restarts(records: list[Record]) -> None:
    """The report, and the dashboards: the number of the node that saw the most of them."""
    shown = {each.layer: each.restarts for each in restart_times(History().take_all(records))}
    for layer in ("inprocess", "launcher"):
        nodes = {record.origin.node for record in records}
        by_node = [counted([record for record in records if record.origin.node == node]) for node in nodes]
        assert max(metrics[ITERATIONS, layer, "interrupted"] for metrics in by_node) == shown.get(layer, 0), layer


def assert_same_restarts(history: History, metrics: Counter[tuple[str, ...]], spans: list[Span]) -> None:
    """Restarts by the launcher: as many spans as nodes restarted, each as long as the rank that was away longest; the
    metrics count each rank of them."""
    drawn = {
        (span.attributes["host.name"], span.attributes["resilience.attempt"], span.attributes["resilience.cycle"]): span
        for span in spans
        if span.name == "restart" and span.attributes["resilience.layer"] == "launcher"
    }
    whole = 0.0
    for node, parts in history.cycles.nodes.items():
        for place, part in parts.items():
            before = history.cycles.before(node, place)
            if before is None:
                continue
            away = [restart.duration_s for restart in restarts_of(parts[before], part)]
            span = drawn[(node, *before)]
            if span.attributes["resilience.outcome"] == "completed":
                assert (span.end_ns - span.start_ns) / 1e9 == pytest.approx(max(away), abs=1e-6)
            whole += sum(away)
    assert metrics["resilience_restart_duration_seconds_sum", "launcher"] == pytest.approx(whole, abs=1e-6)


def assert_same_durations(told: Report, history: History) -> None:
    """The report has the durations of the model's restarts, as the script that counts knows them."""
    for layer in ("inprocess", "launcher"):
        expected = times_of([restart.duration_s for restart in history.restarts() if restart.layer == layer])
        shown = [each for each in told.restarts if each.layer == layer]
        assert [each.ranks for each in shown] == ([] if expected is None else [expected["ranks"]])
        if expected is not None and told.completeness.is_enough:
            durations = (shown[0].median_s, shown[0].p95_s, shown[0].max_s)
            assert durations == pytest.approx((expected["median"], expected["p95"], expected["max"]), abs=1e-6)
    costs = [incident.cost.lost_s for incident in told.incidents if incident.cost.lost_s is not None]
    assert told.lost_s == (pytest.approx(math.fsum(costs)) if costs else None)


def assert_same_page(told: Report, spent: Times, page: str) -> None:
    """The page, and the report that it shows, have the restarts and the productive share of the model."""
    page = " ".join(page.split())
    bound = "about " if told.completeness.damaged or told.completeness.files else ""
    for each in told.restarts:
        words = "in place" if each.layer == "inprocess" else "by the launcher"
        quantiles = f"median {in_words(each.median_s)}, 95 % within {in_words(each.p95_s)}"
        quantiles = quantiles if told.completeness.is_enough else "durations unknown: too many records are missing"
        undone = f", {each.undone} of them undone by the launcher" if each.undone else ""
        shown = f"{each.restarts} {words} ({bound}{number_of(each.ranks, 'rank restart')}{undone}, {quantiles})"
        assert shown in page
        assert (f"about {shown}" in page) == bool(bound)
    if told.times is not None and told.times.ettr is not None:
        assert told.times.ettr == spent.ettr
        assert f"{spent.ettr:.1%} of the time was productive" in page
    if told.incidents:
        assert re.search(rf"(?<!\d){bound}{number_of(len(told.incidents), 'incident')}\b", page)
    else:
        assert ("no incident in the readable records" if bound else "no incident") in page


def assert_same_header(told: Report, now: Now, metrics: Counter[tuple[str, ...]], history: History) -> None:
    assert now.attempt == told.attempt
    last = told.incidents[-1] if told.incidents else None
    # Status counts faults of a rank's own, and those that are on record.
    if last is not None and last.chief is not None and symptom(last.chief).is_own and told.completeness.is_whole:
        assert now.failure is not None
        assert now.failure.rank in {culprit.rank for culprit in last.verdict.culprits}
    if told.launched is not None and not told.launched.cycles:
        assert not now.cycle and not now.restarts
    elif told.launched is not None and told.attempts == 1:
        assert now.cycle is not None and now.cycle + 1 == told.launched.cycles
        assert now.restarts == told.launched.restarts_used
        assert now.world_size is not None and told.world_size is not None and now.world_size <= told.world_size
        if now.phase == "ended":
            assert now.outcome == told.launched.outcome
    elif told.launched is None and told.calls:
        assert now.world_size == told.world_size
        if now.phase == "ended" and told.attempts == 1:
            outcomes = {last.outcome for last in history.last_calls().values()}
            assert (now.outcome == "completed") == ("completed" in outcomes)


def seconds_counted(records: list[Record]) -> Counter[str]:
    """The counters of all nodes, each of which knows its own records only, added up as the dashboards do."""
    found: Counter[str] = Counter()
    for node in {record.origin.node for record in records}:
        of_node = [record for record in records if record.origin.node == node]
        read_ns = max(record.mono_ns for record in of_node) + round(READ_S * 1e9)
        view = MetricView(lambda read_ns=read_ns: read_ns)  # type: ignore[misc]
        for record in of_node:
            view.take(record)
        for (name, labels), value in view.samples().items():
            if name in (PRODUCTIVE, LOST):
                found[labels[0] if labels else "work"] += value  # type: ignore[assignment]
    return found


def goodput(counters: Counter[str]) -> float:
    """As `dashboards.generator.queries.goodput` has it."""
    outside = sum(counters[cause] for cause in ("startup", "restart", "idle"))
    lost = outside + counters["hang"] + counters["rework"]
    return max(0.0, 1 - lost / (counters["work"] + outside))


def assert_same_seconds(records: list[Record]) -> None:
    spent = times(History().take_all(records))
    counters = seconds_counted(records)
    if spent.ettr is not None:
        assert spent.ettr == pytest.approx(goodput(counters), abs=1e-6)
    for cause in ("startup", "restart", "hang", "rework", "idle"):
        assert getattr(spent, f"{cause}_s") * spent.ranks == pytest.approx(counters[cause], abs=1e-6), cause
