"""Whatever happens to a pipeline, in whatever order: when it has stopped, the pipeline is served as the spec says."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import given, settings
from hypothesis import strategies as st
from prefill_operator.api.types import ReplicaPhase
from prefill_operator.desired.pod import pod_template, template_hash

from tests.unit.operator.world import FIXED, World

Happening = Callable[[World, int], None]


def crash(world: World, number: int) -> None:
    if world.snapshot.pods:
        world.crash(world.snapshot.pods[number % len(world.snapshot.pods)]["metadata"]["name"], "boom")


def lose(world: World, number: int) -> None:
    if world.snapshot.pods:
        world.lose(world.snapshot.pods[number % len(world.snapshot.pods)]["metadata"]["name"])


def serve(world: World, number: int) -> None:
    world.ready(*[pod["metadata"]["name"] for pod in world.snapshot.pods if not broken(pod)][: number + 1])


def broken(pod: dict[str, dict[str, list[dict[str, int]]]]) -> bool:
    return any(status.get("restartCount", 0) for status in pod["status"].get("containerStatuses", []))


def scale(world: World, number: int) -> None:
    world.spec["replicas"] = number % 4


def change(world: World, number: int) -> None:
    world.spec["engine"] = {"image": f"engine:{number % 3}"}


def widen(world: World, number: int) -> None:
    world.spec["parallelism"] = {"pipeline": 1 + number % 3}


def suspend(world: World, number: int) -> None:
    world.spec["suspend"] = bool(number % 2)


def pause(world: World, number: int) -> None:
    world.spec["paused"] = bool(number % 2)


def wait(world: World, number: int) -> None:
    world.wait(seconds=number * 7)


def look(world: World, number: int) -> None:
    world.step()


HAPPENINGS: list[Happening] = [crash, lose, serve, scale, change, widen, suspend, pause, wait, look, look, look]
HISTORIES = st.lists(st.tuples(st.sampled_from(HAPPENINGS), st.integers(0, 9)), max_size=25)


@settings(max_examples=50, deadline=None)
@given(HISTORIES)
def test_every_history_ends_well(history: list[tuple[Happening, int]]) -> None:
    world = World(chunking=FIXED, replicas=2)
    for happening, number in history:
        happening(world, number)
    world.spec |= {"suspend": False, "paused": False}
    for _ in range(12):
        plan = world.settle()
        if all(step.phase == ReplicaPhase.READY and not step.outdated for step in plan.steps):
            break
        serve(world, len(world.snapshot.pods))
        world.wait(seconds=700)
    pipeline = world.pipeline
    assert [step.phase for step in plan.steps] == [ReplicaPhase.READY] * pipeline.spec.replicas
    sets = {name: item for (kind, name), item in world.snapshot.children.items() if kind == "StatefulSet"}
    assert sorted(sets) == [f"a-{replica}" for replica in range(pipeline.spec.replicas)]
    for replica in range(pipeline.spec.replicas):
        assert world.note("template-hash", f"a-{replica}") == template_hash(pod_template(pipeline, replica))
        lives = {
            pod["metadata"]["annotations"]["prefill.dev/incarnation"]
            for pod in world.snapshot.pods
            if pod["metadata"]["name"].startswith(f"a-{replica}-")
        }
        assert lives == {world.note("incarnation", f"a-{replica}")}, "all ranks are of one life"
    assert len(world.snapshot.pods) == pipeline.spec.replicas * pipeline.spec.pods_per_replica
