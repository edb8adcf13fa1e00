"""The shipped samples are valid; the Ascend one says what the vendor's documented deployment says."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from prefill_operator.api.types import Policy, PrefillPipeline
from prefill_operator.api.validation import problems

SAMPLES = Path(__file__).resolve().parents[3] / "manifests" / "samples"


def load(name: str) -> PrefillPipeline:
    return PrefillPipeline.model_validate(yaml.safe_load((SAMPLES / f"{name}.yaml").read_text()))


@pytest.mark.parametrize("file", sorted(SAMPLES.glob("*.yaml")), ids=lambda file: file.stem)
def test_samples_have_no_problems(file: Path) -> None:
    sample = load(file.stem)
    assert problems(sample.spec, sample.metadata["name"]) == []


def test_there_are_three() -> None:
    assert {file.stem for file in SAMPLES.glob("*.yaml")} == {
        "smollm2-cpu", "longctx-toy-cpu", "longctx-toy-foldback-cpu", "deepseek-v31-ascend",
    }  # fmt: skip


def test_deepseek_on_one_node_with_16_cards() -> None:
    spec = load("deepseek-v31-ascend").spec
    assert (spec.parallelism.pipeline, spec.parallelism.tensor) == (2, 8)
    assert (spec.pods_per_replica, spec.cards_per_pod) == (1, 16)
    assert (spec.chunking.policy, spec.chunking.max_tokens, spec.chunking.min_tokens) == (
        Policy.ENGINE_NATIVE, 32768, 4096,
    )  # fmt: skip
    assert (spec.model.max_model_len, spec.served_name, spec.engine.port) == (131072, "model", 8003)
    assert len(spec.engine.env) == 16
