"""A rank that has finished while others train raises no alert, and no alert about the others names it.

The series are those that the exporters of both nodes show, minute by minute."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from resilience.core.observation import Doing
from resilience.facts import events
from resilience.facts.identity import Origin
from resilience.telemetry.metrics import MetricView
from resilience.telemetry.prometheus import Exposition
from resilience.telemetry.rank_snapshot import RankSnapshot
from tests.generate_dashboards import ROOT
from tests.support.node_stories import NodeStory
from tests.unit.dashboards.test_panel_values import PROMTOOL

pytestmark = pytest.mark.skipif(PROMTOOL is None, reason="promtool is not here: apt-get install prometheus")
FINISHED_S = 120.0  # when rank 0 has finished
HANGS_S = 300.0  # when rank 1 gives its last sign, if it hangs
MINUTES = 31
FIRING = 'count by (alertname, node, rank) (ALERTS{alertstate="firing"})'
MOST_SILENT = 'count by (node, rank) (topk(1, resilience_rank_silence_seconds{job_id="j"}))'  # as in JobStalled's text
# How a worker that has finished lives on: it waits in the Wrapper for the others, has ended its monitoring
# (`shutdown_workload_monitoring`, as callbacks do after a training), or shuts down. None: its process has ended.
LIVES_ON = [Doing.WAITING, Doing.OUTSIDE, Doing.ENDING, None]


def shown(told: NodeStory, node: str, rank: int, now_s: float, snapshot: RankSnapshot) -> dict[str, str]:
    """Return the node's series and their values at this time of the job."""
    began_ns = 10**12 * (1 + ord(node) - ord("a"))
    view = MetricView(lambda: began_ns + round(now_s * 1e9))
    for record in told.of_node(node):
        if record.mono_ns <= began_ns + now_s * 1e9:
            view.take(record)
    view.take_snapshots({rank: snapshot})
    text = Exposition(view).labelled({"job_id": "j", "node": node}, with_gauges=True).decode()
    lines = [line for line in text.splitlines() if not line.startswith("#") and "_created" not in line]
    return dict(line.rsplit(" ", 1) for line in lines)


def snapshot_of(node: str, rank: int, doing: Doing, sign_s: float, now_s: float) -> RankSnapshot:
    """Return what a monitor writes now of a rank whose last step was at this time of the job."""
    origin = Origin("job", node, "monitor", 500 + rank, initial_rank=rank, rank=rank, world_size=2, layer="launcher")
    at = 1000.0 * (1 + ord(node) - ord("a")) + sign_s
    step = round(sign_s)
    return RankSnapshot(origin, doing.value, at, step=step, step_at=at, heartbeat_at=at, alive_at=at + now_s - sign_s)


def minutes_of(doing: Doing | None, does_hang: bool) -> Iterator[dict[str, str]]:
    """Yield all series of the job and their values, for each minute."""
    told = NodeStory()
    told.join("ab", 0.0, 1.0)
    told.start("ab", 1.0)
    if doing is None:
        told.exited("a", FINISHED_S, 0)
        told.monitor("a", 0, FINISHED_S, events.RankExited(goodbye=True, code=0))
    for minute in range(MINUTES):
        now_s = 60.0 * minute + 5.0
        sign_s = min(now_s, HANGS_S) if does_hang else now_s
        is_finished = now_s > FINISHED_S
        first_doing = doing or Doing.ENDING if is_finished else Doing.FUNCTION
        first = snapshot_of("a", 0, first_doing, min(now_s, FINISHED_S), now_s)
        yield shown(told, "a", 0, now_s, first) | shown(
            told, "b", 1, now_s, snapshot_of("b", 1, Doing.FUNCTION, sign_s, now_s)
        )


def check(folder: Path, minutes: list[dict[str, str]], expected: list[tuple[str, int, list[str]]]) -> None:
    """Let promtool check queries, as (query, minute, labels of the results), on these series and on our rules."""
    test = {
        "interval": "1m",
        "input_series": [
            {"series": name, "values": " ".join(values.get(name, "stale") for values in minutes)}
            for name in sorted({name for values in minutes for name in values})
        ],
        "promql_expr_test": [
            {
                "expr": query,
                "eval_time": f"{minute}m",
                "exp_samples": [{"labels": f"{{{labels}}}", "value": 1} for labels in results],
            }
            for query, minute, results in expected
        ],
    }
    rules = [str(ROOT / "dashboards" / "prometheus" / name) for name in ("recording.yaml", "alerts.yaml")]
    (folder / "tests.yaml").write_text(json.dumps({"rule_files": rules, "evaluation_interval": "1m", "tests": [test]}))
    done = subprocess.run([str(PROMTOOL), "test", "rules", "tests.yaml"], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("doing", LIVES_ON)
def test_no_alert_fires_while_the_other_rank_trains(doing: Doing | None, tmp_path: Path) -> None:
    minutes = list(minutes_of(doing, does_hang=False))
    assert 'resilience_rank_silence_seconds{job_id="j",node="b",rank="1"}' in minutes[-1]
    check(tmp_path, minutes, [(FIRING, minute, []) for minute in range(2, MINUTES)])


@pytest.mark.parametrize("doing", LIVES_ON)
def test_alerts_name_the_rank_that_hangs_and_not_the_one_that_has_finished(doing: Doing | None, tmp_path: Path) -> None:
    minutes = list(minutes_of(doing, does_hang=True))
    rank_1 = 'node="b", rank="1"'
    stale, stalled = f'alertname="RankHeartbeatStale", {rank_1}', 'alertname="JobStalled"'
    check(
        tmp_path,
        minutes,
        [(FIRING, minute, [stale]) for minute in (10, 15)]
        + [(FIRING, 28, [stalled, stale]), (MOST_SILENT, 28, [rank_1])],
    )
