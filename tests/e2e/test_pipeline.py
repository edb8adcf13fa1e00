"""The life of one PrefillPipeline on a real cluster, in the order a user meets it; each test builds on the last."""

from __future__ import annotations

import json
import random
import re
import time
from pathlib import Path
from typing import Any

import pytest

from localcluster import deploy
from localcluster.console import progress
from localcluster.kube import Kube, condition
from tests.e2e.conftest import (
    TOY,
    Pipeline,
    chunks,
    container,
    plain_vllm_first_tokens,
    samples,
    seconds_between,
    toy,
)

LENGTHS = (33, 1500, 6000)
NOT_IDLE = {"compute", "transfer", "host", "bubble_fill", "bubble_imbalance", "bubble_drain"}


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    rng = random.Random(11)
    return [[rng.randrange(4, 256) for _ in range(length)] for length in LENGTHS]


@pytest.fixture(scope="module")
def truth(toy_model: Path, prompts: list[list[int]], tmp_path_factory: pytest.TempPathFactory) -> list[int]:
    return plain_vllm_first_tokens(toy_model, prompts, tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="module")
def chunks_under_auto() -> list[int]:
    """Filled by the first test that asks a long prompt, compared after the policy changed."""
    return []


def calibration_maps(kube: Kube) -> list[dict[str, Any]]:
    return kube.items("configmaps", "-l", "app.kubernetes.io/name=prefill-calibration")


def test_ready_and_calibrated(kube: Kube, pipeline: Pipeline) -> None:
    resource = pipeline.get()
    calibrated = condition(resource, "Calibrated")
    assert calibrated["status"] == "True", calibrated["message"]
    header, row = kube("get", "pfp", TOY).splitlines()
    shown = dict(zip(re.split(r"\s{2,}", header), re.split(r"\s{2,}", row), strict=False))
    assert (shown["READY"], shown["CALIBRATED"], shown["POLICY"]) == ("True", "True", "Auto")


def test_config_map_explains_itself(kube: Kube, pipeline: Pipeline) -> None:
    (found,) = calibration_maps(kube)
    data = found["data"]
    document = json.loads(data["calibration.json"])
    assert document["schemaVersion"] == 2
    assert [stage["stage"] for stage in document["stages"]] == [0, 1]
    for stage in document["stages"]:
        assert stage["coefficients"]["k1"] + stage["coefficients"]["k2"] > 0
        assert stage["r2"] > 0.8
        assert stage["sampleCount"] >= 8
    assert document["key"] == pipeline.get()["status"]["calibration"]["key"]
    described = kube("describe", "configmap", found["metadata"]["name"])
    for word in ("R^2", "seconds", "sampleCount", "schemaVersion", "k0=", "quadratic: a=", document["key"]):
        assert word in described, f"{word} is not explained:\n{described}"


def test_first_tokens_equal_plain_vllm(
    pipeline: Pipeline, prompts: list[list[int]], truth: list[int], chunks_under_auto: list[int]
) -> None:
    assert [pipeline.first_token(prompt) for prompt in prompts] == truth
    sizes = chunks(pipeline.last_period(LENGTHS[-1]), LENGTHS[-1])
    assert sum(sizes) == LENGTHS[-1]
    assert len(set(sizes)) > 1, f"chunks after a growing history are not equal: {sizes}"
    assert set(sizes[:-1]) != {2048}, f"chunks are planned: {sizes}"
    page = samples(pipeline.ask("/metrics"))
    assert page["prefill_chunk_tokens_count", frozenset({("policy", "Auto")})] >= len(sizes)
    assert [v for (name, _), v in page.items() if name == "prefill_policy_fallback_total" and v] == []
    chunks_under_auto.extend(sizes)


def test_state_seconds_add_up_to_wall_time(pipeline: Pipeline, prompts: list[list[int]]) -> None:
    def seconds(rank: int) -> tuple[float, dict[str, float]]:
        page, at = samples(pipeline.ask("/metrics", rank)), time.monotonic()
        return at, {
            dict(labels)["state"]: value
            for (name, labels), value in page.items()
            if name == "prefill_rank_state_seconds_total" and dict(labels)["rank"] == str(rank)
        }

    for rank in (0, 1):
        began, before = seconds(rank)
        pipeline.first_token([rank, 7, *prompts[-1][2:]])  # new from the first token on: nothing of it is cached
        time.sleep(20)
        ended, after = seconds(rank)
        grown = {state: after[state] - before.get(state, 0.0) for state in after}
        assert sum(grown.values()) == pytest.approx(ended - began, rel=0.01), grown
        assert grown["compute"] > 0
        assert grown["idle"] > 10


def test_scraped_bubble_agrees_with_timeline(pipeline: Pipeline, prompts: list[list[int]]) -> None:
    pipeline.first_token([9, 8, *prompts[-1][2:]])
    period = pipeline.last_period(LENGTHS[-1])
    for rank in (0, 1):
        totals = dict.fromkeys(NOT_IDLE, 0.0)
        for segment in period["ranks"][rank]["segments"]:
            if segment["state"] in totals:
                totals[segment["state"]] += segment["end"] - segment["start"]
        ratio = sum(value for state, value in totals.items() if state.startswith("bubble")) / sum(totals.values())
        assert 0 < ratio < 1
        # A follower closes its own period with rank 0's next beat.
        pipeline.kube.wait(
            f"rank {rank} exports a bubble ratio of {ratio:.3f}",
            lambda rank=rank, ratio=ratio: abs(pipeline.bubble_ratio(rank) - ratio) <= 0.01,
            5,
            lambda rank=rank: f"{pipeline.bubble_ratio(rank):.3f}",
        )
    assert "<svg" in pipeline.ask("/timeline.svg")


def test_ttft_histogram_counts_prompts(pipeline: Pipeline) -> None:
    page = samples(pipeline.ask("/metrics"))
    counts = {dict(labels)["prompt_class"]: v for (n, labels), v in page.items() if n == "prefill_ttft_seconds_count"}
    assert counts["le_16k"] >= 3
    assert counts["le_4k"] >= 2


def test_pods_hold_no_credentials(kube: Kube, pipeline: Pipeline) -> None:
    for pod in pipeline.pods():
        assert pod["spec"]["automountServiceAccountToken"] is False
        mounts = [m["mountPath"] for c in pod["spec"]["containers"] for m in c["volumeMounts"]]
        assert not any("serviceaccount" in mount for mount in mounts)
    operator = Kube(kube.kubeconfig, deploy.OPERATOR_NAMESPACE)
    (pod,) = operator.items("pods", "-l", "app.kubernetes.io/name=prefill-operator")
    assert pod["spec"]["securityContext"]["runAsNonRoot"] is True
    assert pod["spec"]["containers"][0]["securityContext"]["readOnlyRootFilesystem"] is True
    account = f"system:serviceaccount:{deploy.OPERATOR_NAMESPACE}:prefill-operator"
    for verb in ("get", "list", "watch"):
        assert _can_i(kube, verb, "secrets", account) is False
    assert _can_i(kube, "list", "prefillpipelines.prefill.dev", account) is True


def _can_i(kube: Kube, verb: str, resource: str, account: str) -> bool:
    group = resource.partition(".")[2]
    review = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SubjectAccessReview",
        "spec": {
            "user": account,
            "resourceAttributes": {"verb": verb, "resource": resource.partition(".")[0], "group": group},
        },
    }
    answer = json.loads(kube("create", "-f", "-", "-o", "json", stdin=json.dumps(review)))
    return bool(answer["status"]["allowed"])


@pytest.mark.parametrize("rank", [0, 1])
def test_killed_engine_heals(kube: Kube, pipeline: Pipeline, rank: int) -> None:
    """Stock vLLM deadlocks when rank 0's engine dies: the headless rank never notices."""
    before = pipeline.get()["status"]["replicaStatuses"][0]["incarnation"]
    status = json.loads(pipeline.ask("/status", rank))
    began = time.monotonic()
    kube("exec", f"{TOY}-0-{rank}", "-c", "engine", "--", "kill", "-9", str(status["enginePid"]))
    _wait_for_new_life(pipeline, before)
    progress.say(f"engine of rank {rank} killed: Ready again after {time.monotonic() - began:.0f} s")


def test_deleted_pod_heals(kube: Kube, pipeline: Pipeline) -> None:
    before = pipeline.get()["status"]["replicaStatuses"][0]["incarnation"]
    began = time.monotonic()
    kube("delete", "pod", f"{TOY}-0-1", "--wait=false")
    _wait_for_new_life(pipeline, before)
    progress.say(f"pod of rank 1 deleted: Ready again after {time.monotonic() - began:.0f} s")


def _wait_for_new_life(pipeline: Pipeline, before: str) -> None:
    def incarnation() -> str:
        return str(pipeline.get()["status"]["replicaStatuses"][0].get("incarnation"))

    pipeline.kube.wait("a new incarnation", lambda: incarnation() != before, 120, lambda: "")
    pipeline.wait_ready(300)


def test_changed_policy_changes_chunks_not_tokens(
    pipeline: Pipeline, prompts: list[list[int]], truth: list[int], chunks_under_auto: list[int]
) -> None:
    pipeline.patch({"chunking": {"policy": "Fixed"}})
    pipeline.wait_ready()
    assert [pipeline.first_token(prompt) for prompt in prompts] == truth
    sizes = chunks(pipeline.last_period(LENGTHS[-1]), LENGTHS[-1])
    assert set(sizes[:-1]) == {2048}
    assert sum(sizes) == LENGTHS[-1]
    assert sizes != chunks_under_auto
    page = samples(pipeline.ask("/metrics"))
    assert page["prefill_chunk_tokens_count", frozenset({("policy", "Fixed")})] >= len(sizes)


def test_delete_leaves_the_calibration_and_the_next_one_reuses_it(
    kube: Kube, pipeline: Pipeline, engine_image: str
) -> None:
    kube("delete", "prefillpipeline", TOY)
    kube.wait("clean-up", lambda: _children(kube) == [], 90, lambda: f"left: {_children(kube)}")
    (kept,) = calibration_maps(kube)
    kube.apply(toy(kube, engine_image))
    progress.say(f"re-applied to Ready in {pipeline.wait_ready():.0f} s")
    pods = pipeline.pods()
    assert len(pods) == 2
    for pod in pods:
        ended = container(pod, "initContainerStatuses", "profile")["state"]["terminated"]
        assert json.loads(ended["message"])["outcome"] == "Reused"
        assert seconds_between(ended["startedAt"], ended["finishedAt"]) <= 1
    (again,) = calibration_maps(kube)
    assert again["data"] == kept["data"]


def test_retention_delete_leaves_nothing(kube: Kube, pipeline: Pipeline) -> None:
    pipeline.patch({"profiling": {"retention": "Delete"}})

    def owned() -> bool:
        return all(item["metadata"].get("ownerReferences") for item in calibration_maps(kube))

    kube.wait("ownership of the ConfigMap", owned, 30, lambda: "")
    kube("delete", "prefillpipeline", TOY)
    kube.wait(
        "clean-up of everything",
        lambda: _children(kube) == [] and calibration_maps(kube) == [],
        90,
        lambda: f"left: {_children(kube)}",
    )


def _children(kube: Kube) -> list[str]:
    kinds = "statefulsets,pods,services,poddisruptionbudgets,controllerrevisions,endpointslices"
    names = kube("get", kinds, "-l", f"prefill.dev/pipeline={TOY}", "-o", "name")
    return names.split()
