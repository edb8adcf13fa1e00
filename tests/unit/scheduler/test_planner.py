import json
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prefill_runtime.scheduler.bound import prompt_bound
from prefill_runtime.scheduler.chunkers import Bounds, Chunker, Dynamic, Fixed, Queue
from prefill_runtime.scheduler.cost import Attention, PipelineCost, StagedModel, StageModel
from prefill_runtime.scheduler.errors import ParameterError
from prefill_runtime.scheduler.grid import Grid, Wanted
from prefill_runtime.scheduler.layout import FoldBack, Linear
from prefill_runtime.scheduler.planner import Auto, Plan, Planned, Planner
from prefill_runtime.scheduler.recurrence import OLDEST
from prefill_runtime.scheduler.search_process import MODULE, planner_of, setup_line
from prefill_runtime.scheduler.simulate import Request, simulate

from tests.unit.scheduler.pipelines import bounds, costs, layouts

COST = PipelineCost(StageModel(0.7, 2.42 / 32_768, 3.64 / 32_768**2))
PLANNER = Planner(FoldBack(2), COST, Bounds(32_768))
PLANNER_LINEAR = Planner(Linear(2), COST, Bounds(32_768))


class CountingPlanner(Planner):
    """Knows what it was asked."""

    asked: list[Wanted]

    def plan(self, tokens: int, history: int = 0, weight: float = 0.0) -> Plan:
        self.asked = [*getattr(self, "asked", []), Wanted(tokens, history, weight)]
        return super().plan(tokens, history, weight)


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


def test_a_plan_has_to_gain_more_than_the_cost_is_off_by() -> None:
    sure = Planner(Linear(2), COST, Bounds(32_768))
    plan = sure.plan(131_072)
    gain = plan.fixed[1] / plan.seconds - 1
    assert gain > 0.02
    for doubt, policy in ((gain - 0.005, plan.policy), (gain + 0.005, f"Fixed {plan.fixed[0]}")):
        planner = Planner(Linear(2), COST, Bounds(32_768), doubt=doubt)
        assert planner.plan(131_072).policy == policy
        assert planner_of(setup_line(planner)).plan(131_072).policy == policy
    assert len(set(Planner(Linear(2), COST, Bounds(32_768), doubt=0.5).seed(131_072)[:-1])) == 1


@pytest.mark.parametrize("layout", [Linear(2), FoldBack(2), FoldBack(4)], ids=str)
def test_sliding_windows_are_planned_for(layout: Linear | FoldBack) -> None:
    """A token's cost stops growing at the window, so equal work is not where a model without windows puts it."""
    terms, limits = (0.7, 2.42 / 32_768, 3.64 / 32_768**2), Bounds(32_768, quantum=128)
    planner = Planner(layout, PipelineCost(StageModel(*terms, attention=Attention(16_384, 0.1))), limits)
    plan = planner.plan(131_072)
    blind = Planner(layout, PipelineCost(StageModel(*terms)), limits).plan(131_072)
    assert plan.seconds < 0.99 * planner.predict(list(blind.chunks))[0]
    assert plan.seconds < 0.97 * plan.fixed[1]
    assert plan.seconds >= plan.bound


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
    planner = Planner(FoldBack(2), COST, limits, orders=(OLDEST,))

    def mean(chunker: Chunker) -> float:
        return sum(simulate(FoldBack(2), COST, queue, chunker).ttft) / len(queue)

    others = [Dynamic(limits, COST.model), Planned(limits, planner)]
    others += [Fixed(limits, size * 1024) for size in (4, 8, 12, 16, 24, 32)]  # type: ignore[misc]
    assert mean(Auto(limits, planner)) < min(map(mean, others))


def test_the_scheduling_path_gets_a_seed_at_once_and_the_plan_later() -> None:
    asked: list[Wanted] = []
    planned = Planned(Bounds(32_768), PLANNER, later=asked.append)
    seed = planned.cut(131_072)
    assert seed == PLANNER.seed(131_072)
    assert planned.cut(131_072) == seed
    assert asked == [Wanted(131_072)]  # asked once, not once a request
    planned.learn(asked[0], PLANNER.plan(131_072).chunks)
    assert planned.cut(131_072) == list(PLANNER.plan(131_072).chunks) != seed
    assert len(asked) == 1


def test_a_search_without_an_answer_is_asked_for_again() -> None:
    asked: list[Wanted] = []
    planned = Planned(Bounds(32_768), PLANNER, later=asked.append)
    planned.cut(131_072, 1000)
    planned.forget(Wanted(131_072, 1000))
    planned.cut(131_072, 1000)
    assert asked == [Wanted(131_072, 1000)] * 2


def test_as_many_plans_are_kept_as_allowed_and_those_in_use_stay() -> None:
    planned = Planned(Bounds(32_768), PLANNER, later=lambda wanted: None, remembered=3)
    plan = [30_016, 30_016, 5504]
    planned.learn(Wanted(65_536), plan)
    for tokens in range(70_000, 80_000, 1000):
        planned.learn(Wanted(tokens), [tokens])
        assert planned.cut(65_536) == plan
    assert len(planned._known) == 3


def test_lengths_close_to_one_another_share_a_plan_scaled_to_each() -> None:
    planner = CountingPlanner(Linear(2), COST, Bounds(32_768))
    planned = Planned(Bounds(32_768), planner, ratio=1.05)
    first, second = planned.cut(131_000), planned.cut(129_000)
    assert planner.asked == [Grid(Bounds(32_768)).nearest(Wanted(131_000))]
    assert (sum(first), sum(second), len(first)) == (131_000, 129_000, len(second))
    for chunks, total in ((first, 131_000), (second, 129_000)):
        assert planner.predict(chunks)[0] <= PLANNER_LINEAR.plan(total).seconds * 1.005


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_scaled_plan_is_legal_and_no_worse_than_fixed(data: st.DataObject) -> None:
    layout = data.draw(layouts)
    cost, limits = data.draw(costs(layout)), data.draw(bounds)
    planner = Planner(layout, cost, limits)
    tokens = data.draw(st.integers(2, 12 * limits.max_tokens))
    wanted = Wanted(
        tokens, data.draw(st.sampled_from([0, tokens // 3, tokens - 1])), data.draw(st.sampled_from([0, 2.0]))
    )
    shared = Grid(limits).nearest(wanted)
    chunks = planner.scaled(planner.plan(*shared).chunks, wanted)
    assert sum(chunks) == wanted.tokens - wanted.history
    assert all(c % limits.quantum == 0 and limits.lowest <= c for c in chunks[:-1])
    assert all(0 < c <= limits.max_tokens for c in chunks)
    problem = planner.problem(*wanted)
    fixed = [f.cut(wanted.tokens, wanted.history) for f in planner._sweep(problem.rest)]
    least = min(problem.price(c)[0] for c in fixed if len(c) * layout.stages <= 300)
    assert problem.price(chunks)[0] <= least * (1 + 1e-9)


def test_a_plan_of_equal_chunks_keeps_their_size_for_a_neighbour() -> None:
    limits = Bounds(512, 8, quantum=64)
    planner = Planner(Linear(7), PipelineCost(StageModel(0.0, 0.001, 0.0, 0.0)), limits)
    assert planner.scaled([64] * 49 + [36], Wanted(3205, 0, 2.0)) == [64] * 50 + [5]  # not 48 of 64 and one of 128


@pytest.mark.parametrize("history", [0, 1, 5000])
def test_every_prompt_is_within_the_ratio_of_its_plan(history: int) -> None:
    grid = Grid(Bounds(4096, 512, max_model_len=100_000, quantum=128))
    for rest in (*range(1, 3000, 7), *range(3000, 100_000 - history, 501), 100_000 - history):
        shared = grid.nearest(Wanted(rest + history, history, 2.0))
        assert shared.weight == 2.0
        assert shared.tokens <= 100_000
        if rest > 100:  # below, tokens are coarser than the grid
            assert 1 / 1.03 < (shared.tokens - shared.history) / rest < 1.03
        assert grid.nearest(shared) == shared


def test_plans_ahead_come_coarse_to_fine_and_cover_the_range() -> None:
    limits = Bounds(4096, 512, max_model_len=131_072, quantum=128)
    ahead = Grid(limits).ahead()
    assert ahead[0] == Grid(limits).nearest(Wanted(131_072))
    lengths = sorted(w.tokens for w in ahead)
    assert len(lengths) == len(set(lengths)) < 110
    assert 900 < lengths[0] < 1100
    assert all(b / a < 1.06 for a, b in pairwise(lengths))
    coarse = sorted(w.tokens for w in ahead[:7])
    assert coarse[-1] == ahead[0].tokens
    assert coarse[0] < 2048
    assert all(w.history == 0 == w.weight for w in ahead)


def test_the_seed_is_never_worse_than_a_fixed_size() -> None:
    limits = Bounds(1024, 128, quantum=128)
    planner = Planner(Linear(4), PipelineCost(StageModel(0.012, 8e-5, 8e-9)), limits)
    for tokens in (1024, 4096, 16_384):
        best = min(planner.predict(f.cut(tokens))[0] for f in planner._sweep(tokens))
        assert planner.predict(planner.seed(tokens))[0] <= best


def test_the_search_process_answers_as_the_planner_does() -> None:
    cost = PipelineCost(StagedModel((StageModel(0.1, 1e-5, 1e-9), StageModel(0.2, 1e-5, 1e-9))), 0.001)
    planner = Planner(Linear(2), cost, Bounds(4096, 256, max_model_len=50_000, quantum=128))
    lines = [setup_line(planner), "[20000, 0, 0.0]", "[30000, 128, 4.0]", "[60000, 0, 0.0]"]
    done = subprocess.run(
        [sys.executable, "-m", MODULE], input="\n".join(lines), capture_output=True, text=True, timeout=60, check=True
    )
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert answers[:2] == [{"chunks": list(planner.plan(*w).chunks)} for w in ((20_000,), (30_000, 128, 4.0))]
    assert "allowed: <= max_model_len = 50000" in answers[2]["error"]


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
