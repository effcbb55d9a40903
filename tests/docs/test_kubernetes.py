"""The manifests in examples/kubernetes are what the published types allow, and agree with the launcher."""

from __future__ import annotations

import re
import shlex
from typing import Any

import pytest
import yaml

from resilience.core import cycle
from resilience.launcher.arguments import Command, Options, parse
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


def command_of(manifest: dict[str, Any]) -> Command:
    (container,) = job_of(manifest)["template"]["spec"]["containers"]
    assert container["command"] == ["bash", "-c"]
    text = re.sub(r"\$\(\(.*?\)\)", "1", container["args"][0])
    words = shlex.split(text.replace("$PET_MASTER_ADDR:$PET_MASTER_PORT", "node0:29500"))
    assert words[:3] == ["exec", "resilience", "run"]
    return parse(words[3:])


@pytest.mark.parametrize("manifest", JOBS)
def test_job_has_completed_once_the_stores_host_or_the_least_number_of_nodes_has(manifest: dict[str, Any]) -> None:
    job = job_of(manifest)
    least, _, _ = command_of(manifest).torchrun.nnodes.partition(":")
    assert job["completionMode"] == "Indexed"  # otherwise Kubernetes refuses the policy
    assert job["successPolicy"] == {"rules": [{"succeededIndexes": "0"}, {"succeededCount": int(least)}]}


@pytest.mark.parametrize("manifest", JOBS)
def test_command_is_one_that_the_launcher_understands(manifest: dict[str, Any]) -> None:
    pod = job_of(manifest)["template"]["spec"]
    options = command_of(manifest)
    grace = options.options.stop_grace + 30  # --shutdown-timeout is torchrun's, 30 by default
    assert pod["terminationGracePeriodSeconds"] > grace


FIELDS = {"spec.nodeName": "__meta_kubernetes_pod_node_name", "metadata.name": "__meta_kubernetes_pod_name"}
SNIPPETS = [
    yaml.safe_load(block)
    for block in re.findall(
        r"^```\w+\n(.*?)^```", (ROOT / "docs/integrations.md").read_text(), re.DOTALL | re.MULTILINE
    )
    if block.startswith(("env:", "apiVersion: monitoring"))
]
PODS = [{"spec.nodeName": host, "metadata.name": f"train-{number}"} for number, host in enumerate(["a", "a", "b"])]


def container_of(manifest: dict[str, Any]) -> dict[str, Any]:
    (container,) = job_of(manifest)["template"]["spec"]["containers"]
    return dict(container)


def node_of(env: list[dict[str, Any]], pod: dict[str, str]) -> str:
    """Return the value of RESILIENCE_NODE in a pod. As the kubelet, use only variables that come before."""
    values: dict[str, str] = {}
    for entry in env:
        if "valueFrom" in entry:
            values[entry["name"]] = pod[entry["valueFrom"]["fieldRef"]["fieldPath"]]
        else:
            values[entry["name"]] = re.sub(r"\$\((\w+)\)", lambda match: values[match[1]], entry["value"])
    return values["RESILIENCE_NODE"]


def label_of(pod: dict[str, str]) -> str:
    """Return the label `node` that the PodMonitor gives a pod's series."""
    _, monitor = SNIPPETS
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    (rule,) = [rule for rule in endpoint["relabelings"] if rule["targetLabel"] == "node"]
    meta = {FIELDS[field]: value for field, value in pod.items()}
    return str(rule.get("separator", ";")).join(meta[name] for name in rule["sourceLabels"])


@pytest.mark.parametrize(
    "env",
    [
        *[pytest.param(container_of(each.values[0])["env"], id=str(each.id)) for each in JOBS],
        pytest.param(SNIPPETS[0]["env"], id="integrations.md"),
    ],
)
def test_label_of_a_pods_series_is_its_node_in_the_records(env: list[dict[str, Any]]) -> None:
    assert [label_of(pod) for pod in PODS] == [node_of(env, pod) for pod in PODS]
    assert len({label_of(pod) for pod in PODS}) == len(PODS)  # also of two pods on one host


def test_pod_monitor_finds_the_pods_of_the_jobset() -> None:
    snippet, monitor = SNIPPETS
    (jobset,) = [each.values[0] for each in JOBS if each.values[0]["kind"] == "JobSet"]
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    ports = {port.get("name"): port["containerPort"] for port in container_of(jobset)["ports"]}
    assert ports[endpoint["port"]] == 9400
    assert snippet["ports"] == [{"name": endpoint["port"], "containerPort": 9400}]
    (label,) = [each["key"] for each in monitor["spec"]["selector"]["matchExpressions"]]
    values = {each["name"]: each.get("value") for each in container_of(jobset)["env"]}
    assert job_of(jobset)["template"]["metadata"]["labels"][label] == values["RESILIENCE_JOB_ID"]


def test_page_has_a_row_for_every_status_of_the_manifests() -> None:
    rows = set(re.findall(r"^\| (\d+)", PAGE, flags=re.MULTILINE))
    assert rows >= {"0", "1", "2", "93", "94", "95", "137", "143"}


def test_page_names_every_manifest() -> None:
    assert [path.name for path in FOLDER.iterdir() if path.name not in PAGE] == []
