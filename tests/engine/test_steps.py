"""What each step holds: vLLM's real scheduler and KV cache with our class, step by step, without a model behind."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from prefill_runtime.scheduler.budget import Rest
from prefill_runtime.scheduler.chunkers import Fixed
from prefill_runtime.scheduler.errors import ParameterError
from prefill_runtime.scheduler.planner import Planned

from tests.engine.harness import calibration, prompt

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of torch, when it is imported
    import torch
    from prefill_runtime.engine.scheduler import PrefillScheduler
    from vllm import SamplingParams
    from vllm.config import CacheConfig, DeviceConfig, ModelConfig, ParallelConfig, SchedulerConfig, VllmConfig
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import Request, RequestStatus
    from vllm.v1.structured_output import StructuredOutputManager

pytestmark = pytest.mark.filterwarnings("ignore")  # of vLLM and torch
BLOCK = 128
A, B, C = 1e-8, 4e-5, 0.004


class Steps:
    """Requests in, steps out; a result comes back when ``answer`` says so."""

    def __init__(self, scheduler: PrefillScheduler) -> None:
        self.scheduler = scheduler
        self.flying: list[Any] = []
        self.hasher = get_request_block_hasher(BLOCK, sha256)

    def add(self, name: str, tokens: list[int] | int, priority: int = 0, outputs: int = 4) -> None:
        tokens = prompt(tokens, seed=len(name)) if isinstance(tokens, int) else tokens
        params = SamplingParams(temperature=0.0, max_tokens=outputs, ignore_eos=True)
        params.update_from_generation_config({}, 2)
        self.scheduler.add_request(
            Request(name, tokens, params, None, priority=priority, block_hasher=self.hasher, arrival_time=0.0)
        )

    def step(self) -> dict[str, int]:
        output = self.scheduler.schedule()
        self.flying.append(output)
        return dict(output.num_scheduled_tokens)

    def answer(self) -> None:
        """The oldest step is done: a token for each request that has none left to compute."""
        output = self.flying.pop(0)
        names = list(output.num_scheduled_tokens)
        requests = [self.scheduler.requests.get(name) for name in names]
        done = [r is not None and r.num_computed_tokens >= r.num_tokens for r in requests]
        self.scheduler.update_from_output(
            output,
            ModelRunnerOutput(
                req_ids=names,
                req_id_to_index={name: i for i, name in enumerate(names)},
                sampled_token_ids=[[7] if end else [] for end in done],
                logprobs=None,
                prompt_logprobs_dict={},
                pooler_output=[],
            ),
        )

    def run(self, most: int = 200) -> list[dict[str, int]]:
        """Two steps in flight, until nothing is left."""
        seen = []
        for _ in range(most):
            seen.append(self.step())
            if len(self.flying) > 1:
                self.answer()
            if not self.scheduler.has_unfinished_requests():
                return [step for step in seen if step]
        raise AssertionError(f"not done after {most} steps: {seen[-3:]}")


Make = Callable[..., Steps]


@pytest.fixture
def make(model: Path) -> Iterator[Make]:
    made: list[PrefillScheduler] = []

    def steps(chunks: str, *, blocks: int = 400, cached: bool = False, **options: Any) -> Steps:
        scheduler: dict[str, Any] = {
            "max_num_seqs": 16, "max_num_batched_tokens": 1040, "max_model_len": 16_384, "enable_chunked_prefill": True,
            "async_scheduling": False, "is_encoder_decoder": False,
        } | options  # fmt: skip
        section = {"policy": chunks, "maxTokens": 1024, "minTokens": 128, "smoothingFactor": 1.0,
                   "calibration": calibration(A, B, c=C)}  # fmt: skip
        cache = CacheConfig(block_size=BLOCK, gpu_memory_utilization=0.9, enable_prefix_caching=cached)
        cache.num_gpu_blocks = blocks
        config = VllmConfig(
            model_config=ModelConfig(model=str(model), dtype="float32", skip_tokenizer_init=True),
            scheduler_config=SchedulerConfig(**scheduler),
            cache_config=cache,
            parallel_config=ParallelConfig(pipeline_parallel_size=2, distributed_executor_backend="mp"),
            device_config=DeviceConfig("cpu"),
            additional_config={"prefill": section},
        )
        init_none_hash(sha256)
        group = KVCacheGroupSpec(
            ["layer"], FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)
        )
        kv = KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=[group])
        made.append(
            PrefillScheduler(
                vllm_config=config, kv_cache_config=kv, structured_output_manager=StructuredOutputManager(config),
                block_size=BLOCK, log_stats=True,
            )
        )  # fmt: skip
        return Steps(made[-1])

    yield steps
    for scheduler in made:
        scheduler.shutdown()


@pytest.mark.parametrize("policy", ["Auto", "Planned", "Dynamic", "Fixed", "TokenThrottle", "TeraPipe", "Seq1F1B"])
@pytest.mark.parametrize("cached", [False, True])
def test_every_prompt_is_computed_once_and_in_legal_chunks(make: Make, policy: str, cached: bool) -> None:
    steps = make(policy, cached=cached)
    sizes = (5000, 1, 40, 129, 16_000, 700, 3000)
    for number, size in enumerate(sizes):
        steps.add(f"r{number}", size, outputs=1)
    seen = steps.run()
    assert {f"r{n}": sum(step.get(f"r{n}", 0) for step in seen) for n in range(7)} == {
        f"r{n}": size for n, size in enumerate(sizes)
    }
    assert all(sum(step.values()) <= 1024 for step in seen)
    for number in range(7):
        own = [step[f"r{number}"] for step in seen if f"r{number}" in step]
        assert all(chunk >= 128 for chunk in own[:-1])


def test_short_prompts_share_a_step_and_what_does_not_fit_comes_in_part(make: Make) -> None:
    steps = make("Dynamic")
    budget = steps.scheduler.prefill_choice.budget
    assert budget.cost is not None
    for name, size in (("front", 300), ("a", 40), ("b", 50), ("c", 3000), ("d", 10)):
        steps.add(name, size)
    step = steps.step()
    # Ten fixed parts are longer than a full chunk, so that is the limit: 1024 tokens' worth of time
    left = budget.allowed(whole(300)) - budget.fixed - sum(budget.seconds(n, whole(n)) for n in (300, 40, 50))
    part = int(budget.cost.model.chunk_for(left, 0.0)) // BLOCK * BLOCK
    assert step == {"front": 300, "a": 40, "b": 50, "c": part}
    assert 128 <= part < 1024 - 390 + 1


def whole(tokens: int) -> Rest:
    return Rest(0, tokens)


def test_nobody_joins_a_chunk_that_does_not_end_its_prompt(make: Make) -> None:
    steps = make("Dynamic")
    for name, size in (("long", 3000), ("short", 40)):
        steps.add(name, size)
    first = steps.step()
    assert list(first) == ["long"]
    assert first["long"] % BLOCK == 0
    seen = [first, *steps.run()]
    assert next(step for step in seen if "short" in step)["long"] < 1024


def test_without_a_cost_tokens_alone_count(make: Make) -> None:
    steps = make("Fixed")
    for name, size in (("front", 300), ("a", 40), ("c", 3000)):
        steps.add(name, size)
    assert steps.step() == {"front": 300, "a": 40, "c": 640}


def test_decodes_and_prefills_go_on_beside_each_other(make: Make) -> None:
    steps = make("Fixed")
    for number in range(8):
        steps.add(f"d{number}", 10, outputs=30)
    steps.step()
    steps.answer()
    steps.add("long", 4000)
    for _ in range(3):
        step = steps.step()
        assert step == {"long": 1024} | {f"d{n}": 1 for n in range(8)}
        steps.answer()
    assert steps.step() == {"long": 4000 - 3072} | {f"d{n}": 1 for n in range(8)}


def test_a_cached_prefix_is_history_for_the_chunk_and_for_the_budget(make: Make) -> None:
    steps = make("Dynamic", cached=True)
    shared = prompt(4096, seed=9)
    steps.add("one", shared, outputs=1)
    steps.run()
    steps.add("two", shared + prompt(200, seed=3))
    steps.add("three", shared + prompt(50, seed=4))
    steps.add("four", shared + prompt(60, seed=5))
    steps.add("five", 60)
    assert steps.step() == {"two": 200, "three": 50}
    budget = steps.scheduler.prefill_choice.budget
    first, spent = Rest(4096, 200), budget.seconds(50, Rest(4096, 50))
    left = budget.allowed(first) - budget.fixed - budget.seconds(200, first) - spent
    assert budget.seconds(60, Rest(0, 60)) < left < budget.seconds(60, Rest(4096, 60))


def test_priority_decides_who_is_served_and_whose_chunk_counts(make: Make) -> None:
    steps = make("Fixed", policy="priority")
    for name, size, priority in (("last", 500, 9), ("second", 300, 2), ("first", 200, 1)):
        steps.add(name, size, priority=priority)
    assert list(steps.step().items()) == [("first", 200), ("second", 300), ("last", 500)]
    steps = make("Dynamic", policy="priority")
    for name, size, priority in (("last", 40, 9), ("second", 3000, 2), ("first", 200, 1)):
        steps.add(name, size, priority=priority)
    step = steps.step()
    assert list(step) == ["first", "second"]
    assert step["second"] % BLOCK == 0


def test_preempted_prompts_come_again_and_nothing_is_lost(make: Make) -> None:
    steps = make("Auto", blocks=20)
    for number in range(4):
        steps.add(f"r{number}", 500, outputs=200)
    seen = steps.run(most=2000)
    computed = {f"r{n}": sum(step.get(f"r{n}", 0) for step in seen) for n in range(4)}
    assert max(computed.values()) > 500 + 200, "nothing was preempted, so nothing was tested"
    assert all(sum(step.values()) <= 1040 for step in seen)


def test_an_abort_in_the_middle_leaves_the_next_prompt_its_chunks(make: Make) -> None:
    steps = make("Dynamic")
    steps.add("victim", 9000)
    steps.add("next", 2000)
    steps.step()
    steps.step()
    steps.scheduler.finish_requests("victim", RequestStatus.FINISHED_ABORTED)
    seen = steps.run()
    expected = steps.scheduler.prefill_choice.chunker.cut(2000)
    assert [step["next"] for step in seen if step.get("next", 0) > 1] == expected


def test_a_failing_policy_is_replaced_by_fixed_and_serving_goes_on(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = make("Planned")
    assert isinstance(steps.scheduler.prefill_choice.chunker, Planned)

    def fails(*args: Any) -> list[int]:
        raise ParameterError("anything", 1, "2")

    monkeypatch.setattr(steps.scheduler.prefill_choice.chunker, "plan_chunks", fails)
    steps.add("long", 3000)
    assert steps.step() == {"long": 1024}
    assert isinstance(steps.scheduler.prefill_choice.chunker, Fixed)
    assert steps.scheduler.prefill_choice.fallback == "PolicyFailed"
    assert steps.scheduler.prefill_searches is None


def test_a_dead_search_process_means_fixed(make: Make) -> None:
    steps = make("Auto")
    searches = steps.scheduler.prefill_searches
    assert searches is not None
    searches.problem = "no plans can be searched: gone"
    steps.add("long", 3000)
    assert steps.step() == {"long": 1024}
    assert steps.scheduler.prefill_choice.message == "no plans can be searched: gone"


def test_a_prompt_in_the_middle_of_its_plan_keeps_its_cuts(make: Make) -> None:
    steps = make("Planned")
    steps.add("long", 6000, outputs=1)
    begun = steps.step()["long"]
    old = steps.scheduler.prefill_choice.chunker
    assert isinstance(old, Planned)
    planned = [b - a for a, b in pairwise(old._plans["long"])]
    steps.scheduler._recalibrate(calibration(1e-6, 1e-6, c=1e-5))
    assert steps.scheduler.prefill_choice.chunker is not old
    assert [begun, *(step["long"] for step in steps.run())] == planned
    steps.add("other", 6000, outputs=1)
    assert [step["other"] for step in steps.run()] != planned


def test_what_the_policy_is_told_of_its_surroundings(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = make("TokenThrottle", blocks=401)
    told: list[Any] = []
    monkeypatch.setattr(steps.scheduler.prefill_choice.chunker, "observe", told.append)
    for name, size in (("a", 3000), ("b", 500), ("c", 700)):
        steps.add(name, size)
    steps.step()
    steps.step()
    assert [(q.waiting_tokens, q.waiting_requests) for q in told] == [(4200, 2), (4200 - 256, 2)]
    assert told[0].kv_free == 1.0
    assert told[1].kv_free == pytest.approx(1 - 2 / 400, abs=0.003)
    assert told[0].load == 0
