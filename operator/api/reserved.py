"""What a PrefillPipeline may not set because the operator sets it."""

from __future__ import annotations

from prefill_runtime.agent.config import CONTROL_PORT, GROUP_PORT, STORE_PORT

# Arguments of vllm serve that follow from other fields, or that would break a rank group.
RESERVED_ARGS = (
    "--additional-config",
    "--config",
    "--data-parallel-address",
    "--data-parallel-rank",
    "--data-parallel-start-rank",
    "--distributed-executor-backend",
    "--dtype",
    "--enable-chunked-prefill",
    "--enable-expert-parallel",
    "--headless",
    "--host",
    "--master-addr",
    "--master-port",
    "--max-model-len",
    "--max-num-batched-tokens",
    "--model",
    "--nnodes",
    "--node-rank",
    "--pipeline-parallel-size",
    "--port",
    "--prefill-context-parallel-size",
    "--quantization",
    "--revision",
    "--scheduler-cls",
    "--served-model-name",
    "--tensor-parallel-size",
    "--trust-remote-code",
    "--uds",
    "--worker-cls",
)
RESERVED_SHORT_ARGS = ("-dpa", "-dpn", "-dpr", "-ep", "-n", "-pcp", "-pp", "-q", "-r", "-tp")
RESERVED_ENV = ("PREFILL_RANK", "PYTHONPATH", "VLLM_PP_LAYER_PARTITION")
RESERVED_CONFIG = ("prefill", "profiling_chunk_config")
RESERVED_KEYS = (
    "app.kubernetes.io/component",
    "app.kubernetes.io/instance",
    "app.kubernetes.io/managed-by",
    "app.kubernetes.io/name",
)
RESERVED_PREFIX = "prefill.dev/"
RESERVED_PATHS = ("/dev/shm", "/etc/prefill", "/models", "/opt/prefill", "/run/prefill")
RESERVED_VOLUMES = "prefill-"
RESERVED_PORTS = (CONTROL_PORT, GROUP_PORT, STORE_PORT)
