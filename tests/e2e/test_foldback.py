"""The same pipeline, straight and folded back: Ready with two pods, the same answers, and a lower bubble."""

from __future__ import annotations

import random
import statistics

from localcluster import deploy
from localcluster.console import progress
from localcluster.kube import Kube
from tests.e2e.conftest import Pipeline, chunks

PROMPT, CHUNK = 8192, 2048
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


def bubble(pipeline: Pipeline, prompt: list[int]) -> tuple[int, dict[str, float]]:
    """The answer to a prompt, and the mean over the ranks of what each exports about it, by cause."""
    token = pipeline.first_token(prompt)
    period = pipeline.last_period(len(prompt))
    assert chunks(period, len(prompt)) == [CHUNK] * (PROMPT // CHUNK)
    causes = dict[str, float]()
    for rank, line in enumerate(period["ranks"]):
        spent = {x["state"]: 0.0 for x in line["segments"]}
        for x in line["segments"]:
            spent[x["state"]] += x["end"] - x["start"]
        busy = sum(seconds for state, seconds in spent.items() if state != "idle")
        shares = {state: seconds / busy for state, seconds in spent.items() if state.startswith("bubble")}
        share = sum(shares.values())
        pipeline.kube.wait(
            f"rank {rank} exports a bubble ratio of {share:.3f}",
            lambda rank=rank, share=share: abs(pipeline.bubble_ratio(rank) - share) <= 0.01,
            5,
            lambda rank=rank: f"{pipeline.bubble_ratio(rank):.3f}",
        )
        for state, part in shares.items():
            causes[state] = causes.get(state, 0.0) + part / len(period["ranks"])
    return token, causes


def test_folded_back_a_pipeline_serves_the_same_with_a_lower_bubble(kube: Kube, engine_image: str) -> None:
    rng = random.Random(5)
    prompts = [[rng.randrange(4, 256) for _ in range(PROMPT)] for _ in range(5)]
    seen: dict[int, list[tuple[int, dict[str, float]]]] = {}
    for virtual, name in NAMES.items():
        pipeline = serve(kube, engine_image, virtual)
        progress.say(f"{name}: applied to Ready in {pipeline.wait_ready():.0f} s")
        assert len(pipeline.pods()) == 2
        seen[virtual] = [bubble(pipeline, prompt) for prompt in prompts]
        lines = pipeline.timeline()["periods"][-1]["ranks"]
        kinds = {x["kind"] for line in lines for x in line["segments"] if x["state"] == "compute"}
        assert kinds == ({"head", "tail"} if virtual == 2 else {"stage"})
        for _, causes in seen[virtual]:
            parts = ", ".join(f"{state.removeprefix('bubble_')} {part:.3f}" for state, part in causes.items())
            progress.say(f"{name}: bubble of {PROMPT} tokens in {PROMPT // CHUNK} chunks: {parts}")
        kube("delete", "prefillpipeline", name, "--wait")
    assert [token for token, _ in seen[1]] == [token for token, _ in seen[2]]
    # By the model, for the toy's costs that grow with the history: 0.30 straight and 0.22 folded, drain 0.15 and 0.08.
    for share, limit in ((total, 0.95), (drain, 0.65)):
        straight, folded = (statistics.median(share(causes) for _, causes in seen[virtual]) for virtual in NAMES)
        assert folded < limit * straight


def total(causes: dict[str, float]) -> float:
    return sum(causes.values())


def drain(causes: dict[str, float]) -> float:
    return causes["bubble_drain"]
