"""How do dashboards and rules get into an installation?  One folder, from which all of it can be started.

grafana/*.json              dashboards               provisioning/…     how Grafana finds them
prometheus/*.yaml           rules, and a config      docker-compose.yaml   all three servers, for a try
prometheus/tests/*.yaml     unit tests of the alerts alertmanager.yaml  an example
lnav/resilience.json        log lines in lnav        logs/*             log lines for Loki"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from resilience.adapters import files
from resilience.analysis.dashboards import collecting, rules, scenarios
from resilience.analysis.dashboards.boards import BOARDS
from resilience.analysis.dashboards.examples import unit_tests
from resilience.analysis.dashboards.queries import is_matcher
from resilience.errors import ConfigurationError
from resilience.telemetry.targets import FOLDER

DATASOURCE = "Prometheus"
GRAFANA = "http://localhost:3000"
MADE = "# Made from the code by `resilience dashboards export`; change it there, or after exporting.\n"


def texts(datasource: str = DATASOURCE, grafana: str = GRAFANA, matchers: tuple[str, ...] = ()) -> dict[str, str]:
    """Return all files by their path within the folder.

    datasource: name of Grafana's Prometheus data source. grafana: URL under which people reach Grafana. matchers: of
    labels, for everything that dashboards and rules ask.
    Raises: ConfigurationError if what dashboards are built with is not installed, or a matcher is none."""
    for matcher in matchers:
        if not is_matcher(matcher):
            raise ConfigurationError(f'{matcher!r} is no matcher of labels; expected one such as cluster="a"')
    from resilience.analysis.dashboards.grafana import board_json, runbooks_json

    made = {f"grafana/{board.name}.json": board_json(board, BOARDS, datasource, matchers) for board in BOARDS}
    made["grafana/runbooks.json"] = runbooks_json()
    made["prometheus/recording.yaml"] = _yaml(rules.recording_rules(matchers))
    made["prometheus/alerts.yaml"] = _yaml(rules.alert_rules(grafana, matchers))
    made["prometheus/prometheus.yaml"] = _yaml(_prometheus())
    for alert in rules.ALERTS:
        made[f"prometheus/tests/{alert.name}.yaml"] = _yaml(unit_tests(alert, grafana))
    made["prometheus/tests/scenarios.yaml"] = _yaml(scenarios.unit_tests())
    made["alertmanager.yaml"] = _yaml(rules.alertmanager())
    made["provisioning/dashboards/resilience.yaml"] = _yaml(_dashboard_provider())
    made["provisioning/datasources/prometheus.yaml"] = _yaml(_datasource(datasource))
    made["docker-compose.yaml"] = _yaml(_compose())
    return {**made, **collecting.texts()}


def write(
    folder: Path, datasource: str = DATASOURCE, grafana: str = GRAFANA, matchers: tuple[str, ...] = ()
) -> list[Path]:
    """Write all files into a folder, replacing those of an earlier export; return their paths.

    Raises: ConfigurationError if the folder cannot be written, or see `texts`."""
    written = []
    for name, text in texts(datasource, grafana, matchers).items():
        path = folder / name
        if not files.replace(path, text.encode()):
            raise ConfigurationError(f"cannot write {path}: give a folder that can be written")
        written.append(path)
    return written


def _yaml(content: dict[str, Any]) -> str:
    return MADE + yaml.safe_dump(content, sort_keys=False, width=120, allow_unicode=True)


def _prometheus() -> dict[str, Any]:
    """A Prometheus that finds the nodes of all jobs by the entries that they leave in the run directory.

    refresh_interval: on a network file system nobody tells Prometheus of a change."""
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
        # timeInterval is the scrape interval: $__rate_interval is made from it. An exemplar leads to the trace.
        "jsonData": {
            "timeInterval": "15s",
            "httpMethod": "POST",
            "exemplarTraceIdDestinations": [{"name": "trace_id", "datasourceUid": "tempo"}],
        },
    }
    return {"apiVersion": 1, "datasources": [source]}


def _compose() -> dict[str, Any]:
    """On the host's own network: the nodes serve their metrics on the loopback address."""
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
