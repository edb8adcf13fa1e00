"""Faults that other schedulers and dashboards had in the field, each as the smallest input. Named after the report."""

from __future__ import annotations

import itertools
import os
import signal

import pytest
from prefill_runtime.profiling.fitting import Fit, fit_quadratic, fit_stages
from prefill_runtime.profiling.sampling import plan
from prefill_runtime.scheduler.chunkers import Bounds, Chunker
from prefill_runtime.scheduler.cost import QuadraticModel
from prefill_runtime.telemetry.account import RankAccount, bubble_ratio
from prefill_runtime.telemetry.metrics import TTFT_BUCKETS

from tests.unit.agent.conftest import site
from tests.unit.agent.harness import Site, until
from tests.unit.agent.test_profile import engines_up, profile_pair, refusal
from tests.unit.telemetry.conftest import Prompt, run_pipeline

__all__ = ["site"]


def test_sglang_17198_cold_first_sample() -> None:
    """One-time cost in the first sample: plain least squares would cut 25 tokens after 262,144, not 1,916."""
    clean = QuadraticModel(2e-10, 3e-5, 0.012)
    samples = [(size, 0, clean.seconds(size)) for size in range(8192, 0, -512)]
    samples[0] = (8192, 0, 6.0)
    fit = fit_quadratic(samples)
    assert isinstance(fit, Fit)
    assert tuple(fit.coefficients.values()) == pytest.approx((2e-10, 3e-5, 0.012), rel=0.05)
    assert fit.outliers == 1
    (stage,) = fit_stages([samples])
    assert isinstance(stage, Fit)
    assert tuple(stage.coefficients.values()) == pytest.approx((4e-10, 3e-5, 0.012), rel=0.05)
    model = QuadraticModel(**fit.coefficients)
    assert int(model.chunk_for(model.chunk_seconds(8192, 0), 262_144) + 1e-6) == 1916


def test_sglang_23621_sizes_of_a_plan_are_aligned() -> None:
    """Base 3072, TP 8, 128 samples: an unaligned step would be int(3072 * 1.25 / 128) = 30."""
    sizes = {p[0] for p in plan(3072, 128, 0, 32_768, 8).prompts}
    assert len(sizes) == 128
    assert all(s % 8 == 0 for s in sizes)


def test_sglang_23621_a_tiny_tail_joins_its_neighbour() -> None:
    sizes = iter([4096, 3584, 3200, 2816, 2496, 192])

    class Listed(Chunker):
        def propose(self, history: int, remaining: int) -> float:
            return next(sizes)

    chunks = Listed(Bounds(max_tokens=4096, min_tokens=512)).cut(16_384)
    assert chunks == [4096, 3584, 3200, 2816, 2688]


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize(
    ("knob", "there", "doing"),
    [
        ({"FAKE_NEVER_READY": "1"}, "fake engine", "the engine was starting"),
        ({"FAKE_ANSWER": "0"}, "does not answer", "prefill-warm-up 1 of 3 was running"),
    ],
    ids=["starting", "sampling"],
)
def test_sglang_23057_one_rank_fails_while_profiling(
    site: Site, victim: int, knob: dict[str, str], there: str, doing: str
) -> None:
    """The others must not wait in a collective: all end with the cause, and nothing of a calibration is left."""
    pair = profile_pair(site, leader=knob)
    engines_up(*pair)
    until(there, lambda: there in pair[0].log())
    os.kill(pair[victim].engine_pids()[0], signal.SIGKILL)
    assert [rank.exit_code() for rank in pair] == [0, 0]
    for rank in pair:
        reason, message = refusal(rank)
        assert reason == "EngineFailed"
        assert "SIGKILL" in message or "Server disconnected" in message  # whichever rank 0 notices first
    assert doing in refusal(pair[0])[1]


@pytest.mark.parametrize(("limit", "ratio"), [(1, 3 / 4), (4, 3 / 7)])
def test_vllm_41682_and_tt_metal_48246_waiting_is_no_work(limit: int, ratio: float) -> None:
    """On every rank 1 - 1/P when fully serialised, (P - 1)/(n + P - 1) in an ideal pipeline."""
    run = run_pipeline(4, [Prompt(2.0, [[1.0] * 4] * 4)], limit=limit)
    for rank in range(4):
        account = RankAccount(0.0)
        for _, event in run.worker_events(rank):
            account.feed(event)
        period, empty = run.empties[-1]
        account.pipeline_idle(period, empty, empty)
        account.settle(empty + 1)
        assert bubble_ratio(account.seconds) == pytest.approx(ratio)
        assert account.last is not None
        assert bubble_ratio(account.last.seconds) == pytest.approx(ratio)


def test_vllm_15167_p99_is_not_the_last_bucket() -> None:
    """100 TTFTs evenly from 90 to 400 s: p99 within 25% of the true 396.9."""
    values = sorted(90 + 310 * n / 99 for n in range(100))
    counts = [sum(v <= edge for v in values) for edge in TTFT_BUCKETS]
    rank = 0.99 * len(values)
    i = next(i for i, count in enumerate(counts) if count >= rank)
    low, below = (TTFT_BUCKETS[i - 1], counts[i - 1])
    p99 = low + (TTFT_BUCKETS[i] - low) * (rank - below) / (counts[i] - below)
    assert p99 == pytest.approx(396.9, rel=0.25)
    assert TTFT_BUCKETS[0] == 0.05
    assert {1, 120, 600, 1800} <= set(TTFT_BUCKETS)
    fine = [b for b in TTFT_BUCKETS if 1 <= b <= 120]
    assert max(b / a for a, b in itertools.pairwise(fine)) <= 1.25 + 1e-9
