"""make demo: from nothing to a measured first token, on a local cluster or on the one KUBECONFIG names."""

import json
import os
import sys
import threading
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

from localcluster import cluster, deploy, envs, models, preflight, programs
from localcluster.console import ClusterError, progress
from localcluster.kube import Kube, condition
from localcluster.settings import REPOSITORY

Result = TypeVar("Result")
NAME = "demo"
PIPELINE = "smollm2"
OUT = REPOSITORY / "out" / "demo"
CONTROL_PORT = 9400
CUSTOM = ("PREFILL_OPERATOR_IMAGE", "PREFILL_ENGINE_IMAGE")
FIXED = '{"spec":{"chunking":{"policy":"Fixed"}}}'
QUESTION = "\n\nWhat is the name of this license?"


def beside(work: Callable[[], Result]) -> Callable[[], Result]:
    """Start `work` now; the returned function waits for its result. It does not keep a failed demo from ending."""
    future: Future[Result] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future.result


def local() -> tuple[Kube, dict[str, Any]]:
    """A local cluster with the operator in it, and the sample made to fit."""
    preflight.check(NAME, whole_demo=True)
    built_programs, built_images = beside(programs.build), beside(deploy.build_images)
    envs.engine_python()
    models.ensure(PIPELINE)
    built_programs()
    operator, engine = built_images()
    settings = cluster.up(NAME)
    deploy.load_images(settings, (operator, engine))
    kube = Kube(settings.kubeconfig)
    deploy.install_operator(kube)
    return kube, deploy.sample(kube, "smollm2-cpu", deploy.fit_local(engine.tag, PIPELINE))


def own(kubeconfig: Path) -> tuple[Kube, dict[str, Any]]:
    """The user's cluster: it must be able to pull both images."""
    operator, engine = (os.environ.get(name, "") for name in CUSTOM)
    if not operator or not engine or ":" not in operator.rsplit("/", 1)[-1]:
        raise ClusterError(
            f"KUBECONFIG is set, so the demo uses that cluster, which must pull two images: build them from "
            f"images/operator/Dockerfile and images/engine-cpu/Dockerfile, push them, and set {' and '.join(CUSTOM)} "
            "to REPOSITORY:TAG. Or unset KUBECONFIG for a cluster on this machine"
        )
    programs.build(["kubectl", "helm"])
    kube = Kube(kubeconfig)
    deploy.install_operator(kube, *operator.rsplit(":", 1))
    return kube, deploy.sample(kube, "smollm2-cpu", {"spec": {"engine": {"image": engine}}})


def ask(url: str, model: str, document: str) -> dict[str, Any]:
    """One streamed chat completion: answer, seconds to the first token, prompt tokens."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": document + QUESTION}],
        "max_tokens": 60,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    began, first, answer = time.monotonic(), 0.0, ""
    usage: dict[str, Any] = {}
    with urllib.request.urlopen(request, timeout=300) as response:
        for line in response:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            usage = event.get("usage") or usage
            for choice in event.get("choices", []):
                if text := choice["delta"].get("content"):
                    first = first or time.monotonic() - began
                    answer += text
    return {"answer": answer.strip(), "ttft": first, "tokens": usage.get("prompt_tokens", 0)}


def longest_period(timeline: dict[str, Any]) -> dict[str, Any]:
    """The busy period that computed most tokens: the long prompt, not the warm-up before it."""

    def tokens(period: dict[str, Any]) -> int:
        return sum(chunk["tokens"] for batch in period["batches"] for chunk in batch["chunks"] if chunk["promptTokens"])

    return max(timeline["periods"], key=tokens)


def samples(page: str) -> dict[str, float]:
    """A page of Prometheus text; samples of one name are added up."""
    found: dict[str, float] = {}
    for line in page.splitlines():
        if line and not line.startswith("#"):
            name = line.partition(" ")[0].partition("{")[0]
            found[name] = found.get(name, 0.0) + float(line.split()[-1])
    return found


def report(kube: Kube, pod: str, policy: str, reply: dict[str, Any]) -> None:
    OUT.mkdir(parents=True, exist_ok=True)
    timeline = json.loads(kube.from_pod(pod, CONTROL_PORT, "/timeline"))
    (OUT / "timeline.json").write_text(json.dumps(timeline))
    (OUT / "timeline.svg").write_text(kube.from_pod(pod, CONTROL_PORT, "/timeline.svg"))
    period = longest_period(timeline)
    chunks = [
        chunk["tokens"]
        for batch in period["batches"]
        for chunk in batch["chunks"]
        if chunk["history"] < chunk["promptTokens"]  # the rest are decode steps
    ]
    bubbles = ", ".join(f"rank {rank['rank']} {rank['bubbleRatio']:.1%}" for rank in period["ranks"])
    metrics = samples(kube.from_pod(pod, CONTROL_PORT, "/metrics"))
    floor, passes = metrics.get("prefill_bubble_ratio_floor"), metrics.get("prefill_chunk_prediction_error_ratio_count")
    maps = kube.items("configmap", "-l", "app.kubernetes.io/name=prefill-calibration")
    print(f"\nprompt       {reply['tokens']} tokens")
    print(f"answer       {reply['answer']}")
    print(f"TTFT         {reply['ttft']:.2f} s at the client, {period['requests'][0]['ttft']:.2f} s in the engine")
    print(f"chunks       {chunks} by policy {policy}")
    print(f"bubble       {bubbles}" + (f"; no chunks could have less than {floor:.1%}" if floor is not None else ""))
    if passes:
        error = metrics["prefill_chunk_prediction_error_ratio_sum"] / passes
        print(f"prediction   {error:.1%} off the measured time of a chunk, on average of {passes:.0f}")
    for entry in maps:
        print(f"calibration  ConfigMap {entry['metadata']['name']}")
        for name in ("key", "source", "form", "coefficients", "r2", "sampleCount"):
            for line in entry["data"][name].splitlines():
                print(f"             {name:<13}{line}")
    print(f"timeline     {OUT.relative_to(REPOSITORY)}/timeline.svg (open it in a browser)\n")


def next_steps(kube: Kube, own_cluster: bool) -> None:
    down = "helm uninstall prefill-operator -n prefill-system" if own_cluster else "python3 -m localcluster down"
    kubectl = "kubectl" if own_cluster else "python3 -m localcluster kubectl"
    print("Go on:")
    for text, command in (
        ("look at it", f"{kubectl} get pfp,pods,configmaps"),
        ("why is it as it is", f"{kubectl} describe pfp {PIPELINE}"),
        ("other chunks", f"{kubectl} patch pfp {PIPELINE} --type merge -p '{FIXED}'"),
        ("break it", f"{kubectl} delete pod {PIPELINE}-0-1   # and watch it heal"),
        ("ask it", f"{kubectl} port-forward svc/{PIPELINE} 8000"),
        ("remove it", f"{kubectl} delete pfp {PIPELINE}"),
        ("tear down", down),
    ):  # fmt: skip
        print(f"  {text:<20} {command}")
    if not own_cluster:
        print(f"  {'kubeconfig':<20} {kube.kubeconfig}")


def main() -> int:
    began = time.monotonic()
    kubeconfig = os.environ.get("KUBECONFIG")
    try:
        kube, sample = own(Path(kubeconfig)) if kubeconfig else local()
        kube.apply(sample)
        progress.say(f"applied PrefillPipeline {PIPELINE}; first it is profiled, then the engine starts again to serve")
        seconds = deploy.wait_ready(kube, PIPELINE)
        calibrated = condition(kube.get("prefillpipeline", PIPELINE), "Calibrated")
        progress.say(f"Ready after {seconds:.0f} s; Calibrated={calibrated['status']}: {calibrated['message']}")
        with kube.forwarded(f"svc/{PIPELINE}", 8000) as url, progress.step("a long prompt"):
            reply = ask(url, sample["spec"]["model"]["name"], (REPOSITORY / "LICENSE").read_text())
        print("\n" + kube("get", "prefillpipelines"), end="")
        report(kube, f"{PIPELINE}-0-0", kube.get("prefillpipeline", PIPELINE)["status"]["policy"], reply)
        next_steps(kube, bool(kubeconfig))
    except (ClusterError, envs.SetupError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; the next run cleans up by itself", file=sys.stderr)
        return 130
    progress.say(f"demo done in {time.monotonic() - began:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
