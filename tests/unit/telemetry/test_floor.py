"""The floor of the bubble ratio, against the simulator: nothing that can run has less bubble."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prefill_runtime.scheduler.chunkers import Bounds, Fixed
from prefill_runtime.scheduler.cost import NO_WINDOW, PipelineCost, StagedModel, StageModel
from prefill_runtime.scheduler.layout import FoldBack, Linear
from prefill_runtime.scheduler.order import static_order
from prefill_runtime.scheduler.planner import Planner
from prefill_runtime.scheduler.simulate import Request, simulate
from prefill_runtime.telemetry.account import WINDOW_SECONDS
from prefill_runtime.telemetry.events import Chunk, Idle, Issue, Stamp
from prefill_runtime.telemetry.floor import FloorMeter, Work, bubble_floor
from prefill_runtime.telemetry.hub import Hub

from tests.documents import calibration

DEVICE = StageModel(0.7, 2.42 / 32768, 3.64 / 32768**2)
"""A large model on accelerators, all layers, with what a pass costs beside its tokens."""


def even(ranks: int, whole: StageModel = DEVICE) -> tuple[StageModel, ...]:
    terms = (whole.k0, whole.k1, whole.k2, whole.k3)
    return (StageModel(*(term / ranks for term in terms)),) * ranks


def of_cuts(cuts: Sequence[Sequence[int]]) -> Work:
    work = Work()
    for number, cut in enumerate(cuts):
        for k, tokens in enumerate(cut):
            work.add([Chunk(f"r{number}", sum(cut[:k]), tokens, sum(cut))], NO_WINDOW)
    return work


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize(("tokens", "passes"), [(100, 1), (512, 1), (513, 2), (51_200, 100)])
def test_a_lone_prompt_on_even_stages_has_the_textbook_floor(ranks: int, tokens: int, passes: int) -> None:
    """(P - 1) / (n + P - 1): n chunks of equal time, n as large as the smallest chunk allows."""
    floor = bubble_floor(Linear(ranks), even(ranks), of_cuts([Fixed(Bounds(8192, 512)).cut(tokens)]), 512)
    assert floor == pytest.approx((ranks - 1) / (passes + ranks - 1), abs=2e-4)


def test_equal_chunks_of_equal_time_reach_it() -> None:
    stages = even(4, StageModel(0.0, 1e-4, 0.0))
    cut = Fixed(Bounds(512, 512)).cut(64 * 512)
    run = simulate(Linear(4), PipelineCost(StagedModel(stages)), [Request(sum(cut), chunks=tuple(cut))])
    assert run.bubble_ratio == pytest.approx(bubble_floor(Linear(len(stages)), stages, of_cuts([cut]), 512), abs=1e-4)


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("tokens", [3000, 32_768, 131_072, 262_144])
def test_the_best_plan_stays_above_it(ranks: int, tokens: int) -> None:
    stages, layout, bounds = even(ranks), Linear(ranks), Bounds(32_768, 2048)
    cost = PipelineCost(StagedModel(stages))
    cut = Planner(layout, cost, bounds).plan(tokens).chunks
    measured = simulate(layout, cost, [Request(tokens, chunks=tuple(cut))]).bubble_ratio
    floor = bubble_floor(Linear(len(stages)), stages, of_cuts([cut]), 2048)
    assert 0 < floor <= measured + 1e-9


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("tokens", [3000, 32_768, 131_072])
def test_the_best_plan_of_a_folded_pipeline_stays_above_it(ranks: int, tokens: int) -> None:
    stages, layout, bounds = even(2 * ranks), FoldBack(ranks), Bounds(32_768, 2048)
    cost = PipelineCost(StagedModel(stages))
    plan = Planner(layout, cost, bounds).plan(tokens)
    order = static_order(layout, len(plan.chunks), plan.lag)
    measured = simulate(layout, cost, [Request(tokens, chunks=plan.chunks)], order=order).bubble_ratio
    floor = bubble_floor(layout, stages, of_cuts([plan.chunks]), 2048)
    assert 0 < floor <= measured + 1e-9


COEFFICIENTS = st.tuples(st.floats(0, 0.1), st.floats(1e-6, 1e-4), st.floats(0, 1e-8))


@given(
    st.lists(COEFFICIENTS, min_size=1, max_size=5),
    st.lists(st.integers(1, 60_000), min_size=1, max_size=5),
    st.integers(1, 128),
)
@settings(max_examples=150, deadline=None)
def test_no_run_on_any_stages_is_below_it(
    terms: list[tuple[float, float, float]], prompts: list[int], quanta: int
) -> None:
    stages = tuple(StageModel(*three) for three in terms)
    chunker = Fixed(Bounds(64 * quanta, min(512, 64 * quanta)))
    cuts = [chunker.cut(tokens) for tokens in prompts]
    requests = [Request(sum(cut), chunks=tuple(cut)) for cut in cuts]
    run = simulate(Linear(len(stages)), PipelineCost(StagedModel(stages)), requests)
    work = of_cuts(cuts)
    assert 0 <= bubble_floor(Linear(len(stages)), stages, work, 512) <= run.bubble_ratio + 1e-3
    assert (
        bubble_floor(Linear(len(stages)), stages, work, 512, whole=False)
        <= bubble_floor(Linear(len(stages)), stages, work, 512) + 1e-9
    )


def issue(at: float, tokens: int = 4096, history: int = 0, total: int = 4096, period: int = 1) -> Issue:
    return Issue(stamp=Stamp(batch=1, period=period, chunks=(Chunk("r", history, tokens, total),)), at=at)


def test_a_backlog_has_almost_none_and_uneven_stages_have_theirs() -> None:
    meter = FloorMeter(2, 512)
    meter.stages = even(2)
    for k in range(100):
        meter.issue(issue(float(k)))
        if k < WINDOW_SECONDS:
            assert meter.value is None
    assert meter.value == pytest.approx(0, abs=1e-9)
    meter.stages = (StageModel(0.0, 1e-4, 0.0), StageModel(0.0, 3e-4, 0.0))
    meter.idle(Idle(period=1, at=100.0))
    assert meter.value == pytest.approx(1 - 4 / (2 * 3))


def test_a_short_period_counts_as_a_whole_and_only_its_own_work() -> None:
    meter = FloorMeter(2, 4096)
    meter.stages = even(2)
    meter.issue(issue(0.0, period=1))
    meter.idle(Idle(period=1, at=1.0))
    assert meter.value == pytest.approx(1 / 2)
    for k in range(4):
        meter.issue(issue(2.0 + k, history=4096 * k, total=4 * 4096, period=2))
    meter.idle(Idle(period=1, at=5.5))  # late news of a period that is over
    assert meter.value == pytest.approx(1 / 2)
    meter.idle(Idle(period=2, at=6.0))
    assert meter.value == pytest.approx(1 / 5)


def test_no_calibration_of_these_stages_no_floor() -> None:
    hub = Hub(0, 2, True, least_chunk=4096)

    def exported() -> list[str]:
        return [line for line in hub.metrics_text().decode().splitlines() if line.startswith("prefill_bubble_ratio_f")]

    for period, document in enumerate((None, calibration(stages=3), calibration()), 1):
        assert exported() == []
        hub.set_calibration(document)
        hub.feed(issue(float(period), period=period))
        hub.feed(Idle(period=period, at=period + 0.5))
    assert exported() == ["prefill_bubble_ratio_floor 0.5"]
