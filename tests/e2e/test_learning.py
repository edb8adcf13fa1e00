"""Without profiling: served at once with Fixed chunks, learnt from traffic, and kept by the operator."""

from __future__ import annotations

import json
import random
import time

from localcluster import deploy
from localcluster.console import ClusterError, progress
from localcluster.kube import Kube, condition
from tests.e2e.conftest import Pipeline, chunks

NAME = "learner"
PROMPT = 6000
PROMPTS = 50
# The operator asks leaders once in a resync of 60 s.
ASK_SECONDS = 150


def offered(pipeline: Pipeline) -> dict[str, object] | None:
    try:
        return dict(json.loads(pipeline.ask("/calibration")))
    except ClusterError:
        return None  # status 404


def test_what_traffic_teaches_is_used_and_kept(kube: Kube, engine_image: str) -> None:
    change = deploy.merge(
        deploy.fit_local(engine_image, "toy"),
        {
            "metadata": {"name": NAME},
            "spec": {
                "model": {"maxModelLen": 8192, "dtype": "float32"},
                "chunking": {"policy": None, "maxTokens": 2048, "minTokens": 128},
                "profiling": {"enabled": False, "retention": "Delete", "onlineCalibration": {"windowPoints": 64}},
            },
        },
    )
    kube.apply(deploy.sample(kube, "longctx-toy-cpu", change))
    pipeline = Pipeline(kube, NAME)
    progress.say(f"not profiled: applied to Ready in {pipeline.wait_ready():.0f} s")
    found = pipeline.get()
    assert (condition(found, "Calibrated")["status"], condition(found, "Calibrated")["reason"]) == ("False", "Learning")
    assert found["status"]["policy"] == "Fixed"
    life = found["status"]["replicaStatuses"][0]["incarnation"]
    pods = [pod["metadata"]["uid"] for pod in pipeline.pods()]
    assert all(len(pod["spec"]["initContainers"]) == 1 for pod in pipeline.pods()), "no profile step"

    rng, began = random.Random(3), time.monotonic()

    def prompt(tokens: int) -> list[int]:
        return [rng.randrange(4, 256) for _ in range(tokens)]

    sent = 0
    while offered(pipeline) is None and sent < PROMPTS:
        # Of many lengths, for many sizes and depths of chunks; none like an earlier one.
        pipeline.first_token(prompt(rng.randrange(PROMPT // 10, PROMPT)))
        sent += 1
    assert offered(pipeline) is not None, f"nothing learnt from {sent} prompts"
    progress.say(f"a calibration was learnt from {sent} prompts in {time.monotonic() - began:.0f} s")

    def learnt() -> bool:
        pipeline.first_token(prompt(rng.randrange(PROMPT // 10, PROMPT)))  # a first fit may not be good enough to keep
        return condition(pipeline.get(), "Calibrated")["reason"] == "Learnt"

    kube.wait("Calibrated by learning", learnt, ASK_SECONDS, lambda: condition(pipeline.get(), "Calibrated")["message"])
    found = pipeline.get()
    assert condition(found, "Calibrated")["status"] == "True"
    assert (found["status"]["policy"], found["status"]["calibration"]["source"]) == ("Auto", "Online")
    kept = kube.get("configmap", found["status"]["calibration"]["configMap"])
    assert kept["data"]["source"] == json.loads(kept["data"]["calibration.json"])["source"] == "Online"
    assert kept["metadata"]["annotations"]["prefill.dev/revision"] == "1"

    pipeline.first_token(prompt(PROMPT))
    sizes = chunks(pipeline.last_period(PROMPT), PROMPT)
    assert sum(sizes) == PROMPT
    assert sizes != [2048, 2048, PROMPT - 4096], "the engine plans with what was learnt, without a restart"
    found = pipeline.get()
    assert found["status"]["replicaStatuses"][0]["incarnation"] == life
    assert [pod["metadata"]["uid"] for pod in pipeline.pods()] == pods
    kube("delete", "prefillpipeline", NAME)
    name = kept["metadata"]["name"]
    kube.wait("clean-up", lambda: not pipeline.pods() and not kube.exists("configmap", name), 90, lambda: "")
