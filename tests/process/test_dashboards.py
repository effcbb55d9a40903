"""What dashboards and alerts ask, a real Prometheus answers, fed by jobs with real faults.

Two jobs, one restarted in its processes and one by the launcher, are scraped by Debian's Prometheus; alerts go
through its Alertmanager. Only intervals and waits are shortened."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from xml.etree import ElementTree

import pytest

pytest.importorskip("grafana_foundation_sdk", reason="dashboards are built with it; it needs Python 3.11")

from dashboards.generator.boards import BOARDS
from dashboards.generator.boards.overview import OVERVIEW
from dashboards.generator.grafana import ANNOTATIONS, VARIABLES
from dashboards.generator.panels import Board, Panel
from dashboards.generator.rules import RECORDINGS
from tests.draw_dashboards import JOB, answers, draw
from tests.process.dashboard_jobs import RESTARTS
from tests.process.dashboard_scene import JOBS, Scene, filled, stage
from tests.support.prometheus import MISSING
from tests.support.server import ForkServer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(MISSING), reason=f"{MISSING} not here: apt-get install prometheus prometheus-alertmanager"),
]

# What none of the two jobs shows: it would need a fault that no test can have at will.
NEVER = {
    "Cascades": "that one fault is seen by others first is a matter of chance",
    "Stale limits": "takes more than an hour of a learned limit",
    "How jobs ended": "node-exporter would tell, and it is not here",
    "Age of files for node-exporter": "it is not here",
    "Other values": "torch's agent tells them at the very end of a job, and both go on",
}
# Queries of a panel that has others: both jobs have set limits, which are neither on trial nor learned.
NEVER_ANSWERED = ("resilience_suspicions_total", "resilience_shadow_alarms_total")


@pytest.fixture(autouse=True)
def exporters_end() -> None:
    """Nothing to check after each test: the scene exports until the last one has ended."""


@pytest.fixture(scope="module")
def scene(fork_server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    with stage(fork_server, tmp_path_factory.mktemp("scene")) as made:
        yield made


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.name)
def test_every_panel_has_data_or_says_why_it_has_none(scene: Scene, board: Board) -> None:
    wrong = []
    for panel in board.panels():
        found = {job: _has_data(scene, panel, job) for job in JOBS}
        if not panel.empty and not all(found.values()):
            wrong.append(f"{panel.title}: {found}, and it does not say why")
        elif not any(found.values()) and panel.title not in NEVER:
            wrong.append(f"{panel.title}: no data in either job")
    assert wrong == []


def _has_data(scene: Scene, panel: Panel, job: str) -> bool:
    is_instant = panel.view in ("stat", "table", "gauge")
    asked = [query.expr for query in panel.queries if not any(name in query.expr for name in NEVER_ANSWERED)]
    return all([scene.series(expr, job, is_instant) for expr in asked])


@pytest.mark.parametrize("job", JOBS)
def test_variables_and_annotations_have_data(scene: Scene, job: str) -> None:
    for name, (selector, label) in VARIABLES.items():
        values = scene.watching.prometheus.label_values(filled(selector, {"job": job}), label, scene.began)
        assert values if name == "node" else set(values) == set(JOBS)
    for name, expr in ANNOTATIONS.items():
        # Only the job that restarted five times has an alert that fires.
        assert scene.series(expr, job, is_instant=False) or (name, job) == ("Alerts", "launched")


def test_pictures_for_the_docs_are_drawn_from_the_answers(scene: Scene) -> None:
    assert JOB in JOBS
    for board in BOARDS:
        picture = ElementTree.fromstring(draw(board, answers(scene, board)))
        written = {text.text for text in picture.iter("{http://www.w3.org/2000/svg}text")}
        assert {panel.title for panel in board.panels()} <= written


def test_restarts_are_counted_from_the_first_one(scene: Scene) -> None:
    (panel,) = (panel for panel in OVERVIEW.panels() if panel.title == "Restarts")
    counted = {job: scene.series(panel.queries[0].expr, job, True)[0]["value"][1] for job in JOBS}
    assert {job: float(value) for job, value in counted.items()} == {"inprocess": RESTARTS, "launched": 2}


def test_exemplars_of_the_heat_map_are_trace_ids(scene: Scene) -> None:
    (panel,) = (panel for board in BOARDS for panel in board.panels() if panel.has_exemplars)
    named = {"job": "inprocess", "node": ".*", "__interval": "15s", "__interval_ms": "15000"}
    query = filled(panel.queries[0].expr, named)
    found = scene.watching.prometheus.exemplars(query, scene.began, time.time())
    assert found
    assert all(re.fullmatch(r"[0-9a-f]{32}", each["labels"]["trace_id"]) for each in found)


def test_every_recording_rule_records(scene: Scene) -> None:
    recorded = {rule.record for rule in RECORDINGS if scene.watching.prometheus.instant(rule.record)}
    of_files = {"job:resilience_file:fresh", "node:resilience_file:stopped"}  # no node-exporter is here
    of_nodes = {"job:resilience_spare_nodes:count"}  # no node waits for a place
    assert recorded == {rule.record for rule in RECORDINGS} - of_files - of_nodes


def test_alert_about_a_job_pages_and_silences_those_about_its_sections(scene: Scene) -> None:
    watched = scene.watching
    page = watched.pager.await_page("RestartLoop")
    assert page["labels"]["job_id"] == "inprocess"
    restarted = re.fullmatch(r"Job inprocess restarted (\d) times within 30 minutes", page["annotations"]["summary"])
    assert restarted is not None and 5 <= int(restarted[1]) <= RESTARTS  # it fires at five, and has come at once
    assert page["annotations"]["runbook_url"].startswith("http://localhost:3000/d/resilience-runbooks")
    # Both jobs came near a limit; of the one that is paged about as a whole this is not worth a page.
    near = watched.pager.await_page("SectionNearLimit")
    assert near["labels"]["job_id"] == "launched"
    states = {
        alert["labels"]["job_id"]: alert["status"]
        for alert in watched.all_alerts()
        if alert["labels"]["alertname"] == "SectionNearLimit"
    }
    assert states["launched"]["state"] == "active"
    assert states["inprocess"]["state"] == "suppressed"
    assert states["inprocess"]["inhibitedBy"]
    paged = {(alert["labels"]["alertname"], alert["labels"]["job_id"]) for alert in watched.pager.paged}
    assert ("SectionNearLimit", "inprocess") not in paged
