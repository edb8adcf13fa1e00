"""KV caches of a folded pipeline's layers, kept by vLLM's file-based connector and used by another engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.engine.harness import Engine, prompt
from tests.engine.test_foldback import FIXED

SIZES = (500, 300, 200)  # each within one chunk: the connector keeps prompts that are prefilled in one
HITS = [384, 256, 128]  # whole blocks
LAYERS = 8


def start(model: Path, folder: Path, kept: Path, prefill: dict[str, Any] | None, ranks: int) -> Engine:
    connector = {
        "kv_connector": "ExampleConnector", "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(kept)},
    }  # fmt: skip
    return Engine(
        model, folder, prefill, pipeline_parallel_size=ranks, enable_prefix_caching=False, kv_transfer_config=connector
    )


def test_prompts_that_one_pipeline_prefilled_are_hits_in_another(model: Path, tmp_path: Path) -> None:
    """Folded first, then one stage alone, then folded again: a prefill and a decode side, and back."""
    kept, prompts = tmp_path / "kept", [prompt(size, seed=size) for size in SIZES]
    answers, cached = list[list[list[int]]](), list[list[int]]()
    for number, (prefill, ranks) in enumerate(((FIXED, 2), (None, 1), (FIXED, 2))):
        folder = tmp_path / str(number)
        folder.mkdir()
        engine = start(model, folder, kept, prefill, ranks)
        try:
            outcome = engine.generate(prompts)
        finally:
            engine.close()
        answers.append(outcome["tokens"])
        cached.append(outcome["cached"])
        layers = sorted(int(path.name.split(".layers.")[1].split(".")[0]) for path in kept.glob("*/*.safetensors"))
        assert layers == sorted(list(range(LAYERS)) * len(SIZES))
    assert answers[0] == answers[1] == answers[2]
    assert cached == [[0, 0, 0], HITS, HITS]
