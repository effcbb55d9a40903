"""Eight real jobs: every view says what was done to them, and what a script counts that knows nothing of the package.

The jobs were recorded by `python -m tests.fixtures`; the script is tests/fixtures/count.py."""

from __future__ import annotations

import itertools
import json
import re
import urllib.parse
from collections import Counter
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest

from resilience.attribution.culprits import NAMED
from resilience.attribution.first_and_cascade import Interruptions
from resilience.cli import main
from resilience.facts import events
from resilience.facts.in_words import count as number_of
from resilience.facts.in_words import seconds as in_words
from resilience.facts.records import Record
from resilience.history.history import History
from resilience.report.condensed import Report, report
from resilience.report.counterfactual import vacancies
from resilience.report.rank_lanes import lanes
from resilience.run_folder.load import load
from resilience.run_folder.merge import history_of
from resilience.run_folder.query import run_query
from resilience.status.state import Watcher
from resilience.telemetry.span import Span
from resilience.trace.export import otlp, spans_of
from tests.fixtures.count import count
from tests.fixtures.jobs import JOBS, unpacked
from tests.support.agreement import (
    assert_agree,
    assert_one_first_interruption_for_each_incident,
    assert_same_number_of_restarts,
    assert_same_seconds,
    counted,
    phases_in,
    seconds_counted,
)
from tests.support.server import ROOT

LAYERS = ("inprocess", "launcher")
CAUSES = ("startup", "restart", "hang", "idle")
CHECKPOINT_EVERY = 5  # steps, as in tests/fixtures/train.py
RESTARTS, PHASES = "resilience_restart_duration_seconds", "resilience_restart_phase_duration_seconds_sum"


class Recorded:
    """One of the jobs, and what the script counts."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.plan = name, JOBS[name]
        self.folder = unpacked(name, folder)
        self.counted: dict[str, Any] = count(self.folder)
        self.records: list[Record] = list(load(self.folder).records)

    @cached_property
    def report(self) -> Report:
        return report(load(self.folder))

    @cached_property
    def spans(self) -> list[Span]:
        return [span for batch in spans_of(self.folder) for span in batch.spans]

    def restarts(self, layer: str) -> list[float]:
        """The seconds that each rank was away, each time."""
        return list(self.counted["restarts"][layer])

    def phases(self, layer: str) -> dict[str, float]:
        """The seconds of each phase on all ranks, or nodes, together."""
        names = {name.partition("/")[2]: name for name in self.counted["phases"] if name.startswith(f"{layer}/")}
        return {name: self.counted["phases"][full] for name, full in names.items()}


@pytest.fixture(scope="module", params=JOBS)
def job(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    return Recorded(request.param, tmp_path_factory.mktemp("recorded"))


def test_report_blames_the_ranks_that_were_struck(job: Recorded) -> None:
    assert job.report.missing == ()
    blamed = tuple(frozenset(culprit.rank for culprit in each.verdict.culprits) for each in job.report.incidents)
    assert blamed == job.plan.culprits
    assert tuple(each.layer for each in job.report.incidents) == job.plan.layers


@pytest.mark.parametrize(
    "missing", [each for n in (1, 2, 3, 4) for each in itertools.combinations(range(4), n)], ids=str
)
def test_report_names_nobody_else_if_files_of_agents_are_missing(missing: tuple[int, ...], tmp_path: Path) -> None:
    folder = unpacked("wrapper-in-launcher", tmp_path)
    for node in missing:
        (folder / "records" / f"node{node}-agent.jsonl").unlink()
    struck = frozenset().union(*JOBS["wrapper-in-launcher"].culprits)
    for each in report(load(folder)).incidents:
        named = {
            culprit.rank for culprit in each.verdict.culprits if culprit.confidence > NAMED
        }  # at it: a common cause
        assert named <= struck


@pytest.mark.parametrize("layer", LAYERS)
def test_report_has_the_restarts_that_were_counted(job: Recorded, layer: str) -> None:
    restarts = [each for each in job.report.restarts if each.layer == layer]
    assert sum(each.ranks for each in restarts) == len(job.restarts(layer))
    longest = max((each.max_s for each in restarts), default=0.0)
    assert longest == pytest.approx(max(job.restarts(layer), default=0.0), abs=1e-6)
    of_incidents = [each.restart for each in job.report.incidents if each.layer == layer and each.restart is not None]
    undone = sum(job.counted["undone"]) if layer == "inprocess" else 0
    assert sum(each.undone for each in restarts) == undone
    assert sum(each.ranks for each in of_incidents) == len(job.restarts(layer)) - undone


def test_report_and_metrics_have_the_seconds_that_were_counted(job: Recorded) -> None:
    spent, times, counters = job.counted["spent"], job.report.times, seconds_counted(job.records)
    assert times is not None
    assert_same_seconds(job.records)  # those of the report are those of the metrics, rework too
    for cause in CAUSES:
        assert getattr(times, f"{cause}_s") * times.ranks == pytest.approx(spent[cause], abs=1e-6), cause
        assert counters[cause] == pytest.approx(spent[cause], abs=1e-6), cause
    assert counters["work"] == pytest.approx(spent["work"], abs=1e-6)
    assert (times.rework_s or 0.0) * times.ranks == pytest.approx(spent["rework"], abs=1e-6)
    assert counters["rework"] == pytest.approx(spent["rework"], abs=1e-6)
    assert times.unknown_s * times.ranks == pytest.approx(spent["unknown"], abs=1e-6)
    assert (times.ettr is None) == (job.name == "fails-at-start")  # none of its workers has shown progress


def test_steps_that_are_done_again_are_those_since_the_last_checkpoint(job: Recorded) -> None:
    """Each fault strikes in a step that the plan names; two at once are one incident."""
    places = [fault.split(".") for fault in job.plan.faults]
    struck = {(cycle, iteration): int(step) for cycle, iteration, _, step, _ in places}
    expected: list[int | None] = [step % CHECKPOINT_EVERY for step in struck.values()]
    if job.name in ("agent-killed", "fails-at-start"):  # nothing was restarted; no step was made
        expected = [None] * len(job.report.incidents)
    elif job.name == "wrapper-in-launcher":  # no record has the first step after the launcher's restart
        expected[1] = None
    assert [incident.cost.lost_steps for incident in job.report.incidents] == expected


def test_what_ifs_save_no_more_than_was_lost(job: Recorded) -> None:
    """Nothing is cut down to the loss."""
    told = job.report
    assert told.times is not None
    vacant = vacancies(History().take_all(job.records), told.incidents, told.times.ranks)
    assert sum(vacant.places) <= told.times.idle_s
    assert sum(vacant.waited) <= told.times.restart_s
    assert (len(vacant.places) > 0) == (job.name == "wrapper-in-launcher")  # where a spare was, it took the place
    assert told.times.hang_s <= sum(each.cost.hang_s or 0.0 for each in told.incidents) + 1e-6
    lost = {"limit": told.times.hang_s, "checkpoints": told.times.rework_s or 0.0}
    lost |= {"spares": told.times.idle_s + told.times.restart_s}
    assert all(answer.saved_s <= lost[answer.kind] for answer in told.what_ifs)


def test_metrics_count_one_first_interruption_for_each_incident(job: Recorded) -> None:
    """A Wrapper inside the launcher and the launcher see the same death: it counts once."""
    without = int(job.name == "agent-killed")  # no agent is left to count it
    assert_one_first_interruption_for_each_incident(job.records, without)


def test_counts_of_interruptions_never_fall_while_records_arrive(job: Recorded) -> None:
    for node in {record.origin.node for record in job.records}:
        history = History(has_details=False)
        interruptions = Interruptions(history.cycles.nodes)
        before: Counter[Any] = Counter()
        for record in sorted((r for r in job.records if r.origin.node == node), key=lambda r: r.mono_ns):
            history.take(record)
            interruptions.take(record)
            if isinstance(record.event, COUNTS):
                now = interruptions.counted()
                assert before <= now, record
                before = now


COUNTS = (
    events.RankInterrupted,
    events.IterationDecided,
    events.IterationStarted,
    events.MonitorEnded,
    events.WorkerExited,
    events.RestartDecided,
    events.CycleEnded,
)


@pytest.mark.parametrize("layer", LAYERS)
def test_metrics_have_the_restarts_and_phases_that_were_counted(job: Recorded, layer: str) -> None:
    metrics = counted(job.records)
    assert metrics[f"{RESTARTS}_sum", layer] == pytest.approx(sum(job.restarts(layer)), abs=1e-6)
    buckets = Counter({labels: n for labels, n in metrics.items() if labels[:2] == (f"{RESTARTS}_bucket", layer)})
    assert buckets.total() == len(job.restarts(layer))
    phases = {labels[2]: s for labels, s in metrics.items() if labels[:2] == (PHASES, layer)}
    assert phases == pytest.approx(job.phases(layer), abs=1e-6)
    nodes = {record.origin.node for record in job.records}
    by_node = [counted([record for record in job.records if record.origin.node == node]) for node in nodes]
    failed = [sum(of_node[name, layer, outcome] for name, outcome in ENDED) for of_node in by_node]
    if layer == "launcher":
        assert failed == [job.counted["failures"]] * len(nodes)
    else:
        assert max(failed) == job.counted["interrupted"] - len(job.counted["undone"])


def test_report_and_dashboards_have_the_same_number_of_restarts(job: Recorded) -> None:
    assert_same_number_of_restarts(job.records)


def test_death_that_wrapper_and_launcher_react_to_is_one_restart(tmp_path: Path) -> None:
    """The Wrapper restarts in place; a moment later the launcher ends all workers, for the same death."""
    run = load(unpacked("wrapper-in-launcher", tmp_path))
    condensed = report(run)
    assert sum(each.restarts for each in condensed.restarts) == len(condensed.incidents) == 2
    assert_same_number_of_restarts(list(run.records))


ENDED = [("resilience_restart_iterations_total", outcome) for outcome in ("interrupted", "exhausted")]


@pytest.mark.parametrize("layer", LAYERS)
def test_spans_have_the_restarts_and_phases_that_were_counted(job: Recorded, layer: str) -> None:
    assert phases_in(job.spans, layer) == pytest.approx(job.phases(layer), abs=1e-6)
    restarts = [span for span in job.spans if span.name == "restart" and span.attributes["resilience.layer"] == layer]
    whole = [s for span in restarts if (s := (span.end_ns - span.start_ns) / 1e9)]
    assert max(whole, default=0.0) == pytest.approx(max(job.restarts(layer), default=0.0), abs=1e-6)


def test_every_trace_has_one_root_and_no_orphans_and_few_anchors(job: Recorded) -> None:
    known = {span.span_id: span for span in job.spans}
    assert len(known) == len(job.spans)
    assert all(span.parent_id is None or span.parent_id in known for span in job.spans)
    roots = Counter(span.trace_id for span in job.spans if span.parent_id is None)
    assert roots == Counter({span.trace_id for span in job.spans})
    anchors = [span for span in job.spans if span.name.endswith(".start")]
    assert len(anchors) <= max(1, 0.1 * len(job.spans))


def test_restarts_point_at_the_ranks_that_were_struck(job: Recorded) -> None:
    known = {span.span_id: span for span in job.spans}
    struck = frozenset().union(*job.plan.culprits)
    causes = [link for span in job.spans if span.name == "restart" for link in span.links if link.kind == "caused_by"]
    assert all(known[link.span_id].name == "interruption" for link in causes)
    assert {known[link.span_id].attributes["resilience.rank.initial"] for link in causes} <= struck
    assert causes or job.name == "agent-killed"  # of which nothing was restarted


def test_dashboards_link_to_traces_finds_the_restarts(job: Recorded) -> None:
    text = (ROOT / "dashboards" / "grafana" / "restarts.json").read_text()
    (name,) = set(re.findall(r'name = \\+"(\w+)', urllib.parse.unquote(text)))
    found = [span for span in job.spans if span.name == name]
    assert {span.attributes["resilience.layer"] for span in found} == {layer for layer in LAYERS if job.restarts(layer)}
    assert all(span.attributes["resilience.job.id"] == job.name for span in found)


def test_file_for_trace_viewers_holds_every_span(job: Recorded) -> None:
    told = json.loads(json.dumps(list(otlp(job.folder))))
    resources = [one["resource"]["attributes"] for message in told for one in message["resourceSpans"]]
    assert all({"service.name", "service.version"} <= {each["key"] for each in one} for one in resources)
    spans = [span for m in told for r in m["resourceSpans"] for scope in r["scopeSpans"] for span in scope["spans"]]
    assert {span["spanId"] for span in spans} == {f"{span.span_id:016x}" for span in job.spans}


def test_sql_has_the_restarts_and_phases_that_were_counted(job: Recorded) -> None:
    pytest.importorskip("duckdb", reason="the extra `analysis` is not installed")
    with run_query(job.folder, "SELECT layer, max(restart_s) FROM incidents GROUP BY layer") as answer:
        longest = dict(answer.rows)
    for layer in set(job.plan.layers):
        assert (longest[layer] or 0.0) == pytest.approx(max(job.restarts(layer), default=0.0), abs=1e-6)
    with run_query(job.folder, "SELECT layer, phase, sum(duration_s) FROM phases GROUP BY ALL") as answer:
        phases = {(layer, phase): s for layer, phase, s in answer.rows}
    expected = {(layer, phase): s for layer in LAYERS for phase, s in job.phases(layer).items()}
    assert phases.keys() == expected.keys()
    for key, seconds in phases.items():
        assert seconds == pytest.approx(expected[key], abs=1e-6), key
    with run_query(
        job.folder, "SELECT sum(startup_s), sum(restart_s), sum(hang_s), sum(idle_s), sum(unknown_s) FROM seconds"
    ) as answer:
        (row,) = answer.rows
    assert row == pytest.approx([job.counted["spent"][cause] for cause in (*CAUSES, "unknown")], abs=1e-6)


def test_status_says_how_often_the_launcher_restarted_and_how_the_job_ended(job: Recorded) -> None:
    last = max(record.wall_ns for record in job.records) / 1e9
    now = Watcher(job.folder, lambda: last + 3600).look()
    assert now is not None
    is_launched = "launcher" in job.plan.layers
    assert (now.cycle is not None) == is_launched
    if is_launched and now.cycle is not None:
        assert now.cycle + 1 == job.counted["cycles"]
    assert (now.phase, now.outcome) == ENDS.get(job.name, ("ended", "completed"))
    assert_agree(job.records)


def test_status_names_a_rank_of_the_last_incident(job: Recorded) -> None:
    now = Watcher(job.folder).look()
    assert now is not None and now.failure is not None
    assert now.failure.rank in job.plan.culprits[-1]
    assert now.failure.rank == job.report.incidents[-1].verdict.first


def test_job_without_its_agent_is_over_in_the_report_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = unpacked("agent-killed", tmp_path)
    (incident,) = report(load(folder)).incidents
    assert incident.status == "ended"
    (lane,) = lanes(history_of(folder), (incident,)).lanes
    assert [stretch.kind for stretch in lane.stretches] == ["lost"]
    assert not any(mark.is_own for mark in lane.marks)
    assert incident.detected_wall_ns is not None
    assert main(["report", str(folder)]) == 0
    text = capsys.readouterr().out
    assert "rank 0 lost; the launcher recorded no end" in text
    assert "running" not in text and "continued" not in text
    assert "lost with the launcher's agent" in text and "a whole node" not in text


def test_ranks_whose_records_are_missing_are_not_cleared(tmp_path: Path) -> None:
    folder = unpacked("launcher-faults", tmp_path)
    for rank in (1, 2):
        (folder / "records" / f"node0-{rank}.jsonl").unlink()
    found = report(load(folder))
    assert found.completeness.damaged == (1, 2)
    for incident in found.incidents:
        cleared = {rank for group in incident.verdict.exonerated for rank in group.ranks}
        assert not cleared & {1, 2, incident.verdict.first}
        assert incident.verdict.culprits or not cleared


ENDS = {"agent-killed": ("lost", None), "fails-at-start": ("ended", "exhausted")}


def test_page_and_trace_show_the_numbers_that_were_counted(
    job: Recorded, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(job.folder), "--html", str(tmp_path / "page.html")]) == 0
    page = (tmp_path / "page.html").read_text()
    for layer in LAYERS:
        if job.restarts(layer):
            assert in_words(max(job.restarts(layer))) in page
    capsys.readouterr()
    if job.name == "agent-killed":
        return
    assert main(["trace", str(job.folder), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert f"{told['trace_id']}" in {f"{span.trace_id:032x}" for span in job.spans if span.name == "restart"}


def test_trace_of_each_incident_takes_as_long_as_its_ranks_were_away(
    job: Recorded, capsys: pytest.CaptureFixture[str]
) -> None:
    counted_s = sorted(seconds for layer in LAYERS for seconds in job.restarts(layer))
    for incident in (each for each in job.report.incidents if each.restart is not None):
        assert main(["trace", str(job.folder), "--incident", str(incident.number), "--json"]) == 0
        seconds = json.loads(capsys.readouterr().out)["seconds"]
        assert incident.restart is not None
        longest = incident.restart.max_s
        assert any(longest == pytest.approx(each, abs=1e-6) for each in counted_s)
        assert seconds >= longest - 1e-6
        # Where ranks, or nodes, begin one after the other, or are away until an end without progress, it takes longer.
        if incident.layer == "launcher" and job.plan.processes == 1 and job.name != "fails-at-start":
            assert seconds == pytest.approx(longest, abs=1e-6)


def test_lines_around_each_incident_have_lines_of_the_struck_ranks(
    job: Recorded, capsys: pytest.CaptureFixture[str]
) -> None:
    for incident in job.report.incidents:
        assert main(["logs", str(job.folder), "--around", str(incident.number), "--json"]) == 0
        lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        struck = job.plan.culprits[incident.number - 1]
        assert struck <= {line.get("initial_rank", line.get("worker_rank")) for line in lines}


def test_terminal_shows_the_times_that_were_counted(job: Recorded, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(job.folder)]) == 0
    text = " ".join(capsys.readouterr().out.split())
    for layer, words in (("inprocess", "in place"), ("launcher", "by the launcher")):
        if (times := job.counted["times"][layer]) is not None:
            quantiles = f"median {in_words(times['median'])}, 95 % within {in_words(times['p95'])}"
            if layer == "inprocess" and (undone := sum(job.counted["undone"])):
                quantiles = f"{undone} of them undone by the launcher, {quantiles}"
            assert re.search(rf"\d+ {words} \({number_of(times['ranks'], 'rank restart')}, {quantiles}\)", text)


def test_second_attempt_is_a_run_of_its_own(tmp_path: Path) -> None:
    folder = unpacked("two-attempts", tmp_path, attempt=1)
    found, numbers = report(load(folder)), count(folder)
    assert {record.origin.attempt for record in load(folder).records} == {1}
    assert [each.verdict.first for each in found.incidents] == [1]
    assert numbers["cycles"] == 2
    (incident,) = found.incidents
    assert incident.restart is not None
    assert incident.restart.max_s == pytest.approx(max(numbers["restarts"]["launcher"]), abs=1e-6)


def test_both_attempts_in_one_folder_are_told_apart(tmp_path: Path) -> None:
    first, second = (unpacked("two-attempts", tmp_path / str(n), attempt=n) for n in (0, 1))
    for path in (second / "records").iterdir():
        with (first / "records" / path.name).open("ab") as file:
            file.write(path.read_bytes())
    both = count(first)
    metrics = counted(list(load(first).records))
    assert metrics[f"{RESTARTS}_sum", "launcher"] == pytest.approx(sum(both["restarts"]["launcher"]), abs=1e-6)
    assert [each.attempt for each in report(load(first)).incidents] == [0, 1]
    assert_agree(list(load(first).records))


def test_script_that_counts_shares_no_code_with_the_package() -> None:
    text = (Path(__file__).parents[2] / "fixtures" / "count.py").read_text()
    assert "resilience" not in text and "msgspec" not in text


def test_rank_killed_in_a_wrapper_under_the_launcher_keeps_its_step_and_section(tmp_path: Path) -> None:
    second = report(load(unpacked("wrapper-in-launcher", tmp_path))).incidents[1]
    assert second.chief is not None
    assert second.chief.step == 13
    assert [section.name for section in second.chief.open_sections] == ["data"]


def test_rank_that_exited_with_an_error_has_failed_and_is_not_called_lost(tmp_path: Path) -> None:
    condensed = report(load(unpacked("fails-at-start", tmp_path)))
    assert condensed.failed == condensed.lost != ()
    assert " failed; " in condensed.end
    assert "lost" not in condensed.end
