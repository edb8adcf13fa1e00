"""What serving groups learn reaches the ConfigMap: the real operator process, API server and control port."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from prefill_operator.desired.life import timestamp
from prefill_operator.desired.names import calibration_name
from prefill_runtime.agent.config import RankConfig
from prefill_runtime.profiling.document import CalibrationDocument

from tests.leader import Leader
from tests.operator.lab import Lab, Object, condition, document, measured, pipeline

pytestmark = pytest.mark.usefixtures("operator")

LEARNING = {"enabled": False}


@pytest.fixture
def leader() -> Iterator[Leader]:
    with Leader() as found:
        yield found


def key_of(pod: Object) -> str:
    return RankConfig.model_validate_json(pod["metadata"]["annotations"]["prefill.dev/config"]).calibration_key


def learnt(key: str, seconds: float = 5, **more: Any) -> CalibrationDocument:
    """Within what clocks may differ by, so surely after the group was formed."""
    return document(key, timestamp(datetime.now(UTC) + timedelta(seconds=seconds)), source="Online", **more)


def kept(lab: Lab, key: str, text: str) -> Object:
    return lab.until("ConfigMap", calibration_name(key), lambda item: item["data"]["calibration.json"] == text)


def lives(lab: Lab) -> list[tuple[str, str]]:
    pods = sorted((p["metadata"]["name"], p["metadata"]["uid"]) for p in lab.list("Pod"))
    sets = sorted((s["metadata"]["name"], str(s["metadata"]["generation"])) for s in lab.list("StatefulSet"))
    return [*pods, *sets]


def let_the_pause_pass(lab: Lab, key: str) -> None:
    written = {"prefill.dev/written-at": timestamp(datetime.now(UTC) - timedelta(minutes=10))}
    lab.patch("ConfigMap", calibration_name(key), {"metadata": {"annotations": written}})


def test_learnt_from_nothing_refined_and_never_a_restart(lab: Lab, leader: Leader) -> None:
    lab.create(pipeline("a", profiling=LEARNING))
    pods = lab.serve("a-0", address=leader.address)
    found = lab.until_ready("a")
    assert condition(found, "Calibrated")["status"] == "False"
    assert condition(found, "Calibrated")["reason"] == "Learning"
    assert found["status"]["policy"] == "Fixed"
    key, before = key_of(pods[0]), lives(lab)

    first = learnt(key)
    leader.offer = first.to_json()
    item = kept(lab, key, first.to_json())
    assert item["metadata"]["annotations"]["prefill.dev/revision"] == "1"
    assert "previous.json" not in item["data"]
    found = lab.until_reason("a", "Learnt", "Calibrated")
    calibrated = condition(found, "Calibrated")
    assert calibrated["status"] == "True"
    assert f"source Online: R^2 0.9980, 128 samples, learnt while serving {first.created_at}" in calibrated["message"]
    assert found["status"]["policy"] == "Dynamic"
    assert found["status"]["calibration"]["source"] == "Online"

    second = learnt(key, 60)
    leader.offer = second.to_json()
    leader.wait_asked(2)
    item = lab.get("ConfigMap", calibration_name(key)) or {}
    assert item["data"]["calibration.json"] == first.to_json(), "one write in ten minutes"
    let_the_pause_pass(lab, key)
    item = kept(lab, key, second.to_json())
    assert item["metadata"]["annotations"]["prefill.dev/revision"] == "2"
    assert item["data"]["previous.json"] == first.to_json()
    lab.until("PrefillPipeline", "a", lambda i: i["status"]["calibration"]["time"] == second.created_at)

    lab.patch("ConfigMap", calibration_name(key), {"data": {"calibration.json": "{}"}})
    leader.offer = None
    item = kept(lab, key, first.to_json())
    assert item["metadata"]["annotations"]["prefill.dev/revision"] == "3"
    assert lives(lab) == before, "no pod was replaced, and no set changed"


def test_a_refinement_follows_a_measurement_and_the_newest_replica_counts(lab: Lab, leader: Leader) -> None:
    with Leader() as other:
        lab.create(pipeline("a", replicas=2))
        key = key_of(lab.group("a-0")[0])
        now = timestamp(datetime.now(UTC))
        lab.serve("a-0", profile=measured(key, now), address=leader.address)
        lab.serve("a-1", profile=measured(key, now), address=other.address)
        lab.until_ready("a")
        lab.until_reason("a", "Measured", "Calibrated")
        before = lives(lab)
        leader.offer, other.offer = learnt(key, 20).to_json(), learnt(key, 30).to_json()
        leader.wait_asked()
        other.wait_asked()
        let_the_pause_pass(lab, key)
        item = kept(lab, key, other.offer)
        assert item["data"]["previous.json"] == document(key, now).to_json()
        assert condition(lab.until_reason("a", "Learnt", "Calibrated"), "Calibrated")["status"] == "True"
        assert lives(lab) == before


@pytest.mark.parametrize(
    ("offer", "reason"),
    [
        (lambda key: "<html>", "document: Invalid JSON"),
        (lambda key: learnt("0" * 16).to_json(), "document has key 0000000000000000, this pipeline needs"),
        (lambda key: learnt(key, 3600).to_json(), "which is yet to come: set the clocks of the nodes"),
    ],
    ids=["malformed", "foreign", "future"],
)
def test_what_is_no_calibration_is_told_and_changes_nothing(
    lab: Lab, leader: Leader, operator: Any, offer: Any, reason: str
) -> None:
    lab.create(pipeline("a"))
    key = key_of(lab.group("a-0")[0])
    now = timestamp(datetime.now(UTC))
    lab.serve("a-0", profile=measured(key, now), address=leader.address)
    lab.until_reason("a", "Measured", "Calibrated")
    let_the_pause_pass(lab, key)
    leader.offer = offer(key)
    found = lab.until("PrefillPipeline", "a", lambda item: reason in condition(item, "Calibrated")["message"])
    assert (condition(found, "Calibrated")["status"], condition(found, "Calibrated")["reason"]) == ("True", "Measured")
    assert "what replica 0 offers is ignored: " in condition(found, "Calibrated")["message"]
    version = found["metadata"]["resourceVersion"]
    leader.wait_asked(2)
    found = lab.get("PrefillPipeline", "a") or {}
    assert found["metadata"]["resourceVersion"] == version, "told once, not at each look"
    item = lab.get("ConfigMap", calibration_name(key)) or {}
    assert item["data"]["calibration.json"] == document(key, now).to_json()
    assert f"{lab.namespace}/a: what replica 0 offers is ignored: " in operator.log.read_text()


def test_a_leader_that_does_not_answer_keeps_nobody_waiting(lab: Lab, leader: Leader) -> None:
    leader.offer = "x"
    leader.released.clear()
    lab.create(pipeline("a", profiling=LEARNING))
    lab.serve("a-0", address=leader.address)
    lab.until_ready("a")
    leader.wait_asked()
    lab.patch("PrefillPipeline", "a", {"spec": {"engine": {"port": 8100}}})
    lab.until("Service", "a", lambda item: [port["port"] for port in item["spec"]["ports"]] == [8100])


def test_nobody_is_asked_when_the_calibration_is_to_stay(lab: Lab, leader: Leader) -> None:
    lab.create(pipeline("a", profiling={"onlineCalibration": {"enabled": False}}))
    key = key_of(lab.group("a-0")[0])
    lab.serve("a-0", profile=measured(key), address=leader.address)
    lab.until_ready("a")
    lab.until_reason("a", "Measured", "Calibrated")
    lab.create(pipeline("b", profiling=LEARNING))
    with Leader() as other:
        lab.serve("b-0", address=other.address)
        other.wait_asked()
        other.wait_asked()
    assert leader.count == 0
