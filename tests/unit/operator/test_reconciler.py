from __future__ import annotations

from typing import Any

import pytest
from prefill_operator.reconcile.cluster import PIPELINES, Cluster, Resource
from prefill_operator.reconcile.errors import ClusterError, ForbiddenError, QuotaError
from prefill_operator.reconcile.metrics import Metrics
from prefill_operator.reconcile.offers import Offers
from prefill_operator.reconcile.reconciler import Reconciler, Release

from tests.unit.operator.world import NOW, SPEC


class OnlyStatus(Cluster):
    """A cluster with one pipeline, where looking at or touching anything else is an error."""

    def __init__(self, pipeline: dict[str, Any] | None) -> None:
        self.pipeline, self.statuses = pipeline, []

    async def get(self, resource: Resource, namespace: str, name: str) -> dict[str, Any] | None:
        assert resource == PIPELINES
        return self.pipeline

    async def apply_status(self, resource: Resource, manifest: dict[str, Any]) -> dict[str, Any]:
        self.statuses.append(manifest["status"])
        return manifest

    async def create(self, resource: Resource, manifest: dict[str, Any]) -> dict[str, Any]:
        assert manifest["kind"] == "Event"
        return manifest


def stored(**spec: Any) -> dict[str, Any]:
    metadata = {"name": "a", "namespace": "ns", "uid": "u", "generation": 3}
    return {"metadata": metadata, "spec": SPEC | spec}


async def reconcile(cluster: Cluster) -> None:
    reconciler = Reconciler(
        cluster, Release("operator:1", "0.1.0"), Metrics(), Offers(60.0, lambda key: None), clock=lambda: NOW
    )
    assert await reconciler.reconcile(("ns", "a")) is None


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"replicas": -1}, "spec.replicas: Input should be greater than or equal to 0"),
        ({"vllm": {}}, "spec.vllm: Extra inputs are not permitted"),
        ({"chunking": {"maxTokens": 512, "minTokens": 1024}}, "chunking.minTokens 1024 is greater than"),
        ({"engine": {"image": "e", "args": ["--port=1"]}}, "--port"),
    ],
)
async def test_an_invalid_spec_is_told_and_nothing_touched(spec: dict[str, Any], message: str) -> None:
    cluster = OnlyStatus(stored(**spec))
    await reconcile(cluster)
    (status,) = cluster.statuses
    (condition,) = status["conditions"]
    assert (condition["type"], condition["reason"]) == ("Ready", "InvalidSpec")
    assert message in condition["message"]
    assert status["observedGeneration"] == 3
    assert cluster.pipeline is not None
    cluster.pipeline["status"] = status
    await reconcile(cluster)
    assert len(cluster.statuses) == 1, "nothing changed, nothing written"


class Refusing(OnlyStatus):
    """An empty namespace whose quota lets nothing in, or whose objects may not be read."""

    def __init__(self, pipeline: dict[str, Any], *, readable: bool) -> None:
        super().__init__(pipeline)
        self._readable = readable

    async def get(self, resource: Resource, namespace: str, name: str) -> dict[str, Any] | None:
        return self.pipeline if resource == PIPELINES else None

    async def list(self, *_: object, **__: object) -> list[dict[str, Any]]:
        if not self._readable:
            raise ForbiddenError("may not list")
        return []

    async def apply(self, *_: object) -> dict[str, Any]:
        raise QuotaError("exceeded quota: q")


@pytest.mark.parametrize(
    ("readable", "reason", "count"), [(True, "QuotaDenied", 5), (False, "Forbidden", 1)], ids=["quota", "rights"]
)
async def test_a_refusal_is_told_in_one_status_that_stays(readable: bool, reason: str, count: int) -> None:
    pipeline = stored()
    cluster = Refusing(pipeline, readable=readable)
    for _ in range(2):
        with pytest.raises(ClusterError):
            await reconcile(cluster)
        (status,) = cluster.statuses
        assert status["conditions"][0]["reason"] == reason
        assert len(status["conditions"]) == count, "what else is known stays"
        pipeline["status"] = status


async def test_a_pipeline_being_deleted_is_left_alone() -> None:
    item = stored()
    item["metadata"]["deletionTimestamp"] = "2030-01-01T00:00:00Z"
    for pipeline in (item, None):
        cluster = OnlyStatus(pipeline)
        await reconcile(cluster)
        assert cluster.statuses == []
