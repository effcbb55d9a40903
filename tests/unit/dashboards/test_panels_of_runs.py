"""Panels, asked about the metrics of a run's nodes, show the numbers of the run's records.

Restarts are counted by tests/fixtures/count.py, which knows nothing of the package; seconds are those of the report."""

from __future__ import annotations

import bisect
import json
import subprocess
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from resilience.facts.records import Record
from resilience.report.condensed import report
from resilience.run_folder.load import load
from resilience.telemetry.catalogue import BY_NAME
from resilience.telemetry.metrics import READ_S, MetricView
from resilience.telemetry.prometheus import Exposition
from tests.fixtures.count import count
from tests.fixtures.jobs import JOBS, unpacked
from tests.support.agreement import written
from tests.support.launch_streams import Fault, launched
from tests.unit.dashboards.test_panel_values import BEGAN, PROMTOOL, J, expression

pytestmark = pytest.mark.skipif(PROMTOOL is None, reason="promtool is not here: apt-get install prometheus")
DURATION = "resilience_restart_duration_seconds"
TOOK = "restarts: Restart duration, quantiles"


def generated(folder: Path) -> Path:
    told = launched([Fault("kill", 1), Fault("hang", 2), Fault("raise", 0)], nodes=2)
    return written(told.interleaved(0), folder / "generated")


def recorded(name: str) -> Callable[[Path], Path]:
    return lambda folder: unpacked(name, folder)


def series_of(records: Iterable[Record], node: str) -> dict[str, str]:
    """What an exporter of this node shows at the end, in promtool's notation; the job has begun in the first minute."""
    own = [record for record in records if record.origin.node == node]
    read_ns = max(record.mono_ns for record in own) + round(READ_S * 1e9)
    view = MetricView(lambda: read_ns)
    for record in own:
        view.take(record)
    text = Exposition(view).labelled({"job_id": "j", "node": node}, with_gauges=True).decode()
    shown = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    return {
        name: f"_ {30.0 if name.startswith(BEGAN) else float(value):.12f}x9"
        for name, value in shown.items()
        if "_created" not in name
    }


def interpolated(q: float, durations: Iterable[float]) -> float:
    """What Prometheus makes of a quantile: a place within the bucket, as if its values were spread evenly."""
    ordered, edges = sorted(durations), BY_NAME[DURATION].buckets
    wanted = q * len(ordered)
    number = next(n for n, edge in enumerate(edges) if bisect.bisect_right(ordered, edge) >= wanted)
    below, edge = edges[number - 1], edges[number]
    before, until = bisect.bisect_right(ordered, below), bisect.bisect_right(ordered, edge)
    return below + (edge - below) * (wanted - before) / (until - before)


@pytest.mark.parametrize("make", [*map(recorded, JOBS), generated], ids=[*JOBS, "generated"])
def test_panels_show_the_numbers_of_the_records(make: Callable[[Path], Path], tmp_path: Path) -> None:
    folder = make(tmp_path)
    records, told, numbers = list(load(folder).records), report(load(folder)), count(folder)
    assert told.times is not None
    share = told.times.ettr  # None: no worker has shown progress
    times, took = told.times, {layer: seconds for layer, seconds in numbers["restarts"].items() if seconds}
    lost = times.startup_s + times.restart_s + times.hang_s + (times.rework_s or 0.0) + times.idle_s
    in_place = sum(incident.layer == "inprocess" for incident in told.incidents)
    restarts = float(in_place + max(0, numbers["cycles"] - 1))
    expected: list[tuple[str, int, dict[str, float]]] = [
        ("overview: Goodput", 0, {} if share is None else {"": share}),
        ("overview: Restarts", 0, {"": restarts}),
        ("fleet: Lowest goodput", 0, {} if share is None else {J: share}),
        ("fleet: Most restarts", 0, {J: restarts} if restarts else {}),
        ("fleet: Most lost time", 0, {J: lost * times.ranks}),
        ("overview: Time to recover", 0, {f'layer="{name}"': sum(each) / len(each) for name, each in took.items()}),
        (TOOK, 0, {f'layer="{name}"': interpolated(0.5, each) for name, each in took.items()}),
        (TOOK, 1, {f'layer="{name}"': interpolated(0.95, each) for name, each in took.items()}),
    ]
    series = {
        name: values
        for node in sorted({record.origin.node for record in records})
        for name, values in series_of(records, node).items()
    }
    test = {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": [
            {
                "expr": expression(panel, query, 1e-7),
                "eval_time": "5m",
                "exp_samples": [
                    {"labels": f"{{{labels}}}", "value": round(value, 7)} for labels, value in values.items()
                ],
            }
            for panel, query, values in expected
        ],
    }
    (tmp_path / "tests.yaml").write_text(json.dumps({"tests": [test]}))  # JSON is YAML, and quicker to write
    done = subprocess.run([str(PROMTOOL), "test", "rules", "tests.yaml"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
