"""Two stages under every policy: the answers of one stage, the chunks of the policy, an account that adds up."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prefill_runtime.scheduler.chunkers import Bounds, Chunker, Dynamic, Fixed
from prefill_runtime.scheduler.cost import QuadraticModel
from prefill_runtime.telemetry.events import Event, Finish, Issue, Pass, Request
from tests.engine.conftest import SIZES
from tests.engine.harness import Engine, calibration, prompt

A, B = 1e-7, 1e-4
BLOCK = 128
FIXED: dict[str, Any] = {"policy": "Fixed", "maxTokens": 512, "minTokens": 128, "smoothingFactor": 1.0}
DYNAMIC: dict[str, Any] = {"policy": "Dynamic", "maxTokens": 1024, "minTokens": 128, "smoothingFactor": 0.9,
                           "calibration": calibration(A, B)}  # fmt: skip


def pure(settings: dict[str, Any]) -> Chunker:
    """The chunker these settings mean, without an engine."""
    bounds = Bounds(settings["maxTokens"], settings["minTokens"], quantum=BLOCK)
    if settings["policy"] == "Fixed":
        return Fixed(bounds)
    return Dynamic(bounds, QuadraticModel(A, B), 1024, settings["smoothingFactor"])


@pytest.fixture(
    scope="module",
    params=[(FIXED, False), (FIXED, True), (DYNAMIC, False), (DYNAMIC, True)],
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


def issued(events: list[Event], request: str = "") -> list[tuple[int, int]]:
    """(history, tokens) of each prefill chunk, of one request or of all."""
    return [
        (chunk.history, chunk.tokens)
        for event in events
        if isinstance(event, Issue)
        for chunk in event.stamp.chunks
        if chunk.prefill and chunk.request.startswith(request)
    ]


def test_answers_equal_one_stage_alone(engine: Engine, truth: list[list[int]]) -> None:
    assert [engine.tokens([prompt(size)])[0] for size in SIZES] == truth


def test_answers_equal_one_stage_together(engine: Engine, truth: list[list[int]]) -> None:
    since = engine.agent.mark()
    assert engine.tokens([prompt(size) for size in SIZES]) == truth
    outcomes = engine.agent.wait(lambda e: [x.outcome for x in e if isinstance(x, Finish)][len(SIZES) - 1 :], since)
    assert outcomes == ["length"]
    budget = 512 if engine else 0
    del budget


@pytest.mark.parametrize("size", [1, 128, 1500, 8000])
def test_a_lone_prompt_gets_the_policys_chunks(engine: Engine, settings: dict[str, Any], size: int) -> None:
    since = engine.agent.mark()
    engine.tokens([prompt(size, seed=1)], max_tokens=1)
    engine.agent.wait(lambda e: any(isinstance(x, Finish) for x in e), since)
    chunks = issued(engine.agent.events[since:])
    sizes = [tokens for _, tokens in chunks]
    assert sizes == pure(settings).cut(size)
    assert [history for history, _ in chunks] == [sum(sizes[:k]) for k in range(len(sizes))]
