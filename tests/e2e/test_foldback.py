"""The same pipeline, straight and folded back: Ready with two pods, the same answer, less bubble."""

from __future__ import annotations

import random

from localcluster import deploy
from localcluster.console import progress
from localcluster.kube import Kube
from tests.e2e.conftest import Pipeline, chunks

PROMPT, CHUNK = 8192, 1024
NAMES = {1: "straight", 2: "folded"}


def serve(kube: Kube, engine_image: str, virtual: int) -> Pipeline:
    change = deploy.merge(
        deploy.fit_local(engine_image, "toy"),
        {
            "metadata": {"name": NAMES[virtual]},
            "spec": {
                "parallelism": {"virtualStages": virtual},
                "model": {"maxModelLen": 16384, "dtype": "float32"},
                "chunking": {"policy": "Fixed", "maxTokens": CHUNK, "minTokens": 128},
                "profiling": {"enabled": False},
            },
        },
    )
    kube.apply(deploy.sample(kube, "longctx-toy-foldback-cpu", change))
    return Pipeline(kube, NAMES[virtual])


def bubble(pipeline: Pipeline, prompt: list[int]) -> tuple[int, float]:
    """The answer to a prompt, and the mean over the ranks of what each exports about it."""
    token = pipeline.first_token(prompt)
    period = pipeline.last_period(len(prompt))
    assert chunks(period, len(prompt)) == [CHUNK] * (PROMPT // CHUNK)
    shares = []
    for rank, line in enumerate(period["ranks"]):
        spent = {x["state"]: 0.0 for x in line["segments"]}
        for x in line["segments"]:
            spent[x["state"]] += x["end"] - x["start"]
        idle = sum(seconds for state, seconds in spent.items() if state.startswith("bubble"))
        share = idle / sum(seconds for state, seconds in spent.items() if state != "idle")
        pipeline.kube.wait(
            f"rank {rank} exports a bubble ratio of {share:.3f}",
            lambda rank=rank, share=share: abs(pipeline.bubble_ratio(rank) - share) <= 0.01,
            5,
            lambda rank=rank: f"{pipeline.bubble_ratio(rank):.3f}",
        )
        shares.append(share)
    return token, sum(shares) / len(shares)


def test_folded_back_the_bubble_is_smaller(kube: Kube, engine_image: str) -> None:
    rng = random.Random(5)
    prompts = [[rng.randrange(4, 256) for _ in range(PROMPT)] for _ in range(3)]
    seen: dict[int, list[tuple[int, float]]] = {}
    for virtual, name in NAMES.items():
        pipeline = serve(kube, engine_image, virtual)
        progress.say(f"{name}: applied to Ready in {pipeline.wait_ready():.0f} s")
        assert len(pipeline.pods()) == 2
        seen[virtual] = [bubble(pipeline, prompt) for prompt in prompts]
        kube("delete", "prefillpipeline", name, "--wait")
    assert [token for token, _ in seen[1]] == [token for token, _ in seen[2]]
    straight, folded = (sorted(share for _, share in seen[virtual])[1] for virtual in (1, 2))
    progress.say(f"bubble of {PROMPT} tokens in {PROMPT // CHUNK} chunks: {straight:.3f} straight, {folded:.3f} folded")
    # By the model of passes whose time grows linearly along a prompt: 0.182 and 0.111.
    assert folded < 0.85 * straight
