"""The contents of `dashboards/`: one folder from which everything can be started.

grafana/*.json            dashboards                 provisioning/…       Grafana's provisioning
prometheus/*.yaml         rules and a configuration  docker-compose.yaml  all three servers, to try them
prometheus/tests/*.yaml   unit tests of the alerts   alertmanager.yaml    an example
lnav/resilience.json      log format for lnav        logs/*               log shippers for Loki"""

from __future__ import annotations

from typing import Any

from dashboards.generator import collecting, rules, scenarios
from dashboards.generator.boards import BOARDS
from dashboards.generator.examples import unit_tests
from dashboards.generator.grafana import board_json, runbooks_json
from resilience.telemetry.dashboard_files import DATASOURCE, GRAFANA, yaml_text
from resilience.telemetry.targets import FOLDER


def texts() -> dict[str, str]:
    """Return all files by their path in `dashboards/`."""
    contents = {f"grafana/{board.name}.json": board_json(board, BOARDS) for board in BOARDS}
    contents["grafana/runbooks.json"] = runbooks_json()
    contents["prometheus/recording.yaml"] = yaml_text(rules.recording_rules())
    contents["prometheus/alerts.yaml"] = yaml_text(rules.alert_rules(GRAFANA))
    contents["prometheus/prometheus.yaml"] = yaml_text(_prometheus())
    for alert in rules.ALERTS:
        contents[f"prometheus/tests/{alert.name}.yaml"] = yaml_text(unit_tests(alert, GRAFANA))
    contents["prometheus/tests/scenarios.yaml"] = yaml_text(scenarios.unit_tests())
    contents["alertmanager.yaml"] = yaml_text(rules.alertmanager())
    contents["provisioning/dashboards/resilience.yaml"] = yaml_text(_dashboard_provider())
    contents["provisioning/datasources/prometheus.yaml"] = yaml_text(_datasource(DATASOURCE))
    contents["docker-compose.yaml"] = yaml_text(_compose())
    return {**contents, **collecting.texts()}


def _prometheus() -> dict[str, Any]:
    """Return a Prometheus configuration that discovers the nodes of all jobs by their entries in the run directory.

    refresh_interval: a network file system does not notify Prometheus of changes."""
    return {
        "global": {"scrape_interval": "15s", "evaluation_interval": "30s"},
        "storage": {"exemplars": {"max_exemplars": 10_000}},
        "rule_files": ["recording.yaml", "alerts.yaml"],
        "alerting": {"alertmanagers": [{"static_configs": [{"targets": ["127.0.0.1:9093"]}]}]},
        "scrape_configs": [
            {
                "job_name": "resilience",
                "file_sd_configs": [{"files": [f"/runs/{FOLDER}/*.json"], "refresh_interval": "1m"}],
            }
        ],
    }


def _dashboard_provider() -> dict[str, Any]:
    provider = {
        "name": "resilience",
        "folder": "Resilience",
        "type": "file",
        "options": {"path": "/etc/grafana/resilience"},
    }
    return {"apiVersion": 1, "providers": [provider]}


def _datasource(name: str) -> dict[str, Any]:
    source = {
        "name": name,
        "uid": "resilience-prometheus",
        "type": "prometheus",
        "access": "proxy",
        "url": "http://127.0.0.1:9090",
        "isDefault": True,
        # timeInterval is the scrape interval, from which Grafana derives $__rate_interval. Exemplars link to traces.
        "jsonData": {
            "timeInterval": "15s",
            "httpMethod": "POST",
            "exemplarTraceIdDestinations": [{"name": "trace_id", "datasourceUid": "tempo"}],
        },
    }
    return {"apiVersion": 1, "datasources": [source]}


def _compose() -> dict[str, Any]:
    """Return a docker-compose file that uses the host's network: nodes serve metrics on the loopback address."""
    return {
        "services": {
            "prometheus": {
                "image": "prom/prometheus:v2.53.4",
                "network_mode": "host",
                "command": [
                    "--config.file=/etc/prometheus/prometheus.yaml",
                    "--web.listen-address=127.0.0.1:9090",
                    "--enable-feature=exemplar-storage",
                ],
                "volumes": [
                    "./prometheus:/etc/prometheus:ro",
                    "${RESILIENCE_RUN_DIR:?the directory that holds the run folders}:/runs:ro",
                ],
            },
            "alertmanager": {
                "image": "prom/alertmanager:v0.27.0",
                "network_mode": "host",
                "command": [
                    "--config.file=/etc/alertmanager/alertmanager.yaml",
                    "--web.listen-address=127.0.0.1:9093",
                    "--cluster.listen-address=",
                ],
                "volumes": ["./alertmanager.yaml:/etc/alertmanager/alertmanager.yaml:ro"],
            },
            "grafana": {
                "image": "grafana/grafana:11.6.0",
                "network_mode": "host",
                "environment": {"GF_SERVER_HTTP_ADDR": "127.0.0.1"},
                "volumes": [
                    "./provisioning:/etc/grafana/provisioning:ro",
                    "./grafana:/etc/grafana/resilience:ro",
                ],
            },
        }
    }
