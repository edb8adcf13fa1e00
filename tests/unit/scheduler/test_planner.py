import time
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prefill_runtime.scheduler.bound import prompt_bound
from prefill_runtime.scheduler.chunkers import Bounds, Chunker, Dynamic, Fixed, Queue
from prefill_runtime.scheduler.cost import PipelineCost, StageModel
from prefill_runtime.scheduler.errors import ParameterError
from prefill_runtime.scheduler.layout import FoldBack, Linear
from prefill_runtime.scheduler.planner import Auto, Planned, Planner
from prefill_runtime.scheduler.simulate import Request, simulate

from tests.unit.scheduler.pipelines import bounds, costs, layouts

COST = PipelineCost(StageModel(0.7, 2.42 / 32_768, 3.64 / 32_768**2))
PLANNER = Planner(FoldBack(2), COST, Bounds(32_768))


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_never_worse_than_the_best_fixed_size_and_never_below_the_bound(data: st.DataObject) -> None:
    layout = data.draw(layouts)
    cost, limits = data.draw(costs(layout)), data.draw(bounds)
    prompt = data.draw(st.integers(1, 12 * limits.max_tokens))
    cached = data.draw(st.integers(0, prompt - 1))
    planner = Planner(layout, cost, limits)
    plan = planner.plan(prompt, cached)
    assert sum(plan.chunks) == prompt - cached
    assert plan.seconds <= plan.fixed[1] * (1 + 1e-9)
    assert plan.seconds >= plan.bound * (1 - 1e-9)
    for size in {limits.highest, max(limits.lowest, limits.highest // 2 // limits.quantum * limits.quantum)}:
        chunks = Fixed(limits, size).cut(prompt, cached)
        if len(chunks) <= 256:
            assert plan.seconds <= planner.predict(chunks, cached)[0] * (1 + 1e-9)
    seed = planner.seed(prompt, cached)
    assert sum(seed) == prompt - cached
    assert max(seed) <= limits.max_tokens


def test_the_bound_is_tight_at_both_layouts() -> None:
    for layout, gap in ((Linear(2), 0.004), (Linear(8), 0.004), (FoldBack(2), 0.012), (FoldBack(8), 0.025)):
        plan = Planner(layout, COST, Bounds(65_536)).plan(524_288)
        assert 0 <= plan.gap < gap
        assert plan.bound == prompt_bound(layout, COST, 524_288, 0, Bounds(65_536))


def test_small_chunks_at_both_ends() -> None:
    chunks = PLANNER.plan(131_072).chunks
    assert chunks[0] < max(chunks) / 2 > chunks[-1]


def test_the_explanation_names_policy_gain_and_bound() -> None:
    text = PLANNER.plan(131_072).explanation
    assert text.startswith("Planned: 7 chunks from ")
    assert "% less than the best fixed size (24576 tokens, 24.11 s)" in text
    assert "no cut can beat 22.8" in text


def test_rank_time_has_its_price_while_others_wait() -> None:
    alone, crowded = PLANNER.plan(131_072), PLANNER.plan(131_072, weight=16)
    assert len(crowded.chunks) < len(alone.chunks)
    assert crowded.rank_seconds < alone.rank_seconds
    assert crowded.seconds > alone.seconds
    assert "priced at 16 s" in crowded.explanation


def test_auto_follows_the_queue() -> None:
    auto = Auto(Bounds(32_768), PLANNER)
    auto.observe(Queue(131_072))
    assert auto.cut(131_072) == list(PLANNER.plan(131_072).chunks)
    auto.observe(Queue(10**7, waiting_requests=20))
    assert auto.cut(131_072) == list(PLANNER.plan(131_072, weight=16).chunks)
    auto.observe(Queue(131_072, load=0.5))
    assert auto.cut(131_072) == list(PLANNER.plan(131_072, weight=1).chunks)


def test_short_prompts_that_wait_make_auto_finish_soon() -> None:
    auto = Auto(Bounds(32_768), PLANNER)
    auto.observe(Queue(131_072 + 20 * 100, waiting_requests=20))
    assert auto.cut(131_072) == list(PLANNER.plan(131_072).chunks)


def test_auto_serves_a_queue_sooner_than_what_it_chooses_from() -> None:
    queue, limits = [Request(131_072)] * 6, Bounds(32_768)
    planner = Planner(FoldBack(2), COST, limits, static=False)

    def mean(chunker: Chunker) -> float:
        return sum(simulate(FoldBack(2), COST, queue, chunker).ttft) / len(queue)

    others = [Dynamic(limits, COST.model), Planned(limits, planner)]
    others += [Fixed(limits, size * 1024) for size in (4, 8, 12, 16, 24, 32)]  # type: ignore[misc]
    assert mean(Auto(limits, planner)) < min(map(mean, others))


def test_the_scheduling_path_gets_a_seed_at_once_and_the_plan_later() -> None:
    jobs: list[Callable[[], None]] = []
    planned = Planned(Bounds(32_768), PLANNER, later=jobs.append)
    seed = planned.cut(131_072)
    assert sum(seed) == 131_072
    assert planned.cut(131_072) == seed
    assert len(jobs) == 1  # asked once, not once a request
    jobs[0]()
    assert planned.cut(131_072) == list(PLANNER.plan(131_072).chunks)


def test_a_failed_search_is_asked_for_again() -> None:
    jobs: list[Callable[[], None]] = []
    planned = Planned(Bounds(32_768), PLANNER, later=jobs.append)
    planned.cut(131_072)
    planned.planner = None  # type: ignore[assignment]
    with pytest.raises(AttributeError):
        jobs[0]()
    planned.planner = PLANNER
    planned.cut(131_072)
    assert len(jobs) == 2


def test_lengths_of_one_bucket_share_a_plan() -> None:
    planned = Planned(Bounds(32_768), PLANNER, bucket=1024)
    first, second = planned.cut(131_000), planned.cut(130_500)
    assert first[:-1] == second[:-1]
    assert sum(second) == 130_500


def test_the_seed_is_quick_enough_for_the_scheduling_path() -> None:
    """CPU time, many times over the limit of 10 ms, so that only a change of kind fails."""
    planner = Planner(FoldBack(8), COST, Bounds(4096))
    planner.seed(524_288)
    start = time.process_time()
    for _ in range(5):
        planner.seed(524_288)
    assert (time.process_time() - start) / 5 < 0.1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PLANNER.plan(0), "prompt_tokens is 0, allowed: >= 1"),
        (lambda: PLANNER.plan(10, 10), "prompt_tokens is 10, allowed: >= 11"),
        (lambda: PLANNER.plan(10, weight=-1), "weight is -1, allowed: >= 0"),
        (lambda: Planner(Linear(2), COST, Bounds(512, max_model_len=100)).plan(101), "<= max_model_len = 100"),
        (lambda: Planner(Linear(2), PipelineCost(StageModel(1, 0, 0)), Bounds(512)), "cost of a token is 0.0"),
        (lambda: Planner(FoldBack(2), PipelineCost(COST.model, shares=(0.5, 0.5)), Bounds(512)), "allowed: 4, one per"),
    ],
)
def test_impossible_values_name_field_value_and_range(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        make()
