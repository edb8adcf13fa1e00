"""Eager mode with pipeline stages on CPU: vLLM 0.28.0 dies at the first request of every stage but the first.

``warming_up_model`` returns early in eager mode, so nobody allocates the buffer that a stage's input is copied into.
0.23 warms up in eager mode as well: there the buffer exists, and this does nothing.
"""

from __future__ import annotations

import multiprocessing
from typing import Any


def needed_here() -> bool:
    """Only a worker process of a CPU engine has a runner, and importing one costs the others a second."""
    if not multiprocessing.current_process().name.startswith("VllmWorker"):
        return False
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def install() -> None:
    """Allocate the buffer at its first use."""
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    stock = CPUModelRunner.sync_and_gather_intermediate_tensors
    if getattr(stock, "allocates", False):
        return

    def sync_and_gather_intermediate_tensors(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.intermediate_tensors is None:
            self.intermediate_tensors = self.model.make_empty_intermediate_tensors(
                batch_size=self.max_num_tokens, dtype=self.model_config.dtype, device=self.device
            )
        return stock(self, *args, **kwargs)

    sync_and_gather_intermediate_tensors.allocates = True  # type: ignore[attr-defined]
    CPUModelRunner.sync_and_gather_intermediate_tensors = sync_and_gather_intermediate_tensors
