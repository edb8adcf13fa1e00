"""What hands, clocks and lost nodes do to a group: no endless writes, no endless restarts, nothing stuck."""

from __future__ import annotations

from datetime import timedelta

import pytest
from prefill_operator.api.types import ReplicaPhase
from prefill_operator.desired.life import timestamp
from prefill_operator.desired.pipeline import Manifest
from prefill_operator.reconcile.drift import differs
from prefill_operator.reconcile.status import status_of, to_manifest
from prefill_runtime.agent.config import EndReason, LastWords
from prefill_runtime.profiling.document import ProfileResult

from tests.unit.operator.world import FIXED, World, document


def formed(**spec: object) -> World:
    world = World(**({"chunking": FIXED} | spec))
    world.settle()
    world.ready()
    world.settle()
    return world


def status(world: World, earlier: Manifest | None = None) -> Manifest:
    return to_manifest(status_of(world.pipeline, world.plan(), earlier or {}, world.now))


def annotate(world: World, name: str, value: str) -> None:
    world.stateful_set()["metadata"]["annotations"][f"prefill.dev/{name}"] = value


@pytest.mark.parametrize(
    ("name", "value"),
    [("note", "mine"), ("last-failure", "no: reason"), ("not-before", "x"), ("formed-at", ""), ("restarts", "many")],
)
def test_annotations_set_by_hand_cause_no_writes_that_never_end(name: str, value: str) -> None:
    world = formed()
    annotate(world, name, value)
    world.settle()
    assert world.plan().actions == []
    assert world.plan().steps[0].phase == ReplicaPhase.READY


def test_every_note_of_a_life_is_written_so_that_none_set_by_hand_survives() -> None:
    """Server-side apply leaves what it does not name to the hand that set it: absent would not mean empty."""
    world = formed()
    annotate(world, "formed", "by hand")
    world.step()
    notes = world.stateful_set()["metadata"]["annotations"]
    assert notes["prefill.dev/formed"] == ""
    assert notes["prefill.dev/last-failure"].startswith("GroupRestarting")
    world.wait(minutes=1)
    world.settle()
    world.ready()
    assert world.settle().steps[0].phase == ReplicaPhase.READY


@pytest.mark.parametrize("text", ["two words: x", "no colon", ": empty", "Ünicode: ☃", "x" * 9000])
def test_a_failure_that_was_edited_by_hand_is_still_a_condition(text: str) -> None:
    world = formed()
    world.crash("a-0-0")
    world.step()
    annotate(world, "last-failure", text)
    assert status(world)["conditions"][0]["status"] == "False"
    world.settle()
    assert world.plan().actions == []


def test_paused_is_quiet_even_while_a_group_is_broken() -> None:
    world = formed()
    world.spec["paused"] = True
    world.crash("a-0-0")
    first = status(world)
    world.wait(seconds=7)
    assert status(world, first) == first
    assert world.plan().wake is None


def test_a_pause_longer_than_the_longest_ends_at_once() -> None:
    """The clock went back, or the limit was lowered."""
    world = formed(recovery={"backoffSeconds": 10, "maxBackoffSeconds": 60})
    world.crash("a-0-0")
    world.step()
    world.step()
    annotate(world, "not-before", timestamp(world.now + timedelta(hours=1)))
    world.step()
    assert world.stateful_set()["spec"]["replicas"] == 2


def test_suspend_and_resume_retries_what_had_failed_for_good() -> None:
    world = World(chunking=FIXED, recovery={"backoffSeconds": 1, "maxRestarts": 1})
    for _ in range(2):
        world.settle()
        world.crash("a-0-0")
        world.step()
        world.wait(seconds=60)
    assert world.settle().steps[0].phase == ReplicaPhase.FAILED
    world.spec["suspend"] = True
    world.settle()
    world.spec["suspend"] = False
    assert world.settle().steps[0].phase == ReplicaPhase.PENDING
    assert world.note("restarts") == "0"


def test_a_crash_that_shows_after_its_consequence_is_told() -> None:
    world = formed()
    peer = LastWords(reason=EndReason.PEER_LOST, message="rank 1 closed", rank=0)
    world.crash("a-0-0", peer.model_dump_json(by_alias=True))
    pods = list(world.snapshot.pods)
    world.step()
    world.snapshot.pods = pods
    world.crash("a-0-1", "CUDA error")
    late = list(world.snapshot.pods)
    world.step()
    assert world.note("last-failure") == "EngineCrashed: rank 1 ended with exit code 1: CUDA error"
    world.snapshot.pods = late
    assert world.plan().actions == []


def test_what_is_killed_because_the_group_stops_is_no_cause() -> None:
    world = formed()
    world.pod("a-0-1")["metadata"]["deletionTimestamp"] = timestamp(world.now)
    pods = list(world.snapshot.pods)
    world.step()
    world.snapshot.pods = pods
    world.crash("a-0-0", code=137)
    world.step()
    assert world.note("last-failure") == "GroupRestarting: the pod of rank 1 was deleted"


def test_a_pod_that_never_ends_is_named_with_its_node() -> None:
    world = formed()
    pod = world.pod("a-0-1")
    pod["spec"]["nodeName"] = "n7"
    pod["metadata"]["deletionTimestamp"] = timestamp(world.now + timedelta(seconds=30))
    world.step()
    world.snapshot.pods = [pod]
    world.wait(seconds=40)
    assert "n7" not in status(world)["conditions"][0]["message"]
    world.wait(minutes=2)
    message = status(world)["conditions"][0]["message"]
    assert "pod a-0-1 on node n7 should have ended at 2030-01-01T00:00:30Z" in message


def test_a_calibration_deleted_while_suspended_is_measured_anew() -> None:
    world = World()
    world.settle()
    found = document(world.pipeline.calibration_key)
    world.ready(profile=ProfileResult(outcome="Measured", calibration=found).to_json())
    world.settle()
    world.crash("a-0-1")
    world.step()
    world.wait(minutes=1)
    world.settle()
    world.spec["suspend"] = True
    world.settle()
    world.snapshot.calibration = None
    world.settle()
    assert world.snapshot.calibration is None
    world.spec["suspend"] = False
    world.settle()
    assert world.pod("a-0-0")["metadata"]["annotations"]["prefill.dev/calibration"] == ""


@pytest.mark.parametrize(
    ("asked", "stored"), [("1e4", "10e3"), ("1E2", "100"), ("0.0005", "500u"), ("1.5Gi", "1536Mi"), (2, "2")]
)
def test_quantities_are_compared_by_amount(asked: str | int, stored: str) -> None:
    def with_memory(amount: str | int) -> Manifest:
        return {"metadata": {}, "spec": {"resources": {"requests": {"memory": amount}}}}

    assert not differs(with_memory(asked), with_memory(stored))
    assert differs(with_memory(asked), with_memory("3"))
