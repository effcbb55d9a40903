"""Every configuration that the docs show or that we export is loaded by the program that it is for."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXPORTED = ROOT / "dashboards"
LIMIT = 280.0  # seconds

# file, program, the arguments that make it load the file and do nothing more
LOADED = [
    ("prometheus/prometheus.yaml", "promtool", ("check", "config")),
    ("prometheus/recording.yaml", "promtool", ("check", "rules")),
    ("prometheus/alerts.yaml", "promtool", ("check", "rules")),
    ("alertmanager.yaml", "amtool", ("check-config",)),
    ("logs/promtail.yaml", "promtail", ("-check-syntax", "-config.file")),
    ("logs/vector.toml", "vector", ("validate", "--no-environment")),
    ("logs/config.alloy", "alloy", ("validate",)),
]
FROM_WHERE = {"promtool": "apt-get install prometheus", "amtool": "apt-get install prometheus-alertmanager"}
NO_PACKAGE = "PyPI, Debian and npm have no package of it; tests/docs/test_log_shippers.py performs the file in Python"
SHOWN = re.findall(r"```yaml\n(scrape_configs:\n.*?)```", (ROOT / "docs" / "dashboards.md").read_text(), re.DOTALL)


def load(program: str, arguments: tuple[str, ...], path: Path) -> None:
    if shutil.which(program) is None:
        pytest.skip(f"{program} is not here, so {path.name} was not loaded: {FROM_WHERE.get(program, NO_PACKAGE)}")
    done = subprocess.run(
        [program, *arguments, str(path)], cwd=path.parent, capture_output=True, text=True, timeout=LIMIT
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(("name", "program", "arguments"), LOADED, ids=[name for name, *_ in LOADED])
def test_exported_configuration_is_loaded(
    name: str, program: str, arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RESILIENCE_RUN_DIR", str(ROOT))
    load(program, arguments, EXPORTED / name)


def test_docker_compose_loads_the_example(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RESILIENCE_RUN_DIR", str(ROOT))
    program = composer()
    if program is None:
        pytest.skip("docker-compose.yaml was not loaded: apt-get install --no-install-recommends docker-compose")
    compose = [*program, "--file", str(EXPORTED / "docker-compose.yaml"), "config"]
    done = subprocess.run(compose, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, done.stderr
    assert f"{ROOT}:/runs:ro" in done.stdout or f"source: {ROOT}\n" in done.stdout  # as versions 1 and 2 write it
    monkeypatch.delenv("RESILIENCE_RUN_DIR")
    done = subprocess.run(compose, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode != 0
    assert "the directory that holds the run folders" in done.stderr


def composer() -> list[str] | None:
    """Return the command of the Docker Compose that is installed: of version 2, a plugin, or of version 1."""
    for command in (["docker", "compose"], ["docker-compose"]):
        is_here = shutil.which(command[0]) is not None
        if is_here and not subprocess.run([*command, "version"], capture_output=True, timeout=LIMIT).returncode:
            return command
    return None


def test_docs_show_both_ways_of_discovery() -> None:
    assert {name for text in SHOWN for name in re.findall(r"\w+_sd_configs", text)} == {
        "file_sd_configs",
        "http_sd_configs",
    }


@pytest.mark.parametrize("text", SHOWN, ids=[re.findall(r"(\w+_sd)_configs", text)[0] for text in SHOWN])
def test_configuration_that_the_docs_show_is_loaded_by_prometheus(text: str, tmp_path: Path) -> None:
    path = tmp_path / "prometheus.yaml"
    path.write_text(text)
    load("promtool", ("check", "config"), path)


def test_path_that_the_docs_showed_before_is_refused(tmp_path: Path) -> None:
    """It has two `*`; so the test above does find such a thing."""
    path = tmp_path / "prometheus.yaml"
    path.write_text(SHOWN[0].replace("/.targets/*.json", "/*/metrics/*.sd.json"))
    with pytest.raises(AssertionError, match="is not valid for file discovery"):
        load("promtool", ("check", "config"), path)
