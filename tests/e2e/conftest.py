"""One cluster for the session, from nothing: the operator in it as users install it, vLLM for real."""

from __future__ import annotations

import json
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from localcluster import cluster, deploy, envs, models
from localcluster.console import progress
from localcluster.kube import Kube

ROOT = Path(__file__).resolve().parent.parent.parent
NAME = "e2e"
CONTROL_PORT = 9400
TOY = "toy"


@pytest.fixture(scope="session")
def engine_image_and_kube() -> Iterator[tuple[str, Kube]]:
    cluster.down(NAME)  # a killed run may have left a whole cluster, with pipelines in it
    settings = cluster.up(NAME)
    try:
        operator, engine = deploy.build_images()
        deploy.load_images(settings, (operator, engine))
        kube = Kube(settings.kubeconfig)
        deploy.install_operator(kube)
        yield engine.tag, kube
    finally:
        cluster.down(NAME)


@pytest.fixture(scope="session")
def kube(engine_image_and_kube: tuple[str, Kube]) -> Kube:
    return engine_image_and_kube[1]


@pytest.fixture(scope="session")
def engine_image(engine_image_and_kube: tuple[str, Kube]) -> str:
    return engine_image_and_kube[0]


@pytest.fixture(scope="session")
def toy_model() -> Path:
    return models.ensure("toy")


class Pipeline:
    """A PrefillPipeline under test and how clients see it."""

    def __init__(self, kube: Kube, name: str) -> None:
        self.kube, self.name = kube, name

    def get(self) -> dict[str, Any]:
        return self.kube.get("prefillpipeline", self.name)

    def patch(self, spec: dict[str, Any]) -> None:
        self.kube("patch", "prefillpipeline", self.name, "--type=merge", "-p", json.dumps({"spec": spec}))

    def wait_ready(self, timeout: float = 600) -> float:
        return deploy.wait_ready(self.kube, self.name, timeout)

    def pods(self) -> list[dict[str, Any]]:
        return sorted(
            self.kube.items("pods", "-l", f"prefill.dev/pipeline={self.name}"), key=lambda p: p["metadata"]["name"]
        )

    def ask(self, path: str, rank: int = 0) -> str:
        """GET from the control port of a rank's agent."""
        return self.kube.from_pod(f"{self.name}-0-{rank}", CONTROL_PORT, path)

    def timeline(self) -> dict[str, Any]:
        return dict(json.loads(self.ask("/timeline")))

    def bubble_ratio(self, rank: int) -> float:
        """As scraped from that rank."""
        return samples(self.ask("/metrics", rank))["prefill_bubble_ratio", frozenset({("rank", str(rank))})]

    def first_token(self, prompt: list[int]) -> int:
        """The greedy first token that the CR's Service answers with."""
        body = {
            "model": self.get()["spec"]["model"]["name"],
            "prompt": prompt,
            "max_tokens": 1,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        with self.kube.forwarded(f"svc/{self.name}", 8000) as url:
            request = urllib.request.Request(
                f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
            )
            with urllib.request.urlopen(request, timeout=300) as response:
                return int(json.load(response)["choices"][0]["token_ids"][0])

    def last_period(self, tokens: int) -> dict[str, Any]:
        """The newest busy period, which must have worked on a prompt of that length; waits until it is complete."""
        for _ in range(60):
            period = self.timeline()["periods"][-1]
            if period["complete"] and chunks(period, tokens):
                return dict(period)
            time.sleep(0.5)
        raise AssertionError(f"the last period is not one with a prompt of {tokens} tokens: {period}")


def toy(kube: Kube, engine_image: str) -> dict[str, Any]:
    """The pipeline whose life test_pipeline.py follows."""
    change = deploy.merge(
        deploy.fit_local(engine_image, "toy"),
        {
            "metadata": {"name": TOY},
            "spec": {
                "model": {"maxModelLen": 16384, "dtype": "float32"},
                "chunking": {"policy": None, "maxTokens": 2048, "minTokens": 256},
                "profiling": {"samples": 16, "historyDepths": 2},
                "recovery": {"backoffSeconds": 1, "maxBackoffSeconds": 5},
            },
        },
    )
    return deploy.sample(kube, "longctx-toy-cpu", change)


@pytest.fixture(scope="session")
def pipeline(kube: Kube, engine_image: str) -> Pipeline:
    """Serving; test_pipeline.py, which comes last, does with it what the others' measurements must not see."""
    kube.apply(toy(kube, engine_image))
    result = Pipeline(kube, TOY)
    progress.say(f"applied to Ready in {result.wait_ready():.0f} s")
    return result


def chunks(period: dict[str, Any], tokens: int) -> list[int]:
    """Chunk sizes of the prompts of that length in a period of the timeline."""
    return [
        chunk["tokens"]
        for batch in period["batches"]
        for chunk in batch["chunks"]
        if chunk["promptTokens"] == tokens and chunk["history"] < tokens
    ]


def container(pod: dict[str, Any], kind: str, name: str) -> dict[str, Any]:
    (status,) = [s for s in pod["status"][kind] if s["name"] == name]
    return dict(status)


def seconds_between(earlier: str, later: str) -> float:
    return (datetime.fromisoformat(later) - datetime.fromisoformat(earlier)).total_seconds()


def samples(text: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """A Prometheus text page as {(name, labels): value}."""
    from prometheus_client.parser import text_string_to_metric_families

    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def plain_vllm_first_tokens(model: Path, prompts: list[list[int]], scratch: Path) -> list[int]:
    """The truth: stock vLLM, one rank, no plugin."""
    script = scratch / "plain.py"
    script.write_text(
        "import json, sys\n"
        "from vllm import LLM, SamplingParams\n"
        "if __name__ == '__main__':\n"
        "    llm = LLM(model=sys.argv[1], dtype='float32', max_model_len=16384, enforce_eager=True,\n"
        "              max_num_batched_tokens=2048, enable_prefix_caching=False)\n"
        "    params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)\n"
        "    prompts = [{'prompt_token_ids': p} for p in json.load(open(sys.argv[2]))]\n"
        "    out = llm.generate(prompts, params, use_tqdm=False)\n"
        "    print('TOKENS', json.dumps([o.outputs[0].token_ids[0] for o in out]))\n"
    )
    (scratch / "prompts.json").write_text(json.dumps(prompts))
    environment = {
        "PATH": "/usr/bin:/bin",
        "HOME": str(scratch),
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "0",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_NO_USAGE_STATS": "1",
    }
    done = subprocess.run(
        [str(envs.engine_python()), str(script), str(model), str(scratch / "prompts.json")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("TOKENS ")]
    assert lines, done.stderr[-3000:]
    return list(json.loads(lines[0].removeprefix("TOKENS ")))
