"""The shipped DeepSeek-V3.1 sample against the published way to run it by hand, point by point.

The facts of vllm-ascend's guide (one server, 16 cards, PP 2, TP 8, 128K context, dynamic chunks of up to 32K)
stand here as data; what a pod does differently is listed, each with its reason.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from prefill_operator.api.types import PrefillPipelineSpec
from prefill_operator.api.validation import problems
from prefill_operator.desired.pipeline import Pipeline, rank_config
from prefill_operator.desired.pod import pod_template
from prefill_runtime.agent.command import engine_command

SAMPLE = Path(__file__).resolve().parents[3] / "manifests" / "samples" / "deepseek-v31-ascend.yaml"

IMAGE = "vllm-ascend:v0.20.2rc1"
CARDS = 16
SHARED_MEMORY = "1Gi"
DRIVER_PATHS = {
    "/usr/local/dcmi",
    "/usr/local/Ascend/driver/tools/hccn_tool",
    "/usr/local/bin/npu-smi",
    "/usr/local/Ascend/driver/lib64",
    "/usr/local/Ascend/driver/version.info",
    "/etc/ascend_install.info",
    "/etc/hccn.conf",
}
WEIGHTS = "/mnt/weight/DeepSeek-V3.1-w8a8"
ENVIRONMENT = {
    "OMP_PROC_BIND": "false",
    "PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True",
    "OMP_NUM_THREADS": "1",
    "HCCL_BUFFSIZE": "2048",
    # Followed by ":$LD_PRELOAD" in the guide; a container's is empty.
    "LD_PRELOAD": "/usr/lib/aarch64-linux-gnu/libjemalloc.so.2",
    "HCCL_OP_EXPANSION_MODE": "AIV",
    "VLLM_USE_V1": "1",
    "TASK_QUEUE_ENABLE": "1",
    "ASCEND_LAUNCH_BLOCKING": "0",
    "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",
    "VLLM_ASCEND_ENABLE_FLASHCOMM1": "1",
    "VLLM_ASCEND_ENABLE_FUSED_MC2": "1",
    "VLLM_RPC_TIMEOUT": "3600000",
    "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": "30000",
    "HCCL_EXEC_TIMEOUT": "204",
    "HCCL_CONNECT_TIMEOUT": "120",
}
FLAGS: dict[str, Any] = {
    "--host": "0.0.0.0",
    "--port": "8003",
    "--served-model-name": "model",
    "--data-parallel-size": "1",
    "--tensor-parallel-size": "8",
    "--pipeline-parallel-size": "2",
    "--enable-expert-parallel": True,
    "--max-num-seqs": "32",
    "--max-model-len": "131072",
    "--max-num-batched-tokens": "32768",
    "--gpu-memory-utilization": "0.9",
    "--enable-chunked-prefill": True,
    "--no-enable-prefix-caching": True,
    "--trust-remote-code": True,
    "--quantization": "ascend",
    "--additional-config": {"profiling_chunk_config": {"enabled": True, "smooth_factor": 1.0, "min_chunk": 4096}},
}
# What a pod has beside the guide's variables.
POD_ENVIRONMENT = {
    "PREFILL_RANK": "which rank this pod is",
    "PYTHONPATH": "where the agent is",
    "HOME": "caches belong into the pod's own scratch volume",
    "VLLM_HOST_IP": "the pod's address, which needs no default route to be found",
}


@pytest.fixture(scope="module")
def pipeline() -> Pipeline:
    manifest = yaml.safe_load(SAMPLE.read_text())
    spec = PrefillPipelineSpec.model_validate(manifest["spec"])
    assert problems(spec, manifest["metadata"]["name"]) == []
    return Pipeline(
        namespace="default",
        name=manifest["metadata"]["name"],
        uid="uid",
        generation=1,
        spec=spec,
        operator_image="operator:1",
        runtime_version="0.1.0",
    )


@pytest.fixture(scope="module")
def pod(pipeline: Pipeline) -> dict[str, Any]:
    spec: dict[str, Any] = pod_template(pipeline, 0)["spec"]
    return spec


@pytest.fixture(scope="module")
def engine(pod: dict[str, Any]) -> dict[str, Any]:
    container: dict[str, Any] = pod["containers"][0]
    return container


def flags(command: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    command = [part for word in command for part in (word.split("=", 1) if word.startswith("--") else [word])]
    for word, following in zip(command, [*command[1:], "--"], strict=True):
        if word.startswith("--"):
            found[word] = True if following.startswith("--") else following
    if "--additional-config" in found:
        found["--additional-config"] = json.loads(found["--additional-config"])
    return found


def test_serve_command(pipeline: Pipeline) -> None:
    command = engine_command(rank_config(pipeline, 0), 0, telemetry_socket="/run/prefill/telemetry.sock")
    assert command[:3] == ["vllm", "serve", "/models"]
    assert flags(command[3:]) == FLAGS


def test_one_pod_holds_both_stages(pipeline: Pipeline, engine: dict[str, Any]) -> None:
    assert pipeline.spec.pods_per_replica == 1
    # The device plugin gives the container /dev/davinci0 to 15 and the three management devices.
    cards = {"huawei.com/Ascend910": str(CARDS)}
    assert cards.items() <= engine["resources"]["requests"].items()
    assert cards.items() <= engine["resources"]["limits"].items()


def test_image(engine: dict[str, Any]) -> None:
    assert engine["image"].rsplit("/", 1)[-1] == IMAGE


def test_environment(engine: dict[str, Any]) -> None:
    found = {variable["name"]: variable.get("value") for variable in engine["env"]}
    assert {name: found.get(name) for name in ENVIRONMENT} == ENVIRONMENT
    assert set(found) - set(ENVIRONMENT) == set(POD_ENVIRONMENT)
    # "unset http_proxy": nothing sets it in a pod.
    assert not {"http_proxy", "https_proxy"} & set(found)


def mounted(pod: dict[str, Any], engine: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Volume by the path where the engine sees it."""
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    return {mount["mountPath"]: volumes[mount["name"]] for mount in engine["volumeMounts"]}


def test_mounts_of_the_driver(pod: dict[str, Any], engine: dict[str, Any]) -> None:
    found = {path: volume["hostPath"]["path"] for path, volume in mounted(pod, engine).items() if "hostPath" in volume}
    assert found == {path: path for path in DRIVER_PATHS} | {"/models": WEIGHTS}


def test_shared_memory(pod: dict[str, Any], engine: dict[str, Any]) -> None:
    assert mounted(pod, engine)["/dev/shm"]["emptyDir"] == {"medium": "Memory", "sizeLimit": SHARED_MEMORY}


def test_network(pod: dict[str, Any]) -> None:
    assert pod.get("hostNetwork", False) is True, "the guide has --net=host"


def test_nothing_of_ours_runs_in_the_engine(pod: dict[str, Any]) -> None:
    """EngineNative: chunk sizes are the engine's own; the agent only starts and watches it."""
    assert [step["name"] for step in pod["initContainers"]] == ["runtime"]


def test_toolkit_is_set_up_as_in_the_image(engine: dict[str, Any], tmp_path: Path) -> None:
    """The pod's command replaces the image's entry point, which sources these files; run it with such files."""
    shell, flag, script, *arguments = engine["command"]
    assert (shell, flag, arguments[1:]) == ("/bin/bash", "-c", ["python3", "-m", "prefill_runtime.agent", "serve"])
    for file in ("/usr/local/Ascend/ascend-toolkit/set_env.sh", "/usr/local/Ascend/nnal/atb/set_env.sh"):
        assert file in script
        settings = tmp_path / Path(file).relative_to("/")
        settings.parent.mkdir(parents=True)
        settings.write_text(f"export PYTHONPATH={settings.parent}:$PYTHONPATH\n")
    script = script.replace("/usr/local/Ascend", f"{tmp_path}/usr/local/Ascend")
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": "/opt/prefill"}
    done = subprocess.run(
        [shell, flag, script, "name", "printenv", "PYTHONPATH"], env=environment, capture_output=True, text=True
    )
    base = f"{tmp_path}/usr/local/Ascend"
    assert done.stdout.strip() == f"{base}/nnal/atb:{base}/ascend-toolkit:/opt/prefill"
