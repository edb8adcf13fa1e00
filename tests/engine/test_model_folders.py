"""What the generated and converted model folders hold."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoTokenizer

from localcluster import make_model, models

ROW_5 = {
    "toy": [0.12354, 0.02942, 0.10498, 0.09961],
    "windowed": [0.12354, 0.02942, 0.10498, 0.09961],
    "tiny": [-0.16113, 0.09326, 0.2168, -0.1709],
    "emu": [-0.1367, -0.1270, -0.1128, -0.0293],
}
"""The first embedding weights of token 5."""


@pytest.mark.parametrize("kind", make_model.LLAMAS)
def test_a_generated_model_is_the_same_every_time(kind: str, tmp_path: Path) -> None:
    make_model.generate(tmp_path, **make_model.LLAMAS[kind])
    again, cached = load_file(tmp_path / "model.safetensors"), load_file(models.ensure(kind) / "model.safetensors")
    assert again.keys() == cached.keys()
    assert all(torch.equal(again[name], cached[name]) for name in cached)
    # Values and not only equality: a generator that is seeded otherwise would still agree with itself.
    row = cached["model.embed_tokens.weight"][5, :4].float()
    assert torch.allclose(row, torch.tensor(ROW_5[kind]), rtol=0.01), row


@pytest.mark.parametrize(
    ("kind", "positions", "intermediate"),
    [("toy", 69632, 256), ("windowed", 69632, 256), ("tiny", 16384, 768), ("emu", 655360, 16), ("smollm2", 8192, 1536)],
)
def test_the_engine_sees_the_intended_shape(kind: str, positions: int, intermediate: int) -> None:
    config = AutoConfig.from_pretrained(models.ensure(kind))
    assert (config.max_position_embeddings, config.intermediate_size) == (positions, intermediate)
    assert config.dtype == torch.bfloat16
    assert not hasattr(config, "quantization_config")


def test_every_other_layer_of_the_windowed_model_sees_a_window() -> None:
    config = AutoConfig.from_pretrained(models.ensure("windowed"))
    assert config.sliding_window == 2048
    assert config.layer_types == ["sliding_attention", "full_attention"] * 4


@pytest.mark.parametrize("text", ["naïve — fox\n", "价格 42 €", "a <s> b", " two  spaces "])
def test_a_generated_models_tokens_are_the_bytes_of_any_text(text: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(models.ensure("tiny"))
    tokens = tokenizer(text).input_ids
    assert len(tokens) == len(text.replace("<s>", "*").encode())
    assert tokenizer.decode(tokens) == text
    assert max(tokens) < tokenizer.convert_tokens_to_ids("Ġw300") == 300 < len(tokenizer) == make_model.VOCABULARY


def test_smollm2_comes_with_its_chat_template_and_licence() -> None:
    folder = models.ensure("smollm2")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert chat.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer.eos_token == "<|im_end|>"
    assert "Apache License" in (folder / "LICENSE").read_text()
    assert '"licence": "Apache-2.0"' in (folder / "SOURCE.json").read_text()
