"""A folded pipeline on the real engine: the answers of one stage, whatever is cut, packed, aborted or preempted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import vllm
from prefill_runtime.engine.versions import TESTED, base_version
from prefill_runtime.telemetry.events import Issue, Pass

from tests.engine import answers
from tests.engine.harness import Engine, calibration, finished, prompt

FIXED: dict[str, Any] = {"policy": "Fixed", "maxTokens": 512, "minTokens": 128, "smoothingFactor": 1.0,
                         "virtualStages": 2}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """split: layers by stage; empty: even."""

    name: str
    ranks: int
    cached: bool
    more: dict[str, Any] = field(default_factory=dict)
    split: tuple[int, ...] = ()


def planned(ranks: int) -> dict[str, Any]:
    document = calibration(5e-9, 2e-5, c=0.002, stages=2 * ranks)
    return {"policy": "Planned", "maxTokens": 1024, "calibration": document}


CASES = (
    Case("two", 2, True),
    Case("two-planned", 2, False, planned(2)),
    Case("two-vanilla-uneven", 2, False, {"foldLag": 0, "foldBlocking": True, "foldPacking": False}, (1, 3, 2, 2)),
    Case("three", 3, True, {"foldLag": 1}, (1, 1, 2, 2, 1, 1)),
    Case("four", 4, True, planned(4)),
)


NEWEST = base_version(vllm.__version__) == TESTED[-1]
NEWEST_ONLY = {"two-planned", "three"}
"""What differs between vLLM's lines shows in the others; each case takes two minutes."""


@pytest.fixture(scope="module", params=CASES, ids=lambda case: case.name)
def case(request: pytest.FixtureRequest) -> Case:
    case: Case = request.param
    if case.name in NEWEST_ONLY and not NEWEST:
        pytest.skip("run with the newest vLLM only")
    return case


@pytest.fixture(scope="module")
def engine(case: Case, model: Path, truth: object, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = tmp_path_factory.mktemp("engine")
    settings = FIXED | case.more | {"layerPartition": case.split}
    engine = Engine(model, folder, settings, pipeline_parallel_size=case.ranks, enable_prefix_caching=case.cached)
    yield engine
    engine.close()


def test_answers_equal_one_stage_alone(engine: Engine, truth: list[list[int]]) -> None:
    answers.check_alone(engine, truth)


def test_answers_equal_one_stage_together(engine: Engine, truth: list[list[int]]) -> None:
    answers.check_together(engine, truth)


def test_every_stage_runs_each_batch_once_and_on_its_rank(engine: Engine, case: Case) -> None:
    since = engine.agent.mark()
    engine.tokens([prompt(3000, seed=1)], max_tokens=2)
    batches = {x.stamp.batch for x in engine.agent.events[since:] if isinstance(x, Issue)}
    stages = 2 * case.ranks

    def runs(events: list[Any]) -> list[Pass]:
        passes = [x for x in events if isinstance(x, Pass) and x.stamp.batch in batches]
        return passes if len(passes) >= stages * len(batches) else []

    passes = engine.agent.wait(runs, since)
    assert Counter((x.stamp.batch, x.stage) for x in passes) == {(b, s): 1 for b in batches for s in range(stages)}
    for x in passes:
        assert x.rank == min(x.stage, stages - 1 - x.stage)
        assert x.kind == ("head" if x.stage < case.ranks else "tail")


@pytest.mark.parametrize("chunks", [1, 2, 4])
def test_an_abort_between_head_and_tail(engine: Engine, truth: list[list[int]], chunks: int) -> None:
    answers.check_abort(engine, truth, chunks)


def test_decodes_go_on_beside_a_prefill(engine: Engine) -> None:
    alone = engine.tokens([prompt(64, seed=3)], max_tokens=40)
    since = engine.agent.mark()
    engine.submit("long", prompt(6000, seed=3))
    assert engine.tokens([prompt(64, seed=3)], max_tokens=40) == alone
    assert "length" in engine.agent.wait(finished(2), since)


def test_a_cached_prefix_counts_as_history(engine: Engine, case: Case) -> None:
    answers.check_cached_prefix(engine, case.cached)


def test_preempted_requests_answer_the_same(model: Path, tmp_path: Path) -> None:
    """KV cache for less than the answers need together."""
    engine = Engine(
        model, tmp_path, FIXED, pipeline_parallel_size=2, enable_prefix_caching=True, num_gpu_blocks_override=67,
        max_model_len=8192,
    )  # fmt: skip
    try:
        answers.check_preempted(engine)
    finally:
        engine.close()
