"""Whole manifests against golden files: UPDATE_GOLDEN=1 writes them anew, for review."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from prefill_operator.desired.calibration import RETAINED_BY, calibration_map, newest
from prefill_operator.desired.children import client_service, disruption_budget, headless_service, stateful_set
from prefill_operator.desired.life import Life
from prefill_operator.desired.pipeline import Manifest, Pipeline, rank_config
from prefill_operator.desired.pod import pod_template, template_hash
from prefill_runtime.profiling.document import load_calibration

from tests.unit.operator.world import FIXED, document, make_pipeline

GOLDEN = Path(__file__).parent / "golden"
ASCEND = {
    "parallelism": {"pipeline": 4, "tensor": 8, "stagesPerPod": 2},
    "accelerator": {"vendor": "Ascend", "mountDriver": True, "runtimeClassName": "ascend"},
    "model": {
        "name": "big",
        "source": {"persistentVolumeClaim": {"claimName": "weights", "subPath": "big"}},
        "maxModelLen": 131072,
    },
    "engine": {
        "image": "ascend:1",
        "env": [{"name": "HCCL_BUFFSIZE", "value": "2048"}, {"name": "HOME", "value": "/root"}],
        "volumeMounts": [{"name": "logs", "mountPath": "/logs"}],
        "resources": {"requests": {"cpu": 32}, "limits": {"memory": "512Gi"}},
    },
    "scheduling": {
        "topologyKey": "rack",
        "podTemplate": {
            "metadata": {"labels": {"team": "llm"}, "annotations": {"note": "x"}},
            "nodeSelector": {"npu": "a3"},
            "tolerations": [{"operator": "Exists"}],
            "volumes": [{"name": "logs", "emptyDir": {}}],
            "imagePullSecrets": [{"name": "pull"}],
            "serviceAccountName": "llm",
            "priorityClassName": "high",
            "schedulerName": "volcano",
        },
    },
}


def everything(pipeline: Pipeline) -> list[Manifest]:
    return [
        client_service(pipeline),
        disruption_budget(pipeline),
        headless_service(pipeline, 1),
        stateful_set(pipeline, 1, Life("life-1", 2, last_failure="EngineCrashed: x"), "", running=True),
    ]


@pytest.mark.parametrize(
    ("name", "spec"),
    [
        ("cpu-dynamic", {"replicas": 2}),
        ("ascend-dynamic", ASCEND),
        ("engine-native", {"chunking": {"policy": "EngineNative", "maxTokens": 1024, "minTokens": 128}}),
    ],
)
def test_children_are_the_golden_ones(name: str, spec: dict[str, Any]) -> None:
    file = GOLDEN / f"{name}.yaml"
    text = yaml.safe_dump_all(everything(make_pipeline(**spec)), sort_keys=False, width=120)
    if os.environ.get("UPDATE_GOLDEN"):
        file.write_text(text)
    assert text == file.read_text()


def container(pipeline: Pipeline, name: str = "engine") -> Manifest:
    spec = pod_template(pipeline, 0)["spec"]
    found: Manifest = next(c for c in (*spec["initContainers"], *spec["containers"]) if c["name"] == name)
    return found


def test_the_profile_step_differs_from_the_engine_in_command_and_probes_only() -> None:
    pipeline = make_pipeline(**ASCEND)
    engine, profile = container(pipeline), container(pipeline, "profile")
    for field in ("image", "env", "resources", "volumeMounts", "securityContext"):
        assert engine[field] == profile[field], field


@pytest.mark.parametrize("policy", ["Fixed", "EngineNative"])
def test_only_dynamic_profiles(policy: str) -> None:
    pipeline = make_pipeline(chunking=FIXED | {"policy": policy})
    steps = pod_template(pipeline, 0)["spec"]["initContainers"]
    assert [step["name"] for step in steps] == ["runtime"]
    assert rank_config(pipeline, 0).profiling is None


def test_cards_are_requested_as_they_are_limited() -> None:
    resources = container(make_pipeline(**ASCEND))["resources"]
    assert resources["requests"]["huawei.com/Ascend910"] == resources["limits"]["huawei.com/Ascend910"] == "16"


def test_a_variable_of_the_user_replaces_one_of_ours() -> None:
    env = {v["name"]: v.get("value") for v in container(make_pipeline(**ASCEND))["env"]}
    assert env["HOME"] == "/root"
    assert len(env) == len(container(make_pipeline(**ASCEND))["env"])
    assert env["HCCL_CONNECT_TIMEOUT"] == "1800"


def test_a_hub_model_needs_no_mount_and_the_network() -> None:
    model = {"name": "m", "maxModelLen": 4096, "source": {"huggingFace": {"repo": "org/m", "revision": "v1"}}}
    pipeline = make_pipeline(model=model)
    config = rank_config(pipeline, 0)
    assert config.engine.model_path == "org/m"
    assert config.engine.args[:2] == ("--revision", "v1")
    engine = container(pipeline)
    assert "/models" not in [mount["mountPath"] for mount in engine["volumeMounts"]]
    assert {"name": "HF_HUB_OFFLINE", "value": "0"} in engine["env"]


def test_pods_hold_no_credentials() -> None:
    spec = pod_template(make_pipeline(**ASCEND), 0)["spec"]
    assert spec["automountServiceAccountToken"] is False


def test_the_template_hash_ignores_the_life_of_the_group() -> None:
    pipeline = make_pipeline()
    sets = [stateful_set(pipeline, 0, Life(life), text, running=True) for life, text in (("x", ""), ("y", "{}"))]
    hashes = {s["metadata"]["annotations"]["prefill.dev/template-hash"] for s in sets}
    assert hashes == {template_hash(pod_template(pipeline, 0))}
    assert template_hash(pod_template(make_pipeline(startup={"budgetSeconds": 60}), 0)) not in hashes


@pytest.mark.parametrize(("replicas", "pods", "least"), [(1, 2, 1), (2, 2, 3), (1, 1, 0), (0, 2, 0)])
def test_a_drain_is_never_blocked_while_all_is_well(replicas: int, pods: int, least: int) -> None:
    budget = disruption_budget(make_pipeline(replicas=replicas, parallelism={"pipeline": pods}))
    assert budget["spec"]["minAvailable"] == least
    assert budget["spec"]["unhealthyPodEvictionPolicy"] == "AlwaysAllow"


@pytest.mark.parametrize(
    "change",
    [
        {"model": {"name": "other", "source": {"hostPath": {"path": "/srv/toy"}}, "maxModelLen": 4096}},
        {"model": {"name": "toy", "source": {"hostPath": {"path": "/srv/x"}}, "maxModelLen": 4096}},
        {"engine": {"image": "engine:2"}},
        {"engine": {"image": "engine:1", "args": ["--block-size", "32"]}},
        {"engine": {"image": "engine:1", "additionalConfig": {"x": 1}}},
        {"parallelism": {"pipeline": 4}},
        {"parallelism": {"pipeline": 2, "layerPartition": [3, 5]}},
        {"chunking": {"policy": "Dynamic", "maxTokens": 2048, "minTokens": 128}},
        {"accelerator": {"vendor": "Ascend"}},
    ],
)
def test_what_changes_the_cost_changes_the_key(change: dict[str, Any]) -> None:
    assert make_pipeline(**change).calibration_key != make_pipeline().calibration_key


@pytest.mark.parametrize(
    "change",
    [
        {"replicas": 3},
        {"chunking": {"policy": "Dynamic", "maxTokens": 1024, "minTokens": 256, "smoothingFactor": "0.5"}},
        {"profiling": {"samples": 32}},
        {"startup": {"budgetSeconds": 60}},
    ],
)
def test_what_does_not_change_the_cost_keeps_the_key(change: dict[str, Any]) -> None:
    assert make_pipeline(**change).calibration_key == make_pipeline().calibration_key


def test_the_config_map_holds_the_exact_document_and_explains_itself() -> None:
    pipeline = make_pipeline()
    kept = document(pipeline.calibration_key)
    data = calibration_map(pipeline, kept, None)["data"]
    assert load_calibration(data["calibration.json"], pipeline.calibration_key) == kept
    for name in set(data) - {"README"}:
        assert name in data["README"], f"{name} is not explained"
    assert json.loads(data["calibration.json"])["key"] == data["key"]


def test_a_calibration_stays_as_long_as_one_pipeline_wants_it() -> None:
    keep, drop = make_pipeline("keep"), make_pipeline("drop", profiling={"retention": "Delete"})
    kept = document(keep.calibration_key)
    both = calibration_map(drop, kept, calibration_map(keep, kept, None))
    assert both["metadata"]["annotations"][RETAINED_BY] == "keep"
    assert "ownerReferences" not in both["metadata"]
    changed_mind = calibration_map(make_pipeline("keep", profiling={"retention": "Delete"}), kept, both)
    assert changed_mind["metadata"]["annotations"][RETAINED_BY] == "", "absent would leave what a hand has set"
    assert [owner["name"] for owner in changed_mind["metadata"]["ownerReferences"]] == ["keep"]


def test_the_newest_measurement_is_kept() -> None:
    old, new = document("0" * 16, "2030-01-01T00:00:00Z"), document("0" * 16, "2030-01-01T00:00:01Z")
    assert newest([new, old]) == newest([old, new]) == new
    assert newest([]) is None
