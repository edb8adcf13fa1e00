"""Batches in flight between the engine and the ranks of its host."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prefill_runtime.engine import batch_ring

from localcluster import models
from tests.engine.harness import ENVIRONMENT, Engine, prompt
from tests.engine.shm import SHM

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of torch, when it is imported
    from prefill_runtime.engine.scheduler import PrefillScheduler
    from vllm.distributed.device_communicators.shm_broadcast import MessageQueue
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.executor.abstract import Executor

MEBIBYTES = 16
"""Of a slot: VLLM_MQ_MAX_CHUNK_BYTES_MB."""


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
            queue = MessageQueue(1, 1, max_chunk_bytes=1024)
            queue.buffer.shared_memory.unlink()
            os._exit(queue.buffer.max_chunks)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 10


def test_a_pod_of_four_stages_has_a_ring_for_six_batches(tmp_path: Path) -> None:
    before = set(os.listdir(SHM))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(ENVIRONMENT, "VLLM_CPU_OMP_THREADS_BIND", "nobind")  # more ranks than cores
        settings = {"policy": "Fixed", "maxTokens": 256, "minTokens": 128, "smoothingFactor": 1.0}
        engine = Engine(
            models.ensure("emu"), tmp_path, settings, dtype="bfloat16", pipeline_parallel_size=4, max_num_seqs=4,
            load_format="dummy",
        )  # fmt: skip
    try:
        assert len(engine.tokens([prompt(2000, seed=1)], max_tokens=2)[0]) == 2
        sizes = [(Path(SHM) / name).stat().st_size for name in set(os.listdir(SHM)) - before]
    finally:
        engine.close()
    assert 12 * ((MEBIBYTES << 20) + 1 + 4) in sizes, sizes  # a byte per slot for the writer and for each reader
