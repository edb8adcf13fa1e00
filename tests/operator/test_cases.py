"""Faults that other operators had in the field, each as the smallest input, on a real API server.

Named after the public report; those that need no API server are in tests/cases.
"""

from __future__ import annotations

import json
import subprocess
from contextlib import suppress
from copy import deepcopy
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import pytest
import yaml
from kubernetes.aio import client, config
from prefill_operator.main.process import report_outdated_crd
from prefill_operator.reconcile.cluster import Cluster

from localcluster.apiserver import ApiServer
from tests.operator.lab import Lab, Object, condition, pipeline
from tests.operator.operating import Operator

ROOT = Path(__file__).resolve().parents[2]
FIXED = {"policy": "Fixed", "maxTokens": 1024, "minTokens": 128}
LONG = "pp-longctx-qwen3-235b-a22b-512k-prod-eu-west"


def gone(lab: Lab) -> None:
    for kind in ("PrefillPipeline", "StatefulSet", "Service", "PodDisruptionBudget", "ConfigMap", "Pod"):
        for name in lab.names(kind):
            lab.until_gone(kind, name)


@pytest.mark.usefixtures("operator")
def test_aibrix_1766_long_names(lab: Lab) -> None:
    """Names and labels of children pass 63 characters: no pod is ever made, the pipeline cannot be deleted."""
    names = [f"{LONG}{'x' * 18}{letter}" for letter in "ab"]
    for name in (LONG, *names):
        lab.create(pipeline(name, chunking=FIXED))
    sets = {}
    for name in (LONG, *names):
        lab.until_reason(name, "Starting")
        uid = (lab.get("PrefillPipeline", name) or {})["metadata"]["uid"]
        (found,) = lab.list("StatefulSet", f"prefill.dev/pipeline-uid={uid}")
        sets[name] = found["metadata"]["name"]
        assert found["spec"]["serviceName"] == sets[name] in lab.names("Service")
        for pod in lab.group(sets[name]):
            assert sets[name] in pod["metadata"]["labels"]["controller-revision-hash"]
    assert len(set(sets.values())) == 3
    for name in sets:
        lab.delete("PrefillPipeline", name)
    gone(lab)


@pytest.mark.usefixtures("operator")
def test_kthena_743_a_corrected_image_heals(lab: Lab) -> None:
    """After an image that cannot be pulled the rollout hangs, even when the image is corrected."""
    lab.create(pipeline("a", chunking=FIXED))
    lab.serve("a-0")
    lab.until_ready("a")
    for image in ("engine:typo", "engine:v2"):
        lab.patch("PrefillPipeline", "a", {"spec": {"engine": {"image": image}}})
        lab.until(
            "StatefulSet", "a-0",
            lambda item, image=image: item["spec"]["template"]["spec"]["containers"][0]["image"] == image
            and item["status"].get("replicas") == 2,
        )  # fmt: skip
        if image == "engine:typo":
            waiting = {"reason": "ImagePullBackOff", "message": "not found"}
            status = {"name": "engine", "image": image, "imageID": "", "ready": False, "restartCount": 0}
            pods = lab.group("a-0")
            lab.set_pod(pods[1], {"containerStatuses": [status | {"state": {"waiting": waiting}}]})
            lab.until_reason("a", "ImagePullFailed")
    lab.serve("a-0")
    assert lab.until_ready("a")["status"]["replicaStatuses"][0]["restarts"] == 0


def test_kopf_601_deleted_while_waiting(lab: Lab, operator: Operator) -> None:
    """Deleted while a handler waits for its retry: endless patches, and a finalizer nobody removes."""
    lab.create(pipeline("a"))
    lab.group("a-0")
    lab.until_reason("a", "Starting")

    def writes() -> float:
        text = operator.page(operator.metrics, "/metrics") or ""
        return sum(float(line.split()[-1]) for line in text.splitlines() if "api_writes_total{" in line)

    before = writes()
    lab.delete("PrefillPipeline", "a")
    lab.until_gone("PrefillPipeline", "a", seconds=30)
    gone(lab)
    assert writes() - before < 10


def test_kopf_75_the_namespace_goes_without_the_operator(lab: Lab, operator: Operator) -> None:
    """The operator is uninstalled before its objects: nobody clears the finalizer, the namespace hangs."""
    lab.create(pipeline("a"))
    lab.group("a-0")
    operator.stop()
    try:
        lab.delete_namespace()
        lab.until_gone("Namespace", lab.namespace)
    finally:
        operator.start()


@pytest.mark.usefixtures("operator")
def test_kaito_2124_children_follow_the_spec(lab: Lab) -> None:
    """The child is made once and never updated."""
    lab.create(pipeline("a", chunking=FIXED))
    lab.group("a-0")
    lab.patch("PrefillPipeline", "a", {"spec": {"engine": {"image": "engine:2", "port": 8100}}})
    lab.until("Service", "a", lambda item: [port["port"] for port in item["spec"]["ports"]] == [8100])
    lab.until(
        "StatefulSet", "a-0", lambda item: item["spec"]["template"]["spec"]["containers"][0]["image"] == "engine:2"
    )


@pytest.mark.usefixtures("operator")
def test_kubernetes_88944_status_is_kept_as_written(lab: Lab) -> None:
    """A key the schema lacks is dropped on write, and the controller sees a difference for ever."""
    lab.create(pipeline("a", chunking=FIXED))
    lab.serve("a-0")
    found = lab.until_ready("a")
    version = found["metadata"]["resourceVersion"]
    lab.patch("StatefulSet", "a-0", {"metadata": {"labels": {"look": "again"}}})
    lab.until("StatefulSet", "a-0", lambda item: item["metadata"]["labels"].get("look"))
    lab.create(pipeline("b", chunking=FIXED))
    lab.until_reason("b", "Starting")
    assert (lab.get("PrefillPipeline", "a") or {})["metadata"]["resourceVersion"] == version


@pytest.mark.usefixtures("operator")
@pytest.mark.parametrize(
    "change",
    [
        {"metadata": {"annotations": {"prefill.dev/formed": "by hand", "prefill.dev/restarts": "x"}}},
        {"spec": {"replicas": 1}},
        {"spec": {"template": {"metadata": {"annotations": {"prefill.dev/incarnation": "by hand"}}}}},
        {"spec": {"updateStrategy": {"type": "RollingUpdate"}}},
    ],
    ids=["notes", "size", "incarnation", "strategy"],
)
def test_a_set_edited_by_hand_comes_back(lab: Lab, change: dict[str, Any]) -> None:
    lab.create(pipeline("a", chunking=FIXED))
    lab.serve("a-0")
    lab.until("StatefulSet", "a-0", lambda item: item["metadata"]["annotations"].get("prefill.dev/formed"))
    lab.patch("StatefulSet", "a-0", change)

    def mended(item: dict[str, Any]) -> bool:
        notes = item["metadata"]["annotations"]
        life = item["spec"]["template"]["metadata"]["annotations"]["prefill.dev/incarnation"]
        return (
            item["spec"]["replicas"] == item["status"].get("replicas") == 2
            and item["spec"]["updateStrategy"]["type"] == "OnDelete"
            and notes["prefill.dev/incarnation"] == life
            and notes["prefill.dev/formed"] != "by hand"
            and notes["prefill.dev/restarts"].isdecimal()
        )

    lab.until("StatefulSet", "a-0", mended)
    for _ in range(10):
        # A pod may just be leaving.
        lab.serve("a-0")
        with suppress(AssertionError):
            lab.until("PrefillPipeline", "a", lambda item: condition(item)["status"] == "True", seconds=3)
            break
    lab.until("StatefulSet", "a-0", mended)
    lab.until_ready("a")


@pytest.mark.usefixtures("operator")
def test_a_child_that_an_edit_made_unmendable_is_named_with_the_remedy(lab: Lab) -> None:
    """An entry of a keyed list belongs to the hand that added it; an apply cannot remove it."""
    lab.create(pipeline("a", chunking=FIXED))
    lab.group("a-0")
    lab.patch("Service", "a", {"spec": {"ports": [{"name": "http", "port": 9000, "targetPort": "engine"}]}})
    message = condition(lab.until_reason("a", "ChildRefused"))["message"]
    assert "Duplicate value" in message
    assert "delete Service a: it is made anew" in message
    lab.delete("Service", "a")
    lab.until("Service", "a", lambda item: [port["port"] for port in item["spec"]["ports"]] == [8000])
    lab.until_reason("a", "Starting")


async def test_renovate_operator_136_an_outdated_crd_is_reported(
    crd: ApiServer, caplog: pytest.LogCaptureFixture
) -> None:
    """Helm installs a CRD and never updates it: a new field is dropped without a word."""
    (current,) = yaml.safe_load_all((ROOT / "operator/crds/prefillpipelines.prefill.dev.yaml").read_text())
    older = deepcopy(current)
    schema = older["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]
    del schema["spec"]["properties"]["parallelism"]["properties"]["expertParallel"]
    rules = schema["spec"]["x-kubernetes-validations"]
    schema["spec"]["x-kubernetes-validations"] = [rule for rule in rules if "expertParallel" not in rule["rule"]]
    del schema["status"]["properties"]["replicaStatuses"]["items"]["properties"]["restarts"]

    def published(manifest: Object, fields: bool) -> None:
        text = json.dumps(manifest)
        command = ["kubectl", "apply", "--server-side", "--force-conflicts", "-f", "-"]
        subprocess.run(command, env=crd.environment, input=text, text=True, check=True, capture_output=True, timeout=60)
        command = ["kubectl", "get", "--raw", "/openapi/v3/apis/prefill.dev/v1alpha1"]
        deadline = monotonic() + 60
        while True:
            found = subprocess.run(command, env=crd.environment, text=True, capture_output=True, timeout=60)
            if found.returncode == 0 and ("expertParallel" in found.stdout) == fields:
                return
            assert monotonic() < deadline, found.stderr
            sleep(0.1)

    settings = client.Configuration()
    await config.load_kube_config(str(crd.kubeconfig), client_configuration=settings)
    async with client.ApiClient(settings) as api:
        for manifest, fields in ((older, False), (current, True)):
            published(manifest, fields)
            caplog.clear()
            await report_outdated_crd(Cluster(api))
            if fields:
                assert caplog.text == ""
            else:
                lacking = "spec.parallelism.expertParallel, status.replicaStatuses[].restarts"
                assert f"drops 2 fields, among them {lacking}; apply the CRD" in caplog.text
