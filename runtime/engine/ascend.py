"""Which vllm-ascend the NPU worker is written for. It was read, not run: tests/unit/ascend hold what it relies on."""

from __future__ import annotations

from prefill_runtime.engine.errors import UnsupportedEngineError
from prefill_runtime.engine.versions import base_version

VLLM, VLLM_ASCEND = "0.23.0", "0.23.0.post1"


def check_ascend(vllm: str, vllm_ascend: str, allow_untested: bool) -> None:
    """Refuse any other pair of versions, unless the settings take the risk."""
    if (base_version(vllm), base_version(vllm_ascend)) == (VLLM, VLLM_ASCEND) or allow_untested:
        return
    raise UnsupportedEngineError(
        f"vllm-ascend {vllm_ascend} on vLLM {vllm} is not what prefill-operator's NPU worker was written for "
        f"(vllm-ascend {VLLM_ASCEND} on vLLM {VLLM}). Use an image with these, or chunking policy EngineNative, which "
        f"loads nothing into the engine, or set additional_config.prefill.allowUntestedEngine to true to try this one "
        f"at your own risk"
    )
