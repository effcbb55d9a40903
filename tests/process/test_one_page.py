"""One cause is one page: the exported example, unchanged, silences consequences in a real Alertmanager.

The alerts that fire together in a scenario, as promtool shows, are posted as those of one job."""

from __future__ import annotations

import itertools
import json
import time
import urllib.request
from collections import defaultdict
from collections.abc import Iterator, Mapping

import pytest
import yaml

pytest.importorskip("grafana_foundation_sdk", reason="the scenarios are built with it; it needs Python 3.11")

from dashboards.generator.scenarios import SCENARIOS
from resilience.cli import main
from tests.support.prometheus import MISSING, STRAIGHT, Server, get

pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"{MISSING} not here: apt-get install prometheus-alertmanager")

LIMIT = 30.0  # seconds
Labels = Mapping[str, str]
CONSEQUENCES = (
    ("JobFailed", "JobGone"),
    ("JobGone", "JobStalled"),
    ("JobStalled", "RankHeartbeatStale"),
    ("RestartLoop", "RestartBudgetLow"),
    ("StartStalled", "RestartSlow"),
    ("MonitorDown", "RankHeartbeatStale"),
    ("MonitorDown", "SectionNearLimit"),
)
OF_NODES = ("MonitorDown", "RankHeartbeatStale")  # each is about one node


class Alertmanager:
    """A running Alertmanager with the exported configuration. of_rules: the labels that each exported alert has."""

    def __init__(self, server: Server, of_rules: Mapping[str, Labels]) -> None:
        self._server, self._of_rules = server, of_rules
        self._fired = 0

    def labels(self, name: str, job: str, cluster: str = "", node: str = "n0") -> dict[str, str]:
        """The labels of an alert. Without several clusters it has no label `cluster`, as in Prometheus."""
        labels = {"alertname": name, "job_id": job, **self._of_rules[name]}
        labels |= {"node": node} if name in OF_NODES else {}
        return labels | ({"cluster": cluster} if cluster else {})

    def not_silenced(self, alerts: list[dict[str, str]]) -> dict[str, set[str]]:
        """Fire the alerts. Return the names of those that no other one silences, by job.

        Alertmanager lists an alert before the part that silences others has taken it. That part takes them in their
        order: once it silences a pair that was fired later, it knows all of them."""
        self._fire(alerts)
        self._fired += 1
        later = f"fired later, {self._fired}"
        self._fire([self.labels(name, later) for name in CONSEQUENCES[0]])
        deadline = time.monotonic() + LIMIT
        while self._active({later})[later] != {CONSEQUENCES[0][0]}:
            assert time.monotonic() < deadline, f"{CONSEQUENCES[0]} was not silenced within {LIMIT} s"
            time.sleep(0.1)
        return self._active({labels["job_id"] for labels in alerts})

    def _fire(self, alerts: list[dict[str, str]]) -> None:
        body = json.dumps([{"labels": labels} for labels in alerts]).encode()
        request = urllib.request.Request(
            f"{self._server.url}/api/v2/alerts", body, {"Content-Type": "application/json"}, method="POST"
        )
        STRAIGHT.open(request, timeout=LIMIT).close()

    def _active(self, jobs: set[str]) -> defaultdict[str, set[str]]:
        active: defaultdict[str, set[str]] = defaultdict(set)
        for alert in get(f"{self._server.url}/api/v2/alerts"):
            if alert["labels"]["job_id"] in jobs and not alert["status"]["inhibitedBy"]:
                active[alert["labels"]["job_id"]].add(alert["labels"]["alertname"])
        return active


@pytest.fixture(scope="module")
def alertmanager(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Alertmanager]:
    folder = tmp_path_factory.mktemp("alertmanager")
    assert main(["dashboards", "export", str(folder / "exported")]) == 0
    rules = yaml.safe_load((folder / "exported" / "prometheus" / "alerts.yaml").read_text())
    alerts = [rule for group in rules["groups"] for rule in group["rules"] if "alert" in rule]
    server = Server(
        "prometheus-alertmanager",
        folder,
        f"--config.file={folder / 'exported' / 'alertmanager.yaml'}",
        f"--storage.path={folder / 'storage'}",
        "--cluster.listen-address=",
    )
    try:
        server.await_ready()
        yield Alertmanager(server, {rule["alert"]: rule["labels"] for rule in alerts})
    finally:
        server.end()


def test_alerts_that_fire_together_for_one_cause_are_one_page(alertmanager: Alertmanager) -> None:
    firing = {
        f"{scenario.name} at minute {minute}": names
        for scenario in SCENARIOS
        for minute in scenario.looked_at
        if (names := {name for name, minutes in scenario.fires.items() if minute in minutes})
    }
    assert any(len(names) > 1 for names in firing.values())
    alerts = [alertmanager.labels(name, moment) for moment, names in firing.items() for name in names]
    active = alertmanager.not_silenced(alerts)
    assert {moment: active[moment] for moment in firing if len(active[moment]) != 1} == {}


@pytest.mark.parametrize(("cause", "consequence"), CONSEQUENCES)
def test_cause_silences_its_consequence_in_the_same_job_and_cluster_only(
    alertmanager: Alertmanager, cause: str, consequence: str
) -> None:
    for job, cluster, active in (
        ("one", "east", {cause}),
        ("one", "west", {cause, consequence}),
        ("two", "east", {cause, consequence}),
    ):
        case = f"{cause} and {consequence}, {job} in {cluster}: "
        first = alertmanager.labels(cause, case + job, cluster)
        second = alertmanager.labels(consequence, f"{case}one", "east")
        assert set(itertools.chain(*alertmanager.not_silenced([first, second]).values())) == active, case


@pytest.mark.parametrize(("node", "active"), [("n0", {"MonitorDown"}), ("n1", {"MonitorDown", "RankHeartbeatStale"})])
def test_lost_monitor_silences_stale_heartbeats_of_its_node_only(
    alertmanager: Alertmanager, node: str, active: set[str]
) -> None:
    job = f"monitor of n0, rank of {node}"
    alerts = [alertmanager.labels("MonitorDown", job), alertmanager.labels("RankHeartbeatStale", job, node=node)]
    assert alertmanager.not_silenced(alerts)[job] == active
