import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prefill_runtime.scheduler.chunkers import Bounds, Dynamic, Fixed, chunk_quantum
from prefill_runtime.scheduler.cost import QuadraticModel
from prefill_runtime.scheduler.errors import ParameterError

COST = QuadraticModel(a=2e-10, b=3e-5, c=0.012)


@pytest.mark.parametrize(
    ("page", "tp", "expected"), [(16, 1, 64), (1, 8, 64), (128, 8, 128), (48, 1, 96), (16, 3, 96), (1, 128, 128)]
)
def test_quantum_is_a_multiple_of_lcm_and_at_least_64(page: int, tp: int, expected: int) -> None:
    assert chunk_quantum(page, tp) == expected


def test_fixed_cuts_equal_chunks_and_a_remainder() -> None:
    assert Fixed(Bounds(max_tokens=2048)).cut(5000) == [2048, 2048, 904]
    assert Fixed(Bounds(max_tokens=2048), 1000).cut(3000) == [960, 960, 960, 120]
    assert Fixed(Bounds(max_tokens=2048)).cut(5000, history=4000) == [1000]


def test_a_tail_stays_when_the_budget_has_no_room_for_it() -> None:
    assert Fixed(Bounds(max_tokens=4096, min_tokens=512)).cut(4096 + 192) == [4096, 192]


def test_a_tail_of_half_the_minimum_stays() -> None:
    assert Fixed(Bounds(max_tokens=4096, min_tokens=512), 2048).cut(2048 + 256) == [2048, 256]
    assert Fixed(Bounds(max_tokens=4096, min_tokens=512), 2048).cut(2048 + 255) == [2303]


def test_dynamic_is_the_root_aligned_down() -> None:
    chunker = Dynamic(Bounds(max_tokens=8192), COST)
    assert int(chunker.predict(262_144)) == 1916
    assert chunker.next_chunk(262_144, 100_000) == 1916 // 64 * 64
    assert chunker.next_chunk(0, 100_000) == 8192


def test_smoothing_goes_part_of_the_way_from_base() -> None:
    chunker = Dynamic(Bounds(max_tokens=8192), COST, smoothing=0.5)
    assert chunker.propose(262_144, 1) == pytest.approx(8192 + 0.5 * (1916.6 - 8192), abs=0.5)


def test_dynamic_never_goes_below_the_minimum() -> None:
    assert Dynamic(Bounds(max_tokens=8192, min_tokens=4096), COST).next_chunk(1 << 20, 1 << 20) == 4096


def test_without_attention_dynamic_is_fixed() -> None:
    bounds = Bounds(max_tokens=1024)
    assert Dynamic(bounds, QuadraticModel(0.0, 1e-4)).cut(10_000) == Fixed(bounds).cut(10_000)


def test_dynamic_sizes_never_grow_along_a_prompt() -> None:
    chunks = Dynamic(Bounds(max_tokens=8192), COST).cut(262_144)[:-1]
    assert chunks == sorted(chunks, reverse=True)
    assert chunks[-1] < 2048


@settings(deadline=None)
@given(
    a=st.one_of(st.just(0.0), st.floats(1e-14, 1e-4)),
    b=st.floats(1e-7, 1e-2),
    smoothing=st.floats(0.01, 1),
    base=st.integers(1, 16_384),
    quantum=st.sampled_from([64, 96, 128, 256]),
    largest=st.integers(256, 16_384),
    smallest=st.integers(1, 16_384),
    prompt=st.integers(1, 200_000),
    cached=st.floats(0, 0.99),
)
def test_chunks_sum_to_the_prompt_and_keep_every_bound(
    a: float,
    b: float,
    smoothing: float,
    base: int,
    quantum: int,
    largest: int,
    smallest: int,
    prompt: int,
    cached: float,
) -> None:
    bounds = Bounds(max_tokens=largest, min_tokens=min(smallest, largest), max_model_len=200_000, quantum=quantum)
    history = int(prompt * cached)
    for chunker in (
        Fixed(bounds, max(quantum, min(base, largest))),
        Dynamic(bounds, QuadraticModel(a, b), min(base, largest), smoothing),
    ):
        chunks = chunker.cut(prompt, history)
        assert sum(chunks) == prompt - history
        assert all(c % quantum == 0 and bounds.lowest <= c for c in chunks[:-1])
        assert all(0 < c <= largest for c in chunks)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Bounds(max_tokens=32), "max_tokens is 32, allowed: >= 64"),
        (lambda: Bounds(max_tokens=512, min_tokens=1024), "min_tokens is 1024, allowed: 1 to max_tokens = 512"),
        (lambda: Fixed(Bounds(512), 513), "tokens is 513, allowed: 64 to max_tokens = 512"),
        (lambda: Dynamic(Bounds(512), COST, smoothing=0.0), "smoothing is 0.0, allowed: 0 < smoothing <= 1"),
        (lambda: Dynamic(Bounds(512), COST, base=513), "base is 513"),
        (lambda: Dynamic(Bounds(512), QuadraticModel(0.0, 0.0, 1.0)), r"f\(base\) - f\(0\) is 0.0, allowed: > 0"),
        (lambda: Fixed(Bounds(512, max_model_len=1000)).cut(1001), "is 1001, allowed: <= max_model_len = 1000"),
        (lambda: Fixed(Bounds(512)).cut(10, history=10), "prompt_tokens is 10, allowed: >= 11"),
        (lambda: Fixed(Bounds(512)).next_chunk(0, 0), "remaining is 0, allowed: >= 1"),
    ],
)
def test_impossible_values_name_field_value_and_range(make: object, message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        make()  # type: ignore[operator]
