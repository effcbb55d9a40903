"""Dashboards, rules and alerts ask only for what exists, and say what they show."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

pytest.importorskip("grafana_foundation_sdk", reason="dashboards are built with it; it needs Python 3.11")

from dashboards.generator.boards import BOARDS
from dashboards.generator.examples import CASES
from dashboards.generator.panels import COLUMNS, Board, Panel
from dashboards.generator.rules import ALERTS, EVERY, NEAR, RECORDINGS, SILENCES, Alert
from dashboards.generator.scenarios import SCENARIOS
from resilience.calibration.limits_file import NEAR_MISS
from resilience.telemetry.catalogue import METRICS, RESTART_BUCKETS
from tests.generate_dashboards import ROOT, files
from tests.support.promql import Finding, Known, catalogue, check

KNOWN = catalogue()
MADE = files()
OF_ONE_JOB = [board for board in BOARDS if board.is_of_one_job]
UNITS = {"none", "s", "percentunit", "dateTimeAsIso"}  # of Grafana's, those that are used
PANELS = [pytest.param(board, panel, id=f"{board.name}: {panel.title}") for board in BOARDS for panel in board.panels()]
# What nobody is blamed for, or what metrics do not know.
NOBODYS_FAULT = {"JobGone", "StartStalled", "SectionNearLimit", "SparesExhausted", "TelemetryDropping"}
NOBODYS_FAULT |= {"TimeoutsUncalibrated"}
SCENARIOS_FILE = "scenarios.yaml"
PROMTOOL = shutil.which("promtool")
AMTOOL = shutil.which("amtool")
OF_PROMTOOL = {"GOGC": "1000", "GOMAXPROCS": "1"}  # a fifth less CPU, 200 MB more memory
needs_promtool = pytest.mark.skipif(PROMTOOL is None, reason="promtool is not here: apt-get install prometheus")


def promtool(folder: Path, *arguments: str) -> None:
    """Run promtool in a folder, and expect that it finds no mistake."""
    environment = os.environ | OF_PROMTOOL
    done = subprocess.run([str(PROMTOOL), *arguments], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def rules_known() -> dict[str, Known]:
    """The catalogue, and what the recording rules make of it."""
    known = dict(KNOWN)
    for rule in RECORDINGS:
        known[rule.record] = Known(False, check(rule.expr, known, is_rule=True))
    return known


def dashboard(board: Board) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(MADE[f"dashboards/grafana/{board.name}.json"])
    return found


def selectors_in(query: str) -> str:
    """The series that a template variable asks for."""
    found = re.fullmatch(r"label_values\((.*), (\w+)\)", query)
    assert found is not None, query
    return found[1]


# -- PromQL -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("board", "panel"), PANELS)
def test_panel_asks_for_what_exists(board: Board, panel: Panel) -> None:
    for query in panel.queries:
        labels = check(query.expr, KNOWN, is_rule=not board.is_of_one_job)
        assert set(re.findall(r"{{(\w+)}}", query.legend)) <= labels
        if panel.view in ("lines", "stacked", "bars", "gauge") and labels:
            assert labels - {"le"} <= set(re.findall(r"{{(\w+)}}", query.legend)), "lines that look alike"


@pytest.mark.parametrize("board", OF_ONE_JOB, ids=lambda board: board.name)
def test_variables_and_annotations_ask_for_what_exists(board: Board) -> None:
    made = dashboard(board)
    queries = {each["name"]: each["query"]["query"] for each in made["templating"]["list"] if each["type"] == "query"}
    assert list(queries) == ["job", "id", "node"]
    assert selectors_in(queries["job"]) == "resilience_job_info"
    assert "job_id" in KNOWN["resilience_job_info"].labels
    assert "node" in check(selectors_in(queries["node"]), KNOWN)
    for annotation in made["annotations"]["list"]:
        labels = check(annotation["target"]["expr"], KNOWN)
        assert set(re.findall(r"{{(\w+)}}", annotation["titleFormat"])) <= labels


def test_every_metric_is_shown_somewhere() -> None:
    """Otherwise it is a cost without a use: show it, or say here why not."""
    text = "\n".join(query.expr for board in BOARDS for panel in board.panels() for query in panel.queries)
    text += MADE["dashboards/grafana/overview.json"] + MADE["dashboards/prometheus/alerts.yaml"]
    assert [metric.name for metric in METRICS if metric.name not in text] == []


def test_rules_and_alerts_ask_for_what_exists() -> None:
    known = rules_known()
    for alert in ALERTS:
        labels = check(alert.expr, known, is_rule=True)
        named = set(re.findall(r"\$labels\.(\w+)", alert.summary))
        assert named <= labels, alert.name


def test_quantile_is_compared_with_an_edge_of_its_buckets() -> None:
    """Else interpolation raises the alert though all samples are below its limit."""
    limits = re.findall(r"restart_duration_seconds:p\d+_1h\S* > ([0-9.]+)", " ".join(alert.expr for alert in ALERTS))
    assert len(limits) == 2 and {float(limit) for limit in limits} <= set(RESTART_BUCKETS)
    assert [alert.name for alert in ALERTS if "quantile(" in alert.expr] == []


BAD = {
    'sum(resilience_nothing{job_id="$job"})': "no such metric",
    'sum(resilience_ranks{job_id="$job", rank="1"})': "has no label rank",
    'sum by (rank) (resilience_ranks{job_id="$job"})': "are not there",
    'sum(rate(resilience_ranks{job_id="$job"}[$__rate_interval]))': "which is a gauge",
    'delta(resilience_events_total{job_id="$job"}[$__range])': "which is a counter",
    "sum(resilience_ranks)": "for every job",
    'sum(resilience_ranks{job_id="other"})': "for every job",
    'sum(rate(resilience_events_total{job_id="$job"}[5m]))': "does not fit every graph",
    'resilience_ranks{job_id="$job"} offset 1h': "does not fit every graph",
    'avg_over_time(sum(resilience_ranks{job_id="$job"})[1h:1m])': "does not fit every graph",
    'histogram_quantile(0.5, sum(resilience_heartbeat_interval_seconds_bucket{job_id="$job"}))': "le was",
    'sum by (state) (resilience_ranks{job_id="$job"}) / sum(resilience_ranks{job_id="$job"})': "unlike labels",
    'sum without (node) (resilience_ranks{job_id="$job"})': "without",
    'resilience_section_duration_seconds{job_id="$job"}': "no such metric",
    'sum(resilience_ranks{job_id="$job"}': "no PromQL",
}


@pytest.mark.parametrize("expression", BAD)
def test_wrong_expression_is_found(expression: str) -> None:
    with pytest.raises(Finding, match=BAD[expression]):
        check(expression, KNOWN)


@pytest.mark.parametrize("expression", ["sum(resilience_ranks)", "sum by (job_id) (resilience_ranks)", "vector(1)"])
def test_rule_that_mixes_jobs_is_found(expression: str) -> None:
    with pytest.raises(Finding):
        check(expression, KNOWN, is_rule=True)


# -- dashboards ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted({*MADE} | {str(p.relative_to(ROOT)) for p in ROOT.glob("docs/runbooks/*")}))
def test_file_is_what_the_code_makes(name: str) -> None:
    assert name in MADE, "made by nobody any more: delete it"
    assert (ROOT / name).read_text() == MADE[name], "stale: run `poe docs`"


@pytest.mark.parametrize("name", [*(board.name for board in BOARDS), "runbooks"])
def test_grid_has_no_overlaps_and_no_holes(name: str) -> None:
    panels = json.loads(MADE[f"dashboards/grafana/{name}.json"])["panels"]
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= COLUMNS
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not cells & taken, panel["title"]
        taken |= cells
    assert len(taken) == COLUMNS * (1 + max(y for _, y in taken)), "a line that is not full"
    numbers = [panel["id"] for panel in panels]
    assert len(set(numbers)) == len(numbers)


def test_tables_of_the_fleet_that_promise_an_order_ask_for_it() -> None:
    """Without it the order is that of the aggregation, which Prometheus leaves open."""
    falling = ("most first.", "longest first.", "latest first.", "most severe first.")
    sorts = {"lowest first.": "sort(", **dict.fromkeys(falling, "sort_desc(")}
    panels = json.loads(MADE["dashboards/grafana/fleet.json"])["panels"]
    tables = {panel["title"]: panel for panel in panels if panel["type"] == "table"}
    promised = {title: panel for title, panel in tables.items() if panel["description"].endswith("first.")}
    assert promised.keys() == tables.keys() - {"Run folders", "Age of files for node-exporter"}
    for title, panel in promised.items():
        order = re.split("[,;] ", panel["description"])[-1]
        (target,) = panel["targets"]  # tables of several queries are merged by Grafana, and lose the order
        assert target["expr"].startswith(sorts[order]), title
        assert "sortBy" not in panel["options"], title


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.name)
def test_panels_say_what_they_show(board: Board) -> None:
    made = dashboard(board)
    assert made["uid"] == board.uid
    titles = [panel["title"] for panel in made["panels"]]
    assert len(set(titles)) == len(titles)
    for panel in made["panels"]:
        if panel["type"] == "row":
            continue
        assert panel["description"].endswith("."), panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"] in UNITS
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        assert {target["datasource"]["uid"] for target in panel["targets"]} == {"${datasource}"}
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.name)
def test_links_lead_somewhere(board: Board) -> None:
    made = dashboard(board)
    uids = {each.uid for each in BOARDS}
    runbooks = json.loads(MADE["dashboards/grafana/runbooks.json"])
    pages = {panel["id"]: panel["title"] for panel in runbooks["panels"]}
    to = [link["url"] for link in made["links"] if link["type"] == "link"]
    assert {url.removeprefix("/d/") for url in to if url.startswith("/d/")} == uids
    assert sum(url.startswith("/explore") for url in to) == (2 if board.is_of_one_job else 0)  # traces and logs
    for panel in made["panels"]:
        for link in panel.get("links", ()):
            if link["title"].startswith("Runbook: "):
                found = re.fullmatch(rf"/d/{runbooks['uid']}/runbooks\?viewPanel=(\d+)", link["url"])
                assert found is not None
                assert pages[int(found[1])] == link["title"].removeprefix("Runbook: ")
    without = [panel.title for panel in board.panels() if not panel.runbook]
    assert set(without) <= {"Alerts", "Firing alerts", "Versions"}


def test_exemplars_lead_to_traces() -> None:
    (panel,) = (panel for board in BOARDS for panel in board.panels() if panel.has_exemplars)
    assert panel.view == "heatmap"
    source = yaml.safe_load(MADE["dashboards/provisioning/datasources/prometheus.yaml"])["datasources"][0]
    assert source["jsonData"]["exemplarTraceIdDestinations"][0]["name"] == "trace_id"


# -- alerts -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert.name)
def test_alert_has_runbook_dashboard_and_both_kinds_of_example(alert: Alert) -> None:
    assert f"docs/runbooks/{alert.name}.md" in MADE
    assert alert.board in {board.name for board in BOARDS}
    assert alert.runbook.means and alert.runbook.look and alert.runbook.do
    assert {bool(case.fires) for case in CASES[alert.name]} == {True, False}
    (rule,) = (
        rule
        for rule in yaml.safe_load(MADE["dashboards/prometheus/alerts.yaml"])["groups"][0]["rules"]
        if rule["alert"] == alert.name
    )
    assert set(rule["annotations"]) >= {"summary", "run_folder", "command", "dashboard_url", "runbook_url"}
    assert ("culprit" in rule["annotations"]) == (alert.name not in NOBODYS_FAULT)


def test_nearness_of_a_limit_is_one_number() -> None:
    assert NEAR == NEAR_MISS


@needs_promtool
def test_promtool_takes_rules_and_config() -> None:
    folder = ROOT / "dashboards" / "prometheus"
    promtool(folder, "check", "rules", "recording.yaml", "alerts.yaml")
    promtool(folder, "check", "config", "prometheus.yaml")


def test_every_alert_has_a_file_of_unit_tests_and_no_other_file_is_there() -> None:
    files = {path.name for path in (ROOT / "dashboards" / "prometheus" / "tests").iterdir()}
    assert files == {*(f"{alert.name}.yaml" for alert in ALERTS), Path(SCENARIOS_FILE).name}


def for_promtool(file: str) -> str:
    """An exported file of tests, as it may stand in any folder."""
    folder = ROOT / "dashboards" / "prometheus"
    return (folder / "tests" / file).read_text().replace("../", f"{folder}/")


@needs_promtool
@pytest.mark.parametrize("every", ["1m", pytest.param(EVERY, marks=pytest.mark.slow)])
@pytest.mark.parametrize("alert", [alert.name for alert in ALERTS])
def test_alert_fires_when_it_must_and_only_then(alert: str, every: str, tmp_path: Path) -> None:
    exported, chosen = (f"evaluation_interval: {interval}\n" for interval in (EVERY, every))
    text = for_promtool(f"{alert}.yaml")
    assert exported in text
    (tmp_path / "tests.yaml").write_text(text.replace(exported, chosen))
    promtool(tmp_path, "test", "rules", "tests.yaml")


def scenario_of_file(number: int) -> str:
    """A file for promtool with one scenario of the exported file, which takes minutes as a whole on a busy machine."""
    head, *scenarios = for_promtool(SCENARIOS_FILE).split("\n- name: ")
    assert len(scenarios) == len(SCENARIOS)
    return f"{head}\n- name: {scenarios[number]}"


@needs_promtool
@pytest.mark.parametrize("number", range(len(SCENARIOS)), ids=[scenario.name for scenario in SCENARIOS])
def test_no_gap_new_prometheus_end_or_reset_of_a_counter_pages_anybody(number: int, tmp_path: Path) -> None:
    (tmp_path / "scenario.yaml").write_text(scenario_of_file(number))
    promtool(tmp_path, "test", "rules", "scenario.yaml")


def test_every_alert_that_is_silenced_exists_and_none_silences_itself() -> None:
    names = {alert.name for alert in ALERTS}
    for cause, others, _ in SILENCES:
        assert {*cause.split("|"), *others.split("|")} <= names
        assert not set(cause.split("|")) & set(others.split("|"))


def test_alerts_have_the_labels_by_which_they_silence_each_other() -> None:
    known = rules_known()
    labels = {alert.name: check(alert.expr, known, is_rule=True) for alert in ALERTS}
    for cause, others, equal in SILENCES:
        for name in (*cause.split("|"), *others.split("|")):
            assert set(equal) <= labels[name], (cause, name)


@pytest.mark.skipif(AMTOOL is None, reason="amtool is not here: apt-get install prometheus-alertmanager")
def test_amtool_takes_the_example() -> None:
    path = ROOT / "dashboards" / "alertmanager.yaml"
    done = subprocess.run([str(AMTOOL), "check-config", str(path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


# -- links -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("run", ["job", "job@1", "job@12"])
def test_links_to_logs_and_traces_use_the_jobs_id_whatever_the_attempt(run: str) -> None:
    board = json.loads((ROOT / "dashboards" / "grafana" / "overview.json").read_text())
    (variable,) = (each for each in board["templating"]["list"] if each["name"] == "id")
    found = re.search(variable["regex"].strip("/"), run)
    assert found is not None and found[1] == "job"
    explored = [link["url"] for link in board["links"] if link["url"].startswith("/explore")]
    assert len(explored) == 2
    links = [link["url"] for panel in board["panels"] for link in panel.get("links", ())]
    of_panels = [url for url in links if url.startswith("/explore")]
    assert len(of_panels) == len([panel for panel in board["panels"] if panel["type"] != "row"])
    assert all("$id" in url and "$job" not in url for url in explored + of_panels)
