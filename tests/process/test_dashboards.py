"""What dashboards and alerts ask, a real Prometheus answers, fed by jobs with real faults.

Two jobs, one restarted in its processes and one by the launcher, are scraped by Debian's Prometheus; alerts go
through its Alertmanager. Only intervals and waits are shortened."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("grafana_foundation_sdk", reason="dashboards are built with it; it needs Python 3.11")

from resilience.analysis.dashboards.boards import BOARDS
from resilience.analysis.dashboards.export import write
from resilience.analysis.dashboards.grafana import ANNOTATIONS, VARIABLES
from resilience.analysis.dashboards.panels import Board, Panel
from resilience.analysis.dashboards.rules import RECORDINGS
from resilience.telemetry.setup import AgentExports
from tests.process.dashboard_jobs import END, LAUNCHED, LIMITS, RESTARTS
from tests.process.launching import launcher
from tests.support.prometheus import MISSING, Watching, watching
from tests.support.ranks import free_port, started
from tests.support.server import ForkServer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(MISSING), reason=f"{MISSING} not here: apt-get install prometheus prometheus-alertmanager"),
]

JOBS = ("inprocess", "launched")
STEP = 15  # seconds between two points of a graph
# What none of the two jobs shows: it would need a fault that no test can have at will.
NEVER = {
    "Cascades": "that one fault is seen by others first is a matter of chance",
    "Stale limits": "takes more than an hour of a learned limit",
}


@dataclass
class Scene:
    """Two jobs at work, and who watches them. began: Unix time."""

    watching: Watching
    began: float

    def series(self, expr: str, job: str, is_instant: bool) -> list[dict[str, Any]]:
        """Ask as Grafana does, for all nodes."""
        now = time.time()
        length = round(now - self.began)
        named = {"job": job, "node": ".*", "__rate_interval": f"{STEP + 5}s", "__interval": f"{STEP}s"}
        query = _filled(expr, named | {"__range": f"{length}s"})
        if is_instant:
            return self.watching.prometheus.instant(query)
        return self.watching.prometheus.range(query, self.began, now, STEP)


def _filled(text: str, values: dict[str, str]) -> str:
    """Put in Grafana's variables."""
    return re.sub(r"\$(\w+)", lambda found: values[found[1]], text)


@pytest.fixture(scope="module")
def scene(fork_server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    folders = {name: tmp_path_factory.mktemp(name) for name in JOBS}
    exported = tmp_path_factory.mktemp("exported")
    write(exported)
    began = time.time()
    environment = {
        "RESILIENCE_METRICS_PORT": "0",
        "RESILIENCE_JOB_ID": "inprocess",
        "RESILIENCE_SECTION_TIMEOUTS": LIMITS,
    }
    # Nobody listens there: exporters that fail are part of the picture.
    environment |= {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9", "OTEL_BSP_SCHEDULE_DELAY": "200"}
    served = [str(folders[name] / "runs" / name / "metrics" / "*.sd.json") for name in JOBS]
    with (
        watching(tmp_path_factory.mktemp("servers"), exported, lambda: served) as servers,
        started(
            fork_server, folders["inprocess"], 5, "tests.process.dashboard_jobs:train_in_process", {}, environment
        ) as wrapped,
    ):
        with _launched(fork_server, folders["launched"]) as launched:
            prometheus = servers.prometheus
            prometheus.await_query(f'max(resilience_restart_iteration{{job_id="inprocess"}}) >= {RESTARTS}')
            prometheus.await_query('max(resilience_restart_iteration{job_id="launched"}) >= 2')
            for name in JOBS:
                of_job = f'job_id="{name}"'
                prometheus.await_query(f"max(resilience_timeout_headroom_ratio{{{of_job}}}) > 0.67")
                # Timings come every 15 s; when they have come twice, some point of each graph has them.
                sections = f"resilience_section_duration_seconds_count{{{of_job}}}"
                prometheus.await_query(f"sum(rate({sections}[{STEP + 5}s] offset {STEP + 5}s)) > 0")
            yield Scene(servers, began)
            (folders["inprocess"] / END).touch()
            (folders["launched"] / END).touch()
            launched.wait()
        wrapped.wait_ranks()
        wrapped.ran_to_its_end = True


def _launched(server: ForkServer, folder: Path) -> Any:
    @contextmanager
    def job() -> Iterator[Any]:
        with ExitStack() as stack:

            def start(size: int, target: str, env: Any = None, env_of: Any = None, **kwargs: Any) -> Any:
                return stack.enter_context(started(server, folder, size, target, kwargs, env, env_of))

            environment = {"RESILIENCE_JOB_ID": "launched", "END": str(folder / END)}
            options = ("--max-restarts", "4", "--ft-rank-section-timeouts", LIMITS, "--ft-rank-heartbeat-timeout", "60")
            launched = launcher(start, folder)(LAUNCHED, *options, nproc=3, **environment)
            # What an agent exports, exported beside it.
            exports = AgentExports.start(launched.account.folder, "node0", lambda event: None, free_port())
            assert exports is not None
            stack.callback(exports.close)
            yield launched

    return job()


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
    return all([scene.series(query.expr, job, is_instant) for query in panel.queries])


@pytest.mark.parametrize("job", JOBS)
def test_variables_and_annotations_have_data(scene: Scene, job: str) -> None:
    for name, (selector, label) in VARIABLES.items():
        values = scene.watching.prometheus.label_values(_filled(selector, {"job": job}), label, scene.began)
        assert values if name == "node" else set(values) == set(JOBS)
    for name, expr in ANNOTATIONS.items():
        # Only the job that restarted five times has an alert that fires.
        assert scene.series(expr, job, is_instant=False) or (name, job) == ("Alerts", "launched")


def test_restarts_are_counted_from_the_first_one(scene: Scene) -> None:
    (panel,) = (panel for panel in BOARDS[0].panels() if panel.title == "Restarts")
    counted = {job: scene.series(panel.queries[0].expr, job, True)[0]["value"][1] for job in JOBS}
    assert {job: float(value) for job, value in counted.items()} == {"inprocess": RESTARTS, "launched": 2}


def test_exemplars_of_the_heat_map_are_trace_ids(scene: Scene) -> None:
    (panel,) = (panel for board in BOARDS for panel in board.panels() if panel.has_exemplars)
    query = _filled(panel.queries[0].expr, {"job": "inprocess", "node": ".*", "__interval": "15s"})
    found = scene.watching.prometheus.exemplars(query, scene.began, time.time())
    assert found
    assert all(re.fullmatch(r"[0-9a-f]{32}", each["labels"]["trace_id"]) for each in found)


def test_every_recording_rule_records(scene: Scene) -> None:
    recorded = {rule.record for rule in RECORDINGS if scene.watching.prometheus.instant(rule.record)}
    assert recorded == {rule.record for rule in RECORDINGS}


def test_alert_about_a_job_pages_and_silences_those_about_its_sections(scene: Scene) -> None:
    watched = scene.watching
    page = watched.pager.await_page("RestartLoop")
    assert page["labels"]["job_id"] == "inprocess"
    assert page["annotations"]["summary"] == f"Job inprocess restarted {RESTARTS} times within 30 minutes"
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
