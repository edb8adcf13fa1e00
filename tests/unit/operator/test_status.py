from __future__ import annotations

from typing import Any

import pytest
from prefill_operator.desired.pipeline import Manifest
from prefill_operator.reconcile.events import event, transitions
from prefill_operator.reconcile.group import Failure
from prefill_operator.reconcile.observe import Warned
from prefill_operator.reconcile.status import status_of, to_manifest, trouble_status
from prefill_runtime.agent.config import EndReason, LastWords
from prefill_runtime.profiling.document import ProfileResult, Refusal, RefusalReason

from tests.unit.operator.world import FIXED, World, document


def status(world: World, earlier: Manifest | None = None) -> Manifest:
    return to_manifest(status_of(world.pipeline, world.plan(), earlier or {}, world.now))


def condition(found: Manifest, kind: str = "Ready") -> Manifest:
    result: Manifest = next(c for c in found["conditions"] if c["type"] == kind)
    return result


def started(**spec: Any) -> World:
    world = World(**({"chunking": FIXED} | spec))
    world.settle()
    return world


def test_ready() -> None:
    world = started()
    world.ready()
    world.settle()
    found = status(world)
    assert (condition(found)["status"], condition(found)["reason"]) == ("True", "AllReplicasReady")
    assert found["readyReplicas"] == 1
    assert found["selector"] == "prefill.dev/pipeline-uid=uid-1,apps.kubernetes.io/pod-index=0"
    assert found["replicaStatuses"][0]["phase"] == "Ready"
    assert condition(found, "Progressing")["status"] == "False"


def waiting(reason: str, message: str = "", name: str = "engine") -> Manifest:
    return {
        "containerStatuses": [
            {"name": name, "image": "x:1", "state": {"waiting": {"reason": reason, "message": message}}}
        ]
    }


@pytest.mark.parametrize(
    ("pod", "reason", "message"),
    [
        (
            {"conditions": [{"type": "PodScheduled", "status": "False", "message": "0/3 nodes are available"}]},
            "Scheduling",
            "replica 0: rank 1 waits for a node: 0/3 nodes are available",
        ),
        (waiting("ImagePullBackOff", "not found"), "ImagePullFailed", "replica 0: rank 1, image x:1: not found"),
        (waiting("ErrImagePull"), "ImagePullFailed", "replica 0: rank 1, image x:1: ErrImagePull"),
        (waiting("CreateContainerConfigError", "no secret"), "ContainerNotStarted", "no secret"),
        (waiting("ContainerCreating"), "Starting", "replica 0: 0 of 2 ranks are ready"),
        (
            {"initContainerStatuses": [{"name": "profile", "state": {"running": {}}}]},
            "Profiling",
            "replica 0: chunks are being measured, which comes before the first start",
        ),
        (
            {
                "initContainerStatuses": [
                    {
                        "name": "runtime",
                        "state": {"waiting": {"reason": "CrashLoopBackOff"}},
                        "lastState": {"terminated": {"exitCode": 127, "message": "python3: not found"}},
                    }
                ]
            },
            "InitFailed",
            "init step runtime of rank 1 ended with exit code 127: python3: not found",
        ),
    ],
)
def test_why_a_start_takes_long(pod: Manifest, reason: str, message: str) -> None:
    world = started()
    world.pod("a-0-1")["status"] = pod
    found = condition(status(world))
    assert found["reason"] == reason
    assert message in found["message"]


def test_trouble_that_only_events_tell() -> None:
    world = started()
    pod = world.pod("a-0-0")["metadata"]["uid"]
    mount = (
        'MountVolume.SetUp failed for volume "prefill-model" : hostPath type check failed: /srv/toy is not a directory'
    )
    world.snapshot.warnings[pod] = Warned("FailedMount", mount)
    assert condition(status(world))["reason"] == "ModelNotFound"
    world.snapshot.warnings[pod] = Warned("FailedMount", 'volume "logs": no such claim')
    assert condition(status(world))["reason"] == "VolumeNotMounted"
    world.snapshot.pods = []
    quota = Warned("FailedCreate", 'pods "a-0-0" is forbidden: exceeded quota: q')
    world.snapshot.warnings[world.stateful_set()["metadata"]["uid"]] = quota
    assert condition(status(world))["reason"] == "QuotaDenied"


def words(reason: EndReason, message: str) -> str:
    return LastWords(reason=reason, message=message, rank=0).model_dump_json(by_alias=True)


@pytest.mark.parametrize(
    ("message", "reason", "text"),
    [
        (words(EndReason.ENGINE_EXITED, "exit code 1: KeyError"), "EngineCrashed", "rank 0: exit code 1: KeyError"),
        (words(EndReason.MODEL_NOT_FOUND, "no config.json"), "ModelNotFound", "rank 0: no config.json"),
        (words(EndReason.ENGINE_NEVER_READY, "1800 s"), "EngineNeverReady", "rank 0: 1800 s"),
        (words(EndReason.PEER_LOST, "rank 1"), "GroupRestarting", "rank 0 ended (PeerLost): rank 1"),
        ("Segmentation fault", "EngineCrashed", "rank 0 ended with exit code 1: Segmentation fault"),
        ("", "EngineCrashed", "rank 0 ended with exit code 1: no last words"),
    ],
)
def test_why_a_group_broke_is_told_until_it_is_back(message: str, reason: str, text: str) -> None:
    world = started()
    world.crash("a-0-0", message)
    assert condition(status(world))["reason"] == reason
    world.step()
    found = status(world)
    assert condition(found)["reason"] == reason
    assert text in condition(found)["message"]
    assert found["replicaStatuses"][0]["nextRetryTime"] == "2030-01-01T00:00:10Z"
    assert found["replicaStatuses"][0]["restarts"] == 1


def test_the_worst_replica_speaks_first() -> None:
    world = started(replicas=3)
    world.ready("a-0-0", "a-0-1")
    world.crash("a-2-1", code=137, reason="OOMKilled")
    found = status(world)
    assert condition(found)["reason"] == "OutOfMemory"
    assert condition(found)["message"].startswith("replica 2: rank 1 exceeded its memory limit")
    assert "replica 1: 0 of 2" in condition(found)["message"]
    assert condition(found, "Degraded")["status"] == "True"


def test_transition_times_move_with_the_status_only() -> None:
    world = started()
    first = status(world)
    world.wait(seconds=30)
    assert status(world, first) == first
    world.ready()
    second = status(world, first)
    assert condition(second)["lastTransitionTime"] == "2030-01-01T00:00:30Z"
    assert condition(second, "Paused") == condition(first, "Paused")


@pytest.mark.parametrize(
    ("policy", "expected"),
    [("Fixed", ("Unknown", "NotNeeded")), ("EngineNative", ("Unknown", "MeasuredByEngine"))],
)
def test_policies_without_a_calibration(policy: str, expected: tuple[str, str]) -> None:
    found = condition(status(started(chunking=FIXED | {"policy": policy})), "Calibrated")
    assert (found["status"], found["reason"]) == expected


def test_calibrated() -> None:
    world = World()
    world.settle()
    assert condition(status(world), "Calibrated")["reason"] == "Pending"
    text = ProfileResult(outcome="Measured", calibration=document(world.pipeline.calibration_key)).to_json()
    world.ready(profile=text)
    world.settle()
    found = status(world)
    assert condition(found, "Calibrated")["status"] == "True"
    assert found["policy"] == "Dynamic"
    assert found["calibration"] == {
        "key": world.pipeline.calibration_key,
        "configMap": f"prefill-calibration-{world.pipeline.calibration_key}",
        "source": "Profile",
        "r2": "0.9900",
        "samples": 128,
        "time": "2030-01-01T00:00:00Z",
    }


def test_a_refusal_says_that_chunks_are_fixed() -> None:
    world = World()
    world.settle()
    refusal = Refusal(reason=RefusalReason.TIMED_OUT, message="1800 s were not enough")
    world.ready(profile=ProfileResult(outcome="Refused", refusal=refusal).to_json())
    world.settle()
    found = status(world)
    assert condition(found, "Calibrated")["reason"] == "ProfilingRefused"
    assert condition(found, "Calibrated")["message"] == (
        "chunks are Fixed until enough of them were timed while serving. replica 0: TimedOut: 1800 s were not enough"
    )
    assert found["policy"] == "Fixed"


def test_suspended_is_at_rest() -> None:
    world = started(suspend=True)
    found = status(world)
    assert condition(found)["reason"] == "Suspended"
    assert condition(found, "Progressing")["status"] == "False"


def test_trouble_leaves_the_rest_of_the_status() -> None:
    world = started()
    world.ready()
    world.settle()
    before = status(world)
    found = trouble_status(Failure("InvalidSpec", "spec.replicas: too many"), 2, before, world.now)
    assert condition(found) == {
        "type": "Ready",
        "status": "False",
        "reason": "InvalidSpec",
        "message": "spec.replicas: too many",
        "lastTransitionTime": "2030-01-01T00:00:00Z",
        "observedGeneration": 2,
    }
    assert found["replicaStatuses"] == before["replicaStatuses"]
    assert condition(found, "Paused") == condition(before, "Paused")


def test_events_tell_news_once() -> None:
    world = started()
    first = status(world)
    assert transitions({}, first) == []
    world.crash("a-0-0", "boom")
    second = status(world, first)
    news = transitions(first, second)
    assert [c["reason"] for c in news] == ["EngineCrashed"]
    pipeline = {"metadata": {"name": "a", "namespace": "ns", "uid": "uid-1"}}
    assert event(pipeline, news[0], "host")["type"] == "Warning"
    assert transitions(second, status(world, second)) == []


def test_an_event_has_a_name_whatever_the_pipeline_is_called() -> None:
    name = "a" * 39 + "-" + "b" * 20
    item = {"metadata": {"name": name, "namespace": "ns", "uid": "uid-1"}}
    found = event(item, {"reason": "Measured", "message": "x" * 5000}, "host")
    assert found["metadata"]["generateName"] == "a" * 39 + ".", "no label of a name ends with a dash"
    assert len(found["message"]) == 1000
