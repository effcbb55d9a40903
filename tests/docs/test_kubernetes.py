"""The manifests in examples/kubernetes are what the published types allow, and agree with the launcher."""

from __future__ import annotations

import re
import shlex
from typing import Any

import pytest
import yaml

from resilience.core import cycle
from resilience.launcher.arguments import Options, parse
from tests.support.server import ROOT

FOLDER = ROOT / "examples" / "kubernetes"
PAGE = (ROOT / "docs" / "kubernetes.md").read_text()
MANIFESTS = [
    pytest.param(manifest, id=f"{path.name}:{manifest['kind']}")
    for path in sorted(FOLDER.glob("*.yaml"))
    for manifest in yaml.safe_load_all(path.read_text())
]
JOBS = [manifest for manifest in MANIFESTS if manifest.values[0]["kind"] in ("JobSet", "ClusterTrainingRuntime")]
MODELS = {
    "JobSet": "JobsetV1alpha2JobSet",
    "ClusterTrainingRuntime": "TrainerV1alpha1ClusterTrainingRuntime",
    "TrainJob": "TrainerV1alpha1TrainJob",
}


def spec_of(manifest: dict[str, Any]) -> dict[str, Any]:
    spec = manifest["spec"]
    return dict(spec["template"]["spec"] if manifest["kind"] == "ClusterTrainingRuntime" else spec)


def job_of(manifest: dict[str, Any]) -> dict[str, Any]:
    (job,) = spec_of(manifest)["replicatedJobs"]
    return dict(job["template"]["spec"])


@pytest.mark.parametrize("manifest", MANIFESTS)
def test_manifest_has_only_what_its_published_type_has(manifest: dict[str, Any]) -> None:
    models = pytest.importorskip(
        "kubeflow_trainer_api.models", reason="kubeflow-trainer-api (extra `test`) is not here"
    )
    read = getattr(models, MODELS[manifest["kind"]]).from_dict(manifest)
    assert without_defaults(read.to_dict(), manifest) == manifest


def without_defaults(read: Any, given: Any) -> Any:
    """Leave out what the manifest does not say and its type adds. What the type does not know is missing in `read`."""
    if isinstance(read, dict) and isinstance(given, dict):
        return {key: without_defaults(read[key], value) for key, value in given.items() if key in read}
    if isinstance(read, list) and isinstance(given, list):
        return [without_defaults(*pair) for pair in zip(read, given, strict=True)]
    return getattr(read, "actual_instance", read)


@pytest.mark.parametrize("manifest", JOBS)
def test_rules_of_the_jobset_have_names_and_actions_that_its_controller_accepts(manifest: dict[str, Any]) -> None:
    (rule,) = spec_of(manifest)["failurePolicy"]["rules"]
    assert re.fullmatch(r"[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?", rule["name"])  # not part of the published types
    assert (rule["action"], rule["onJobFailureReasons"]) == ("FailJobSet", ["PodFailurePolicy"])


@pytest.mark.parametrize("manifest", JOBS)
def test_job_is_given_up_for_the_statuses_that_say_so(manifest: dict[str, Any]) -> None:
    rules = job_of(manifest)["podFailurePolicy"]["rules"]
    by_action = {rule["action"]: rule["onExitCodes"]["values"] for rule in rules if "onExitCodes" in rule}
    assert by_action == {"FailJob": [2, 93, 94], "Ignore": [95, 137, 143]}
    assert [Options().same_failure_exit_code, cycle.SHUT_DOWN, cycle.EXCLUDED] == [93, 94, 95]


@pytest.mark.parametrize("manifest", JOBS)
def test_command_is_one_that_the_launcher_understands(manifest: dict[str, Any]) -> None:
    pod = job_of(manifest)["template"]["spec"]
    (container,) = pod["containers"]
    assert container["command"] == ["bash", "-c"]
    text = re.sub(r"\$\(\(.*?\)\)", "1", container["args"][0])
    words = shlex.split(text.replace("$PET_MASTER_ADDR:$PET_MASTER_PORT", "node0:29500"))
    assert words[:3] == ["exec", "resilience", "run"]
    options = parse(words[3:])
    grace = options.options.stop_grace + 30  # --shutdown-timeout is torchrun's, 30 by default
    assert pod["terminationGracePeriodSeconds"] > grace


def test_page_has_a_row_for_every_status_of_the_manifests() -> None:
    rows = set(re.findall(r"^\| (\d+)", PAGE, flags=re.MULTILINE))
    assert rows >= {"0", "1", "2", "93", "94", "95", "137", "143"}


def test_page_names_every_manifest() -> None:
    assert [path.name for path in FOLDER.iterdir() if path.name not in PAGE] == []
