import random

import numpy as np
import pytest
from prefill_runtime.profiling.overhead import LONGEST, Overhead, Span, finish, of_period
from prefill_runtime.scheduler.cost import PipelineCost, StagedModel, StageModel
from prefill_runtime.scheduler.layout import Linear
from prefill_runtime.scheduler.recurrence import finish_seconds


def run(seconds: list[list[float]], overhead: list[list[float]], first: int = 1, at: float = 0.0) -> list[list[Span]]:
    """A pipeline's passes by stage: each waits for its rank, its input and, on rank 0, for a place in flight."""
    ranks = len(seconds)
    passes: list[list[Span]] = [[] for _ in seconds]
    free, out = [at] * ranks, list[float]()
    for k in range(len(seconds[0])):
        ready = out[k - ranks] if k >= ranks else at
        for rank in range(ranks):
            start = max(ready, free[rank]) + (overhead[rank][k] if rank or k else 0.0)
            ready = free[rank] = start + seconds[rank][k]
            passes[rank].append((first + k, start, ready))
        out.append(ready)
    return passes


def noisy(ranks: int, batches: int, seed: int = 0) -> list[list[float]]:
    source = random.Random(seed)
    return [[source.uniform(0.01, 0.2) * source.choice([1, 1, 4]) for _ in range(batches)] for _ in range(ranks)]


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_noise_in_the_passes_does_not_matter(ranks: int) -> None:
    for seed in range(5):
        passes = run(noisy(ranks, 12, seed), [[0.0013] * 12] * ranks)
        assert of_period(Linear(len(passes)), passes) == pytest.approx(0.0013, rel=1e-6)


def test_a_period_that_could_not_have_been_so_quick_has_none() -> None:
    """Clocks of two hosts that are a little off."""
    passes = run(noisy(2, 6), [[0.0] * 6] * 2)
    passes[1] = [(batch, start - 0.01, end - 0.01) for batch, start, end in passes[1]]
    assert of_period(Linear(len(passes)), passes) == 0.0


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_it_is_what_the_planner_adds_to_each_pass(ranks: int) -> None:
    chunks = [512, 1024, 2048, 2048, 1024, 512, 256, 256, 128]
    models = tuple(StageModel(0.003, 2e-5 * (1 + 0.1 * r), 5e-8) for r in range(ranks))
    history = [sum(chunks[:k]) for k in range(len(chunks))]
    seconds = [
        [float(m.pass_seconds(float(c), float(h))) for c, h in zip(chunks, history, strict=True)] for m in models
    ]
    cost = PipelineCost(StagedModel(models), pass_overhead_s=0.004)
    columns = [np.array(x, dtype=np.float64)[:, None] for x in (chunks, history)]
    planned = float(finish_seconds(Linear(ranks), cost, *columns)[0])
    assert finish(Linear(ranks), seconds, 0.004) == pytest.approx(
        planned - 0.004
    )  # before the first pass there is no other


def feed(overhead: Overhead, period: int, passes: list[list[Span]], prompts: tuple[str, ...] = ("p",)) -> None:
    """Batches belong to the prompts in turn."""
    for stage, spans in enumerate(passes):
        for batch, start, end in spans:
            overhead.add(stage, period, batch, [prompts[batch % len(prompts)]], start, end)


def test_prompts_beside_each_other_tell_nothing() -> None:
    found = Overhead(Linear(2))
    feed(found, 1, run(noisy(2, 8), [[0.001] * 8] * 2), ("p", "q"))
    feed(found, 2, run(noisy(2, 8), [[0.003] * 8] * 2))
    feed(found, 3, run(noisy(2, 8), [[0.001] * 8] * 2))
    assert found.seconds() == pytest.approx(0.003, rel=1e-6)


def test_the_least_of_the_periods_counts() -> None:
    found = Overhead(Linear(2))
    for period, each in enumerate((0.01, 0.002, 0.03), 1):
        feed(found, period, run(noisy(2, 8, period), [[each] * 8] * 2, first=8 * period))
        assert (found.seconds() is None) == (period == 1)  # the newest period may still go on
    assert found.seconds() == pytest.approx(0.002, rel=1e-6)


def test_short_long_and_broken_periods_tell_nothing() -> None:
    found = Overhead(Linear(2))
    lost = run(noisy(2, 8), [[0.001] * 8] * 2)
    del lost[1][3]
    gap = run(noisy(2, 8), [[0.001] * 8] * 2)
    for spans in gap:
        del spans[3]
    long = LONGEST + 1
    for period, passes in enumerate(
        (lost, gap, run(noisy(2, 3), [[0.001] * 3] * 2), run(noisy(2, long), [[0.001] * long] * 2)), 1
    ):
        feed(found, period, passes)
    found.add(0, 0, 99, ["p"], 0.0, 1.0)
    feed(found, 9, run(noisy(2, 1), [[0.001]] * 2))
    assert found.seconds() is None


def test_a_stage_that_never_reports_does_not_make_it_grow() -> None:
    found = Overhead(Linear(2))
    for period in range(1, 500):
        found.add(0, period, period, ["p"], 0.0, 1.0)
    assert len(found._open) < 20
    assert found.seconds() is None
