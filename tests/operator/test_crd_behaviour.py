"""What a client sees of the PrefillPipeline resource, on a real API server."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prefill_operator.api.types import (
    CalibrationStatus,
    Condition,
    Policy,
    PrefillPipeline,
    PrefillPipelineStatus,
    ReplicaPhase,
    ReplicaStatus,
)

from localcluster.apiserver import ApiServer

TIME = "2030-01-02T03:04:05Z"
SPEC: dict[str, Any] = {
    "model": {"name": "m", "source": {"hostPath": {"path": "/srv/m"}}, "maxModelLen": 32768},
    "parallelism": {"pipeline": 2},
    "engine": {"image": "engine:1"},
}


def pipeline(name: str, **parts: Any) -> dict[str, Any]:
    return {
        "apiVersion": "prefill.dev/v1alpha1",
        "kind": "PrefillPipeline",
        "metadata": {"name": name},
        "spec": SPEC | parts,
    }


class Client:
    def __init__(self, server: ApiServer) -> None:
        self._environment = server.environment

    def run(self, *arguments: str, body: dict[str, Any] | None = None) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["kubectl", *arguments, *(["-f", "-"] if body else [])],
            env=self._environment,
            input=json.dumps(body) if body else None,
            capture_output=True,
            text=True,
            timeout=60,
        )

    def ok(self, *arguments: str, body: dict[str, Any] | None = None) -> str:
        done = self.run(*arguments, body=body)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def apply(self, body: dict[str, Any], *arguments: str, manager: str = "test") -> dict[str, Any]:
        arguments = ("--server-side", f"--field-manager={manager}", "-o", "json", *arguments)
        applied: dict[str, Any] = json.loads(self.ok("apply", *arguments, body=body))
        return applied


@pytest.fixture
def client(crd: ApiServer) -> Iterator[Client]:
    client = Client(crd)
    yield client
    client.ok("delete", "pfp", "--all")


def test_defaults_are_those_of_the_types(client: Client) -> None:
    stored = client.apply(pipeline("plain"))["spec"]
    expected = PrefillPipeline.model_validate(pipeline("plain")).spec
    assert PrefillPipeline.model_validate(pipeline("plain") | {"spec": stored}).spec == expected
    assert stored["chunking"] == {"policy": "Auto", "maxTokens": 8192, "minTokens": 1024, "smoothingFactor": "1.0"}
    assert stored["scheduling"] == {"podTemplate": {"hostNetwork": False, "terminationGracePeriodSeconds": 60}}


def test_a_partly_given_object_gets_the_rest(client: Client) -> None:
    stored = client.apply(pipeline("partly", chunking={"policy": "Fixed"}))["spec"]
    assert stored["chunking"] == {"policy": "Fixed", "maxTokens": 8192, "minTokens": 1024, "smoothingFactor": "1.0"}


def test_unknown_fields_are_refused_by_kubectl_and_pruned_from_what_slips_through(client: Client) -> None:
    body = pipeline("unknown", virtualStages=2)
    done = client.run("create", body=body)
    assert done.returncode == 1
    assert 'unknown field "spec.virtualStages"' in done.stderr
    done = client.run("create", "--validate=warn", "-o", "json", body=body)
    assert 'unknown field "spec.virtualStages"' in done.stderr
    assert "virtualStages" not in json.loads(done.stdout)["spec"]


def test_open_objects_survive(client: Client) -> None:
    engine = {
        "image": "engine:1",
        "additionalConfig": {"ascend_scheduler_config": {"enabled": True, "depth": 2.5}},
        "env": [{"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k", "optional": True}}}],
        "resources": {"limits": {"cpu": 2, "memory": "8Gi"}},
    }
    pods = {
        "volumes": [{"name": "cache", "hostPath": {"path": "/cache", "type": "Directory"}}],
        "tolerations": [{"key": "npu", "operator": "Exists"}],
        "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": []}}},
        "securityContext": {"runAsUser": 1000},
    }
    stored = client.apply(pipeline("open", engine=engine, scheduling={"podTemplate": pods}))["spec"]
    assert {key: stored["engine"][key] for key in engine} == engine
    assert {key: stored["scheduling"]["podTemplate"][key] for key in pods} == pods


def test_two_appliers_share_a_list_of_named_entries(client: Client) -> None:
    client.apply(pipeline("shared", engine={"image": "engine:1", "env": [{"name": "A", "value": "1"}]}))
    other = {**pipeline("shared"), "spec": {"engine": {"env": [{"name": "B", "value": "2"}]}}}
    stored = client.apply(other, manager="other")
    assert stored["spec"]["engine"]["env"] == [{"name": "A", "value": "1"}, {"name": "B", "value": "2"}]
    again = client.apply(other, manager="other")
    assert again["metadata"]["resourceVersion"] == stored["metadata"]["resourceVersion"]


def _status() -> PrefillPipelineStatus:
    def condition(kind: str, reason: str) -> Condition:
        return Condition(
            type=kind, status="True", reason=reason, message="All is well.", last_transition_time=TIME,
            observed_generation=1,
        )  # fmt: skip

    return PrefillPipelineStatus(
        observed_generation=1,
        conditions=(condition("Ready", "Serving"), condition("Calibrated", "Measured")),
        replicas=1,
        ready_replicas=1,
        selector="prefill.dev/pipeline-uid=u,apps.kubernetes.io/pod-index=0",
        policy=Policy.DYNAMIC,
        calibration=CalibrationStatus(
            key="0123456789abcdef", config_map="c", source="Online", r2="0.9991", samples=128, time=TIME
        ),
        replica_statuses=(
            ReplicaStatus(
                index=0, phase=ReplicaPhase.BACK_OFF, incarnation="abc", restarts=2, next_retry_time=TIME, message="m"
            ),
        ),
    )


def test_status_read_back_is_status_written_and_the_columns_show_it(client: Client) -> None:
    client.apply(pipeline("seen"))
    status = _status().model_dump(by_alias=True, exclude_none=True, mode="json")
    body = {**pipeline("seen"), "status": status}
    del body["spec"]
    stored = client.apply(body, "--subresource=status", manager="operator")
    assert stored["status"] == status
    assert PrefillPipeline.model_validate(stored).status == _status()
    heading, row = client.ok("get", "pfp", "seen").splitlines()
    assert heading.split() == ["NAME", "READY", "REASON", "POLICY", "PP", "REPLICAS", "CALIBRATED", "AGE"]
    assert row.split()[:-1] == ["seen", "True", "Serving", "Dynamic", "2", "1", "True"]
    assert "All is well." in client.ok("get", "pfp", "seen", "-o", "wide")
    assert "prefillpipeline.prefill.dev/seen" in client.ok("get", "all")


def test_a_status_write_changes_no_spec_and_a_spec_write_no_status(client: Client) -> None:
    client.apply(pipeline("apart"))
    patch = json.dumps({"spec": {"replicas": 7}, "status": {"replicas": 3}})
    client.ok("patch", "pfp", "apart", "--type=merge", "--subresource=status", "-p", patch)
    client.ok("patch", "pfp", "apart", "--type=merge", "-p", json.dumps({"status": {"replicas": 9}}))
    stored = json.loads(client.ok("get", "pfp", "apart", "-o", "json"))
    assert (stored["spec"]["replicas"], stored["status"]["replicas"]) == (1, 3)


def test_scale_subresource(client: Client) -> None:
    client.apply(pipeline("scaled"))
    status = json.dumps({"status": {"replicas": 1, "selector": "apps.kubernetes.io/pod-index=0"}})
    client.ok("patch", "pfp", "scaled", "--type=merge", "--subresource=status", "-p", status)
    client.ok("scale", "pfp", "scaled", "--replicas=3")
    path = "/apis/prefill.dev/v1alpha1/namespaces/default/prefillpipelines/scaled/scale"
    scale = json.loads(client.ok("get", "--raw", path))
    assert scale["spec"] == {"replicas": 3}
    assert scale["status"] == {"replicas": 1, "selector": "apps.kubernetes.io/pod-index=0"}


def test_explain_reads_well(client: Client) -> None:
    text = client.ok("explain", "pfp.spec.chunking")
    assert "How prompts are cut into chunks." in text
    for part in ("policy", "enum: Auto, Planned, Dynamic", "maxTokens", "Largest chunk", "smoothingFactor"):
        assert part in text
    assert "Where the weights come from; set exactly one of the fields." in client.ok(
        "explain", "pfp.spec.model.source"
    )


SAMPLES = sorted((Path(__file__).resolve().parents[2] / "manifests" / "samples").glob("*.yaml"))


@pytest.mark.parametrize("file", SAMPLES, ids=lambda file: file.stem)
def test_samples_are_accepted(client: Client, file: Path) -> None:
    assert client.ok("create", "--dry-run=server", "-o", "name", "-f", str(file)).startswith("prefillpipeline")
