"""Files that other services read say the same as the package: the citation, the workflow of the CI."""

from __future__ import annotations

import re

import yaml

from resilience import __version__
from tests.support.server import ROOT

CITATION = yaml.safe_load((ROOT / "CITATION.cff").read_text())
JOBS = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())["jobs"]
PROJECT = (ROOT / "pyproject.toml").read_text()


def version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("."))


def test_citation_names_the_version_and_the_licence_of_the_package() -> None:
    (licence,) = re.findall(r'^license = "(.+)"', PROJECT, re.MULTILINE)
    assert (CITATION["version"], CITATION["license"]) == (__version__, licence)


def test_workflow_runs_only_the_script_that_anybody_can_repeat() -> None:
    assert [step["run"] for job in JOBS.values() for step in job["steps"] if "run" in step] == [".ci/run"]


def test_workflow_begins_with_the_oldest_python_that_is_supported() -> None:
    (oldest,) = re.findall(r'^requires-python = ">=(.+)"', PROJECT, re.MULTILINE)
    pythons = [version(text) for job in JOBS.values() for text in job["strategy"]["matrix"]["python"]]
    assert min(pythons) == version(oldest)


def test_quick_campaign_of_the_ci_has_a_bound() -> None:
    """Without one, only the limit of the whole job ends a campaign that has become slow."""
    script = (ROOT / ".ci" / "run").read_text()
    (options,) = re.findall(r"python -m tests\.campaign --quick (.+)'", script)
    assert "--minutes 15" in options
