"""From PrefillPipeline to children and back, by the operator's process on a real API server and controller-manager."""

from __future__ import annotations

import signal
import time
from typing import Any

import pytest
from prefill_operator.desired.names import calibration_name
from prefill_runtime.agent.config import EndReason, LastWords, RankConfig
from prefill_runtime.profiling.document import RefusalReason, load_calibration

from tests.operator.lab import Lab, condition, crashed_status, document, measured, pipeline, ready_status, refused
from tests.operator.operating import Operator

FIXED = {"policy": "Fixed", "maxTokens": 1024, "minTokens": 128}

pytestmark = pytest.mark.usefixtures("operator")


def incarnation(lab: Lab, name: str) -> str:
    item = lab.get("StatefulSet", name)
    assert item is not None
    return str(item["metadata"]["annotations"]["prefill.dev/incarnation"])


def key_of(pods: list[dict[str, Any]]) -> str:
    return RankConfig.model_validate_json(pods[0]["metadata"]["annotations"]["prefill.dev/config"]).calibration_key


def test_create_makes_the_children_of_each_replica(lab: Lab) -> None:
    lab.create(pipeline("a", replicas=2))
    for replica in range(2):
        lab.group(f"a-{replica}")
    assert lab.names("StatefulSet") == ["a-0", "a-1"]
    assert lab.names("Service") == ["a", "a-0", "a-1"]
    assert lab.names("PodDisruptionBudget") == ["a"]
    assert lab.names("Pod") == ["a-0-0", "a-0-1", "a-1-0", "a-1-1"]
    pod = lab.get("Pod", "a-1-1")
    assert pod is not None
    config = RankConfig.model_validate_json(pod["metadata"]["annotations"]["prefill.dev/config"])
    assert config.group.leader == f"a-1-0.a-1.{lab.namespace}.svc"
    assert config.group.pods == 2
    found = lab.until_reason("a", "Starting")
    assert found["status"]["selector"].endswith("apps.kubernetes.io/pod-index=0")
    assert "finalizers" not in found["metadata"]
    assert not found["metadata"].get("annotations")


def test_ready_needs_every_rank(lab: Lab) -> None:
    lab.create(pipeline("a", chunking=FIXED))
    first, second = lab.group("a-0")
    lab.set_pod(first, ready_status())
    found = lab.until("PrefillPipeline", "a", lambda item: "1 of 2" in condition(item)["message"])
    assert condition(found)["status"] == "False"
    lab.set_pod(second, ready_status())
    found = lab.until_ready("a")
    assert found["status"]["readyReplicas"] == 1
    assert found["status"]["policy"] == "Fixed"
    assert condition(found, "Calibrated")["reason"] == "NotNeeded"
    assert condition(found, "Progressing")["status"] == "False"


def test_a_measurement_becomes_a_config_map_and_outlives_the_pipeline(lab: Lab) -> None:
    lab.create(pipeline("a"))
    key = key_of(lab.group("a-0"))
    lab.serve("a-0", profile=measured(key))
    found = lab.until_ready("a")
    calibrated = condition(lab.until_reason("a", "Measured", "Calibrated"), "Calibrated")
    assert calibrated["status"] == "True"
    assert "R^2 0.9980, 128 samples" in calibrated["message"]
    found = lab.get("PrefillPipeline", "a") or {}
    assert found["status"]["calibration"]["key"] == key
    assert found["status"]["policy"] == "Dynamic"
    kept = lab.get("ConfigMap", calibration_name(key))
    assert kept is not None
    assert load_calibration(kept["data"]["calibration.json"], key, 2) == document(key)
    line = "stage 1: k0=0.003 s, k1=2e-05 s/token, k2=2e-09 s/token^2, k3=0 s/token"
    assert kept["data"]["coefficients"].splitlines()[1] == line
    assert {name: kept["data"][name] for name in ("source", "r2", "sampleCount", "schemaVersion")} == {
        "source": "Profile",
        "r2": "0.9980",
        "sampleCount": "128",
        "schemaVersion": "2",
    }
    lab.delete("PrefillPipeline", "a")
    for kind in ("StatefulSet", "Service", "PodDisruptionBudget"):
        for name in lab.names(kind):
            lab.until_gone(kind, name)
    for name in lab.names("Pod"):
        lab.until_gone("Pod", name)
    assert lab.names("ConfigMap") == [calibration_name(key)]
    # The next pipeline with the same key starts from it.
    lab.create(pipeline("b"))
    pods = lab.group("b-0")
    assert {pod["metadata"]["annotations"]["prefill.dev/calibration"] for pod in pods} == {document(key).to_json()}


def test_retention_delete_removes_the_calibration_too(lab: Lab) -> None:
    lab.create(pipeline("a", profiling={"retention": "Delete"}))
    key = key_of(lab.group("a-0"))
    lab.serve("a-0", profile=measured(key))
    lab.until_reason("a", "Measured", "Calibrated")
    lab.delete("PrefillPipeline", "a")
    lab.until_gone("ConfigMap", calibration_name(key))


def test_a_refusal_is_a_condition(lab: Lab) -> None:
    lab.create(pipeline("a"))
    lab.serve("a-0", profile=refused(RefusalReason.POOR_FIT, "R^2 is 0.31, at least 0.90 is needed"))
    found = lab.until_ready("a")
    assert condition(found, "Calibrated")["reason"] == "ProfilingRefused"
    assert "PoorFit: R^2 is 0.31" in condition(found, "Calibrated")["message"]
    assert found["status"]["policy"] == "Fixed"
    assert lab.names("ConfigMap") == []


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("Traceback (most recent call last):", "Invalid JSON"),
        ('{"outcome": "Measured"}', "missing from a result that says Measured"),
        (measured("0123456789abcdef"), "document has key 0123456789abcdef, this pipeline needs"),
    ],
)
def test_a_malformed_measurement_is_ignored_with_its_reason(lab: Lab, message: str, expected: str) -> None:
    lab.create(pipeline("a"))
    lab.serve("a-0", profile=message)
    found = lab.until_reason("a", "CalibrationInvalid", "Calibrated")
    assert expected in condition(found, "Calibrated")["message"]
    lab.until_ready("a")
    assert lab.names("ConfigMap") == []


def test_a_broken_rank_restarts_the_whole_group(lab: Lab) -> None:
    lab.create(pipeline("a", chunking=FIXED))
    pods = lab.serve("a-0")
    lab.until("StatefulSet", "a-0", lambda item: item["metadata"]["annotations"].get("prefill.dev/formed"))
    before = incarnation(lab, "a-0")
    words = LastWords(reason=EndReason.PEER_LOST, message="rank 1 is silent", rank=0)
    lab.set_pod(pods[0], crashed_status(words.model_dump_json(by_alias=True)))
    lab.until("StatefulSet", "a-0", lambda item: item["spec"]["replicas"] == 0)
    after = lab.serve("a-0", incarnation_not=before)
    assert {pod["metadata"]["uid"] for pod in pods}.isdisjoint(pod["metadata"]["uid"] for pod in after)
    found = lab.until_ready("a")
    assert found["status"]["replicaStatuses"][0]["restarts"] == 1


def test_the_condition_names_the_rank_and_its_last_words(lab: Lab) -> None:
    lab.create(pipeline("a", chunking=FIXED, recovery={"backoffSeconds": 60}))
    pods = lab.group("a-0")
    words = LastWords(reason=EndReason.MODEL_NOT_FOUND, message="/models has no config.json", rank=1)
    lab.set_pod(pods[1], crashed_status(words.model_dump_json(by_alias=True)))
    found = lab.until_reason("a", "ModelNotFound")
    assert condition(found)["message"] == "replica 0: rank 1: /models has no config.json"
    found = lab.until("PrefillPipeline", "a", lambda item: item["status"]["replicaStatuses"][0]["phase"] == "BackOff")
    assert found["status"]["replicaStatuses"][0]["nextRetryTime"]
    # The corrected spec does not wait for the pause to end.
    lab.patch("PrefillPipeline", "a", {"spec": {"model": {"source": {"hostPath": {"path": "/srv/right"}}}}})
    lab.serve("a-0")
    found = lab.until_ready("a")
    assert found["status"]["replicaStatuses"][0]["restarts"] == 0


def test_a_lost_pod_breaks_a_formed_group(lab: Lab) -> None:
    lab.create(pipeline("a", chunking=FIXED))
    lab.serve("a-0")
    lab.until("StatefulSet", "a-0", lambda item: item["metadata"]["annotations"].get("prefill.dev/formed"))
    before = incarnation(lab, "a-0")
    lab.delete("Pod", "a-0-1")
    lab.serve("a-0", incarnation_not=before)
    lab.until_ready("a")


def test_a_group_gives_up_after_max_restarts(lab: Lab) -> None:
    recovery = {"backoffSeconds": 1, "maxBackoffSeconds": 1, "maxRestarts": 1}
    lab.create(pipeline("a", chunking=FIXED, recovery=recovery))
    life = ""
    for _ in range(2):
        pods = lab.group("a-0", incarnation_not=life)
        life = incarnation(lab, "a-0")
        lab.set_pod(pods[0], crashed_status("", code=137, reason="OOMKilled"))
    found = lab.until("PrefillPipeline", "a", lambda i: i["status"]["replicaStatuses"][0]["phase"] == "Failed")
    assert condition(found)["reason"] == "OutOfMemory"
    assert "gave up after 1 restarts" in condition(found)["message"]


def test_suspend_removes_the_pods_and_resume_starts_from_the_calibration(lab: Lab) -> None:
    lab.create(pipeline("a"))
    key = key_of(lab.group("a-0"))
    lab.serve("a-0", profile=measured(key))
    lab.until_ready("a")
    lab.until_reason("a", "Measured", "Calibrated")
    before = incarnation(lab, "a-0")
    lab.patch("PrefillPipeline", "a", {"spec": {"suspend": True}})
    lab.until_reason("a", "Suspended")
    for name in ("a-0-0", "a-0-1"):
        lab.until_gone("Pod", name)
    lab.patch("PrefillPipeline", "a", {"spec": {"suspend": False}})
    pods = lab.serve("a-0", incarnation_not=before)
    lab.until_ready("a")
    assert pods[0]["metadata"]["annotations"]["prefill.dev/calibration"] == document(key).to_json()


def test_a_changed_policy_replaces_the_group(lab: Lab) -> None:
    lab.create(pipeline("a", chunking=FIXED))
    lab.serve("a-0")
    lab.until_ready("a")
    before = incarnation(lab, "a-0")
    lab.patch("PrefillPipeline", "a", {"spec": {"chunking": {"policy": "Dynamic"}}})
    found = lab.until("PrefillPipeline", "a", lambda item: item["status"].get("observedGeneration") == 2)
    assert condition(found)["status"] == "False", "pods of the earlier spec do not count"
    pods = lab.group("a-0", incarnation_not=before)
    assert [step["name"] for step in pods[0]["spec"]["initContainers"]] == ["runtime", "profile"]


def test_a_rollout_takes_one_replica_at_a_time(lab: Lab) -> None:
    lab.create(pipeline("a", replicas=2, chunking=FIXED))
    for name in ("a-0", "a-1"):
        lab.serve(name)
    lab.until_ready("a")
    lives = {name: incarnation(lab, name) for name in ("a-0", "a-1")}
    lab.patch("PrefillPipeline", "a", {"spec": {"engine": {"image": "engine:2"}}})
    lab.group("a-1", incarnation_not=lives["a-1"])
    assert incarnation(lab, "a-0") == lives["a-0"]
    lab.serve("a-1", incarnation_not=lives["a-1"])
    lab.serve("a-0", incarnation_not=lives["a-0"])
    lab.until_ready("a")
    assert {p["spec"]["containers"][0]["image"] for p in lab.list("Pod")} == {"engine:2"}


def test_scale_down_removes_the_highest_replicas(lab: Lab) -> None:
    lab.create(pipeline("a", replicas=3, chunking=FIXED))
    lab.group("a-2")
    lab.patch("PrefillPipeline", "a", {"spec": {"replicas": 1}})
    for kind in ("StatefulSet", "Service"):
        lab.until_gone(kind, "a-1")
        lab.until_gone(kind, "a-2")
    assert lab.names("Service") == ["a", "a-0"]
    lab.patch("PrefillPipeline", "a", {"spec": {"replicas": 0}})
    lab.until_reason("a", "ScaledToZero")
    lab.until_gone("StatefulSet", "a-0")


def test_a_foreign_object_is_never_taken_over(lab: Lab) -> None:
    foreign = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "a-0"},
        "spec": {"selector": {"app": "theirs"}, "ports": [{"port": 80}]},
    }
    before = lab.create(foreign)
    lab.create(pipeline("a"))
    found = lab.until_reason("a", "NameConflict")
    assert "Service a-0 exists" in condition(found)["message"]
    assert lab.get("Service", "a-0") == before
    assert lab.names("StatefulSet") == []
    lab.delete("Service", "a-0")
    lab.patch("PrefillPipeline", "a", {"metadata": {"labels": {"look": "again"}}})
    lab.group("a-0")


def test_paused_changes_nothing(lab: Lab) -> None:
    lab.create(pipeline("a", paused=True))
    found = lab.until("PrefillPipeline", "a", lambda item: condition(item, "Paused")["status"] == "True")
    assert lab.names("StatefulSet") == lab.names("Service") == []
    lab.patch("PrefillPipeline", "a", {"spec": {"paused": False}})
    lab.group("a-0")
    assert found["status"]["observedGeneration"] == 1


def test_quota_is_told_with_the_servers_words(lab: Lab) -> None:
    quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "q"}, "spec": {"hard": {"pods": "0"}}}
    lab.create(quota)
    lab.until("ResourceQuota", "q", lambda item: item.get("status", {}).get("hard"))
    lab.create(pipeline("a"))
    found = lab.until_reason("a", "QuotaDenied")
    assert "exceeded quota: q" in condition(found)["message"]


def test_what_the_api_server_refuses_is_told_and_heals_with_the_spec(lab: Lab) -> None:
    lab.create(pipeline("a", scheduling={"podTemplate": {"affinity": {"bogus": 1}}}))
    found = lab.until_reason("a", "ChildRefused")
    assert "bogus" in condition(found)["message"]
    lab.patch("PrefillPipeline", "a", {"spec": {"scheduling": {"podTemplate": {"affinity": None}}}})
    lab.group("a-0")
    lab.until_reason("a", "Starting")


def test_a_killed_operator_goes_on_where_it_was(lab: Lab, operator: Operator) -> None:
    lab.create(pipeline("a", chunking=FIXED))
    lab.group("a-0")
    operator.stop(signal.SIGKILL)
    try:
        lab.create(pipeline("b", chunking=FIXED))
        lab.delete("PrefillPipeline", "a")
        lab.until_gone("StatefulSet", "a-0")
    finally:
        operator.start()
    lab.serve("b-0")
    lab.until_ready("b")


def test_metrics_and_health(lab: Lab, operator: Operator) -> None:
    lab.create(pipeline("a", chunking=FIXED))
    lab.serve("a-0")
    lab.until_ready("a")
    text = operator.page(operator.metrics, "/metrics") or ""
    for line in (
        'prefill_operator_reconcile_total{result="ok"}',
        'prefill_operator_reconcile_seconds_count{outcome="success"}',
        'prefill_operator_api_writes_total{kind="StatefulSet",verb="patch"}',
        'prefill_operator_pipelines{condition="Ready"}',
        "prefill_operator_queue_depth ",
        "prefill_operator_oldest_resync_seconds ",
    ):
        assert line in text, text
    assert (operator.page(operator.health, "/healthz") or "").startswith("last complete resync")


def test_an_undone_edit_of_a_child(lab: Lab) -> None:
    lab.create(pipeline("a"))
    lab.group("a-0")
    lab.patch("Service", "a", {"spec": {"selector": {"prefill.dev/pipeline-uid": "nobody"}}})
    uid = (lab.get("PrefillPipeline", "a") or {})["metadata"]["uid"]
    lab.until("Service", "a", lambda item: item["spec"]["selector"]["prefill.dev/pipeline-uid"] == uid)


def test_nothing_is_written_when_nothing_changed(lab: Lab, operator: Operator) -> None:
    lab.create(pipeline("a", replicas=2))
    key = key_of(lab.group("a-0"))
    for replica in range(2):
        lab.serve(f"a-{replica}", profile=measured(key, f"2030-01-02T03:04:0{replica}Z"))
    lab.until_ready("a")
    lab.until_reason("a", "Measured", "Calibrated")

    def versions() -> dict[str, str]:
        kinds = ("PrefillPipeline", "StatefulSet", "Service", "PodDisruptionBudget", "ConfigMap", "Event")
        items = [(kind, item["metadata"]) for kind in kinds for item in lab.list(kind)]
        return {f"{kind} {metadata['name']}": metadata["resourceVersion"] for kind, metadata in items}

    def reconciliations() -> float:
        text = operator.page(operator.metrics, "/metrics") or ""
        lines = [line for line in text.splitlines() if line.startswith("prefill_operator_reconcile_total")]
        return sum(float(line.split()[-1]) for line in lines)

    def quiet() -> dict[str, str]:
        while (found := versions()) != (time.sleep(1), versions())[1]:
            pass
        return found

    before, count = quiet(), reconciliations()
    lab.patch("PrefillPipeline", "a", {"metadata": {"annotations": {"poke": "1"}}})
    while reconciliations() < count + 2:
        time.sleep(0.1)
    after = versions()
    before.pop("PrefillPipeline a"), after.pop("PrefillPipeline a")
    assert after == before
