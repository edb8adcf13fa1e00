import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prefill_runtime.profiling.document import PublishedCoefficients, PublishedForms
from prefill_runtime.scheduler.cost import Attention, PipelineCost, QuadraticModel, StagedModel, StageModel
from prefill_runtime.scheduler.errors import ParameterError

from tests.documents import calibration

COST_OF_STAGE = StageModel(1, 1, 1)
COST = QuadraticModel(a=2e-10, b=3e-5, c=0.012)


def test_chunk_seconds_is_the_difference_of_prompt_times() -> None:
    assert COST.seconds(1000) == pytest.approx(2e-4 + 0.03 + 0.012)
    assert COST.chunk_seconds(500, 1000) == pytest.approx(COST.seconds(1500) - COST.seconds(1000))
    assert COST.chunk_seconds(500, 1000, overhead=True) == pytest.approx(COST.chunk_seconds(500, 1000) + 0.012)


def test_chunk_for_is_the_closed_form_root() -> None:
    target = COST.chunk_seconds(8192, 0)
    slope = 2 * COST.a * 262_144 + COST.b
    root = (-slope + math.sqrt(slope**2 + 4 * COST.a * target)) / (2 * COST.a)
    assert COST.chunk_for(target, 262_144) == pytest.approx(root)
    assert int(COST.chunk_for(target, 262_144)) == 1916


def test_chunk_for_without_attention_is_target_over_b() -> None:
    assert QuadraticModel(a=0.0, b=1e-4).chunk_for(0.5, 10_000) == pytest.approx(5000)


@given(
    a=st.floats(1e-30, 1e-3),
    b=st.floats(0, 1e-2),
    history=st.integers(0, 1 << 20),
    target=st.floats(1e-4, 1e4),
)
def test_chunk_for_inverts_chunk_seconds_for_any_size_of_a(a: float, b: float, history: int, target: float) -> None:
    cost = QuadraticModel(a, b)
    assert cost.chunk_seconds(cost.chunk_for(target, history), history) == pytest.approx(target, rel=1e-9)


WINDOWED = Attention(300, 0.25)


@given(chunk=st.integers(1, 900), history=st.integers(0, 900))
def test_pairs_within_a_window_are_those_that_can_be_counted(chunk: int, history: int) -> None:
    """Half a pair for a token with itself, in the limit of many tokens."""
    near = sum(min(end + 0.5, 300) for end in range(history, history + chunk))
    every = sum(end + 0.5 for end in range(history, history + chunk))
    assert WINDOWED.pairs(float(chunk), float(history)) == pytest.approx(0.25 * every + 0.75 * near, abs=0.1)


@given(history=st.integers(0, 4000), target=st.floats(1e-3, 10))
def test_chunk_for_inverts_pass_seconds_with_windows(history: int, target: float) -> None:
    for full in (0.0, 0.25, 1.0):
        model = StageModel(0.01, 1e-5, 1e-7, 1e-7, Attention(300, full))
        chunk = model.chunk_for(target, float(history))
        assert chunk > 0 or target < 1e-7 * history
        if chunk:
            assert model.pass_seconds(chunk, float(history)) == pytest.approx(target + model.k0)
        many = model.chunk_for(np.array([target, 2 * target]), np.array([history, 2.0 * history]))
        assert many[0] == pytest.approx(chunk)


def test_stages_have_windows_of_one_kind() -> None:
    stage = StageModel(1, 1, 1, attention=WINDOWED)
    assert StagedModel((stage, stage)).whole == StageModel(2, 2, 2, attention=WINDOWED)
    with pytest.raises(ParameterError, match="kinds of attention is 2"):
        StagedModel((stage, StageModel(1, 1, 1)))


@pytest.mark.parametrize(("field", "value"), [("a", -1e-9), ("b", math.nan), ("c", math.inf)])
def test_impossible_coefficients_name_field_value_and_range(field: str, value: float) -> None:
    with pytest.raises(ParameterError, match=rf"{field} is {value}, allowed: >= 0"):
        QuadraticModel(**{"a": 1e-9, "b": 1e-4, "c": 0.0, field: value})


def test_a_cost_that_never_grows_has_no_chunk_for_a_target() -> None:
    with pytest.raises(ParameterError, match="a and b"):
        QuadraticModel(0.0, 0.0, 1.0).chunk_for(1.0, 0)


def test_dynamic_chunks_use_the_published_form() -> None:
    form = PublishedForms(quadratic=PublishedCoefficients(a=1e-7, b=2e-3, c=8.0))
    assert QuadraticModel.from_calibration(calibration(published=form)) == QuadraticModel(1e-7, 2e-3, 8.0)


def test_stages_of_different_shape_are_priced_each_for_itself() -> None:
    cost = PipelineCost(StagedModel((StageModel(1.0, 1e-3, 1e-6), StageModel(3.0, 2e-3, 0.0, 1e-4))), 0.5)
    assert cost.stage_seconds(2, 100.0, 1000.0) == pytest.approx([1.5 + 0.1 + 0.105, 3.5 + 0.2 + 0.1])
    assert cost.work(2, 100.0, 1000.0) == pytest.approx(5.505)
    assert cost.model.pass_seconds(100.0, 1000.0) == pytest.approx(4.505)  # without the overhead
    assert cost.batch_seconds(2, [(100, 0), (50, 1000)]) == pytest.approx([1.5 + 0.105 + 0.10125, 3.5 + 0.3 + 0.1])
    assert not cost.even(2)
    assert PipelineCost(StagedModel((StageModel(1, 1, 1),) * 2)).even(2)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: StagedModel(()), "number of stages is 0, allowed: >= 1"),
        (lambda: PipelineCost(StagedModel((COST_OF_STAGE,) * 3)).parts(2), "number of stage models is 3, allowed: 2"),
        (lambda: PipelineCost(StagedModel((COST_OF_STAGE,)), shares=(1.0,)), "shares is .*allowed: none"),
        (lambda: PipelineCost(COST_OF_STAGE, shares=(0.5, 0.5)).parts(3), "number of shares is 2, allowed: 3"),
    ],
)
def test_costs_for_another_number_of_stages_are_told(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        make()
