import itertools

import pytest
from prefill_runtime.scheduler.actions import from_timeline, validate
from prefill_runtime.scheduler.cost import PipelineCost, StageModel
from prefill_runtime.scheduler.errors import ParameterError
from prefill_runtime.scheduler.layout import FoldBack, Linear
from prefill_runtime.scheduler.order import RankOrder, distance, static_order
from prefill_runtime.scheduler.simulate import Request, simulate

COST = PipelineCost(StageModel(0.01, 1e-4, 1e-8))


@pytest.mark.parametrize(("ranks", "lag"), list(itertools.product((2, 3, 4, 8, 16), (0, 1))))
def test_the_order_runs_and_keeps_its_bound(ranks: int, lag: int) -> None:
    """In the simulator, which refuses what blocks, and as actions with their transfers."""
    layout, chunks = FoldBack(ranks), 4 * ranks
    request = Request(chunks * 64, chunks=(64,) * chunks)
    timeline = simulate(layout, COST, [request], order=static_order(layout, chunks, lag))
    validate(layout, from_timeline(timeline), [chunks], inflight=ranks + lag)


def test_distances_never_grow_with_the_rank() -> None:
    for ranks, lag in itertools.product((2, 5, 8), (0, 1)):
        distances = [distance(ranks, rank, lag) for rank in range(ranks)]
        assert distances == sorted(distances, reverse=True)
        assert (distances[0], distances[-1]) == (ranks - 1 + lag, 0)


def test_a_tail_follows_its_head_and_a_flush_ends_the_rest() -> None:
    order = RankOrder(3, 0, lag=1)
    assert [list(order.head(k)) for k in range(5)] == [[], [], [], [0], [1]]
    assert list(order.flush(2)) == [2]
    assert list(order.head(5)) == []
    assert list(order.flush(9)) == [3, 4, 5]
    assert list(order.flush(9)) == []


def test_the_innermost_rank_does_both_at_once() -> None:
    order = RankOrder(2, 1, lag=1)
    assert [list(order.head(k)) for k in (7, 9)] == [[7], [9]]


def test_one_stage_per_rank_has_chunks_in_order() -> None:
    assert static_order(Linear(2), 2) == [[(0, 0, 0), (0, 1, 0)], [(0, 0, 1), (0, 1, 1)]]


def test_what_no_rank_has_is_refused() -> None:
    with pytest.raises(ParameterError, match="rank is 2, allowed: 0 to 1"):
        RankOrder(2, 2, 0)
    with pytest.raises(ParameterError, match="lag is -1"):
        RankOrder(2, 0, -1)
