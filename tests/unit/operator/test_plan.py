"""The life of a group, step by step, on dictionaries: the planner against a played StatefulSet controller."""

from __future__ import annotations

from typing import Any

import pytest
from prefill_operator.api.types import ReplicaPhase
from prefill_operator.reconcile.plan import Apply, Delete
from prefill_runtime.agent.config import EndReason, LastWords
from prefill_runtime.profiling.document import ProfileResult, Refusal, RefusalReason

from tests.unit.operator.world import FIXED, World, document


def formed(**spec: Any) -> World:
    world = World(**({"chunking": FIXED} | spec))
    world.settle()
    world.ready()
    world.settle()
    return world


def test_creation_ends_in_quiet() -> None:
    world = World()
    plan = world.step()
    assert [a.manifest["kind"] for a in plan.actions if isinstance(a, Apply)] == [
        "Service",
        "PodDisruptionBudget",
        "Service",
        "StatefulSet",
    ]
    assert world.settle().actions == []
    world.ready()
    assert world.settle().steps[0].phase == ReplicaPhase.READY
    assert world.note("formed")


def test_a_crash_before_the_group_was_whole_breaks_it() -> None:
    world = World(chunking=FIXED)
    world.settle()
    world.crash("a-0-1", "boom")
    plan = world.step()
    assert plan.steps[0].phase == ReplicaPhase.RESTARTING
    assert world.stateful_set()["spec"]["replicas"] == 0
    assert world.note("last-failure") == "EngineCrashed: rank 1 ended with exit code 1: boom"


def test_restart_waits_for_the_last_pod_and_for_the_pause() -> None:
    world = formed(recovery={"backoffSeconds": 10})
    first = world.note("incarnation")
    world.crash("a-0-0")
    survivors = list(world.snapshot.pods)
    world.step()
    # A pod that takes its time to end.
    leaving = survivors[1] | {"metadata": survivors[1]["metadata"] | {"deletionTimestamp": "2030-01-01T00:00:00Z"}}
    world.snapshot.pods = [leaving]
    world.wait(seconds=60)
    assert world.plan().steps[0].phase == ReplicaPhase.RESTARTING
    world.snapshot.pods = []
    world.now = world.now.replace(minute=0, second=9)
    plan = world.plan()
    assert (plan.steps[0].phase, plan.wake) == (ReplicaPhase.BACK_OFF, 1.0)
    world.wait(seconds=1)
    world.settle()
    assert world.stateful_set()["spec"]["replicas"] == 2
    assert world.note("incarnation") != first
    assert not world.note("formed")


def test_the_pause_doubles_up_to_its_limit() -> None:
    world = World(chunking=FIXED, recovery={"backoffSeconds": 10, "maxBackoffSeconds": 60})
    pauses = []
    for _ in range(5):
        world.settle()
        world.crash("a-0-0")
        wake = world.step().wake
        assert wake is not None
        pauses.append(wake)
        world.wait(seconds=wake)
    assert pauses == [10, 20, 40, 60, 60]


@pytest.mark.parametrize(("minutes", "pause"), [(9, 20), (11, 10)])
def test_a_long_quiet_life_forgives_earlier_failures(minutes: int, pause: int) -> None:
    world = formed(recovery={"backoffSeconds": 10})
    world.crash("a-0-0")
    world.step()
    world.wait(seconds=10)
    world.settle()
    world.ready()
    world.settle()
    world.wait(minutes=minutes)
    world.crash("a-0-1")
    assert world.step().wake == pause


def test_the_cause_wins_over_its_consequences() -> None:
    world = formed()
    peer = LastWords(reason=EndReason.PEER_LOST, message="rank 1 closed", rank=0)
    world.crash("a-0-0", peer.model_dump_json(by_alias=True))
    world.crash("a-0-1", code=137, reason="OOMKilled")
    assert world.plan().steps[0].cause is not None
    world.step()
    assert (world.note("last-failure") or "").startswith("OutOfMemory: rank 1")


def test_a_cause_that_shows_late_is_still_told() -> None:
    world = formed()
    peer = LastWords(reason=EndReason.PEER_LOST, message="rank 1 closed", rank=0)
    world.crash("a-0-0", peer.model_dump_json(by_alias=True))
    pods = list(world.snapshot.pods)
    world.step()
    assert (world.note("last-failure") or "").startswith("GroupRestarting")
    world.snapshot.pods = pods
    world.crash("a-0-1", code=137, reason="OOMKilled")
    late = list(world.snapshot.pods)
    world.step()
    assert (world.note("last-failure") or "").startswith("OutOfMemory")
    world.snapshot.pods = late
    assert world.plan().actions == []


@pytest.mark.parametrize("how", ["deleted", "replaced", "gone"])
def test_a_lost_pod_breaks_a_formed_group(how: str) -> None:
    world = formed()
    if how == "deleted":
        world.pod("a-0-1")["metadata"]["deletionTimestamp"] = "2030-01-01T00:00:00Z"
    elif how == "replaced":
        world.lose("a-0-1")
        world.ready()
    else:
        world.snapshot.pods.remove(world.pod("a-0-1"))
    plan = world.step()
    assert plan.steps[0].phase == ReplicaPhase.RESTARTING
    assert (world.note("last-failure") or "").startswith("GroupRestarting")


def test_a_pod_replaced_before_the_group_was_whole_is_no_failure() -> None:
    world = World(chunking=FIXED)
    world.settle()
    world.lose("a-0-1")
    assert world.step().steps[0].phase == ReplicaPhase.PENDING


def test_readiness_that_flickers_is_no_failure() -> None:
    world = formed()
    world.pod("a-0-1")["status"]["conditions"][0]["status"] = "False"
    plan = world.plan()
    assert plan.actions == []
    assert plan.steps[0].phase == ReplicaPhase.STARTING


@pytest.mark.parametrize("waiting", ["ImagePullBackOff", "ContainerCreating"])
def test_pulling_and_scheduling_are_no_failures(waiting: str) -> None:
    world = World(chunking=FIXED)
    world.settle()
    state = {"waiting": {"reason": waiting}}
    world.pod("a-0-0")["status"] = {"containerStatuses": [{"name": "engine", "restartCount": 0, "state": state}]}
    world.wait(hours=5)
    assert world.plan().actions == []


def test_giving_up_and_healing_by_a_changed_spec() -> None:
    world = World(chunking=FIXED, recovery={"backoffSeconds": 1, "maxRestarts": 1})
    for _ in range(2):
        world.settle()
        world.crash("a-0-0")
        world.step()
        world.wait(seconds=60)
    plan = world.settle()
    assert plan.steps[0].phase == ReplicaPhase.FAILED
    assert plan.wake is None
    world.spec["engine"] = {"image": "engine:fixed"}
    world.settle()
    assert world.stateful_set()["spec"]["replicas"] == 2
    assert world.note("restarts") == "0"


def test_a_typo_in_the_image_does_not_outlive_its_correction() -> None:
    world = formed()
    world.spec["engine"] = {"image": "engine:typo"}
    world.settle()
    world.spec["engine"] = {"image": "engine:2"}
    world.settle()
    assert {p["spec"]["containers"][0]["image"] for p in world.snapshot.pods} == {"engine:2"}
    assert world.note("restarts") == "0"


def test_back_and_forth_ends_where_it_began() -> None:
    world = formed()
    before = world.note("template-hash")
    world.spec["engine"] = {"image": "engine:2"}
    world.step()
    world.spec.pop("engine")
    world.settle()
    world.ready()
    assert world.settle().steps[0].phase == ReplicaPhase.READY
    assert world.note("template-hash") == before


def test_a_rollout_spends_its_budget_on_ready_replicas_only() -> None:
    world = formed(replicas=3)
    world.crash("a-0-0")
    world.spec["engine"] = {"image": "engine:2"}
    world.step()
    stopped = [r for r in range(3) if world.stateful_set(f"a-{r}")["spec"]["replicas"] == 0]
    assert stopped == [0], "the broken one is down, so no other may go"
    world.settle()
    world.ready("a-0-0", "a-0-1")
    world.step()
    assert world.stateful_set("a-2")["spec"]["replicas"] == 0
    assert world.stateful_set("a-1")["spec"]["replicas"] == 2
    for _ in range(6):
        world.settle()
        world.ready()
    plan = world.settle()
    assert {step.phase for step in plan.steps} == {ReplicaPhase.READY}
    assert not any(step.outdated for step in plan.steps)


def test_a_waiting_group_still_records_that_it_formed() -> None:
    world = World(chunking=FIXED, replicas=2)
    world.settle()
    world.ready("a-0-0", "a-0-1")
    world.spec["engine"] = {"image": "engine:2"}
    world.step()
    assert world.note("formed", "a-0")
    assert world.stateful_set("a-0")["spec"]["template"]["spec"]["containers"][0]["image"] == "engine:1"


def test_scale_down_removes_the_highest() -> None:
    world = formed(replicas=3)
    world.spec["replicas"] = 1
    deleted = [a for a in world.step().actions if isinstance(a, Delete)]
    assert sorted((a.kind, a.name) for a in deleted) == [
        ("Service", "a-1"),
        ("Service", "a-2"),
        ("StatefulSet", "a-1"),
        ("StatefulSet", "a-2"),
    ]
    assert world.settle().steps[0].phase == ReplicaPhase.READY


def test_a_set_being_deleted_is_left_alone() -> None:
    world = formed()
    world.stateful_set()["metadata"]["deletionTimestamp"] = "2030-01-01T00:00:00Z"
    assert world.plan().actions == []


def test_suspend_and_resume() -> None:
    world = formed()
    world.spec["suspend"] = True
    world.settle()
    assert world.snapshot.pods == []
    assert world.note("restarts") == "0"
    world.spec["suspend"] = False
    world.settle()
    assert len(world.snapshot.pods) == 2


def test_suspended_from_the_start_makes_no_set() -> None:
    world = World(suspend=True)
    world.settle()
    assert ("StatefulSet", "a-0") not in world.snapshot.children
    assert ("Service", "a") in world.snapshot.children


def test_paused_plans_nothing_but_sees() -> None:
    world = formed()
    world.spec["paused"] = True
    world.crash("a-0-0")
    plan = world.plan()
    assert plan.actions == []
    assert plan.steps[0].phase == ReplicaPhase.RESTARTING


@pytest.mark.parametrize("pods", [0, 1, 3])
def test_a_hand_that_scales_the_set_is_undone(pods: int) -> None:
    world = formed()
    world.scale("a-0", pods)
    world.settle()
    world.wait(minutes=1)
    world.settle()
    assert len(world.snapshot.pods) == 2


def test_a_service_of_somebody_else_keeps_the_group_away() -> None:
    world = World()
    world.snapshot.strangers["Service", "a-0"] = {"metadata": {"uid": "x", "name": "a-0"}}
    plan = world.plan()
    assert plan.conflicts == ["Service a-0"]
    assert {a.manifest["kind"] for a in plan.actions if isinstance(a, Apply)} == {"Service", "PodDisruptionBudget"}


def test_what_a_namesake_left_is_waited_for() -> None:
    world = World()
    owner = {"kind": "PrefillPipeline", "name": "a", "uid": "earlier", "controller": True}
    world.snapshot.strangers["Service", "a"] = {"metadata": {"uid": "x", "name": "a", "ownerReferences": [owner]}}
    plan = world.plan()
    assert (plan.conflicts, plan.leaving, plan.wake) == ([], ["Service a"], 1.0)


# -- calibration


def test_a_measurement_is_kept_and_the_next_life_starts_from_it() -> None:
    world = World()
    world.settle()
    found = document(world.pipeline.calibration_key)
    world.ready(profile=ProfileResult(outcome="Measured", calibration=found).to_json())
    plan = world.settle()
    assert plan.evidence.calibrated == {0}
    assert world.snapshot.calibration is not None
    world.crash("a-0-1")
    world.step()
    world.wait(minutes=1)
    world.settle()
    assert world.pod("a-0-0")["metadata"]["annotations"]["prefill.dev/calibration"] == found.to_json()


def test_reuse_never_starts_from_nothing() -> None:
    world = World(profiling={"reuse": "Never"})
    world.settle()
    found = document(world.pipeline.calibration_key)
    world.ready(profile=ProfileResult(outcome="Measured", calibration=found).to_json())
    world.settle()
    world.crash("a-0-1")
    world.step()
    world.wait(minutes=1)
    world.settle()
    assert world.pod("a-0-0")["metadata"]["annotations"]["prefill.dev/calibration"] == ""


def test_two_replicas_that_measured_agree_on_the_newest() -> None:
    world = World(replicas=2)
    world.settle()
    key = world.pipeline.calibration_key
    for replica, second in ((0, 5), (1, 3)):
        found = document(key, f"2030-01-01T00:00:0{second}Z")
        text = ProfileResult(outcome="Measured", calibration=found).to_json()
        world.ready(f"a-{replica}-0", f"a-{replica}-1", profile=text)
    world.settle()
    assert world.snapshot.calibration is not None
    assert world.snapshot.calibration["data"]["createdAt"] == "2030-01-01T00:00:05Z"
    assert world.plan().actions == []


def test_a_spoilt_config_map_is_mended_from_what_the_group_started_with() -> None:
    world = World()
    world.settle()
    found = document(world.pipeline.calibration_key)
    world.ready(profile=ProfileResult(outcome="Measured", calibration=found).to_json())
    world.settle()
    assert world.snapshot.calibration is not None
    world.snapshot.calibration["data"]["calibration.json"] = "{}"
    assert world.plan().evidence.invalid
    world.settle()
    assert world.snapshot.calibration["data"]["calibration.json"] == found.to_json()


def test_a_config_map_of_somebody_else_is_left_alone() -> None:
    world = World()
    world.snapshot.calibration = {"metadata": {"name": "x", "uid": "y"}, "data": {"calibration.json": "{}"}}
    plan = world.plan()
    assert plan.evidence.foreign
    assert "ConfigMap" not in [a.manifest["kind"] for a in plan.actions if isinstance(a, Apply)]


def test_a_refusal_is_kept_out_of_the_config_map() -> None:
    world = World()
    world.settle()
    refusal = Refusal(reason=RefusalReason.RANK_LOST, message="rank 1 is silent", stage=1)
    world.ready(profile=ProfileResult(outcome="Refused", refusal=refusal).to_json())
    plan = world.settle()
    assert plan.evidence.refused == ("replica 0: RankLost in stage 1: rank 1 is silent",)
    assert world.snapshot.calibration is None
