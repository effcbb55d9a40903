"""Eight real jobs: each view answers each question with the number that a script counts from the records alone.

The script is tests/fixtures/count.py; which rank was struck is known from the plan, tests/fixtures/jobs.py."""

from __future__ import annotations

import json
import re
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest

from resilience.attribution.restarts import restart_times
from resilience.cli import main
from resilience.facts import events
from resilience.facts.in_words import count as number_of
from resilience.facts.in_words import seconds as in_words
from resilience.facts.interruptions import ExceptionInfo, Interruption, InterruptionRecord
from resilience.facts.records import Record
from resilience.history.history import History
from resilience.run_folder.load import load
from resilience.telemetry.catalogue import BY_NAME
from tests.fixtures.count import count
from tests.fixtures.jobs import JOBS, unpacked
from tests.support.agreement import assert_same_restarts, counted, seconds_counted, spans_of, written
from tests.support.record_streams import Fault, job

LAYERS = ("inprocess", "launcher")
CAUSES = ("startup", "restart", "hang", "idle")
DURATION = "resilience_restart_duration_seconds"


class Recorded:
    """One of the jobs, what the script counts, and what a command prints as JSON."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.plan = name, JOBS[name]
        self.folder = unpacked(name, folder)
        self.counted: dict[str, Any] = count(self.folder)
        self.records = list(load(self.folder).records)
        self.times = {layer: times for layer, times in self.counted["times"].items() if times is not None}


@pytest.fixture(scope="module", params=JOBS)
def recorded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    return Recorded(request.param, tmp_path_factory.mktemp("recorded"))


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    capsys.readouterr()
    main(list(arguments))
    return json.loads(capsys.readouterr().out)


def rows(capsys: pytest.CaptureFixture[str], recorded: Recorded, sql: str) -> list[dict[str, Any]]:
    pytest.importorskip("duckdb", reason="the extra `analysis` is not installed")
    capsys.readouterr()
    assert main(["logs", str(recorded.folder), "--json", "--sql", sql]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_report_has_the_numbers_of_the_script(recorded: Recorded, capsys: pytest.CaptureFixture[str]) -> None:
    plain = shown(capsys, "report", str(recorded.folder), "--json")
    names = {"ranks": "ranks", "median_s": "median", "p95_s": "p95", "max_s": "max"}
    assert {each["layer"] for each in plain["restarts"]} == recorded.times.keys()
    for each in plain["restarts"]:
        expected = recorded.times[each["layer"]]
        assert {name: each[mine] for mine, name in names.items()} == pytest.approx(expected, abs=1e-6)
    culprits = [frozenset(one["rank"] for one in each["verdict"]["culprits"]) for each in plain["incidents"]]
    assert tuple(culprits) == recorded.plan.culprits
    times, spent = plain["times"], recorded.counted["spent"]
    times["rework_s"] = times["rework_s"] or 0.0  # None: unknown; the script counts what is known
    lost = {cause: times[f"{cause}_s"] * times["ranks"] for cause in (*CAUSES, "rework")}
    assert lost == pytest.approx({cause: spent[cause] for cause in (*CAUSES, "rework")}, abs=1e-6)
    total = sum(spent[cause] for cause in ("work", "startup", "restart", "idle"))
    if recorded.name == "fails-at-start":  # no worker has shown progress
        assert times["ettr"] is None
    else:
        productive = spent["work"] - spent["hang"] - spent["rework"]
        assert times["ettr"] == pytest.approx(productive / total, abs=1e-6)


def test_page_has_the_numbers_of_the_script(
    recorded: Recorded, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = shown(capsys, "report", str(recorded.folder), "--json")
    assert main(["report", str(recorded.folder), "--html", str(tmp_path / "page.html")]) == 0
    page = " ".join((tmp_path / "page.html").read_text().split())
    for layer, words in (("inprocess", "in place"), ("launcher", "by the launcher")):
        if (times := recorded.times.get(layer)) is not None:
            quantiles = f"median {in_words(times['median'])}, 95 % within {in_words(times['p95'])}"
            if layer == "inprocess" and (undone := sum(recorded.counted["undone"])):
                quantiles = f"{undone} of them undone by the launcher, {quantiles}"
            assert re.search(rf"\d+ {words} \({number_of(times['ranks'], 'rank restart')}, {quantiles}\)", page)
    share = plain["times"]["ettr"]
    assert ("of the time was productive" in page) == (share is not None)
    assert share is None or f"{share:.1%} of the time was productive" in page


def test_status_has_the_numbers_of_the_script(recorded: Recorded, capsys: pytest.CaptureFixture[str]) -> None:
    plain = shown(capsys, "status", str(recorded.folder), "--json")
    is_launched = recorded.plan.options is not None
    assert plain.get("cycle") == (recorded.counted["cycles"] - 1 if is_launched else None)
    assert plain.get("iterations", 0) == recorded.counted["in_place_now"]
    assert plain["failure"]["rank"] in recorded.plan.culprits[-1]


def test_spans_have_the_numbers_of_the_script(recorded: Recorded) -> None:
    spans = spans_of(recorded.records)
    restarts = {span.span_id: span for span in spans if span.name == "restart"}
    ends = [
        (span, span)
        for span in restarts.values()
        if span.attributes["resilience.layer"] == "inprocess"
        and span.attributes["resilience.outcome"] == "completed"
        and span.attributes["resilience.rank.state"] == "active"
    ]
    ends += [(restarts[s.parent_id], s) for s in spans if s.name == "import" and s.parent_id in restarts]
    for layer in LAYERS:
        found = [(e.end_ns - b.start_ns) / 1e9 for b, e in ends if b.attributes["resilience.layer"] == layer]
        if recorded.name != "fails-at-start":  # its workers made no progress, so they have no span of their own
            expected = sorted(recorded.counted["restarts"][layer])
            assert sorted(found) == pytest.approx(
                expected, abs=1e-5
            )  # a record's two clocks are read microseconds apart


def test_live_metrics_have_the_numbers_of_the_script(recorded: Recorded) -> None:
    metrics = counted(recorded.records)
    edges = [*BY_NAME[DURATION].buckets, float("inf")]
    for layer in LAYERS:
        durations = recorded.counted["restarts"][layer]
        found = [metrics[f"{DURATION}_bucket", layer, f"{edge:g}"] for edge in edges]
        assert list(accumulate(found)) == [sum(s <= edge for s in durations) for edge in edges]
        assert metrics[f"{DURATION}_sum", layer] == pytest.approx(sum(durations), abs=1e-6)
    spent = recorded.counted["spent"]
    lost = seconds_counted(recorded.records)
    for cause in ("work", *CAUSES):
        assert lost[cause] == pytest.approx(spent[cause], abs=1e-6), cause


def test_sql_has_the_numbers_of_the_script(recorded: Recorded, capsys: pytest.CaptureFixture[str]) -> None:
    restarts = rows(
        capsys,
        recorded,
        "SELECT layer, count(*) AS ranks, median(duration_s) AS median, quantile_disc(duration_s, 0.95) AS p95, "
        "max(duration_s) AS max FROM restarts GROUP BY layer",
    )
    assert {row["layer"] for row in restarts} == recorded.times.keys()
    for row in restarts:
        expected = recorded.times[row.pop("layer")]
        assert row == pytest.approx(expected, abs=1e-6)
    firsts = rows(capsys, recorded, "SELECT first_rank FROM incidents ORDER BY number")
    assert len(firsts) == len(recorded.plan.culprits)
    assert all(row["first_rank"] in ranks for row, ranks in zip(firsts, recorded.plan.culprits, strict=True))
    sums = ", ".join(f"sum({cause}_s) AS {cause}" for cause in CAUSES)
    (lost,) = rows(capsys, recorded, f"SELECT {sums} FROM seconds")
    assert lost == pytest.approx({cause: recorded.counted["spent"][cause] for cause in CAUSES}, abs=1e-6)


# -- jobs whose end, or whose restart, is not on record -------------------------------------------

MOVES = (
    events.StageEnded,
    events.RestartEnded,
    events.WorkerProgressed,
    events.WorkerExited,
    events.CycleStarted,
    events.CycleEnded,
)


def assert_one_count(records: list[Record]) -> None:
    """Report and SQL (both of `restart_times`), metrics and spans have the same restarts of ranks."""
    history, metrics, spans = History().take_all(records), counted(records), spans_of(records)
    ranks = {each.layer: each.ranks for each in restart_times(history)}
    for layer in LAYERS:
        samples = sum(n for labels, n in metrics.items() if labels[:2] == (f"{DURATION}_bucket", layer))
        assert samples == ranks.get(layer, 0), (layer, len(records))
    completed = [
        span
        for span in spans
        if span.name == "restart" and span.attributes["resilience.layer"] == "inprocess"
        if span.attributes["resilience.outcome"] == "completed"
        if span.attributes["resilience.rank.state"] == "active"
    ]
    assert len(completed) == ranks.get("inprocess", 0)
    assert_same_restarts(history, metrics, spans)


@pytest.mark.parametrize("name", JOBS)
def test_job_that_is_cut_off_anywhere_has_one_count_of_restarts(name: str, tmp_path: Path) -> None:
    records = sorted(load(unpacked(name, tmp_path)).records, key=lambda record: record.mono_ns)
    for number, record in enumerate(records, start=1):
        if isinstance(record.event, MOVES):
            assert_one_count(records[:number])


def gave_up() -> list[Record]:
    """All ranks were asked to restart, and too few were left: they ended before they entered the function again."""
    records: list[Record] = []
    for rank, of_rank in job([Fault("exception", 1, 0)]).files.items():
        entry = next(
            number
            for number, record in enumerate(of_rank)
            if record.origin.iteration == 1
            and isinstance(record.event, events.StageStarted)
            and record.event.stage == "run"
        )
        last = of_rank[entry]
        error = ExceptionInfo("resilience.errors.RestartAbort", "too few ranks are left", "f")
        ends = [
            events.RankInterrupted(InterruptionRecord(rank, Interruption.EXCEPTION, exception=error, iteration=1)),
            events.StageEnded("restart", "failed", 0.01),
            events.CallEnded("failed", 2, 1.0, "RestartAbort: too few ranks are left"),
        ]
        records += of_rank[:entry]
        for number, event in enumerate(ends):
            at = {"sequence": last.sequence + number, "mono_ns": last.mono_ns + number}
            records.append(Record(wall_ns=last.wall_ns + number, origin=last.origin, event=event, **at))
    return records


def test_job_that_gave_up_in_a_restart_has_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records = gave_up()
    assert_one_count(records)
    plain = shown(capsys, "report", str(written(records, tmp_path / "run")), "--json")
    assert plain["restarts"] == []
    assert [each["status"] for each in plain["incidents"]] == ["ended"]
    assert "restart" not in plain["incidents"][0] or plain["incidents"][0]["restart"] is None


def test_end_of_a_job_without_restarts_left_is_no_restart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = unpacked("fails-at-start", tmp_path)
    incidents = shown(capsys, "report", str(folder), "--json")["incidents"]
    assert incidents[-1]["status"] == "ended" and not incidents[-1].get("phases")
    assert main(["trace", str(folder), "--incident", "3"]) == 2
    assert "has no recorded restart of incident 3" in capsys.readouterr().err
