"""The scheduler alone, with a queue for its pipeline: preempted requests are resumed at the right moment."""

from __future__ import annotations

import random
from collections import deque
from pathlib import Path
from typing import Any

import pytest

BLOCK, STAGES = 16, 4
FIXED: dict[str, Any] = {"policy": "Fixed", "maxTokens": 64, "minTokens": 16, "smoothingFactor": 1.0}

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # of torch and vLLM


@pytest.fixture(scope="module")
def config(model: Path) -> Any:
    """Of an engine with STAGES stages; no process is started."""
    from vllm.engine.arg_utils import EngineArgs

    return EngineArgs(
        model=str(model), dtype="float32", max_model_len=1024, max_num_seqs=16, max_num_batched_tokens=80,
        enable_chunked_prefill=True, enable_prefix_caching=False, pipeline_parallel_size=STAGES, block_size=BLOCK,
        async_scheduling=False, additional_config={"prefill": FIXED},
    ).create_engine_config()  # fmt: skip


class Pipeline:
    """Our scheduler and the steps on their way. The token that follows n tokens is n."""

    def __init__(self, config: Any, blocks: int, policy: str = "fcfs") -> None:
        import torch
        from prefill_runtime.engine.scheduler import PrefillScheduler
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
        from vllm.v1.structured_output import StructuredOutputManager

        layer = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)
        config.cache_config.num_gpu_blocks, config.scheduler_config.policy = blocks, policy
        groups = [KVCacheGroupSpec(["layer"], layer)]
        memory = KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=groups)
        self.scheduler = PrefillScheduler(config, memory, StructuredOutputManager(config), block_size=BLOCK)
        self.requests: list[Any] = []
        self.flying: deque[tuple[Any, Any]] = deque()

    def add(self, prompt: int, answer: int, priority: int = 0) -> Any:
        from vllm import SamplingParams
        from vllm.v1.request import Request

        params = SamplingParams(max_tokens=answer, ignore_eos=True)
        request = Request(f"r{len(self.requests)}", list(range(prompt)), params, None, priority=priority)
        self.requests.append(request)
        self.scheduler.add_request(request)
        return request

    def compose(self) -> None:
        from vllm.v1.outputs import ModelRunnerOutput

        step = self.scheduler.schedule()
        names = list(step.num_scheduled_tokens)
        known = [self.scheduler.requests[name] for name in names]
        tokens = [[one.num_tokens] if one.num_computed_tokens == one.num_tokens else [] for one in known]
        answer = ModelRunnerOutput(names, {name: number for number, name in enumerate(names)}, tokens)
        self.flying.append((step, answer))

    def settle(self) -> None:
        self.scheduler.update_from_output(*self.flying.popleft())

    def turn(self) -> None:
        """As the engine does: fill the pipeline, then wait for its oldest step."""
        if self.scheduler.has_requests():
            self.compose()
        if len(self.flying) == STAGES or (self.flying and not self.scheduler.has_requests()):
            self.settle()

    def finish(self) -> None:
        for _ in range(20_000):
            if not (self.scheduler.requests or self.flying):
                break
            self.turn()
        for one in self.requests:
            prompt = one.num_prompt_tokens
            assert list(one.output_token_ids) == list(range(prompt, prompt + one.max_tokens)), one.request_id


def test_a_preempted_request_waits_for_its_own_step(config: Any) -> None:
    pipeline = Pipeline(config, blocks=9, policy="priority")  # of the blocks one is never used
    first = pipeline.add(prompt=32, answer=2)
    pipeline.compose()
    least = pipeline.add(prompt=20, answer=8, priority=1)
    pipeline.compose()
    growing = pipeline.add(prompt=48, answer=8)
    pipeline.compose()
    for _ in range(3):
        assert least.num_preemptions == 0
        pipeline.settle()
        pipeline.compose()
    assert [list(step.num_scheduled_tokens) for step, _ in pipeline.flying] == [["r0"], ["r1"], ["r2"]]
    assert least.num_preemptions == 1, "growing took a block that was its own"
    pipeline.settle()
    assert first.is_finished(), "now there is room again"
    pipeline.compose()
    assert least.num_computed_tokens == 0, "resumed although its token is not back"
    pipeline.settle()
    pipeline.compose()
    assert least.num_computed_tokens == 22
    pipeline.finish()
    assert growing.num_preemptions == 0


@pytest.mark.parametrize("seed", range(3))
def test_answers_survive_too_little_memory(config: Any, seed: int) -> None:
    source = random.Random(seed)
    pipeline = Pipeline(config, blocks=30)
    for _ in range(40):
        pipeline.add(prompt=source.randrange(5, 300), answer=source.randrange(1, 40))
        for _ in range(source.randrange(8)):
            pipeline.turn()
    pipeline.finish()
    assert sum(one.num_preemptions for one in pipeline.requests) > 0, "nothing was preempted, so nothing was tested"
