"""Closed forms and published-like totals that the simulator must reproduce, within 0.5%."""

import itertools
import math

import pytest
from prefill_runtime.scheduler.chunkers import Bounds, Dynamic, Fixed
from prefill_runtime.scheduler.cost import PipelineCost, StageModel
from prefill_runtime.scheduler.layout import FoldBack, Layout, Linear
from prefill_runtime.scheduler.order import static_order
from prefill_runtime.scheduler.planner import Planner
from prefill_runtime.scheduler.recurrence import OLDEST
from prefill_runtime.scheduler.simulate import Request, Rules, simulate

K = 1024
U = 32 * K


def deepseek(overhead: float) -> PipelineCost:
    return PipelineCost(StageModel(overhead, 2.42 / U, 3.64 / U**2))


def growing(chunks: int) -> tuple[PipelineCost, Request]:
    """tau_k = (k + 1) t: pure attention, cut where the square root of the work grows evenly."""
    scale = 10_000
    ends = [round(scale * math.sqrt(k * (k + 1))) for k in range(chunks + 1)]
    cut = tuple(b - a for a, b in itertools.pairwise(ends))
    return PipelineCost(StageModel(0, 0, 1e-6)), Request(ends[-1], chunks=cut)


@pytest.mark.parametrize("n", [4, 8, 16, 32])
def test_closed_forms_of_growing_chunks(n: int) -> None:
    cost, request = growing(n)
    linear = simulate(Linear(2), cost, [request])
    fold = simulate(FoldBack(2), cost, [request])
    assert linear.bubble_ratio == pytest.approx(2 / (n + 3), rel=1e-3)
    assert fold.bubble_ratio == pytest.approx(1 / (n + 1), rel=1e-3)
    assert linear.makespan / fold.makespan == pytest.approx(n * (n + 3) / (n + 1) ** 2, rel=1e-3)


@pytest.mark.parametrize(
    ("layout", "prompt", "overhead", "size", "seconds"),
    [
        (Linear(2), 128, 0.0, 32, 26.98),
        (Linear(2), 128, 0.0, 24, 24.91),
        (Linear(2), 128, 0.0, 16, 23.42),
        (Linear(2), 128, 0.0, 8, 21.47),
        (FoldBack(2), 128, 0.0, 32, 24.25),
        (FoldBack(2), 128, 0.0, 24, 21.83),
        (FoldBack(2), 128, 0.0, 16, 21.82),
        (FoldBack(2), 128, 0.0, 8, 20.61),
        (Linear(2), 512, 0.0, 32, 281.74),
        (Linear(2), 512, 0.0, 24, 274.21),
        (FoldBack(2), 512, 0.0, 32, 268.09),
        (FoldBack(2), 512, 0.0, 24, 260.21),
        (Linear(2), 512, 0.7, 32, 287.69),
        (Linear(2), 512, 0.7, 24, 282.26),
        (Linear(2), 512, 0.7, 16, 278.81),
        (Linear(2), 512, 0.7, 12, 278.80),
        (Linear(2), 512, 0.7, 8, 282.6),
        (FoldBack(2), 512, 0.7, 32, 274.04),
        (FoldBack(2), 512, 0.7, 24, 268.09),
    ],
)
def test_fixed_chunks(layout: Layout, prompt: int, overhead: float, size: int, seconds: float) -> None:
    line = simulate(layout, deepseek(overhead), [Request(prompt * K)], Fixed(Bounds(size * K)))
    assert line.ttft[0] == pytest.approx(seconds, rel=0.005)


@pytest.mark.parametrize(
    ("layout", "size", "bubble"), [(Linear(2), 32, 0.104), (FoldBack(2), 32, 0.059), (FoldBack(2), 24, 0.030)]
)
def test_bubbles_at_512k(layout: Layout, size: int, bubble: float) -> None:
    line = simulate(layout, deepseek(0), [Request(512 * K)], Fixed(Bounds(size * K)))
    assert line.bubble_ratio == pytest.approx(bubble, abs=0.001)


@pytest.mark.parametrize(
    ("prompt", "overhead", "chunks", "seconds"),
    [(128, 0.0, 10, 21.52), (512, 0.0, 97, 256.1), (512, 0.7, 96, 290.4), (128, 0.7, 10, 25.37)],
)
def test_dynamic_chunks(prompt: int, overhead: float, chunks: int, seconds: float) -> None:
    cost = deepseek(overhead)
    line = simulate(Linear(2), cost, [Request(prompt * K)], Dynamic(Bounds(32 * K, 4096), cost.model))
    assert len(line.chunks[0]) == chunks
    assert line.ttft[0] == pytest.approx(seconds, rel=0.005)


def test_dynamic_loses_at_512k_only_because_of_the_overhead() -> None:
    def against_best_fixed(prompt: int, overhead: float) -> float:
        cost = deepseek(overhead)
        sizes = (8, 12, 16, 24, 32)
        fixed = [simulate(Linear(2), cost, [Request(prompt)], Fixed(Bounds(s * K))).makespan for s in sizes]
        dynamic = simulate(Linear(2), cost, [Request(prompt)], Dynamic(Bounds(32 * K, 4096), cost.model)).makespan
        return dynamic / min(fixed) - 1

    assert against_best_fixed(512 * K, 0.7) == pytest.approx(0.042, abs=0.003)
    assert against_best_fixed(128 * K, 0.7) == pytest.approx(-0.043, abs=0.003)
    assert against_best_fixed(512 * K, 0.0) < 0


# prompt, ranks, planned on Linear and on FoldBack, best fixed on Linear
TARGETS = [
    (128, 2, 25.2, 23.06, 26.5),
    (128, 4, 15.2, 13.53, 16.1),
    (128, 8, 9.3, 8.08, 10.1),
    (512, 2, 273.1, 259.6, 278.8),
    (512, 4, 145.3, 136.8, 149.2),
    (512, 8, 78.1, 72.9, 81.5),
]


@pytest.mark.parametrize(("prompt", "ranks", "linear", "fold", "fixed"), TARGETS)
def test_plans_are_at_least_as_good_as_the_targets(
    prompt: int, ranks: int, linear: float, fold: float, fixed: float
) -> None:
    for layout, target in ((Linear(ranks), linear), (FoldBack(ranks), fold)):
        plan = Planner(layout, deepseek(0.7), Bounds(64 * K)).plan(prompt * K)
        assert plan.seconds <= target
        order = static_order(layout, len(plan.chunks), plan.lag)
        request = Request(prompt * K, chunks=plan.chunks)
        run = simulate(layout, deepseek(0.7), [request], order=order)
        assert run.makespan == pytest.approx(plan.seconds, rel=1e-6)
        if isinstance(layout, Linear):
            assert plan.fixed[1] == pytest.approx(fixed, rel=0.005)


def test_a_plan_on_foldback_reaches_the_bound_without_overhead_and_beats_everything_with_it() -> None:
    bare = Planner(FoldBack(2), deepseek(0), Bounds(64 * K)).plan(512 * K)
    assert bare.gap < 0.015
    assert bare.seconds == pytest.approx(252.3, rel=0.005)
    cost = deepseek(0.7)
    ours = Planner(FoldBack(2), cost, Bounds(64 * K)).plan(512 * K)
    for layout in (Linear(2), FoldBack(2)):
        others = [Dynamic(Bounds(32 * K, 4096), cost.model)]
        others += [Fixed(Bounds(size * K)) for size in (8, 12, 16, 24, 32, 64)]  # type: ignore[misc]
        for chunker in others:
            assert ours.seconds < simulate(layout, cost, [Request(512 * K)], chunker).makespan


def test_the_plan_also_holds_when_ranks_dispatch_oldest_first() -> None:
    plan = Planner(FoldBack(2), deepseek(0.7), Bounds(64 * K), orders=(OLDEST,)).plan(512 * K)
    run = simulate(FoldBack(2), deepseek(0.7), [Request(512 * K, chunks=plan.chunks)], rules=Rules(order="oldest"))
    assert run.makespan == pytest.approx(plan.seconds, rel=1e-6)
    assert run.makespan <= 259.6 * 1.005


def test_one_broadcast_order_for_all_ranks_is_not_what_static_order_gives() -> None:
    """Every rank behind by as many chunks as the outermost would nearly double the time at P = 4."""
    assert [o[:5] for o in static_order(FoldBack(4), 16, lag=1)] == [
        [(0, 0, 0), (0, 1, 0), (0, 2, 0), (0, 3, 0), (0, 4, 0)],
        [(0, 0, 1), (0, 1, 1), (0, 2, 1), (0, 3, 1), (0, 0, 6)],
        [(0, 0, 2), (0, 1, 2), (0, 2, 2), (0, 0, 5), (0, 3, 2)],
        [(0, 0, 3), (0, 0, 4), (0, 1, 3), (0, 1, 4), (0, 2, 3)],
    ]
