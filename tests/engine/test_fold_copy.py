"""What the tail pass of a batch is given, against vLLM's own types."""

from __future__ import annotations

from dataclasses import fields

from prefill_runtime.engine.fold_copy import for_tail
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput


def batch() -> SchedulerOutput:
    output = SchedulerOutput.make_empty()
    new = {f.name: None for f in fields(NewRequestData)} | {
        "req_id": "new", "prompt_token_ids": list(range(1000)), "block_ids": ([1, 2], [3]), "num_computed_tokens": 0,
    }  # fmt: skip
    output.scheduled_new_reqs = [NewRequestData(**new)]
    cached = CachedRequestData.make_empty()
    cached.req_ids, cached.new_block_ids = ["old", "other"], [([7],), None]
    output.scheduled_cached_reqs = cached
    output.num_scheduled_tokens, output.total_num_scheduled_tokens = {"new": 1000, "old": 1}, 1001
    return output


def test_blocks_that_one_runner_adds_are_not_the_others() -> None:
    output = batch()
    tail = for_tail(output)
    output.scheduled_new_reqs[0].block_ids[0].append(99)
    output.scheduled_cached_reqs.new_block_ids[0][0].append(98)
    assert tail.scheduled_new_reqs[0].block_ids == ([1, 2], [3])
    assert tail.scheduled_cached_reqs.new_block_ids == [([7],), None]


def test_all_else_is_the_same_and_a_long_prompt_is_held_once() -> None:
    output = batch()
    tail = for_tail(output)
    assert tail.scheduled_new_reqs[0].prompt_token_ids is output.scheduled_new_reqs[0].prompt_token_ids
    assert tail.num_scheduled_tokens == output.num_scheduled_tokens
    assert tail == output
