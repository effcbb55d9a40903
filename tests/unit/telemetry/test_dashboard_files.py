"""`resilience dashboards export` writes the shipped files, with an operator's names and labels."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from resilience.cli import main

SHIPPED = Path(__file__).parents[3] / "dashboards"


def files_in(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_export_writes_the_files_of_the_checkout(tmp_path: Path) -> None:
    assert main(["dashboards", "export", str(tmp_path / "out")]) == 0
    shipped = files_in(SHIPPED)
    expected = {
        name: content for name, content in shipped.items() if not name.startswith("generator/") and name != "README.md"
    }
    assert files_in(tmp_path / "out") == expected


def test_export_writes_everything_with_the_chosen_data_source(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "out"
    options = ["--datasource", "Mimir", "--grafana", "https://grafana.example"]
    assert main(["dashboards", "export", str(folder), *options]) == 0
    written = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert "alertmanager.yaml" in written
    overview = json.loads((folder / "grafana/overview.json").read_text())
    chosen = {each["name"]: each.get("current") for each in overview["templating"]["list"]}["datasource"]
    assert chosen["value"] == "Mimir"
    assert "https://grafana.example/d/resilience-runbooks" in (folder / "prometheus/alerts.yaml").read_text()
    assert str(folder) in capsys.readouterr().out


def test_export_for_one_cluster_asks_for_nothing_else(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    assert main(["dashboards", "export", str(folder), "--match", 'cluster="a"', "--match", 'team!="x"']) == 0
    asked = [rule["expr"] for name in ("recording", "alerts") for rule in rules_of(folder, name)]
    for path in (folder / "grafana").glob("*.json"):
        asked += asked_in(json.loads(path.read_text()))
    names = re.compile(r"(?<![:\w])(?:resilience_\w+|up|ALERTS)(?![:\w])({[^}]*})?")
    selectors = [found[1] for text in asked for found in names.finditer(text)]
    assert len(selectors) > 400
    of_alerts = [found[0] for text in asked for found in names.finditer(text) if found[0].startswith("ALERTS")]
    assert [each for each in selectors if not (each or "").endswith('cluster="a", team!="x"}')] == [
        each.removeprefix("ALERTS") for each in of_alerts
    ]


def test_alerts_are_asked_for_by_labels_that_alerts_have(tmp_path: Path) -> None:
    """Rules keep the cluster and the job. With another label, the panels would show no alert while alerts fire."""
    folder = tmp_path / "out"
    assert main(["dashboards", "export", str(folder), "--match", 'cluster="a"', "--match", 'team!="x"']) == 0
    asked = [text for path in (folder / "grafana").glob("*.json") for text in asked_in(json.loads(path.read_text()))]
    of_alerts = [found for text in asked for found in re.findall(r"ALERTS{[^}]*}", text)]
    assert len(of_alerts) > 2
    assert [each for each in of_alerts if not each.endswith('cluster="a"}')] == []


def test_dashboards_of_two_clusters_do_not_replace_each_other(tmp_path: Path) -> None:
    for name in ("a", "b"):
        options = ["--match", f'cluster="{name}"', "--name", name]
        assert main(["dashboards", "export", str(tmp_path / name), *options]) == 0
    uids, titles = ({of[key] for of in boards_of(tmp_path / "a")} for key in ("uid", "title"))
    others = list(boards_of(tmp_path / "b"))
    assert len(others) == len(uids) == len(titles)
    assert not uids & {of["uid"] for of in others} and not titles & {of["title"] for of in others}
    # Links stay within one cluster: those between dashboards, to runbooks, and of alerts.
    texts = [path.read_text() for path in (tmp_path / "a").rglob("*.*") if path.suffix in (".json", ".yaml")]
    linked = {uid for text in texts for uid in re.findall(r"/d/([\w-]+)", text)}
    assert linked == uids
    (provider,) = yaml.safe_load((tmp_path / "a/provisioning/dashboards/resilience.yaml").read_text())["providers"]
    assert (provider["name"], provider["folder"]) == ("resilience-a", "Resilience a")
    assert "uid: resilience-prometheus\n" in (tmp_path / "a/provisioning/datasources/prometheus.yaml").read_text()


def test_name_that_fits_no_uid_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a b", "", "a" * 21):
        assert main(["dashboards", "export", str(tmp_path / "out"), "--name", name]) == 2
        assert "20 letters" in capsys.readouterr().err


def boards_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in (folder / "grafana").glob("*.json")]


def asked_in(content: Any) -> list[str]:
    """The queries of a dashboard for Prometheus."""
    if isinstance(content, list):
        return [query for each in content for query in asked_in(each)]
    if not isinstance(content, dict):
        return []
    own = [text for name, text in content.items() if name in ("expr", "query") and isinstance(text, str)]
    return own + [query for each in content.values() for query in asked_in(each)]


def rules_of(folder: Path, name: str) -> list[dict[str, str]]:
    groups = yaml.safe_load((folder / "prometheus" / f"{name}.yaml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def test_matcher_that_is_none_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dashboards", "export", str(tmp_path / "out"), "--match", "cluster=a"]) == 2
    assert 'cluster="a"' in capsys.readouterr().err


def test_export_into_what_is_no_folder_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert main(["dashboards", "export", str(tmp_path / "file")]) == 2
    assert ": Not a directory; give a writable folder" in capsys.readouterr().err
