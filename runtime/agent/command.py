"""The engine's command line and environment: a pure function of the rank's configuration.

Flags given here are the operator's; ``engine.args`` holds everything else and is refused by the API
where it names one of these.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from prefill_runtime.agent.config import Policy, RankConfig
from prefill_runtime.profiling.document import CalibrationDocument

SCHEDULER = "prefill_runtime.engine.scheduler.PrefillScheduler"
WORKERS = {
    "CPU": "prefill_runtime.engine.worker.PrefillCPUWorker",
    "Ascend": "prefill_runtime.engine.worker_ascend.PrefillNPUWorker",
}
DEFAULT_SEQUENCES = 256  # vLLM's own --max-num-seqs where the engine's arguments have none


def engine_command(
    config: RankConfig,
    rank: int,
    *,
    telemetry_socket: str,
    profiling: bool = False,
    calibration: CalibrationDocument | None = None,
) -> list[str]:
    """``vllm serve`` for one rank of the group."""
    engine, group = config.engine, config.group
    command = ["vllm", "serve", engine.model_path]
    if rank == 0:
        command += ["--host", "127.0.0.1" if profiling else "0.0.0.0", "--port", str(group.engine_port)]
    command += ["--served-model-name", engine.served_model_name, *engine.args]
    command += ["--tensor-parallel-size", str(engine.tensor), "--pipeline-parallel-size", str(engine.pipeline)]
    if engine.expert_parallel:
        command.append("--enable-expert-parallel")
    command += ["--max-model-len", str(engine.max_model_len)]
    command += ["--max-num-batched-tokens", str(_step_tokens(config)), "--enable-chunked-prefill"]
    if engine.trust_remote_code:
        command.append("--trust-remote-code")
    if engine.quantization:
        command += ["--quantization", engine.quantization]
    if engine.dtype:
        command += ["--dtype", engine.dtype]
    command += _device_flags(config) + _plugin_flags(config)
    if profiling:
        # A cached prefix would shorten the very passes that are to be measured.
        command.append("--no-enable-prefix-caching")
        if config.profiling is not None and config.profiling.weights == "Dummy":
            command += ["--load-format", "dummy"]
    additional = _additional_config(config, telemetry_socket, profiling, calibration)
    if additional:
        command += ["--additional-config", json.dumps(additional, separators=(",", ":"))]
    return command + _node_flags(config, rank)


def _device_flags(config: RankConfig) -> list[str]:
    flags = []
    if config.engine.device == "CPU":
        flags.append("--enforce-eager")
    if config.engine.device == "CPU" or config.group.pods > 1:
        flags += ["--distributed-executor-backend", "mp"]
    return flags


def _plugin_flags(config: RankConfig) -> list[str]:
    if config.chunking.policy == Policy.ENGINE_NATIVE:
        return []
    return ["--scheduler-cls", SCHEDULER, "--no-async-scheduling", "--worker-cls", WORKERS[config.engine.device]]


def _step_tokens(config: RankConfig) -> int:
    """A full chunk and a token for each running decode, which would otherwise make chunks smaller than planned."""
    if config.chunking.policy == Policy.ENGINE_NATIVE:
        return config.chunking.max_tokens
    return config.chunking.max_tokens + _value_of("--max-num-seqs", config.engine.args, DEFAULT_SEQUENCES)


def _value_of(flag: str, arguments: Sequence[str], default: int) -> int:
    """The last one counts, as in vLLM's parser."""
    words = [part for argument in arguments for part in argument.partition("=")[::2] if part]
    values = [value for word, value in pairwise(words) if word == flag and value.isdecimal()]
    return int(values[-1]) if values else default


def _additional_config(
    config: RankConfig, telemetry_socket: str, profiling: bool, calibration: CalibrationDocument | None
) -> dict[str, Any]:
    chunking = config.chunking
    additional = dict(config.engine.additional_config)
    if chunking.policy == Policy.ENGINE_NATIVE:
        additional["profiling_chunk_config"] = {
            "enabled": True,
            "smooth_factor": chunking.smoothing_factor,
            "min_chunk": chunking.min_tokens,
        }
        return additional
    theirs = additional.get("prefill")
    additional["prefill"] = (theirs if isinstance(theirs, dict) else {}) | {
        "policy": chunking.policy.value,
        "maxTokens": chunking.max_tokens,
        "minTokens": chunking.min_tokens,
        "smoothingFactor": chunking.smoothing_factor,
        "virtualStages": config.engine.virtual,
        "layerPartition": config.engine.layer_partition if config.engine.virtual == 2 else (),
        "calibration": calibration.model_dump(mode="json", by_alias=True) if calibration else None,
        "telemetrySocket": telemetry_socket,
        "profiling": profiling,
    }
    return additional


def _node_flags(config: RankConfig, rank: int) -> list[str]:
    group = config.group
    if group.pods == 1:
        return []
    flags = ["--nnodes", str(group.pods), "--node-rank", str(rank)]
    flags += ["--master-addr", group.leader, "--master-port", str(group.store_port)]
    return flags if rank == 0 else [*flags, "--headless"]


def engine_environment(config: RankConfig, environ: Mapping[str, str], address: str | None) -> dict[str, str]:
    """Variables to add to ``environ``; whatever the pod already sets wins.

    ``address`` is this pod's address as its peers see it (vLLM's own guess asks for a default route).
    """
    additions = {
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    }
    if address is not None:
        additions["VLLM_HOST_IP"] = address
    if config.engine.layer_partition and config.engine.virtual == 1:
        additions["VLLM_PP_LAYER_PARTITION"] = ",".join(map(str, config.engine.layer_partition))
    if config.engine.device == "CPU":
        # One core per rank: binding picks the same cores in every pod of a node, so threads float.
        additions |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    return {name: value for name, value in additions.items() if name not in environ}
