"""The tables of the fleet, answered by a real Prometheus: the worst job comes first."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from resilience.cli import main
from tests.process.dashboard_scene import filled
from tests.support.prometheus import Prometheus

pytestmark = pytest.mark.skipif(
    shutil.which("prometheus") is None or shutil.which("promtool") is None,
    reason="no prometheus here: apt-get install prometheus",
)

MINUTES = 30
AT = time.time() // 60 * 60  # Unix seconds of the last sample; a Prometheus deletes old ones
BEGAN = AT - MINUTES * 60
# The values of three jobs in the last minute. Each table has another order, and none that of the names.
VALUES = {
    'resilience_productive_seconds_total{job_id="%s",node="n"}': {"a": 8000, "b": 900, "c": 4000},
    'resilience_lost_seconds_total{job_id="%s",node="n",cause="restart"}': {"a": 800, "b": 100, "c": 3000},
    'resilience_restart_iterations_total{job_id="%s",node="n",layer="launcher",outcome="interrupted"}': {
        "a": 2,
        "b": 11,
        "c": 3,
    },
    'resilience_restart_iteration{job_id="%s",node="n",layer="launcher"}': {"a": 2, "b": 11, "c": 3},
    'resilience_rank_silence_seconds{job_id="%s",node="n",rank="0"}': {"a": 5, "b": 70, "c": 0.1},
    'resilience_start_timestamp_seconds{job_id="%s",node="n"}': dict.fromkeys("abc", BEGAN),
    'resilience_written_timestamp_seconds{job_id="%s",node="n"}': {"a": AT - 15, "b": AT - 40, "c": AT - 30},
    'resilience_ended_timestamp_seconds{job_id="%s",node="n",outcome="failed"}': {"a": AT - 90, "b": AT, "c": AT - 60},
    **{
        f'ALERTS{{job_id="%s",alertname="Any",alertstate="firing",severity="{severity}"}}': {job: 1}
        for job, severity in {"a": "warning", "b": "info", "c": "critical"}.items()
    },
}
WORST_FIRST = {
    "Firing alerts": "cab",
    "How jobs ended": "bca",  # the latest one first
    "Lowest goodput": "cba",  # c: 4 of 7, b: 9 of 10, a: 10 of 11
    "Most restarts": "bca",
    "Longest silence": "bac",
    "Most lost time": "cab",
    "Age of files for node-exporter": "bca",
}


@pytest.fixture
def prometheus(tmp_path: Path) -> Iterator[Prometheus]:
    """A Prometheus that has the samples of three jobs and scrapes nothing."""
    lines = []
    for series, values in VALUES.items():
        for job, last in values.items():
            is_counter = series.partition("{")[0].endswith("_total")
            for minute in range(MINUTES + 1):
                value = last * minute / MINUTES if is_counter else last
                lines.append(f"{series % job} {value} {BEGAN + 60 * minute}\n")
    (tmp_path / "samples").write_text("".join(lines) + "# EOF\n")
    made = ["promtool", "tsdb", "create-blocks-from", "openmetrics", "samples", "tsdb"]
    subprocess.run(made, cwd=tmp_path, check=True, capture_output=True, timeout=120)
    (tmp_path / "prometheus.yaml").write_text("{}")
    server = Prometheus("prometheus", tmp_path, "--config.file=prometheus.yaml", "--storage.tsdb.path=tsdb")
    try:
        server.await_ready()
        yield server
    finally:
        server.end()


def test_worst_job_is_first_in_each_table_of_the_fleet(prometheus: Prometheus, tmp_path: Path) -> None:
    assert main(["dashboards", "export", str(tmp_path / "exported")]) == 0
    board = json.loads((tmp_path / "exported" / "grafana" / "fleet.json").read_text())
    range_s = f"{2 * MINUTES * 60}"
    named = {"__range": f"{range_s}s", "__range_s": range_s}
    tables = {panel["title"]: panel for panel in board["panels"] if panel["type"] == "table"}
    assert tables.keys() == WORST_FIRST.keys() | {"Run folders"}
    orders = {}
    for title in WORST_FIRST:
        (target,) = tables[title]["targets"]
        rows = prometheus.instant(filled(target["expr"], named), AT)
        orders[title] = "".join(row["metric"]["job_id"] for row in rows)
    assert orders == WORST_FIRST
