"""A model with sliding windows in every other layer: folded it answers as on one rank, and its profile finds them."""

from __future__ import annotations

from pathlib import Path

import pytest
import vllm
from prefill_runtime.engine.versions import TESTED, base_version
from prefill_runtime.profiling.document import ProfileResult
from prefill_runtime.scheduler.cost import Attention, StageModel

from localcluster import models
from tests.engine.harness import Engine, calibration, prompt
from tests.engine.test_agent_real import STARTUP, RealSite

WINDOW, LENGTH = 2048, 16_384
SIZES = 1, 512, 2049, 6000, 12_000


def test_folded_and_planned_it_answers_as_on_one_rank(tmp_path: Path) -> None:
    model, prompts, answers = models.ensure("windowed"), [prompt(size) for size in SIZES], []
    document = calibration(5e-9, 2e-5, c=0.002, stages=4)
    for stage in document["stages"]:
        stage["attention"] = {"window": WINDOW, "full": 0.5}
    folded = {"policy": "Planned", "maxTokens": 1024, "minTokens": 128, "smoothingFactor": 1.0, "virtualStages": 2,
              "calibration": document}  # fmt: skip
    for settings, ranks in ((None, 1), (folded, 2)):
        folder = tmp_path / str(ranks)
        folder.mkdir()
        engine = Engine(model, folder, settings, pipeline_parallel_size=ranks, enable_prefix_caching=True)
        try:
            answers += [engine.tokens([one])[0] for one in prompts], engine.tokens(prompts[::-1])[::-1]
        finally:
            engine.close()
    assert answers == answers[:1] * 4


@pytest.mark.skipif(base_version(vllm.__version__) != TESTED[-1], reason="run with the newest vLLM only")
def test_a_profile_finds_the_windows(tmp_path: Path) -> None:
    site = RealSite(tmp_path, models.ensure("windowed"))
    pair = site.pair(profiling__samples=24, profiling__historyDepths=3, engine__maxModelLen=LENGTH)
    try:
        site.start("profile", *pair)
        assert [rank.process.wait(STARTUP) for rank in pair] == [0, 0]
        found = ProfileResult.model_validate_json(pair[0].termination.read_text())
    finally:
        site.clean_up()
    assert found.calibration is not None, found.refusal
    assert [StageModel.of(stage).attention for stage in found.calibration.stages] == [Attention(WINDOW, 0.5)] * 2
