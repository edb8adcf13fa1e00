"""Faults that other operators had in the field, each as the smallest input. Named after the public report.

Those that need an API server are in tests/operator/test_cases.py.
"""

from __future__ import annotations

import pytest
from prefill_operator.api.types import ReplicaPhase
from prefill_operator.desired import names
from prefill_operator.desired.children import disruption_budget
from prefill_operator.desired.pipeline import Manifest
from prefill_operator.reconcile.metrics import Metrics
from prefill_operator.reconcile.status import status_of, to_manifest
from prometheus_client import generate_latest

from tests.unit.operator.world import FIXED, World, make_pipeline


def formed(**spec: object) -> World:
    world = World(**({"chunking": FIXED} | spec))
    world.settle()
    world.ready()
    world.settle()
    return world


def ready(world: World) -> Manifest:
    status = to_manifest(status_of(world.pipeline, world.plan(), {}, world.now))
    found: Manifest = status["conditions"][0]
    assert (found["type"], status["observedGeneration"]) == ("Ready", world.pipeline.generation)
    return found


def test_aibrix_1766_long_names() -> None:
    """A composed name passes 63 characters in a label of the pods: none is ever made."""
    long = "pp-longctx-qwen3-235b-a22b-512k-prod-eu-west"
    assert f"{names.replica_name(long, 0)}-6b5c9d8f7c" == f"{long}-0-6b5c9d8f7c"
    longer = [f"{long}-number-{i}" for i in range(100)]
    found = {names.replica_name(name, 99) for name in longer}
    assert len(found) == 100, "names that begin alike stay apart"
    assert max(map(len, found)) == 51
    pipeline = make_pipeline(longer[0])
    assert disruption_budget(pipeline)["metadata"]["name"] == names.pipeline_name(longer[0])
    leader = names.leader_address(longer[0], 0, "ns")
    assert leader == f"{names.replica_name(longer[0], 0)}-0.{names.replica_name(longer[0], 0)}.ns.svc"


def test_kthena_743_a_corrected_image_heals() -> None:
    """An image that cannot be pulled holds the rollout up, even once it is corrected."""
    world = formed()
    world.spec["engine"] = {"image": "engine:typo"}
    world.settle()
    world.spec["engine"] = {"image": "engine:2"}
    world.settle()
    assert {p["spec"]["containers"][0]["image"] for p in world.snapshot.pods} == {"engine:2"}
    assert world.stateful_set()["spec"]["podManagementPolicy"] == "Parallel"
    assert world.note("restarts") == "0"


@pytest.mark.parametrize("seen", [False, True], ids=["not yet seen", "seen"])
def test_dynamo_3567_old_pods_do_not_make_ready(seen: bool) -> None:
    """Ready pods of the earlier revision satisfy the count just after an update."""
    world = formed(replicas=2)
    assert ready(world)["status"] == "True"
    world.spec["engine"] = {"image": "engine:2"}
    if not seen:
        world.stateful_set()["metadata"]["generation"] += 1
    found = ready(world)
    assert (found["status"], found["reason"]) == ("False", "RolloutInProgress")


def test_dynamo_3567_a_set_its_controller_has_not_seen_is_not_ready() -> None:
    world = formed()
    world.stateful_set()["metadata"]["generation"] += 1
    assert ready(world)["status"] == "False"


@pytest.mark.parametrize(("replicas", "stages", "available"), [(1, 4, 3), (3, 4, 11), (1, 1, 0), (0, 4, 0)], ids=str)
def test_kuberay_1333_a_drain_is_never_blocked_for_ever(replicas: int, stages: int, available: int) -> None:
    """A budget that wants every pod of a group refuses each eviction."""
    spec = disruption_budget(make_pipeline(replicas=replicas, parallelism={"pipeline": stages}, chunking=FIXED))["spec"]
    assert spec["minAvailable"] == available
    assert spec["unhealthyPodEvictionPolicy"] == "AlwaysAllow", "the rest of a broken group may go"


def test_lws_473_children_are_not_taken_for_parents() -> None:
    """A controller that follows labels alone makes children of its children."""
    world = formed(replicas=3)
    for _ in range(10):
        world.step()
    sets = [name for kind, name in world.snapshot.children if kind == "StatefulSet"]
    assert sorted(sets) == ["a-0", "a-1", "a-2"]
    assert len(world.snapshot.pods) == 6
    assert [step.phase for step in world.plan().steps] == [ReplicaPhase.READY] * 3


def test_mcp_lifecycle_operator_159_no_series_outlives_its_pipeline() -> None:
    metrics = Metrics()
    metrics.saw(("ns", "secret-name"), frozenset({"Ready"}))
    assert 'prefill_operator_pipelines{condition="All"} 1.0' in generate_latest(metrics.registry).decode()
    metrics.saw(("ns", "secret-name"), None)
    text = generate_latest(metrics.registry).decode()
    assert "secret-name" not in text
    assert 'prefill_operator_pipelines{condition="Ready"} 0.0' in text
