"""The engine's command line."""

from __future__ import annotations

import json
import shlex
from typing import Any

import pytest
from prefill_runtime.agent.command import engine_command, engine_environment
from prefill_runtime.agent.config import RankConfig
from prefill_runtime.profiling.document import CalibrationDocument

from tests.documents import calibration

SOCKET = "/run/prefill/telemetry.sock"
CALIBRATION = calibration()


def config(**changes: Any) -> RankConfig:
    document: dict[str, Any] = {
        "identity": {"namespace": "n", "pipeline": "p", "replica": 0},
        "group": {"leader": "p-0.p.n.svc", "pods": 2},
        "engine": {
            "device": "CPU", "servedModelName": "m", "modelPath": "/models/m", "pipeline": 2, "tensor": 1,
            "maxModelLen": 8192, "dtype": "bfloat16",
        },
        "chunking": {"policy": "Dynamic", "maxTokens": 1024, "minTokens": 128, "smoothingFactor": 0.5},
        "profiling": {
            "samples": 64, "historyDepths": 4, "timeoutSeconds": 600, "weights": "Dummy", "reuse": "IfValid",
        },
        "calibrationKey": "0123456789abcdef",
        "startupSeconds": 600,
        "graceSeconds": 60,
    }  # fmt: skip
    for section, values in changes.items():
        document[section] = document[section] | values
    return RankConfig.model_validate(document)


def options(command: list[str]) -> dict[str, str | None]:
    """Flags of a command that takes at most one value each."""
    found: dict[str, str | None] = {}
    for word, following in zip(command[3:], [*command[4:], "--"], strict=True):
        if word.startswith("--"):
            assert word not in found, f"{word} is given twice"
            found[word] = None if following.startswith("--") else following
    return found


def test_the_seeds_deployment() -> None:
    """DeepSeek-V3.1 on one Ascend node, both stages in one pod: the published command, flag by flag."""
    published = """vllm serve /mnt/weight/DeepSeek-V3.1-w8a8 --host 0.0.0.0 --port 8003 --served-model-name model
        --data-parallel-size 1 --tensor-parallel-size 8 --pipeline-parallel-size 2 --enable-expert-parallel
        --max-num-seqs 32 --max-model-len 131072 --max-num-batched-tokens 32768 --gpu-memory-utilization 0.9
        --enable-chunked-prefill --no-enable-prefix-caching --trust-remote-code --quantization ascend
        --additional-config
        '{"profiling_chunk_config":{"enabled":true, "smooth_factor":1.0, "min_chunk":4096}}'"""
    rendered = engine_command(
        config(
            group={"pods": 1, "enginePort": 8003},
            engine={
                "device": "Ascend", "servedModelName": "model", "modelPath": "/mnt/weight/DeepSeek-V3.1-w8a8",
                "tensor": 8, "expertParallel": True, "maxModelLen": 131072, "dtype": None, "quantization": "ascend",
                "trustRemoteCode": True,
                "args": shlex.split("--data-parallel-size 1 --max-num-seqs 32 --gpu-memory-utilization 0.9 "
                                    "--no-enable-prefix-caching"),
            },
            chunking={"policy": "EngineNative", "maxTokens": 32768, "minTokens": 4096, "smoothingFactor": 1.0},
        ),
        0,
        telemetry_socket=SOCKET,
    )  # fmt: skip
    wanted, got = options(shlex.split(published)), options(rendered)
    assert rendered[:3] == ["vllm", "serve", "/mnt/weight/DeepSeek-V3.1-w8a8"]
    for each in (wanted, got):
        each["--additional-config"] = json.loads(each["--additional-config"] or "")
    assert got == wanted


def test_two_pods_on_cpu() -> None:
    leader = options(engine_command(config(), 0, telemetry_socket=SOCKET, calibration=CALIBRATION))
    follower = options(engine_command(config(), 1, telemetry_socket=SOCKET, calibration=CALIBRATION))
    assert leader["--host"] == "0.0.0.0"
    assert "--headless" in follower
    assert not {"--host", "--port"} & set(follower)
    assert (leader.pop("--node-rank"), follower.pop("--node-rank")) == ("0", "1")
    for name in ("--host", "--port"):
        leader.pop(name)
    follower.pop("--headless")
    assert leader == follower
    prefill = json.loads(leader.pop("--additional-config") or "")["prefill"]
    assert CalibrationDocument.model_validate(prefill.pop("calibration")) == CALIBRATION
    assert prefill == {
        "policy": "Dynamic", "maxTokens": 1024, "minTokens": 128, "smoothingFactor": 0.5, "virtualStages": 1,
        "layerPartition": [],
        "telemetrySocket": SOCKET, "profiling": False,
    }  # fmt: skip
    assert leader == {
        "--served-model-name": "m", "--tensor-parallel-size": "1", "--pipeline-parallel-size": "2",
        "--max-model-len": "8192", "--max-num-batched-tokens": "1280", "--enable-chunked-prefill": None,
        "--dtype": "bfloat16", "--enforce-eager": None, "--distributed-executor-backend": "mp",
        "--scheduler-cls": "prefill_runtime.engine.scheduler.PrefillScheduler", "--no-async-scheduling": None,
        "--worker-cls": "prefill_runtime.engine.worker.PrefillCPUWorker",
        "--nnodes": "2", "--master-addr": "p-0.p.n.svc", "--master-port": "29500",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "tokens"),
    [([], 1280), (["--max-num-seqs", "32"], 1056), (["--seed", "1", "--max-num-seqs=8"], 1032),
     (["--max-num-seqs", "8", "--max-num-seqs", "9"], 1033)],
)  # fmt: skip
def test_running_decodes_have_room_beside_a_full_chunk(arguments: list[str], tokens: int) -> None:
    """A step of exactly maxTokens would give each decode a token of the chunk that was planned."""
    command = engine_command(config(engine={"args": arguments}), 0, telemetry_socket=SOCKET)
    assert command[command.index("--max-num-batched-tokens") + 1] == str(tokens)


def test_ascend_has_its_own_worker() -> None:
    command = engine_command(config(engine={"device": "Ascend"}), 0, telemetry_socket=SOCKET)
    assert command[command.index("--worker-cls") + 1] == "prefill_runtime.engine.worker_ascend.PrefillNPUWorker"


def test_profiling_is_private_uncached_and_may_use_dummy_weights() -> None:
    wanting = config(engine={"args": ["--enable-prefix-caching", "--load-format", "safetensors"]})
    command = engine_command(wanting, 0, telemetry_socket=SOCKET, profiling=True)
    assert command[command.index("--host") + 1] == "127.0.0.1"
    # The last of contradicting flags wins in vLLM's parser.
    assert command.index("--no-enable-prefix-caching") > command.index("--enable-prefix-caching")
    assert [command[i + 1] for i, word in enumerate(command) if word == "--load-format"][-1] == "dummy"
    assert json.loads(command[command.index("--additional-config") + 1])["prefill"]["profiling"] is True


def test_the_users_additional_config_is_kept() -> None:
    asked = config(engine={"additionalConfig": {"theirs": 1, "prefill": {"allowUntestedEngine": True, "policy": "X"}}})
    command = engine_command(asked, 0, telemetry_socket=SOCKET)
    additional = json.loads(command[command.index("--additional-config") + 1])
    assert additional["theirs"] == 1
    assert additional["prefill"]["allowUntestedEngine"] is True
    assert additional["prefill"]["policy"] == "Dynamic"


@pytest.mark.parametrize("rank", [0, 1])
def test_engine_native_on_several_pods_loads_nothing_of_ours(rank: int) -> None:
    command = engine_command(
        config(engine={"device": "Ascend"}, chunking={"policy": "EngineNative"}), rank, telemetry_socket=SOCKET
    )
    assert "prefill_runtime" not in " ".join(command)
    additional = json.loads(command[command.index("--additional-config") + 1])
    assert list(additional) == ["profiling_chunk_config"]
    assert options(command)["--distributed-executor-backend"] == "mp"


def test_the_pods_own_environment_wins() -> None:
    added = engine_environment(config(), {"OMP_NUM_THREADS": "4", "HOME": "/h"}, "10.0.0.7")
    assert "OMP_NUM_THREADS" not in added
    assert added["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    assert added["VLLM_HOST_IP"] == "10.0.0.7"
    ascend = engine_environment(config(engine={"device": "Ascend"}), {}, None)
    assert not {"VLLM_HOST_IP", "OMP_NUM_THREADS", "VLLM_CPU_KVCACHE_SPACE"} & set(ascend)
