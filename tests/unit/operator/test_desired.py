"""Whole manifests against golden files: UPDATE_GOLDEN=1 writes them anew, for review."""

from __future__ import annotations

import json
import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml
from prefill_operator.api.types import Policy
from prefill_operator.desired.calibration import PREVIOUS, RETAINED_BY, REVISION, WRITTEN_AT, calibration_map
from prefill_operator.desired.children import client_service, disruption_budget, headless_service, stateful_set
from prefill_operator.desired.life import Life
from prefill_operator.desired.pipeline import Manifest, Pipeline, rank_config
from prefill_operator.desired.pod import pod_template, template_hash
from prefill_runtime.profiling.document import PublishedCoefficients, PublishedForms, load_calibration

from tests.unit.operator.world import FIXED, NOW, document, make_pipeline

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
        ("cpu-learning", {"chunking": {"policy": "Auto"}, "profiling": {"enabled": False}}),
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


CALIBRATED = {"Auto", "Planned", "Dynamic", "TeraPipe", "Seq1F1B"}


@pytest.mark.parametrize("policy", list(Policy))
def test_only_policies_that_use_the_cost_of_chunks_measure_it(policy: Policy) -> None:
    pipeline = make_pipeline(chunking=FIXED | {"policy": policy.value})
    steps = [step["name"] for step in pod_template(pipeline, 0)["spec"]["initContainers"]]
    config = rank_config(pipeline, 0)
    assert config.chunking.policy == policy
    found = (steps, config.profiling is not None, config.online_window)
    assert found == ((["runtime", "profile"], True, 256) if policy.value in CALIBRATED else (["runtime"], False, None))


@pytest.mark.parametrize(
    ("profiling", "steps", "measures", "window"),
    [
        ({"enabled": False}, ["runtime"], False, 256),
        ({"onlineCalibration": {"windowPoints": 16}}, ["runtime", "profile"], True, 16),
        ({"onlineCalibration": {"enabled": False}}, ["runtime", "profile"], True, None),
        ({"enabled": False, "onlineCalibration": {"enabled": False}}, ["runtime"], False, None),
    ],
)
def test_measuring_before_and_while_serving(
    profiling: dict[str, Any], steps: list[str], measures: bool, window: int | None
) -> None:
    pipeline = make_pipeline(profiling=profiling)
    config = rank_config(pipeline, 0)
    assert [step["name"] for step in pod_template(pipeline, 0)["spec"]["initContainers"]] == steps
    assert (config.profiling is not None, config.online_window) == (measures, window)


def test_auto_of_a_single_stage_is_fixed() -> None:
    pipeline = make_pipeline(parallelism={"pipeline": 1}, chunking={"policy": "Auto", "maxTokens": 1024})
    config = rank_config(pipeline, 0)
    assert (config.chunking.policy, config.profiling, config.online_window) == (Policy.FIXED, None, None)


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
        {"chunking": {"policy": "Auto", "maxTokens": 1024, "minTokens": 128}},
        {"profiling": {"samples": 32}},
        {"profiling": {"enabled": False, "onlineCalibration": {"windowPoints": 32}}},
        {"startup": {"budgetSeconds": 60}},
    ],
)
def test_what_does_not_change_the_cost_keeps_the_key(change: dict[str, Any]) -> None:
    assert make_pipeline(**change).calibration_key == make_pipeline().calibration_key


def test_the_config_map_holds_the_exact_document_and_explains_itself() -> None:
    pipeline = make_pipeline()
    history = PublishedCoefficients(a=3e-9, b=4e-5, c=0.005)
    forms = PublishedForms(quadratic=PublishedCoefficients(a=1e-9, b=2e-5, c=0.003), history=history)
    kept = document(pipeline.calibration_key, published=forms, pass_overhead_seconds=0.0004)
    first = calibration_map(pipeline, kept, None, NOW)
    data = calibration_map(pipeline, document(pipeline.calibration_key), first, NOW)["data"]
    for name in set(data) - {"README"}:
        assert name in data["README"], f"{name} is not explained"
    data = first["data"]
    assert load_calibration(data["calibration.json"], pipeline.calibration_key, 2) == kept
    assert json.loads(data["calibration.json"])["key"] == data["key"]
    assert data["coefficients"].splitlines() == [
        f"stage {stage}: k0=0.003 s, k1=2e-05 s/token, k2=2e-09 s/token^2, k3=0 s/token" for stage in range(2)
    ]
    assert data["published"].splitlines() == [
        "quadratic: a=1e-09 s/token^2, b=2e-05 s/token, c=0.003 s",
        "history: a=3e-09 s/token^2, b=4e-05 s/token, c=0.005 s",
    ]
    assert data["form"] == "k0 + k1 C + k2 C (H + C/2) + k3 H"
    assert (data["overhead"], data["target"]) == ("0.0004", "0.0215286 at 1024 tokens")


def test_the_config_map_counts_its_documents_and_keeps_the_one_before() -> None:
    pipeline, later = make_pipeline(), NOW + timedelta(hours=1)
    one, two = (document(pipeline.calibration_key, f"2030-01-01T00:00:0{second}Z") for second in (1, 2))

    def notes(item: Manifest) -> tuple[str, str, str | None]:
        annotations = item["metadata"]["annotations"]
        return annotations[REVISION], annotations[WRITTEN_AT], item["data"].get(PREVIOUS)

    first = calibration_map(pipeline, one, None, NOW)
    assert notes(first) == ("1", "2030-01-01T00:00:00Z", None)
    assert calibration_map(pipeline, one, first, later) == first, "the same document is no new one"
    second = calibration_map(pipeline, two, first, later)
    assert notes(second) == ("2", "2030-01-01T01:00:00Z", one.to_json())
    assert calibration_map(pipeline, two, second, later) == second
    second["data"]["calibration.json"] = "{}"
    restored = calibration_map(pipeline, one, second, later)
    assert notes(restored) == ("3", "2030-01-01T01:00:00Z", one.to_json()), "what cannot be read is no good one"
    first["metadata"]["annotations"] = {REVISION: "many"}
    assert notes(calibration_map(pipeline, one, first, later))[:2] == ("1", "")


def test_a_calibration_stays_as_long_as_one_pipeline_wants_it() -> None:
    keep, drop = make_pipeline("keep"), make_pipeline("drop", profiling={"retention": "Delete"})
    kept = document(keep.calibration_key)
    both = calibration_map(drop, kept, calibration_map(keep, kept, None, NOW), NOW)
    assert both["metadata"]["annotations"][RETAINED_BY] == "keep"
    assert "ownerReferences" not in both["metadata"]
    changed_mind = calibration_map(make_pipeline("keep", profiling={"retention": "Delete"}), kept, both, NOW)
    assert changed_mind["metadata"]["annotations"][RETAINED_BY] == "", "absent would leave what a hand has set"
    assert [owner["name"] for owner in changed_mind["metadata"]["ownerReferences"]] == ["keep"]
