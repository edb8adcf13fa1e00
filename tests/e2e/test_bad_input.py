"""What is wrong with a pipeline stands in its condition, others are not touched, and the fix alone heals."""

from __future__ import annotations

from typing import Any

import pytest

from localcluster import deploy
from localcluster.console import ClusterError
from localcluster.kube import Kube, condition
from tests.e2e.conftest import Pipeline

NAME = "broken"


def sample(kube: Kube, engine_image: str, change: dict[str, Any]) -> dict[str, Any]:
    base = deploy.merge(
        deploy.fit_local(engine_image, "toy"),
        {
            "metadata": {"name": NAME},
            "spec": {
                "model": {"maxModelLen": 4096, "dtype": "float32"},
                "chunking": {"policy": "Fixed", "maxTokens": 2048, "minTokens": 256},
                "recovery": {"backoffSeconds": 1, "maxBackoffSeconds": 2},
            },
        },
    )
    return deploy.sample(kube, "longctx-toy-cpu", deploy.merge(base, change))


def wait_for_reason(pipeline: Pipeline, kind: str, reason: str, timeout: float = 180) -> dict[str, Any]:
    def seen() -> dict[str, Any]:
        return condition(pipeline.get(), kind)

    pipeline.kube.wait(
        f"{kind} {reason}",
        lambda: seen()["reason"] == reason,
        timeout,
        lambda: f"{seen()['reason']} {seen()['message']}",
    )
    return seen()


def test_invalid_spec_is_refused_with_the_remedy(kube: Kube, engine_image: str) -> None:
    with pytest.raises(ClusterError, match=r"minTokens.*4096.*maxTokens.*2048"):
        kube.apply(sample(kube, engine_image, {"spec": {"chunking": {"minTokens": 4096}}}))
    assert not kube.exists("prefillpipeline", NAME)


def test_each_fault_is_named_and_the_fix_heals(kube: Kube, engine_image: str) -> None:
    good = sample(kube, engine_image, {})
    pipeline = Pipeline(kube, NAME)
    kube.apply(sample(kube, engine_image, {"spec": {"model": {"source": {"hostPath": {"path": "/nowhere/at-all"}}}}}))
    missing = wait_for_reason(pipeline, "Ready", "ModelNotFound")
    assert "/nowhere/at-all" in missing["message"]

    kube.apply(deploy.merge(good, {"spec": {"engine": {"image": "localhost/no-such-image:1"}}}))
    image = wait_for_reason(pipeline, "Ready", "ImagePullFailed")
    assert "localhost/no-such-image:1" in image["message"]

    kube.apply(deploy.merge(good, {"spec": {"engine": {"args": ["--no-such-flag"]}}}))
    crashed = wait_for_reason(pipeline, "Ready", "EngineCrashed")
    assert "--no-such-flag" in crashed["message"]

    kube.apply(good)
    pipeline.wait_ready(300)


def test_profile_timeout_serves_with_fixed(kube: Kube) -> None:
    pipeline = Pipeline(kube, NAME)
    pipeline.patch({"chunking": {"policy": "Dynamic"}, "profiling": {"timeoutSeconds": 1}})
    refused = wait_for_reason(pipeline, "Calibrated", "ProfilingRefused")
    assert "1 s" in refused["message"]
    pipeline.wait_ready(300)
    assert pipeline.get()["status"]["policy"] == "Fixed"
    kube("delete", "prefillpipeline", NAME)
