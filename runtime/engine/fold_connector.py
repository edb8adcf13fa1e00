"""The KV connector of a rank with two stages: one connector for the layers of both, told of each batch as of one pass.

vLLM's model runners call it in every pass. It loads, and hears of preemptions, in the head pass, before any layer of
the rank runs; what it has finished is asked in the tail pass, when all of them have saved.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from prefill_runtime.engine.fold_group import FoldedGroup
from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

AT_HEAD = "register_kv_caches", "register_cross_layers_kv_cache", "handle_preemptions", "start_load_kv"
AT_TAIL = {
    "get_finished": (None, None), "get_block_ids_with_load_errors": frozenset[int](), "get_kv_connector_stats": None,
    "get_kv_connector_kv_cache_events": None, "build_connector_worker_meta": None,
}  # fmt: skip
"""What to answer in the head pass."""


def fold_connector(group: FoldedGroup) -> bool:
    """Whether this process has a connector; from now on it is told of a batch once."""
    if not has_kv_transfer_group():
        return False
    connector: Any = get_kv_transfer_group()
    if not hasattr(connector, "prefill_folded"):
        connector.prefill_folded = True
        for name in AT_HEAD:
            setattr(connector, name, _once(getattr(connector, name), lambda: not group.at_tail, None))
        for name, otherwise in AT_TAIL.items():
            setattr(connector, name, _once(getattr(connector, name), lambda: group.at_tail, otherwise))
    return True


def _once(call: Callable[..., Any], now: Callable[[], bool], otherwise: object) -> Callable[..., Any]:
    return lambda *args, **kwargs: call(*args, **kwargs) if now() else otherwise
