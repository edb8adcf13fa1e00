import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prefill_runtime.scheduler.chunkers import Bounds, Dynamic, Queue, TokenThrottle
from prefill_runtime.scheduler.cost import HistoryModel, PipelineCost, QuadraticModel, StageModel
from prefill_runtime.scheduler.cutters import Seq1F1B, TeraPipe
from prefill_runtime.scheduler.errors import ParameterError

COST = PipelineCost(StageModel(0.2, 1e-4, 1e-8))


def terapipe_value(cost: PipelineCost, ranks: int, chunks: list[int], history: int = 0) -> float:
    times = []
    for chunk in chunks:
        times.append(cost.model.pass_seconds(float(chunk), float(history)) / ranks + cost.pass_overhead_s)
        history += chunk
    return sum(times) + (ranks - 1) * max(times)


@settings(max_examples=60, deadline=None)
@given(
    units=st.integers(1, 11),
    odd=st.integers(0, 63),
    ranks=st.integers(1, 6),
    k0=st.floats(0, 0.1),
    k1=st.floats(1e-5, 1e-3),
    k2=st.floats(0, 1e-5),
    most=st.integers(2, 12),
    least=st.sampled_from([1, 2]),
)
def test_terapipe_equals_brute_force(
    units: int, odd: int, ranks: int, k0: float, k1: float, k2: float, most: int, least: int
) -> None:
    cost = PipelineCost(StageModel(k0, k1, k2))
    prompt = units * 64 + odd
    bounds = Bounds(64 * most, 64 * least)
    ours = TeraPipe(bounds, cost, ranks, unit=64).plan_chunks(prompt, 0)
    assert sum(ours) == prompt
    best = min(
        terapipe_value(cost, ranks, sizes)
        for count in range(units + 1)
        for cuts in itertools.combinations(range(1, -(-prompt // 64)), count)
        if (sizes := [int(x) for x in np.diff([0, *[c * 64 for c in cuts], prompt])])
        and max(sizes) <= bounds.max_tokens
        and all(size >= bounds.lowest for size in sizes[:-1])
    )
    assert terapipe_value(cost, ranks, ours) == pytest.approx(best, rel=1e-9)


def test_terapipe_refuses_a_unit_that_breaks_alignment() -> None:
    with pytest.raises(ParameterError, match="unit is 100, allowed: a multiple of 64 up to 1024"):
        TeraPipe(Bounds(1024), COST, 2, unit=100)


def test_seq1f1b_cuts_equal_work_from_the_end() -> None:
    model = StageModel(0.0, 1e-4, 1e-8)
    chunks = Seq1F1B(Bounds(65_536), model, 4).cut(100_000)
    work, history = [], 0
    for chunk in chunks:
        work.append(model.pass_seconds(float(chunk), float(history)))
        history += chunk
    assert len(chunks) == 4
    assert work == pytest.approx([sum(work) / 4] * 4, rel=0.01)
    assert all(c % 64 == 0 for c in chunks[:-1])


def test_seq1f1b_takes_more_segments_where_one_would_pass_the_budget() -> None:
    chunks = Seq1F1B(Bounds(4096), StageModel(0.0, 1e-4, 1e-8), 2).cut(20_000)
    assert max(chunks) <= 4096
    assert len(chunks) > 5


def test_a_plan_survives_a_chunk_that_came_out_smaller() -> None:
    cutter = Seq1F1B(Bounds(65_536), StageModel(0.0, 1e-4, 1e-8), 4)
    planned = cutter.cut(100_000)
    first = cutter.next_chunk(0, 100_000, "r")
    assert first == planned[0]
    assert cutter.next_chunk(first - 640, 100_000 - first + 640, "r") == 640  # goes on to the cut that was missed
    assert cutter.next_chunk(first, 100_000 - first, "r") == planned[1]


def test_token_throttle_is_the_published_formula() -> None:
    bounds = Bounds(2048, 128)
    throttle = TokenThrottle(bounds, rounds=8, kv_threshold=0.2)
    throttle.observe(Queue(waiting_tokens=8192, kv_free=1.0))
    assert throttle.propose(0, 4096) == pytest.approx(1024)
    throttle.observe(Queue(waiting_tokens=80_000, kv_free=0.6))
    assert throttle.propose(0, 4096) == pytest.approx(2048 * 0.4 / 0.8)
    throttle.observe(Queue(waiting_tokens=80_000, kv_free=0.1))
    assert throttle.propose(0, 4096) == 128
    assert TokenThrottle.decodes_per_pass(10, 4) == 3


def test_dynamic_with_a_history_model_solves_for_the_chunk() -> None:
    model = HistoryModel(1e-8, 1e-6, 0.05)
    chunker = Dynamic(Bounds(8192), model)
    target = model.pass_seconds(8192.0, 0.0) - model.pass_seconds(0.0, 0.0)
    size = chunker.predict(50_000)
    assert model.pass_seconds(size, 50_000.0) - 0.05 == pytest.approx(target)
    assert chunker.predict(10_000_000) == 0  # history alone takes longer: the minimum is used, nothing hangs
    assert chunker.next_chunk(10_000_000, 5000) == 64


def test_overhead_in_the_target_makes_chunks_larger() -> None:
    model = QuadraticModel(1e-9, 1e-5, 0.05)
    plain, aware = (Dynamic(Bounds(8192), model, overhead=o) for o in (False, True))
    assert aware.predict(100_000) == pytest.approx(model.chunk_for(plain.target + 0.05, 100_000))
    assert aware.predict(100_000) > plain.predict(100_000)


def test_a_tail_stays_if_its_work_is_more_than_a_pass_costs_anyway() -> None:
    bounds = Bounds(8192, 4096)
    cheap, dear = (Dynamic(bounds, StageModel(k0, 1e-4, 0), 4096) for k0 in (0.01, 1.0))
    assert cheap.cut(4096 * 2 + 1000) == [4096, 4096, 1000]
    assert dear.cut(4096 * 2 + 1000) == [4096, 5096]
