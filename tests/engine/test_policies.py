"""Every other policy on two stages: the answers of one stage, chunks as planned, a step's time budget, a calibration
that comes while serving, priorities and preemption. Fixed and Dynamic: test_pipeline.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prefill_runtime.engine.policy import Choice, EngineLimits, choose
from prefill_runtime.engine.settings import PrefillSettings
from prefill_runtime.scheduler.planner import Planned
from prefill_runtime.telemetry.events import Event, Fallback, Issue

from tests.engine import answers
from tests.engine.harness import Engine, calibration, finished, issued, prompt

A, B, C = 1e-8, 4e-5, 0.004  # of each stage; about what the model takes here
BLOCK = 128
CALIBRATED: dict[str, Any] = {"maxTokens": 1024, "minTokens": 128, "smoothingFactor": 1.0,
                              "calibration": calibration(A, B, c=C)}  # fmt: skip
CASES = [("Auto", True), ("Planned", False), ("TokenThrottle", True), ("TeraPipe", False), ("Seq1F1B", True)]


def pure(policy: str, **change: Any) -> Choice:
    """What these settings mean, without an engine; plans are searched at once."""
    limits = EngineLimits(1040, 16, 16_384, BLOCK, tensor=1, pipeline=2)
    return choose(PrefillSettings.model_validate(CALIBRATED | {"policy": policy} | change), limits)


def steps(events: list[Event]) -> list[list[tuple[str, int, int]]]:
    """(name, history, tokens) of the prefill chunks of each step that has any."""
    found = [
        [(c.request.rpartition("-")[0], c.history, c.tokens) for c in event.stamp.chunks if c.prefill]
        for event in events
        if isinstance(event, Issue)
    ]
    return [step for step in found if step]


@pytest.fixture(scope="module", params=CASES, ids=lambda case: f"{case[0]}-{'cached' if case[1] else 'uncached'}")
def case(request: pytest.FixtureRequest) -> tuple[str, bool]:
    return request.param


@pytest.fixture(scope="module")
def engine(
    case: tuple[str, bool], model: Path, truth: object, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    settings = CALIBRATED | {"policy": case[0]}
    folder = tmp_path_factory.mktemp("engine")
    engine = Engine(model, folder, settings, pipeline_parallel_size=2, enable_prefix_caching=case[1])
    yield engine
    engine.close()


def test_answers_equal_one_stage_alone(engine: Engine, truth: list[list[int]]) -> None:
    answers.check_alone(engine, truth)


def test_answers_equal_one_stage_together(engine: Engine, truth: list[list[int]]) -> None:
    answers.check_together(engine, truth)


def test_an_abort_in_the_middle_of_a_prompt(engine: Engine, truth: list[list[int]]) -> None:
    answers.check_abort(engine, truth, chunks=3)


def test_a_lone_prompt_gets_the_policys_chunks(engine: Engine, case: tuple[str, bool]) -> None:
    choice = pure(case[0])
    for number, size in enumerate((300, 2000, 6000)):
        expected = choice.chunker.cut(size)
        if case[0] == "TokenThrottle":  # the queue is this prompt alone
            expected = None
        for attempt in range(40):  # Auto plans for a busy pipeline until enough prompts have found it idle
            since = engine.agent.mark()
            engine.tokens([prompt(size, seed=100 * number + attempt)], max_tokens=1)
            chunks = issued(engine.agent.events[since:])
            assert [history for history, _ in chunks] == [sum(t for _, t in chunks[:k]) for k in range(len(chunks))]
            sizes = [tokens for _, tokens in chunks]
            if expected is None or sizes == expected:
                break
            assert isinstance(choice.chunker, Planned)
            if case[0] == "Planned":
                assert sizes == choice.chunker.planner.seed(size), "neither the seed nor the plan"
        else:
            pytest.fail(f"{size} tokens were never cut by a plan: {sizes}, not {expected}")
        assert sum(sizes) == size
        assert all(tokens % BLOCK == 0 and tokens <= 1024 for tokens in sizes[:-1])


def test_a_cached_prefix_counts_as_history(engine: Engine, case: tuple[str, bool]) -> None:
    answers.check_cached_prefix(engine, cached=case[1])


@pytest.fixture(scope="module")
def late(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """Auto without a calibration, priorities, and KV cache for one long prompt and little else."""
    settings = CALIBRATED | {"policy": "Auto", "calibration": None}
    engine = Engine(
        model, tmp_path_factory.mktemp("late"), settings, pipeline_parallel_size=2, enable_prefix_caching=False,
        scheduling_policy="priority", num_gpu_blocks_override=67, max_model_len=8192,
    )  # fmt: skip
    yield engine
    engine.close()


def cut(engine: Engine, size: int, seed: int) -> tuple[list[int], str]:
    """A lone prompt's chunks, and the policy that was told for them."""
    since = engine.agent.mark()
    engine.tokens([prompt(size, seed=seed)], max_tokens=1)
    events = engine.agent.events[since:]
    names = {x.policy for x in events if isinstance(x, Issue) and any(c.prefill for c in x.stamp.chunks)}
    assert len(names) == 1
    return [tokens for _, tokens in issued(events)], names.pop()


def fallbacks(engine: Engine) -> list[str]:
    return [x.reason for x in engine.agent.events if isinstance(x, Fallback)]


def test_a_calibration_that_comes_while_serving(late: Engine) -> None:
    """One test, for its parts need their order."""
    fixed = [1024, 1024, 1024, 928]
    assert cut(late, 4000, 0) == (fixed, "Fixed")
    assert fallbacks(late) == ["NoCalibration"]

    late.agent.tell({"calibration": calibration(A, B, stages=3)})
    assert cut(late, 4000, 1) == (fixed, "Fixed")
    assert fallbacks(late) == ["NoCalibration", "WrongStages"]

    late.agent.tell({"calibration": calibration(A, B, c=C)})
    planned = pure("Auto").chunker
    assert isinstance(planned, Planned)
    expected, seed = planned.cut(4000), planned.planner.seed(4000)
    assert fixed not in (expected, seed)
    for attempt in range(2, 30):
        sizes, name = cut(late, 4000, attempt)
        assert name == "Auto"
        assert sizes in (expected, seed)
        if sizes == expected:
            break
    assert sizes == expected

    for bad in ("text", calibration(A, B) | {"key": "f" * 16}, calibration(A, B) | {"stages": []}, None):
        late.agent.tell({"calibration": bad})
    late.agent.tell({"something": "else"})
    assert cut(late, 4000, 40) == (expected, "Auto")
    assert fallbacks(late)[2:] == ["InvalidCalibration"] * 4

    late.agent.tell({"calibration": calibration(1e-6, 1e-6, c=1e-5)})  # attention only: chunks get smaller and smaller
    sizes, name = cut(late, 4000, 41)
    assert (name, sum(sizes)) == ("Auto", 4000)
    assert sizes != expected
    late.agent.tell({"calibration": calibration(A, B, c=C)})
    cut(late, 500, 42)


def test_short_prompts_share_a_step_and_one_too_long_for_the_rest_does_not(late: Engine) -> None:
    since = late.agent.mark()
    late.submit("front", prompt(3000, seed=50), max_tokens=1)
    for name, size in (("a", 40), ("b", 50), ("c", 1000)):
        late.submit(name, prompt(size, seed=51), max_tokens=1)
    late.agent.wait(finished(4), since)
    seen = steps(late.agent.events[since:])
    together = [[name for name, _, _ in step] for step in seen]
    assert any(step[-2:] == ["a", "b"] or step[-3:-1] == ["a", "b"] for step in together), together
    joined = next(step for step in seen if ("b", 0, 50) in step)
    part = sum(tokens for name, _, tokens in joined if name == "c")
    assert part < 1000, "the long one came whole"
    assert part % BLOCK == 0
    assert sum(tokens for _, _, tokens in joined) <= 1024


def test_waiting_prompts_are_served_by_priority(late: Engine) -> None:
    since = late.agent.mark()
    late.submit("running", prompt(6000, seed=60), max_tokens=1, priority=5)
    late.agent.wait(lambda events: issued(events, "running"), since)
    for name, priority in (("last", 9), ("second", 2), ("first", 1)):
        late.submit(name, prompt(900, seed=61 + priority), max_tokens=1, priority=priority)
    late.agent.wait(finished(4), since)
    begun = [name for step in steps(late.agent.events[since:]) for name, history, _ in step if history == 0]
    assert begun == ["running", "first", "second", "last"]


def test_preempted_prompts_are_computed_again(late: Engine) -> None:
    answers.check_preempted(late)
