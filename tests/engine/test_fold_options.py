"""What a folded pipeline refuses at its start, and with which numbers."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from prefill_runtime.engine import fold_memory
from prefill_runtime.engine.errors import SettingsError
from prefill_runtime.engine.fold_memory import check_memory, read_weights
from prefill_runtime.engine.fold_options import check_virtual_stages
from safetensors import safe_open

SETTINGS = {"policy": "Fixed", "maxTokens": 512, "minTokens": 128, "smoothingFactor": 1.0, "virtualStages": 2}


def config(folder: Path = Path(), **change: Any) -> Any:
    """A VllmConfig that may be folded, but for ``change``: names with their part, as in model__is_hybrid."""
    model = SimpleNamespace(
        get_total_num_hidden_layers=lambda: 8, runner_type="generate", is_multimodal_model=False,
        is_encoder_decoder=False, is_hybrid=False, is_attention_free=False, enforce_eager=True, max_model_len=4096,
        dtype=torch.float32, quantization=None, model=str(folder), use_mla=False, get_head_size=lambda: 64,
        get_num_kv_heads=lambda _: 2, hf_text_config=SimpleNamespace(),
    )  # fmt: skip
    parallel = SimpleNamespace(
        pipeline_parallel_size=2, data_parallel_size=1, tensor_parallel_size=1, distributed_executor_backend="mp"
    )
    parts = {"model": model, "parallel": parallel}
    made = SimpleNamespace(
        additional_config={"prefill": dict(SETTINGS)}, model_config=model, parallel_config=parallel,
        scheduler_config=SimpleNamespace(max_num_seqs=16), device_config=SimpleNamespace(device_type="cpu"),
        speculative_config=None, lora_config=None,
    )  # fmt: skip
    for name, value in change.items():
        part, _, attribute = name.rpartition("__")
        setattr(parts[part] if part else made, attribute, value)
    return made


def test_what_can_be_folded_is_let_through() -> None:
    check_virtual_stages(config())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"parallel__pipeline_parallel_size": 1}, "--pipeline-parallel-size is 1: set it to 2 or more"),
        ({"parallel__pipeline_parallel_size": 5}, "8 layers for 10 stages (5 ranks with two each): use at most 4"),
        ({"parallel__data_parallel_size": 2}, "--data-parallel-size is 2"),
        ({"parallel__decode_context_parallel_size": 2}, "--decode-context-parallel-size is 2"),
        ({"parallel__distributed_executor_backend": "ray"}, "is ray: set it to mp"),
        ({"model__runner_type": "pooling"}, "run as pooling"),
        ({"model__is_multimodal_model": True}, "more than text"),
        ({"model__is_hybrid": True}, "not one stack of decoder layers"),
        ({"speculative_config": object()}, "--speculative-config"),
        ({"lora_config": object()}, "--enable-lora"),
        ({"additional_config": {"prefill": SETTINGS | {"layerPartition": [2, 2, 2]}}},
         "layerPartition has 3 entries with 6 layers in all, and there are 4 stages and 8 layers"),
        ({"additional_config": {"prefill": SETTINGS | {"layerPartition": [2, 2, 2, 3]}}}, "4 entries with 9 layers"),
        ({"model__enforce_eager": False, "device_config": SimpleNamespace(device_type="npu")}, "--enforce-eager"),
    ],
)  # fmt: skip
def test_what_cannot_be_folded_is_refused_with_numbers(change: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingsError) as caught:
        check_virtual_stages(config(**change))
    assert str(caught.value).startswith("virtualStages is 2, but ")
    assert words in str(caught.value)


def test_weights_are_counted_as_they_will_be_loaded(model: Path) -> None:
    elements = dict[str, int]()
    for path in model.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            elements |= {name: file.get_tensor(name).numel() for name in file.keys()}  # noqa: SIM118
    for dtype, size in ((torch.float32, 4), (torch.bfloat16, 2)):
        weights = read_weights(model, config(model__dtype=dtype))
        assert weights is not None
        assert sorted(weights.layers) == list(range(8))
        assert sum(weights.layers.values()) + weights.outer == size * sum(elements.values())
        assert weights.outer == size * sum(n for name, n in elements.items() if ".layers." not in name)
    assert read_weights(model / "nowhere", config()) is None


def test_a_rank_that_cannot_hold_its_stages_says_so_before_it_loads(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpu = torch.device("cpu")
    check_memory(config(model), 0, [(0, 2), (6, 8)], cpu)
    monkeypatch.setattr(fold_memory, "free_bytes", lambda device: 1 << 20)
    with pytest.raises(SettingsError) as caught:
        check_memory(config(model), 1, [(2, 4), (4, 6)], cpu)
    # 4 layers of K and V for 4096 tokens, two heads of 64 float32 each: 16 MiB.
    assert "rank 1 cannot hold layers 2-3 and 4-5: weights 0." in str(caught.value)
    assert "KV cache of one prompt of full length 0.02 GiB" in str(caught.value)
    assert "0.00 GiB are free. Use more ranks" in str(caught.value)
