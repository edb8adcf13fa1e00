import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prefill_runtime.profiling.document import CalibrationDocument
from prefill_runtime.scheduler.cost import QuadraticModel
from prefill_runtime.scheduler.errors import ParameterError

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


@pytest.mark.parametrize(("field", "value"), [("a", -1e-9), ("b", math.nan), ("c", math.inf)])
def test_impossible_coefficients_name_field_value_and_range(field: str, value: float) -> None:
    with pytest.raises(ParameterError, match=rf"{field} is {value}, allowed: >= 0"):
        QuadraticModel(**{"a": 1e-9, "b": 1e-4, "c": 0.0, field: value})


def test_a_cost_that_never_grows_has_no_chunk_for_a_target() -> None:
    with pytest.raises(ParameterError, match="a and b"):
        QuadraticModel(0.0, 0.0, 1.0).chunk_for(1.0, 0)


def test_the_slowest_stage_at_the_base_size_sets_the_pace() -> None:
    document = CalibrationDocument.model_validate(
        {
            "key": "0" * 16,
            "model": "m",
            "source": "Profile",
            "createdAt": "2026-01-01T00:00:00Z",
            "runtimeVersion": "1",
            "engineVersion": "1",
            "baseTokens": 1000,
            "targetSeconds": 1.0,
            "stages": [
                {
                    "stage": i,
                    "coefficients": {"a": a, "b": b, "c": 9.0 - i},
                    "r2": 1.0,
                    "sampleCount": 8,
                    "relativeErrorP50": 0.0,
                    "relativeErrorP90": 0.0,
                }
                for i, (a, b) in enumerate([(1e-6, 1e-4), (1e-7, 2e-3), (2e-6, 1e-5)])
            ],
        }
    )
    # growth at 1000 tokens: 1.1, 2.1 and 2.01 s
    assert QuadraticModel.from_calibration(document) == QuadraticModel(1e-7, 2e-3, 8.0)
