"""The time budget of a step, and the load that plans look at."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prefill_runtime.scheduler.budget import Rest, StepBudget
from prefill_runtime.scheduler.chunkers import Bounds
from prefill_runtime.scheduler.cost import PipelineCost, StagedModel, StageModel
from prefill_runtime.scheduler.load import Load

BOUNDS = Bounds(1024, 128, quantum=128)


def budget(k0: float, k1: float = 1e-3, k2: float = 0.0, overhead: float = 0.0) -> StepBudget:
    """Two equal stages of half of these seconds each."""
    return StepBudget(BOUNDS, 2, PipelineCost(StagedModel((StageModel(k0 / 2, k1 / 2, k2 / 2),) * 2), overhead))


def whole(*tokens: int) -> list[Rest]:
    return [Rest(0, count) for count in tokens]


def test_a_step_is_as_long_as_ten_fixed_parts_but_no_longer_than_a_full_chunk() -> None:
    assert budget(0.05).allowed(Rest(0, 10)) == pytest.approx(0.5)
    assert budget(0.04, overhead=0.005).allowed(Rest(0, 10)) == pytest.approx(0.5)
    assert budget(1.0).allowed(Rest(0, 10)) == pytest.approx(2.024)
    assert budget(0.01).allowed(Rest(0, 900)) == pytest.approx(0.91)  # the first prompt's own chunk


def test_prompts_that_fit_whole_share_the_step_and_the_next_one_does_not() -> None:
    # 0.45 s of work: 100 + 100 + 150 tokens leave 100, below the least chunk
    assert budget(0.05).shares(Rest(0, 100), whole(100, 150, 300, 50), 900) == [100, 150]


def test_what_does_not_fit_whole_comes_in_part_if_that_is_a_legal_chunk() -> None:
    assert budget(0.05).shares(Rest(0, 100), whole(100, 300, 50), 900) == [100, 128]
    assert budget(0.05).shares(Rest(0, 150), whole(180, 300), 900) == [180]


def test_tokens_are_the_other_limit() -> None:
    assert budget(1.0).shares(Rest(0, 100), whole(100, 900), 400) == [100, 256]
    assert budget(1.0).shares(Rest(0, 100), whole(400, 1), 400) == [400]
    assert budget(1.0).shares(Rest(0, 100), whole(1), 0) == []


def test_without_a_cost_tokens_alone_count() -> None:
    step = StepBudget(BOUNDS, 2)
    assert step.shares(Rest(0, 100), [Rest(9000, 300), Rest(0, 50), Rest(0, 700)], 924) == [300, 50, 512]
    assert step.shares(Rest(0, 800), whole(300), 224) == [128]
    assert step.shares(Rest(0, 900), whole(300), 124) == []


def test_history_counts() -> None:
    attention = budget(0.05, k2=1e-5)  # a token after 10,000 others takes 0.101 s
    assert attention.shares(Rest(0, 10), [Rest(10_000, 3), Rest(10_000, 2)], 900) == [3]
    assert attention.shares(Rest(0, 10), [Rest(0, 3), Rest(0, 2)], 900) == [3, 2]


def test_a_long_queue_is_not_walked_to_its_end() -> None:
    looked: list[int] = []

    def queue() -> Iterator[Rest]:
        for number in range(1000):
            looked.append(number)
            yield Rest(0, 100)

    assert budget(0.05).shares(Rest(0, 140), queue(), 900) == [100, 100, 100]
    assert len(looked) == 4
    looked.clear()
    assert budget(0.01).shares(Rest(0, 900), queue(), 124) == []
    assert looked == []


@given(
    k0=st.floats(0, 1),
    k2=st.sampled_from([0.0, 1e-8]),
    first=st.integers(1, 1024),
    others=st.lists(st.builds(Rest, st.integers(0, 5000), st.integers(1, 5000)), max_size=30),
    room=st.integers(0, 1024),
)
def test_shares_keep_both_budgets_and_the_order(
    k0: float, k2: float, first: int, others: list[Rest], room: int
) -> None:
    step = budget(k0, 1e-4, k2)
    shares = step.shares(Rest(0, first), others, room)
    assert sum(shares) <= room
    seconds = [step.seconds(share, rest) for share, rest in zip(shares, others, strict=False)]
    assert step.fixed + step.seconds(first, Rest(0, first)) + sum(seconds) <= step.allowed(Rest(0, first)) * (1 + 1e-9)
    assert all(share == rest.remaining for share, rest in zip(shares[:-1], others, strict=False))
    if shares and shares[-1] < others[len(shares) - 1].remaining:
        assert shares[-1] % 128 == 0
        assert shares[-1] >= 128


def test_load_is_the_share_of_time_with_work_when_prompts_come_at_random() -> None:
    source, load, now, free = random.Random(1), Load(0.0), 0.0, 0.0
    shares = []
    for _ in range(4000):
        now += source.expovariate(1.0)
        if now > free > 0:
            load.changed(free, busy=False)
        load.arrived()
        load.changed(now, busy=True)
        free = max(now, free) + 0.6
        shares.append(load.share(now))
    assert sum(shares[1000:]) / 3000 == pytest.approx(0.6, abs=0.1)


def test_a_client_who_waits_for_each_answer_is_no_load() -> None:
    load = Load(0.0)
    for second in range(1, 200):
        load.arrived()
        load.changed(float(second), busy=True)
        load.changed(second + 0.9, busy=False)
    assert load.share(200.0) == 0


def test_load_is_forgotten_with_time() -> None:
    load = Load(0.0)
    load.changed(0.0, busy=True)
    for _ in range(100):
        load.arrived()
    assert load.share(300.0) > 0.99
    load.changed(300.0, busy=False)
    assert load.share(330.0) == pytest.approx(0.368, abs=0.01)
    assert load.share(600.0) < 0.001
