"""How many tokens of a waiting request the prefix cache holds (differs between vLLM versions)."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import Request


def cached_tokens(scheduler: Scheduler, request: Request) -> int:
    """Asks below ``get_computed_blocks``, which counts hits (0.23) or may publish KV events (0.28): looking must
    not be counted as using.
    """
    manager = scheduler.kv_cache_manager
    if not manager.enable_caching or getattr(request, "skip_reading_prefix_cache", False):
        return 0
    # The engine always computes the last token, so that there are logits to sample from.
    return int(manager.coordinator.find_longest_cache_hit(request.block_hashes, request.num_tokens - 1)[1])
