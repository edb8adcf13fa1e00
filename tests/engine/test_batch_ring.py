"""Batches in flight between the engine and the ranks of its host; test_emulation.py has a whole engine of four."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from prefill_runtime.engine import batch_ring

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of torch, when it is imported
    from prefill_runtime.engine.scheduler import PrefillScheduler
    from vllm.distributed.device_communicators.shm_broadcast import MessageQueue
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.executor.abstract import Executor


def config(ranks: int, scheduler: type[Any]) -> Any:
    names = ("model", "cache", "lora", "load", "device", "speculative", "observability", "kv_transfer", "ec_transfer")
    return SimpleNamespace(
        scheduler_config=SimpleNamespace(get_scheduler_cls=lambda: scheduler),
        parallel_config=SimpleNamespace(pipeline_parallel_size=ranks),
        **{f"{name}_config": None for name in names},
    )


@pytest.fixture
def executor(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Any]]:
    """One that makes its ring as vLLM's and vllm-ascend's do."""
    monkeypatch.setattr(Executor, "__init__", Executor.__init__)  # to be put back

    class Made(Executor):  # type: ignore[misc]
        def _init_executor(self) -> None:
            self.ring = MessageQueue(8, 8, max_chunk_bytes=1024)
            rings.append(self.ring)

        def collective_rpc(self, *args: Any, **kwargs: Any) -> Any: ...
        def check_health(self) -> None: ...

    rings: list[Any] = []
    batch_ring.install()
    batch_ring.install()
    yield Made
    for ring in rings:
        ring.local_socket.context.destroy(0)


@pytest.mark.parametrize(
    ("ranks", "scheduler", "slots"), [(8, PrefillScheduler, 20), (2, PrefillScheduler, 10), (8, Scheduler, 10)]
)
def test_the_ring_has_two_slots_for_each_batch_of_our_scheduler(
    executor: type[Any], ranks: int, scheduler: type[Any], slots: int
) -> None:
    assert executor(config(ranks, scheduler)).ring.buffer.max_chunks == slots
    after = MessageQueue(8, 8, max_chunk_bytes=1024)
    assert after.buffer.max_chunks == 10
    after.local_socket.context.destroy(0)


def test_a_forked_worker_makes_its_queues_as_ever() -> None:
    with batch_ring.roomy(20):
        child = os.fork()
        if child == 0:
            try:
                queue = MessageQueue(1, 1, max_chunk_bytes=1024)
                queue.buffer.shared_memory.unlink()
                os._exit(queue.buffer.max_chunks)
            finally:
                os._exit(255)  # an error must not go on with the other tests here
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 10
