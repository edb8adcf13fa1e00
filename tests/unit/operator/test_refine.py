"""Which of the calibrations that serving groups offer is kept."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from prefill_operator.desired.calibration import calibration_map
from prefill_operator.desired.life import timestamp
from prefill_operator.desired.pipeline import Manifest
from prefill_operator.reconcile.refine import CLOCK_SKEW, PAUSE, newest, refine
from prefill_operator.reconcile.status import status_of, to_manifest
from prefill_runtime.profiling.document import CalibrationDocument, ProfileResult, Refusal, RefusalReason

from tests.unit.operator.world import NOW, World, document, make_pipeline

PIPELINE = make_pipeline()
KEY = PIPELINE.calibration_key


def at(**after: float) -> str:
    return timestamp(NOW + timedelta(**after))


def online(created_at: str = "", key: str = KEY, **more: Any) -> CalibrationDocument:
    return document(key, created_at or at(minutes=-1), source="Online", **more)


KEPT = document(KEY, at(hours=-2))


def stored(kept: CalibrationDocument = KEPT, **ago: float) -> Manifest:
    return calibration_map(PIPELINE, kept, None, NOW - timedelta(**ago))


def test_a_newer_refinement_of_this_pipeline_is_kept() -> None:
    found = refine(PIPELINE, KEPT, stored(hours=2), {0: online().to_json()}, NOW)
    assert (found.document, found.ignored) == (online(), ())


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "Invalid JSON"),
        ("null", "document: Input should be an object"),
        ("x" * 5000, "document has 5000 bytes, more than the 4096 allowed"),
        (online(key="0" * 16).to_json(), f"document has key {'0' * 16}, this pipeline needs {KEY}"),
        (online(stages=3).to_json(), "document has 3 stages, this pipeline has 2"),
        (online(r2=0.899).to_json(), "R^2 is 0.899, at least 0.9 is needed"),
        (online(at(minutes=6)).to_json(), "it is of 2030-01-01T00:06:00Z, which is yet to come"),
        (online().to_json().replace('"schemaVersion":2', '"schemaVersion":3'), "schemaVersion"),
        (online().to_json().replace("0.003", "NaN"), "Input should be a finite number"),
    ],
)
@pytest.mark.parametrize("kept", [KEPT, None])
def test_what_is_none_is_ignored_with_its_reason(text: str, reason: str, kept: CalibrationDocument | None) -> None:
    found = refine(PIPELINE, kept, None, {1: text}, NOW)
    assert found.document is None
    (told,) = found.ignored
    assert told.startswith("what replica 1 offers is ignored: ")
    assert reason in told


@pytest.mark.parametrize(
    "offer",
    [
        document(KEY, at(minutes=-1)),
        online(at(hours=-3)),
        online(KEPT.created_at, r2=0.999).model_copy(update={"model": "a"}),
    ],
    ids=["measured before the start", "older", "as old"],
)
def test_what_is_nothing_new_is_no_news(offer: CalibrationDocument) -> None:
    kept = online(KEPT.created_at) if offer.created_at == KEPT.created_at else KEPT
    found = refine(PIPELINE, kept, stored(hours=2), {0: offer.to_json()}, NOW)
    assert found.ignored == ()
    assert found.document is None


def test_of_several_replicas_the_newest_counts_in_any_order() -> None:
    texts = [online(at(minutes=-3)).to_json(), online(at(minutes=-2), r2=0.95).to_json(), "{}"]
    for order in ((0, 1, 2), (2, 1, 0), (1, 2, 0)):
        found = refine(PIPELINE, None, None, {place: texts[number] for place, number in enumerate(order)}, NOW)
        assert found.document == online(at(minutes=-2), r2=0.95)
        assert len(found.ignored) == 1


@pytest.mark.parametrize(
    ("ago", "written"),
    [
        (timedelta(0), False),
        (PAUSE - timedelta(seconds=1), False),
        (PAUSE, True),
        (-timedelta(days=1), True),  # the clock went back since
    ],
)
def test_refinements_pause_after_a_write(ago: timedelta, written: bool) -> None:
    observed = calibration_map(PIPELINE, KEPT, None, NOW - ago)
    found = refine(PIPELINE, KEPT, observed, {0: online().to_json()}, NOW)
    assert found.document == (online() if written else None)


def test_the_first_calibration_does_not_wait() -> None:
    unreadable = stored(seconds=1)
    unreadable["data"]["calibration.json"] = "{}"
    for observed in (None, unreadable):
        assert refine(PIPELINE, None, observed, {0: online().to_json()}, NOW).document == online()


def test_a_document_of_a_clock_that_was_wrong_gives_way() -> None:
    future = document(KEY, at(days=400))
    assert newest([future, KEPT], NOW) == KEPT
    assert newest([future, document(KEY, at(days=500))], NOW) == document(KEY, at(days=500))
    assert refine(PIPELINE, future, stored(hours=2), {0: online().to_json()}, NOW).document == online()
    soon = document(KEY, timestamp(NOW + CLOCK_SKEW))
    assert newest([soon, KEPT], NOW) == soon


def test_the_newest_measurement_is_kept() -> None:
    old, new = document("0" * 16, at(seconds=-2)), document("0" * 16, at(seconds=-1))
    assert newest([new, old], NOW) == newest([old, new], NOW) == new
    assert newest([], NOW) is None


# -- in a whole pipeline


def calibrated(world: World) -> tuple[str, str, str]:
    found = to_manifest(status_of(world.pipeline, world.plan(), {}, world.now))
    condition = next(c for c in found["conditions"] if c["type"] == "Calibrated")
    return condition["status"], condition["reason"], condition["message"]


def learning() -> World:
    world = World(profiling={"enabled": False})
    world.settle()
    world.ready()
    world.settle()
    return world


def offer(world: World, **more: Any) -> CalibrationDocument:
    found = document(world.pipeline.calibration_key, timestamp(world.now), source="Online", **more)
    world.snapshot.offers = {0: found.to_json()}
    return found


def test_learnt_from_nothing_without_touching_a_pod() -> None:
    world = learning()
    assert calibrated(world)[:2] == ("False", "Learning")
    assert world.snapshot.calibration is None
    before = [pod["metadata"]["uid"] for pod in world.snapshot.pods], world.stateful_set()["metadata"]["generation"]
    world.wait(minutes=1)
    first = offer(world)
    plan = world.step()
    assert [action.manifest["kind"] for action in plan.actions if hasattr(action, "manifest")] == ["ConfigMap"]
    assert world.step().actions == []
    assert world.snapshot.calibration is not None
    assert world.snapshot.calibration["data"]["calibration.json"] == first.to_json()
    status, reason, message = calibrated(world)
    assert (status, reason) == ("True", "Learnt")
    assert message.startswith("source Online: R^2 0.9900, 128 samples, learnt while serving 2030-01-01T00:01:00Z")
    world.snapshot.offers = {}  # another operator process has not asked yet
    found = to_manifest(status_of(world.pipeline, world.plan(), {}, world.now))
    assert (found["policy"], found["calibration"]["source"]) == ("Dynamic", "Online")
    assert before == (
        [pod["metadata"]["uid"] for pod in world.snapshot.pods],
        world.stateful_set()["metadata"]["generation"],
    )


def test_the_next_life_starts_from_what_was_learnt() -> None:
    world = learning()
    found = offer(world)
    world.settle()
    world.snapshot.offers = {}
    world.crash("a-0-0")
    world.settle()
    world.wait(minutes=1)
    world.settle()
    assert world.pod("a-0-0")["metadata"]["annotations"]["prefill.dev/calibration"] == found.to_json()


def test_learning_after_a_refused_measurement() -> None:
    world = World()
    world.settle()
    refusal = Refusal(reason=RefusalReason.POOR_FIT, message="R^2 is 0.3")
    world.ready(profile=ProfileResult(outcome="Refused", refusal=refusal).to_json())
    world.settle()
    assert calibrated(world)[1] == "ProfilingRefused"
    world.wait(minutes=1)
    offer(world)
    world.settle()
    assert calibrated(world)[:2] == ("True", "Learnt")


def test_an_ignored_offer_is_told_beside_what_is_kept() -> None:
    world = World()
    world.settle()
    world.measure()
    world.settle()
    _, _, before = calibrated(world)
    world.snapshot.offers = {0: "{}", 7: "of no replica"}
    assert world.step().actions == []
    status, reason, message = calibrated(world)
    assert (status, reason) == ("True", "Measured")
    assert message == f"{before}; what replica 0 offers is ignored: key: Field required"


def test_a_pause_keeps_what_is_kept() -> None:
    world = learning()
    world.spec["paused"] = True
    offer(world)
    assert world.step().actions == []
    assert calibrated(world)[1] == "Learning"


def test_without_any_way_to_a_calibration_the_condition_says_so() -> None:
    world = World(profiling={"enabled": False, "onlineCalibration": {"enabled": False}})
    world.settle()
    status, reason, message = calibrated(world)
    assert (status, reason) == ("False", "NotMeasured")
    assert f"there is no ConfigMap {world.pipeline.calibration_name}" in message


def test_an_unreadable_document_is_replaced_by_the_one_before() -> None:
    world = learning()
    first = offer(world)
    world.settle()
    world.wait(minutes=10)
    second = offer(world)
    world.settle()
    assert world.snapshot.calibration is not None
    data = world.snapshot.calibration["data"]
    assert (data["calibration.json"], data["previous.json"]) == (second.to_json(), first.to_json())
    world.snapshot.offers = {}
    data["calibration.json"] = data["calibration.json"][:-1]
    world.settle()
    kept = world.snapshot.calibration
    assert (kept["data"]["calibration.json"], kept["data"]["previous.json"]) == (first.to_json(), first.to_json())
    assert kept["metadata"]["annotations"]["prefill.dev/revision"] == "3"
    assert calibrated(world)[:2] == ("True", "Learnt")
