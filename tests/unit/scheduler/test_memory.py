import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prefill_runtime.scheduler.errors import ParameterError
from prefill_runtime.scheduler.layout import FoldBack, Linear
from prefill_runtime.scheduler.memory import ModelShape, best_split, check_fits, rank_memory, stage_shares

GIB = 2**30
DEEPSEEK = ModelShape(
    layers=61,
    layer_bytes=1.4 * GIB,
    kv_bytes=1152,
    activation_bytes=14_336,
    embedding_bytes=0.23 * GIB,
    head_bytes=0.23 * GIB,
)


def test_memory_follows_layers_embedding_and_head() -> None:
    shape = ModelShape(layers=8, layer_bytes=100, kv_bytes=2, activation_bytes=1, embedding_bytes=30, head_bytes=40)
    linear = rank_memory(Linear(2), shape, (3, 5), kv_tokens=10, max_chunk=4)
    assert [(m.weights, m.kv, m.activations) for m in linear] == [(330, 60, 16), (540, 100, 8)]
    fold = rank_memory(FoldBack(2), shape, (1, 2, 3, 2), kv_tokens=10, max_chunk=4)
    assert [(m.weights, m.kv, m.activations) for m in fold] == [(370, 60, 24), (500, 100, 24)]


def test_odd_layers_go_where_the_outer_rank_has_less_to_do() -> None:
    shape = ModelShape(layers=61, layer_bytes=1, kv_bytes=0, embedding_cost=0.2, head_cost=1.5)
    split = best_split(FoldBack(2), shape)
    assert sum(split) == 61
    outer, inner = split[0] + split[3], split[1] + split[2]
    assert inner - outer == 1
    assert split[0] > split[3]  # the head and sampler make the tail pass longer
    shares = stage_shares(FoldBack(2), shape, split)
    assert sum(shares) == pytest.approx(1)
    assert shares[3] == pytest.approx((split[3] + 1.5) / 62.7)


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 4), st.integers(4, 12), st.floats(0, 3), st.floats(0, 3))
def test_the_split_is_optimal_for_the_slowest_rank(ranks: int, layers: int, embedding: float, head: float) -> None:
    shape = ModelShape(layers=layers, layer_bytes=1, kv_bytes=0, embedding_cost=embedding, head_cost=head)

    def slowest(split: tuple[int, ...]) -> float:
        return max(n + embedding * (r == 0) + head * (r == ranks - 1) for r, n in enumerate(split))

    best = min(slowest(s) for s in itertools.product(range(1, layers + 1), repeat=ranks) if sum(s) == layers)
    assert slowest(best_split(Linear(ranks), shape)) == pytest.approx(best)


def test_memory_moves_layers_off_a_full_rank_and_refuses_what_does_not_fit() -> None:
    even = best_split(FoldBack(2), DEEPSEEK)
    assert abs((even[0] + even[3]) - (even[1] + even[2])) <= 1
    tight = best_split(FoldBack(2), DEEPSEEK, available=54 * GIB, kv_tokens=131_072, max_chunk=32_768)
    memory = rank_memory(FoldBack(2), DEEPSEEK, tight, 131_072, 32_768)
    check_fits(memory, 54 * GIB)
    with pytest.raises(ParameterError, match=r"layers is 61, allowed: <= \d+, what fits into 40.0 GiB"):
        best_split(FoldBack(2), DEEPSEEK, available=40 * GIB, kv_tokens=131_072, max_chunk=32_768)
    with pytest.raises(ParameterError, match=r"memory of rank 0 is .* allowed: <= 30.0 GiB; fewer KV tokens"):
        check_fits(memory, 30 * GIB)


@pytest.mark.parametrize("split", [(30, 30), (61, 0), (30, 30, 1)])
def test_a_split_must_have_every_layer_once(split: tuple[int, ...]) -> None:
    with pytest.raises(ParameterError, match="split"):
        rank_memory(Linear(2), DEEPSEEK, split, 1, 1)


def test_fewer_layers_than_stages_is_refused() -> None:
    with pytest.raises(ParameterError, match="layers is 3, allowed: >= 4"):
        best_split(FoldBack(2), ModelShape(layers=3, layer_bytes=1, kv_bytes=1))
