import math
from datetime import UTC, datetime
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prefill_runtime.profiling.compose import Origin, fit_document
from prefill_runtime.profiling.document import (
    MAX_BYTES,
    MAX_STAGES,
    CalibrationDocument,
    ProfileResult,
    Refusal,
    RefusalReason,
    load_calibration,
)
from prefill_runtime.profiling.fitting import (
    Fit,
    Sample,
    fit_history,
    fit_quadratic,
    fit_stages,
    nonnegative_solve,
)
from prefill_runtime.profiling.sampling import plan, points
from prefill_runtime.scheduler.cost import Attention, HistoryModel, QuadraticModel, StageModel

KEY = "0123456789abcdef"


def measured(cost: QuadraticModel, noise: float = 0.0, outliers: float = 0.0, seed: int = 0) -> list[Sample]:
    """Samples as the real plan would take them, with proportional noise and a share of wild values."""
    random = np.random.default_rng(seed)
    samples: list[Sample] = []
    for prompt in plan(2048, 64, 4, 32_768, 64).prompts * 3:
        took = []
        for chunk, history, _ in points(prompt, [0.0] * len(prompt)):
            seconds = cost.chunk_seconds(chunk, history, overhead=True) * math.exp(random.normal(0, noise))
            took.append(float(seconds * random.choice([0.2, 3, 20])) if random.random() < outliers else seconds)
        samples += points(prompt, took)
    return samples


def fitted(samples: list[Sample]) -> Fit:
    result = fit_quadratic(samples)
    assert isinstance(result, Fit), result
    return result


def refused(samples: list[Any]) -> Refusal:
    result = fit_quadratic(samples)
    assert isinstance(result, Refusal), result
    return result


@settings(max_examples=25, deadline=None)
@given(
    linear=st.floats(1e-5, 1e-3),
    attention=st.floats(0.3, 3),
    overhead=st.floats(0.15, 0.5),
    seed=st.integers(0, 1 << 30),
)
def test_noise_and_a_tenth_of_outliers_leave_coefficients_within_5_percent(
    linear: float, attention: float, overhead: float, seed: int
) -> None:
    """Coefficients sized so that each is visible at 2048 tokens; an invisible one cannot be recovered by anyone."""
    cost = QuadraticModel(attention * linear / 8192, linear, overhead * linear * 2048)
    fit = fitted(measured(cost, noise=0.01, outliers=0.1, seed=seed))
    assert tuple(fit.coefficients.values()) == pytest.approx((cost.a, cost.b, cost.c), rel=0.05)


def test_points_with_history_are_not_thrown_out_together_as_outliers() -> None:
    cost = QuadraticModel(1e-8, 1e-4, 0.01)
    samples = [(c, h, t * 1.3 if h else t) for c, h, t in measured(cost, noise=0.01)]
    fit = fitted(samples)
    assert fit.outliers < 8
    deep = [(c, h, t) for c, h, t in samples if h]
    model = QuadraticModel(**fit.coefficients)
    errors = [abs(model.chunk_seconds(c, h, overhead=True) / t - 1) for c, h, t in deep]
    assert np.median(errors) < 0.1


def test_growth_with_history_that_the_fit_missed_is_refused() -> None:
    """A penalty for any history that shrinks with depth: not what a quadratic can follow."""
    deep = (2048, 1024, 512) * 4
    samples = [(size, 0, 0.0) for size in range(64, 2049, 64)] + points(deep, [0.0] * len(deep))
    linear = [(c, h, 1e-4 * c + 0.01) for c, h, _ in samples]
    refusal = refused([(c, h, t * (1.5 - h / 20_000 if h else 1)) for c, h, t in linear])
    assert refusal.reason == RefusalReason.NOT_GROWING
    assert "with history take" in refusal.message


def test_samples_at_history_only_are_judged_without_those_at_none() -> None:
    rows = [(1, 3, 0.5), (2, 2, 0.5), (1, 1, 1.0), (1, 2, 1.0), (1, 4, 1.0), (1, 5, 1.0), (1, 6, 1.0), (2, 1, 1.0)]
    assert "nan" not in refused(rows).message


def test_repeats_count_by_their_median() -> None:
    cost = QuadraticModel(1e-8, 1e-4, 0.01)
    once = [(size, 0, cost.seconds(size)) for size in range(64, 1025, 64)]
    wild = [(size, 0, 50 * seconds) for size, _, seconds in once]
    fit = fitted(once + once + wild)
    assert fit.outliers == 0
    assert fit.sample_count == 48
    assert fit.coefficients["a"] == pytest.approx(1e-8)


def test_linear_data_give_no_attention_and_no_complaint() -> None:
    fit = fitted(measured(QuadraticModel(0.0, 1e-4, 0.02)))
    assert fit.coefficients["a"] == pytest.approx(0, abs=1e-12)
    assert fit.coefficients["b"] == pytest.approx(1e-4)


@pytest.mark.parametrize("noise", [0.0, 0.02])
def test_the_stage_form_finds_the_prefix_rebuild_where_there_is_one(noise: float) -> None:
    rows = measured(QuadraticModel(0, 1e-4))
    for k3 in (0.0, 3e-6):
        cost, random = StageModel(0.02, 1e-4, 1e-8, k3), np.random.default_rng(1)
        timed = [(c, h, cost.pass_seconds(c, h) * math.exp(random.normal(0, noise))) for c, h, _ in rows]
        (fit,) = fit_stages([timed])
        assert isinstance(fit, Fit)
        wanted = {"k2": 1e-8, "k1": 1e-4, "k0": 0.02} | ({"k3": k3} if k3 else {})
        assert fit.coefficients == pytest.approx(wanted, rel=max(10 * noise, 1e-6))


def test_stages_have_the_prefix_rebuild_all_or_none() -> None:
    """The noisier stage could not tell by itself, and plans are made of both."""
    rows, cost, random = measured(QuadraticModel(0, 1e-4)), StageModel(0.02, 1e-4, 1e-8, 1e-6), np.random.default_rng(3)
    clear, noisy = (
        [(c, h, cost.pass_seconds(c, h) * math.exp(random.normal(0, noise))) for c, h, _ in rows]
        for noise in (0.002, 0.05)
    )
    (alone,), together = fit_stages([noisy]), fit_stages([clear, noisy])
    assert isinstance(alone, Fit)
    assert "k3" not in alone.coefficients
    for fit in together:
        assert isinstance(fit, Fit)
        assert fit.coefficients["k3"] == pytest.approx(1e-6, rel=0.5)
    steady = [(c, h, StageModel(0.02, 1e-4, 1e-8).pass_seconds(c, h)) for c, h, _ in rows]
    assert ["k3" in fit.coefficients for fit in fit_stages([steady, steady]) if isinstance(fit, Fit)] == [False, False]


def test_a_sliding_window_is_found_where_the_engine_has_one() -> None:
    rows, window = measured(QuadraticModel(0, 1e-4)), Attention(500, 0.5)
    for kind in (window, Attention()):
        cost, random = StageModel(0.02, 1e-4, 1e-7, attention=kind), np.random.default_rng(2)
        timed = [(c, h, cost.pass_seconds(float(c), float(h)) * math.exp(random.normal(0, 0.01))) for c, h, _ in rows]
        for fit in fit_stages([timed, timed], window):
            assert isinstance(fit, Fit)
            assert fit.attention == kind
            assert fit.coefficients["k2"] == pytest.approx(1e-7, rel=0.1)


def test_the_history_form_recovers_its_own_model() -> None:
    cost = HistoryModel(1e-8, 1e-4, 0.02)
    fit = fit_history([(c, h, cost.pass_seconds(c, h)) for c, h, _ in measured(QuadraticModel(0, 1e-4))])
    assert isinstance(fit, Fit)
    assert fit.coefficients == pytest.approx({"a": 1e-8, "b": 1e-4, "c": 0.02})


LINE = [(64 * i, 0, 0.01 + 1e-5 * i) for i in range(1, 17)]


@pytest.mark.parametrize(
    ("samples", "reason", "words"),
    [
        ([], RefusalReason.TOO_FEW_SAMPLES, "0 distinct"),
        (LINE[:5], RefusalReason.TOO_FEW_SAMPLES, "5 distinct"),
        ([LINE[0]] * 100, RefusalReason.TOO_FEW_SAMPLES, "1 distinct"),
        ([*LINE, (64, 0, math.nan)], RefusalReason.BAD_SAMPLE, "sample 16: seconds is nan"),
        ([*LINE, (64, 0, math.inf)], RefusalReason.BAD_SAMPLE, "seconds is inf"),
        ([*LINE, (64, 0, -1.0)], RefusalReason.BAD_SAMPLE, "seconds is -1.0, allowed: > 0"),
        ([(0, 0, 1.0), *LINE], RefusalReason.BAD_SAMPLE, "sample 0: chunk is 0"),
        ([(64, -1, 1.0), *LINE], RefusalReason.BAD_SAMPLE, "history is -1"),
        ([(512, 512 * h, 0.1 + 0.01 * h) for h in range(20)], RefusalReason.ILL_CONDITIONED, "20 kinds of samples"),
        ([(64 * i, 0, 0.5) for i in range(1, 33)], RefusalReason.NOT_GROWING, "more than an empty pass"),
        ([(64 * i, 0, 0.01 * math.sqrt(i)) for i in range(1, 65)], RefusalReason.NOT_GROWING, "a < 0"),
        ([(64 * i, 0, max(1e-4, 1e-8 * (64 * i - 2048) ** 2)) for i in range(1, 65)], RefusalReason.POOR_FIT, ""),
        ([(64 * i, 0, 0.01 * i * (1 + i * i % 7)) for i in range(1, 65)], RefusalReason.POOR_FIT, "R^2"),
    ],
)
def test_degenerate_samples_give_typed_refusals(samples: list[Sample], reason: RefusalReason, words: str) -> None:
    refusal = refused(samples)
    assert refusal.reason == reason, refusal
    assert words in refusal.message


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(-5, 1 << 31),
            st.integers(-5, 1 << 31),
            st.one_of(st.floats(), st.floats(1e-4, 10), st.just(0.5)),
        ),
        max_size=40,
    )
)
def test_nothing_raises_and_nothing_negative_comes_out(samples: list[Sample]) -> None:
    result = fit_quadratic(samples)
    if isinstance(result, Fit):
        assert min(result.coefficients.values()) >= 0
        assert all(map(math.isfinite, (*result.coefficients.values(), result.r2)))


@given(st.integers(0, 1 << 30))
@settings(max_examples=30, deadline=None)
def test_nonnegative_solve_meets_the_optimality_conditions(seed: int) -> None:
    random = np.random.default_rng(seed)
    design, seconds, scale = random.normal(size=(20, 3)), random.normal(size=20), np.ones(20)
    x = nonnegative_solve(design, seconds, scale)
    gradient = design.T @ (design @ x - seconds)
    assert np.all(x >= 0)
    assert np.all(gradient >= -1e-9)
    assert x @ gradient == pytest.approx(0, abs=1e-9)


def document(samples_by_stage: dict[int, list[Sample]]) -> CalibrationDocument | Refusal:
    return fit_document(
        samples_by_stage,
        Origin(key=KEY, model="toy", base_tokens=2048, engine_version="0.28.0", runtime_version="0.1.0"),
        datetime(2026, 1, 2, 3, 4, 5, 678, tzinfo=UTC),
        pass_overhead_seconds=0.00123,
    )


def test_the_document_holds_every_stage_and_the_slowest_target() -> None:
    costs = [QuadraticModel(1e-8, 1e-4, 0.01), QuadraticModel(2e-8, 1e-4, 0.01)]
    made = document({i: measured(c) for i, c in enumerate(costs)})
    assert isinstance(made, CalibrationDocument)
    assert load_calibration(made.to_json(), KEY, 2) == made
    assert made.created_at == "2026-01-02T03:04:05Z"
    assert [s.coefficients.k2 for s in made.stages] == pytest.approx([2e-8, 4e-8])
    assert [s.coefficients.k0 for s in made.stages] == pytest.approx([0.01, 0.01])
    assert made.target_seconds == pytest.approx(costs[1].chunk_seconds(2048, 0))
    assert made.pass_overhead_seconds == 0.00123
    published = made.published.quadratic
    assert (published.a, published.b, published.c) == pytest.approx((2e-8, 1e-4, 0.01))


def test_the_published_history_form_is_that_of_the_slowest_stage() -> None:
    """The form of seeds/000 charges history even where the chunk is small; data of that kind have it, others do not."""
    rows = [(c, h) for c, h, _ in measured(QuadraticModel(0, 1e-4))]
    slow = HistoryModel(2e-8, 2e-5, 0.02)
    made = document({i: [(c, h, f / 2 * slow.pass_seconds(c, h)) for c, h in rows] for i, f in enumerate((1, 2))})
    assert isinstance(made, CalibrationDocument)
    history = made.published.history
    assert history is not None
    assert (history.a, history.b, history.c) == pytest.approx((2e-8, 2e-5, 0.02))
    assert made.stages[1].coefficients.k3 == pytest.approx(2e-5, rel=0.2)


def test_as_many_stages_as_are_allowed_fit_into_a_termination_message() -> None:
    cost, random = HistoryModel(1.2345678e-8, 1.2345678e-5, 0.012345678), np.random.default_rng(0)
    rows = measured(QuadraticModel(0, 1e-4))
    samples = [(c, h, cost.pass_seconds(c, h) * math.exp(random.normal(0, 0.01))) for c, h, _ in rows]
    made = document(dict.fromkeys(range(MAX_STAGES), samples))
    assert isinstance(made, CalibrationDocument)
    assert made.stages[-1].coefficients.k3 > 0
    assert made.published.history is not None
    names = {"model": "m" * 253, "engine_version": "v" * 64, "runtime_version": "r" * 32}
    longest = made.model_copy(update=names | {"target_seconds": 0.1234567, "pass_overhead_seconds": 0.001234567})
    result = ProfileResult(outcome="Measured", calibration=longest, seconds=12345.678)
    assert len(result.to_json().encode()) <= MAX_BYTES


def test_a_silent_stage_refuses_the_whole_document() -> None:
    made = document({0: measured(QuadraticModel(1e-8, 1e-4, 0.01)), 1: []})
    assert isinstance(made, Refusal)
    assert (made.reason, made.stage) == (RefusalReason.TOO_FEW_SAMPLES, 1)
    assert made.message.startswith("stage 1: ")
