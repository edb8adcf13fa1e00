"""Room between the engine and the ranks of its host for every batch in flight.

vLLM broadcasts to the ranks of a host through a ring in shared memory of ten slots, and each batch takes two: one for
its pass and one for its sampling, or for the head and the tail of a fold. A rank takes a batch out when it starts it,
so with more than five batches in flight the last rank holds back the first. With eight stages in one pod that costs a
tenth of the time to first token with equal chunks, more with a plan. Ranks of other hosts hear through sockets, which
hold nobody back.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.config import VllmConfig

STOCK_SLOTS = 10
MESSAGES = 2
"""Per batch."""
SPARE_BATCHES = 2
"""The one that the engine is about to issue, and the one whose answer is on its way."""


def slots(vllm_config: VllmConfig) -> int:
    """Of the ring for an engine with our scheduler; stock engines keep vLLM's."""
    from prefill_runtime.engine.scheduler import PrefillScheduler

    if not issubclass(vllm_config.scheduler_config.get_scheduler_cls(), PrefillScheduler):
        return STOCK_SLOTS
    ranks = vllm_config.parallel_config.pipeline_parallel_size
    return max(STOCK_SLOTS, MESSAGES * (ranks + SPARE_BATCHES))


@contextmanager
def roomy(count: int) -> Iterator[None]:
    """Message queues that this process makes inside get so many slots; workers that it forks make theirs as ever."""
    from vllm.distributed.device_communicators.shm_broadcast import MessageQueue

    stock, process = MessageQueue.__init__, os.getpid()

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        if os.getpid() == process:
            kwargs.setdefault("max_chunks", count)
        stock(self, *args, **kwargs)

    MessageQueue.__init__ = __init__
    try:
        yield
    finally:
        MessageQueue.__init__ = stock


def install() -> None:
    """In the process that has the executor; vllm-ascend's own executor is made the same way."""
    if "vllm.v1.executor.abstract" not in sys.modules:
        return
    from vllm.v1.executor.abstract import Executor

    stock = Executor.__init__
    if getattr(stock, "roomy", False):
        return

    def __init__(self: Any, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> None:
        with roomy(slots(vllm_config)):
            stock(self, vllm_config, *args, **kwargs)

    __init__.roomy = True  # type: ignore[attr-defined]
    Executor.__init__ = __init__
