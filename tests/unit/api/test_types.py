"""What the operator reads from a stored object."""

from __future__ import annotations

import pytest
from prefill_operator.api.types import Policy, PrefillPipeline, Vendor
from pydantic import ValidationError

MINIMAL = {
    "model": {"name": "m", "source": {"hostPath": {"path": "/srv/m"}}, "maxModelLen": 32768},
    "parallelism": {"pipeline": 4, "tensor": 8, "stagesPerPod": 2},
    "engine": {"image": "engine:1"},
}


def pipeline(**parts: object) -> PrefillPipeline:
    return PrefillPipeline.model_validate({"metadata": {"name": "p"}, "spec": MINIMAL} | parts)


def test_defaults() -> None:
    spec = pipeline().spec
    assert (spec.replicas, spec.suspend, spec.paused) == (1, False, False)
    assert (spec.chunking.policy, spec.chunking.max_tokens, spec.chunking.min_tokens) == (Policy.AUTO, 8192, 1024)
    online = spec.profiling.online_calibration
    assert (spec.profiling.enabled, online.enabled, online.window_points) == (True, True, 256)
    assert (spec.accelerator.vendor, spec.accelerator.resource_name) == (Vendor.ASCEND, "huawei.com/Ascend910")
    assert (spec.startup.budget_seconds, spec.recovery.max_restarts, spec.rollout.max_unavailable) == (1800, 0, 1)


def test_derived_numbers() -> None:
    spec = pipeline().spec
    assert (spec.pods_per_replica, spec.cards_per_pod, spec.served_name) == (2, 16, "m")
    named = PrefillPipeline.model_validate(
        {"metadata": {}, "spec": MINIMAL | {"model": MINIMAL["model"] | {"servedName": "model"}}}  # type: ignore[operator]
    )
    assert named.spec.served_name == "model"


def test_round_trip_keeps_every_field() -> None:
    body = {
        "env": [{"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}],
        "additionalConfig": {"ascend_compilation_config": {"enable_npugraph_ex": True}},
        "resources": {"requests": {"cpu": "2", "memory": "8Gi"}, "limits": {"memory": 1024}},
    }
    volumes = [{"name": "cache", "hostPath": {"path": "/cache", "type": "Directory"}}]
    spec = PrefillPipeline.model_validate(
        {
            "metadata": {},
            "spec": MINIMAL
            | {"engine": body | {"image": "engine:1"}, "scheduling": {"podTemplate": {"volumes": volumes}}},
        }
    ).spec
    dumped = spec.model_dump(by_alias=True, exclude_none=True, mode="json")
    assert {key: dumped["engine"][key] for key in body} == body
    assert dumped["scheduling"]["podTemplate"]["volumes"] == volumes


def test_an_unknown_field_of_the_spec_is_named_rather_than_ignored() -> None:
    with pytest.raises(ValidationError, match=r"spec\.virtualStages"):
        pipeline(spec=MINIMAL | {"virtualStages": 2})


def test_status_of_another_version_is_no_reason_to_stop() -> None:
    status = pipeline(status={"observedGeneration": 3, "somethingNew": 1}).status
    assert status.observed_generation == 3
