"""Two stages with Fixed and Dynamic chunks: the answers of one stage, the policy's chunks, an account that adds up."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prefill_runtime.engine.policy import Choice, EngineLimits, choose
from prefill_runtime.engine.settings import PrefillSettings
from prefill_runtime.scheduler.budget import Rest
from prefill_runtime.telemetry.events import Finish, Issue, Pass, Request

from tests.engine import answers
from tests.engine.harness import Engine, calibration, finished, issued, prompt

A, B = 1e-7, 1e-4
BLOCK = 128
FIXED: dict[str, Any] = {"policy": "Fixed", "maxTokens": 512, "minTokens": 128, "smoothingFactor": 1.0}
DYNAMIC: dict[str, Any] = {"policy": "Dynamic", "maxTokens": 1024, "minTokens": 128, "smoothingFactor": 0.9,
                           "calibration": calibration(A, B)}  # fmt: skip


LIMITS = EngineLimits(1040, 16, 16_384, BLOCK, tensor=1, pipeline=2)


def pure(settings: dict[str, Any]) -> Choice:
    """What these settings mean, without an engine."""
    return choose(PrefillSettings.model_validate(settings), LIMITS)


@pytest.fixture(
    scope="module",
    params=[(FIXED, True), (DYNAMIC, False)],
    ids=lambda p: f"{p[0]['policy']}-{'cached' if p[1] else 'uncached'}",
)
def case(request: pytest.FixtureRequest) -> tuple[dict[str, Any], bool]:
    return request.param


@pytest.fixture(scope="module")
def settings(case: tuple[dict[str, Any], bool]) -> dict[str, Any]:
    return case[0]


@pytest.fixture(scope="module")
def engine(
    case: tuple[dict[str, Any], bool], model: Path, truth: object, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    folder = tmp_path_factory.mktemp("engine")
    engine = Engine(model, folder, case[0], pipeline_parallel_size=2, enable_prefix_caching=case[1])
    yield engine
    engine.close()


def test_answers_equal_one_stage_alone(engine: Engine, truth: list[list[int]]) -> None:
    answers.check_alone(engine, truth)


def test_answers_equal_one_stage_together(engine: Engine, truth: list[list[int]]) -> None:
    answers.check_together(engine, truth)


def test_short_prompts_share_a_step_within_its_budgets(engine: Engine, settings: dict[str, Any]) -> None:
    choice, since = pure(settings), engine.agent.mark()
    prompts = {f"packed-{size}": prompt(size, seed=2) for size in (1500, 60, 100, 3000, 40)}
    for name, one in prompts.items():
        engine.submit(name, one)
    engine.agent.wait(finished(len(prompts)), since)
    steps = [x.stamp.chunks for x in engine.agent.events[since:] if isinstance(x, Issue)]
    steps = [prefills for step in steps if (prefills := [chunk for chunk in step if chunk.prefill])]
    assert max(len(step) for step in steps) > 1, "nothing was packed, so nothing was tested"
    seen = dict.fromkeys(prompts, 0)
    for first, *others in steps:
        for chunk in (first, *others):
            seen[chunk.request.rpartition("-")[0]] += chunk.tokens
        rest = Rest(first.history, first.prompt_tokens - first.history)
        own = choice.chunker.next_chunk(rest.history, rest.remaining)
        assert first.tokens == own
        if others:
            assert own == rest.remaining, "somebody joined a chunk that did not end its prompt"
            assert own + sum(chunk.tokens for chunk in others) <= settings["maxTokens"]
        if others:
            work = sum(choice.budget.seconds(x.tokens, Rest(x.history, x.prompt_tokens)) for x in (first, *others))
            assert choice.budget.fixed + work <= choice.budget.allowed(rest) * (1 + 1e-9)
    assert seen == {name: len(one) for name, one in prompts.items()}


def test_decodes_go_on_beside_a_prefill_whose_chunks_stay_the_same(engine: Engine, settings: dict[str, Any]) -> None:
    since = engine.agent.mark()
    engine.submit("short", prompt(64, seed=3), max_tokens=2000)  # more than the prompt beside it takes
    engine.agent.wait(lambda events: any(isinstance(x, Request) for x in events), since)
    engine.submit("long", prompt(3000, seed=3))
    engine.agent.wait(lambda events: any(isinstance(x, Finish) and x.request.startswith("long") for x in events), since)
    engine.abort("short")
    assert set(engine.agent.wait(finished(2), since)) == {"length", "abort"}
    events = engine.agent.events[since:]
    assert [tokens for _, tokens in issued(events, "long")] == pure(settings).chunker.cut(3000)
    mixed = [x for x in events if isinstance(x, Issue) and {c.prefill for c in x.stamp.chunks} == {True, False}]
    assert len(mixed) >= 2


def test_an_abort_in_the_middle_of_a_prompt(engine: Engine, truth: list[list[int]]) -> None:
    answers.check_abort(engine, truth, chunks=3)


def test_a_cached_prefix_counts_as_history(engine: Engine, case: tuple[dict[str, Any], bool]) -> None:
    settings, cached = case
    sizes = answers.check_cached_prefix(engine, cached)
    assert sizes == pure(settings).chunker.cut(3948, history=2048 if cached else 0)


def test_rank_states_add_up_to_wall_time(engine: Engine) -> None:
    since = engine.agent.mark()
    began, before = engine.agent.states()
    engine.tokens([prompt(16_000, seed=7)])
    engine.agent.wait(finished(1), since)
    ended, after = engine.agent.states()
    spent = {r: {s: v - before[r][s] for s, v in states.items()} for r, states in after.items()}
    assert set(spent) == {0, 1}
    for states in spent.values():
        assert sum(states.values()) == pytest.approx(ended - began, rel=0.01)
        assert states["compute"] > 0.3 * (ended - began)
    passes = [x for x in engine.agent.events[since:] if isinstance(x, Pass) and x.stamp.first]
    first = {x.rank: x.end - x.start for x in passes}
    # Rank 1 waits for the first chunk of rank 0, rank 0 for the last of rank 1.
    assert spent[1]["bubble_fill"] >= 0.8 * first[0]
    assert spent[0]["bubble_drain"] > 0
    assert spent[1]["bubble_drain"] < 0.5 * spent[0]["bubble_drain"]


@pytest.mark.parametrize("size", [1, 128, 1500, 8000])
def test_a_lone_prompt_gets_the_policys_chunks(engine: Engine, settings: dict[str, Any], size: int) -> None:
    since = engine.agent.mark()
    engine.tokens([prompt(size, seed=1)], max_tokens=1)
    engine.agent.wait(finished(1), since)
    chunks = issued(engine.agent.events[since:])
    sizes = [tokens for _, tokens in chunks]
    assert sizes == pure(settings).chunker.cut(size)
    assert [history for history, _ in chunks] == [sum(sizes[:k]) for k in range(len(sizes))]
